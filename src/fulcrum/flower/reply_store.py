"""Replies on the party's own disk. A reply is stored before it is sent, and sent again byte for byte.

Beside the reply lies the clipping state of a rule that each party adapts for itself: it never comes from elsewhere.

So a crash at any moment leaves one of two cases: nothing was stored, so nothing left the party and the
round is computed again under the same reservation; or it was stored, and those bytes are sent again.

The store also keeps the ledger's head, with each reply: a ledger that is missing, replaced or rolled back beside it is
noticed before anything is released under it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fulcrum.errors import ConfigError, InputError
from fulcrum.flower.messages import Envelope
from fulcrum.privacy.ledger import Ledger, LedgerHead

REPLIES_KEPT = 16
"""Number of replies kept per run. The coordinator asks again for its last round only."""


_TABLES = (
    "CREATE TABLE IF NOT EXISTS replies (run TEXT NOT NULL, round INTEGER NOT NULL, request TEXT NOT NULL,"
    " header BLOB NOT NULL, body BLOB NOT NULL, signature BLOB NOT NULL, time REAL NOT NULL,"
    " PRIMARY KEY (run, round))",
    "CREATE TABLE IF NOT EXISTS states (run TEXT NOT NULL, round INTEGER NOT NULL, arrays BLOB NOT NULL,"
    " PRIMARY KEY (run, round))",
    "CREATE TABLE IF NOT EXISTS ledger (id INTEGER PRIMARY KEY, identity TEXT NOT NULL, sequence INTEGER NOT NULL,"
    " digest TEXT NOT NULL)",
)


@dataclass(frozen=True)
class StoredReply:
    """A reply, and the digest of the request that it answers."""

    request: str
    reply: Envelope


class ReplyStore:
    """An open store of replies. Every change is on disk when the call returns."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._translate_errors():
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("PRAGMA synchronous = FULL")
                for table in _TABLES:
                    self._db.execute(table)
            except BaseException:
                self._db.close()
                raise

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn SQLite's errors about the file into one sentence."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise  # a second reply to one round: a defect of the program, not of the file
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a damaged file's names need not be text
            raise InputError(
                f"{self.path} cannot hold replies: {error}; check the disk and the file's permissions, or restore it."
            ) from error

    def get(self, run: str, round: int) -> StoredReply | None:
        """The reply to this round, if one was stored."""
        with self._lock, self._translate_errors():
            row = self._db.execute(
                "SELECT request, header, body, signature FROM replies WHERE run = ? AND round = ?", (run, round)
            ).fetchone()
        return None if row is None else StoredReply(row[0], Envelope(*row[1:]))

    def get_state(self, run: str, round: int) -> bytes | None:
        """The clipping state that the last answered round before this one left, as it was stored."""
        with self._lock, self._translate_errors():
            row = self._db.execute(
                "SELECT arrays FROM states WHERE run = ? AND round < ? ORDER BY round DESC LIMIT 1", (run, round)
            ).fetchone()
        return None if row is None else row[0]

    def get_ledger_head(self) -> LedgerHead | None:
        """The ledger's head when the last reply was stored; None before the first one."""
        with self._lock, self._translate_errors():
            row = self._db.execute("SELECT identity, sequence, digest FROM ledger WHERE id = 1").fetchone()
        return None if row is None else LedgerHead(*row)

    def check_ledger(self, ledger: Ledger) -> None:
        """ConfigError where the ledger is not the one that the stored replies were charged to, with all its rows."""
        head = self.get_ledger_head()
        if head is None:
            return
        try:
            ledger.check_contains(head)
        except InputError as error:
            raise ConfigError(
                f"the replies in {self.path} were charged to a ledger of {head.sequence} rows, and this is not it: "
                f"{error}"
            ) from error

    def put(
        self,
        run: str,
        round: int,
        request: str,
        reply: Envelope,
        state: bytes | None = None,
        head: LedgerHead | None = None,
    ) -> None:
        """Store the reply to a round, once, and this party's clipping state after it; older ones are dropped.

        head: of the ledger that has the round's reservation; kept for `check_ledger`.
        """
        with self._lock, self._translate_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute(
                    "INSERT INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (run, round, request, reply.header, reply.body, reply.signature, time.time()),
                )
                if state is not None:
                    self._db.execute("INSERT INTO states VALUES (?, ?, ?)", (run, round, state))
                if head is not None:
                    self._db.execute(
                        "INSERT OR REPLACE INTO ledger VALUES (1, ?, ?, ?)", (head.ledger, head.sequence, head.digest)
                    )
                for table in ("replies", "states"):
                    self._db.execute(f"DELETE FROM {table} WHERE run = ? AND round <= ?", (run, round - REPLIES_KEPT))
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled back by itself, as where the disk is full
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()
