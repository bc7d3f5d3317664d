"""A ledger's file: its format, atomic transactions, and a copy of its rows in memory."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fulcrum.errors import InputError
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.ledger.rows import LedgerAccount, read_events_text

# --- the format: tables, and triggers that make the file append-only ----------------------------

SQLITE_APPLICATION_ID = 0x46554C43  # "FULC": distinguishes a ledger from other SQLite files
FORMAT_VERSION = 2
"""The written format. Format 1 omits the kinds of events; it is readable, and the first new row makes it format 2."""
READABLE_VERSIONS = (1, 2)

_TABLE_NAMES = ("parties", "budgets", "entries", "settlements")
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
    for table in _TABLE_NAMES
    for verb in ("UPDATE", "DELETE")
)


def _is_ledger_file(db: sqlite3.Connection, path: Path) -> bool:
    """True for a ledger, False for a new file; InputError for anything else."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == SQLITE_APPLICATION_ID and version not in READABLE_VERSIONS:
        formats = " and ".join(map(str, READABLE_VERSIONS))
        raise InputError(
            f"ledger {path} has format {version}, and this Fulcrum reads formats {formats}; use the one that wrote it."
        )
    if application != SQLITE_APPLICATION_ID and tables:
        raise InputError(f"ledger {path} is not a Fulcrum ledger; give the path of a ledger or of a new file.")
    return bool(application == SQLITE_APPLICATION_ID)


def _create_tables(db: sqlite3.Connection) -> None:
    """Create the tables of a ledger in a new file, within the open transaction."""
    for statement in _split_statements(_SCHEMA):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {SQLITE_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")


def _split_statements(script: str) -> Iterator[str]:
    """Split a script into statements, since `executescript` would commit the open transaction."""
    part = ""
    for piece in script.split(";"):
        part += piece + ";"
        if sqlite3.complete_statement(part):
            yield part
            part = ""


# --- the open file ------------------------------------------------------------------------------

EMPTY_SPEND = Spend.empty()

_SQLITE_ERROR_ADVICE = {
    "locked": "is in use by another process; wait until that is done, or close it",
    "full": "cannot grow because the disk is full; free some space and run again (nothing was released)",
    "not a database": "is not a Fulcrum ledger; give the path of a ledger or of a new file",
    "malformed": "is damaged; restore it from a copy",
    "readonly": "cannot be written to; check the file's and the folder's permissions",
    "unable to open": "cannot be opened; check that the folder exists and can be written to",
}
"""Advice for an error, by a word of SQLite's message."""


@contextmanager
def _translate_sqlite_errors(path: Path) -> Iterator[None]:
    """Translate each SQLite error to one sentence."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise  # a defect of the program, not of the file
    except sqlite3.DatabaseError as error:
        words = str(error)
        reason = next((text for sign, text in _SQLITE_ERROR_ADVICE.items() if sign in words), f"failed: {words}")
        raise InputError(f"ledger {path} {reason}.") from error


class SpendAdder:
    """Adds events to a spend, once for all parties with the same past: they share one object."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, str, int], tuple[Spend, Spend]] = {}

    def __call__(self, past: Spend, events: str, times: int = 1) -> Spend:
        key = (id(past), events, times)
        if key not in self._done:
            # The past is kept with the sum, so that no other object can get its id.
            self._done[key] = (past, past.add_events(read_events_text(events), times))
        return self._done[key][1]


class LedgerStore:
    """An open file. Use `accounts`, `find_account` and `get_spend` within `reading` or `write_transaction`.

    accounts: each party's row and current terms, by name. At the beginning of a transaction, spends and
    accounts are updated from the rows that were added since the last one.
    """

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.db = db
        self.path = path
        self.accounts: dict[str, tuple[int, LedgerAccount]] = {}
        self._spends: dict[int, Spend] = {}
        self._seen = 0  # last entry included in _spends
        self._budgets_seen = 0  # last budget included in accounts; every party has one from the start
        self._lock = threading.RLock()

    @staticmethod
    def open(path: Path, wait: float) -> LedgerStore:
        """Open a ledger's file, or start a new one where there is none; `wait` seconds for other processes."""
        with _translate_sqlite_errors(path):
            db = sqlite3.connect(path, timeout=wait, isolation_level=None, check_same_thread=False)
            try:
                # A rollback journal keeps the ledger one file that can be copied; EXTRA also syncs the
                # folder, so that a committed reservation survives a power cut and not just kill -9.
                db.execute("PRAGMA journal_mode = DELETE")
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("PRAGMA recursive_triggers = ON")
                store = LedgerStore(db, path)
                if not _is_ledger_file(db, path):
                    with store._exclusive_transaction():
                        if not _is_ledger_file(db, path):  # another process may have created them first
                            _create_tables(db)
                return store
            except BaseException:
                db.close()
                raise

    @contextmanager
    def _exclusive_transaction(self) -> Iterator[None]:
        """One exclusive, atomic transaction: at the end all of it is on disk, or none."""
        with self._lock, _translate_sqlite_errors(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A consistent view, with up-to-date spends in memory."""
        with self._lock, _translate_sqlite_errors(self.path):
            outer = self.db.in_transaction
            if not outer:
                self.db.execute("BEGIN")
            try:
                self._refresh_spends()
                yield
            finally:
                if not outer and self.db.in_transaction:
                    self.db.execute("ROLLBACK")

    @contextmanager
    def write_transaction(self) -> Iterator[None]:
        """`reading` with exclusive, atomic writes: at the end all of them are on disk, or none."""
        with self._exclusive_transaction(), self.reading():
            yield

    def _refresh_spends(self) -> None:
        # Only new rows: the cost of a round must not grow with the number of enrolled parties.
        fresh = self.db.execute(
            "SELECT b.id, p.id, p.name, b.epsilon, p.delta, p.accountant, p.unit, p.population FROM budgets b"
            " JOIN parties p ON p.id = b.party WHERE b.id > ? ORDER BY b.id",
            (self._budgets_seen,),
        )
        for budget, party, *terms in fresh:
            self.accounts[terms[0]] = (party, LedgerAccount(*terms))
            self._budgets_seen = budget
        rows = self.db.execute(
            "SELECT party, events, count(*), max(id) FROM entries WHERE id > ? GROUP BY party, events", (self._seen,)
        ).fetchall()
        add = SpendAdder()
        for party, events, times, last in rows:
            self._spends[party] = add(self.get_spend(party), events, times)
            self._seen = max(self._seen, last)

    def mark_current_format(self) -> None:
        """Mark the file as the current format, before the first row of that format; within `write_transaction`."""
        if self.db.execute("PRAGMA user_version").fetchone() != (FORMAT_VERSION,):
            self.db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")

    def remember_spends(self, last: int, spends: Mapping[int, Spend]) -> None:
        """Keep the spends that this process has just written, up to entry `last`, without reading them again."""
        with self._lock:
            if self._seen < last:
                self._spends.update(spends)
                self._seen = last

    def find_account(self, party: str) -> tuple[int, LedgerAccount]:
        """A party's row and terms; InputError for a party that is not enrolled."""
        if party not in self.accounts:
            raise InputError(f"party {party!r} is not in the ledger {self.path}; enroll it first.")
        return self.accounts[party]

    def get_spend(self, row: int) -> Spend:
        """The total of reservations of the party in this row."""
        return self._spends.get(row, EMPTY_SPEND)
