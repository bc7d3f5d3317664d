"""The chain over a ledger's rows: each row's digest covers the row and all rows before it.

    digest(i) = BLAKE2b(digest(i - 1), name of the table, content of the row)

The table `chain` keeps one line per row of every other table, in the order in which they were written. The first row is
the ledger's identity. Opening a file computes all digests again (a hundred thousand rows in under a second).

What this stops: a row that was changed, replaced, deleted, moved or added by anything but this module (SQLite's
`INSERT OR REPLACE` passes triggers that refuse changes), and, for whoever kept a `LedgerHead`, a ledger that was rolled
back, cut short or exchanged. What it does not stop: someone who can write the file and computes the chain again from a
changed row on. Only a head that was kept elsewhere (a run's folder, a statement) gives that away.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulcrum.errors import InputError
from fulcrum.privacy.ledger.row_checks import find_loose_reference, refuse_wrong_row

CHAINED_TABLES: dict[str, str] = {
    "identity": "id",
    "parties": "id",
    "budgets": "id",
    "runs": "id",
    "terms": "id",
    "plans": "id",
    "unit_sets": "id",
    "units": "id",
    "entries": "id",
    "settlements": "entry",
}
"""The tables whose rows are chained, with the column that numbers their rows."""

DIGEST_BYTES = 32
EMPTY_DIGEST = bytes(DIGEST_BYTES)
"""The digest before the first row."""


def compute_row_digest(previous: bytes, table: str, row: Sequence[Any]) -> bytes:
    """The digest of a row (all its columns, in the table's order) after `previous`."""
    # !a, ascii() of numbers, text and bytes is exact and the same in every version of Python.
    content = f"{table}{tuple(row)!a}".encode("ascii")
    return hashlib.blake2b(previous + content, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class ChainEnd:
    """The last row that was checked or written: its sequence number (0: none) and digest."""

    sequence: int = 0
    digest: bytes = EMPTY_DIGEST


def read_chain_end(db: sqlite3.Connection) -> ChainEnd:
    """The last line of the file's chain, unchecked."""
    found = db.execute("SELECT sequence, digest FROM chain ORDER BY sequence DESC LIMIT 1").fetchone()
    return ChainEnd(int(found[0]), bytes(found[1])) if found else ChainEnd()


def append_rows(
    db: sqlite3.Connection, end: ChainEnd, table: str, rows: Sequence[tuple[int, Sequence[Any]]]
) -> ChainEnd:
    """Chain rows (row number, all columns as SQLite returns them) within the open transaction; returns the new end."""
    links, sequence, digest = [], end.sequence, end.digest
    for number, row in rows:
        sequence, digest = sequence + 1, compute_row_digest(digest, table, row)
        links.append((sequence, table, number, digest))
    db.executemany("INSERT INTO chain (sequence, source, row, digest) VALUES (?, ?, ?, ?)", links)
    return ChainEnd(sequence, digest)


def append_table(db: sqlite3.Connection, end: ChainEnd, table: str) -> ChainEnd:
    """Chain all rows of a table, for a file that had no chain."""
    key = CHAINED_TABLES[table]
    rows = db.execute(f"SELECT {key}, * FROM {table} ORDER BY {key}").fetchall()
    return append_rows(db, end, table, [(row[0], row[1:]) for row in rows])


def check_chain(db: sqlite3.Connection, path: Path, end: ChainEnd) -> ChainEnd:
    """Compute the digests of all rows after `end` again; returns the chain's end, or raises InputError.

    Within a transaction. The error names the first wrong row.
    """
    if end.sequence:
        known = db.execute("SELECT digest FROM chain WHERE sequence = ?", (end.sequence,)).fetchone()
        if known is None or known[0] != end.digest:
            raise InputError(
                f"ledger {path} was changed from outside while it was open: row {end.sequence} of its chain is not the "
                "one that was there; restore it from a copy."
            )
    fetch = _make_row_reader(db)
    sequence, digest = end.sequence, end.digest
    for number, table, row, stored in db.execute(
        "SELECT sequence, source, row, digest FROM chain WHERE sequence > ? ORDER BY sequence", (end.sequence,)
    ):
        sequence += 1
        if number != sequence:
            raise _make_chain_error(path, f"row {sequence} of its chain is missing")
        content = fetch(table, row)
        if content is None:
            raise _make_chain_error(path, f"row {row} of {table} (number {sequence} of the chain) is missing")
        digest = compute_row_digest(digest, table, content)
        if digest != stored:
            raise _make_chain_error(
                path, f"row {row} of {table} (number {sequence} of the chain) is not the row that was written"
            )
        refuse_wrong_row(path, table, content)
    if end.sequence == 0:  # at opening; later only what others added is read
        _check_every_row_is_chained(db, path)
        if loose := find_loose_reference(db):
            raise _make_chain_error(path, loose)
    return ChainEnd(sequence, digest)


def _make_row_reader(db: sqlite3.Connection) -> Callable[[str, int], tuple[Any, ...] | None]:
    """A function (table, row number) -> the row's columns. Rows of a table mostly follow each other: read in order."""
    waiting: dict[str, Iterator[tuple[Any, ...]]] = {}

    def fetch(table: str, row: int) -> tuple[Any, ...] | None:
        key = CHAINED_TABLES.get(table)
        if key is None:
            return None
        if table in waiting:
            found = next(waiting[table], None)
            if found is not None and found[0] == row:
                return tuple(found[1:])
        waiting[table] = iter(db.execute(f"SELECT {key}, * FROM {table} WHERE {key} >= ? ORDER BY {key}", (row,)))
        found = next(waiting[table], None)
        return tuple(found[1:]) if found is not None and found[0] == row else None

    return fetch


def _check_every_row_is_chained(db: sqlite3.Connection, path: Path) -> None:
    chained = dict(db.execute("SELECT source, count(*) FROM chain GROUP BY source"))
    for table, key in CHAINED_TABLES.items():
        (rows,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        if rows != chained.get(table, 0):
            loose = db.execute(
                f"SELECT {key} FROM {table} WHERE {key} NOT IN (SELECT row FROM chain WHERE source = ?) LIMIT 1",
                (table,),
            ).fetchone()
            which = f"row {loose[0]} of {table}" if loose else f"a row of {table}"
            raise _make_chain_error(path, f"{which} is not in its chain")


def _make_chain_error(path: Path, what: str) -> InputError:
    return InputError(
        f"ledger {path} was changed by something other than Fulcrum: {what}; restore it from a copy, since what it "
        "says was spent can no longer be believed."
    )
