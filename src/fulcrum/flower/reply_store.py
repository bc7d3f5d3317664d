"""Replies on the party's own disk. A reply is stored before it is sent, and sent again byte for byte.

Beside the reply lies the clipping state of a rule that each party adapts for itself: it never comes from elsewhere.

So a crash at any moment leaves one of two cases: nothing was stored, so nothing left the party and the
round is computed again under the same reservation; or it was stored, and those bytes are sent again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from fulcrum.errors import InputError
from fulcrum.flower.messages import Envelope

REPLIES_KEPT = 16
"""Number of replies kept per run. The coordinator asks again for its last round only."""


@dataclass(frozen=True)
class StoredReply:
    """A reply, and the digest of the request that it answers."""

    request: str
    reply: Envelope


class ReplyStore:
    """An open store of replies. Every change is on disk when the call returns."""

    def __init__(self, path: Path | str) -> None:
        try:
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS replies (run TEXT NOT NULL, round INTEGER NOT NULL, request TEXT NOT NULL,"
                " header BLOB NOT NULL, body BLOB NOT NULL, signature BLOB NOT NULL, time REAL NOT NULL,"
                " PRIMARY KEY (run, round))"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS states (run TEXT NOT NULL, round INTEGER NOT NULL, arrays BLOB NOT NULL,"
                " PRIMARY KEY (run, round))"
            )
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path} cannot hold replies: {error}; check the path and the disk.") from error
        self._lock = threading.Lock()

    def get(self, run: str, round: int) -> StoredReply | None:
        """The reply to this round, if one was stored."""
        with self._lock:
            row = self._db.execute(
                "SELECT request, header, body, signature FROM replies WHERE run = ? AND round = ?", (run, round)
            ).fetchone()
        return None if row is None else StoredReply(row[0], Envelope(*row[1:]))

    def get_state(self, run: str, round: int) -> bytes | None:
        """The clipping state that the last answered round before this one left, as it was stored."""
        with self._lock:
            row = self._db.execute(
                "SELECT arrays FROM states WHERE run = ? AND round < ? ORDER BY round DESC LIMIT 1", (run, round)
            ).fetchone()
        return None if row is None else row[0]

    def put(self, run: str, round: int, request: str, reply: Envelope, state: bytes | None = None) -> None:
        """Store the reply to a round, once, and this party's clipping state after it; older ones are dropped."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute(
                    "INSERT INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (run, round, request, reply.header, reply.body, reply.signature, time.time()),
                )
                if state is not None:
                    self._db.execute("INSERT INTO states VALUES (?, ?, ?)", (run, round, state))
                for table in ("replies", "states"):
                    self._db.execute(f"DELETE FROM {table} WHERE run = ? AND round <= ?", (run, round - REPLIES_KEPT))
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()
