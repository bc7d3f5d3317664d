"""The format of a ledger's file: its tables, the triggers that make it append-only, and how it is told from others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fulcrum.errors import InputError

APPLICATION = 0x46554C43  # "FULC": tells a ledger from any other SQLite file
VERSION = 1

_TABLES = ("parties", "budgets", "entries", "settlements")
_SCHEMA = """
CREATE TABLE parties (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, delta REAL NOT NULL,
    accountant TEXT NOT NULL, unit TEXT NOT NULL, population TEXT NOT NULL, time REAL NOT NULL);
CREATE TABLE budgets (id INTEGER PRIMARY KEY, party INTEGER NOT NULL REFERENCES parties, epsilon REAL,
    time REAL NOT NULL);
CREATE INDEX budgets_of ON budgets (party, id);
CREATE TABLE entries (id INTEGER PRIMARY KEY, party INTEGER NOT NULL REFERENCES parties, run TEXT NOT NULL,
    round INTEGER NOT NULL, attempt INTEGER NOT NULL, events TEXT NOT NULL, time REAL NOT NULL);
CREATE UNIQUE INDEX entry_of ON entries (run, round, attempt, party);
CREATE INDEX entries_of ON entries (party, run);
CREATE TABLE settlements (entry INTEGER PRIMARY KEY REFERENCES entries, digest TEXT NOT NULL,
    time REAL NOT NULL);
""" + "".join(
    f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table} "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
    for table in _TABLES
    for verb in ("UPDATE", "DELETE")
)


def is_ready(db: sqlite3.Connection, path: Path) -> bool:
    """True for a ledger, False for a new file; InputError for anything else."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == APPLICATION and version != VERSION:
        raise InputError(
            f"ledger {path} has format {version}, and this Fulcrum reads format {VERSION}; use the one that wrote it."
        )
    if application != APPLICATION and tables:
        raise InputError(f"ledger {path} is not a Fulcrum ledger; give the path of a ledger or of a new file.")
    return bool(application == APPLICATION)


def create(db: sqlite3.Connection) -> None:
    """Make a new file a ledger, within the transaction that is open."""
    for statement in _statements(_SCHEMA):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _statements(script: str) -> Iterator[str]:
    """Single statements, since `executescript` would commit half-way."""
    part = ""
    for piece in script.split(";"):
        part += piece + ";"
        if sqlite3.complete_statement(part):
            yield part
            part = ""
