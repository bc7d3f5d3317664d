"""A ledger's file: its format, atomic transactions, and a copy of its rows in memory."""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fulcrum.errors import InputError
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.ledger.chain import (
    CHAINED_TABLES,
    ChainEnd,
    append_rows,
    append_table,
    check_chain,
    read_chain_end,
)
from fulcrum.privacy.ledger.row_checks import refuse_wrong_row
from fulcrum.privacy.ledger.rows import LedgerAccount, RunPlan, RunRecord, read_events_text

# --- the format: tables, and triggers that make the file append-only ----------------------------

SQLITE_APPLICATION_ID = 0x46554C43  # "FULC": distinguishes a ledger from other SQLite files
FORMAT_VERSION = 3
"""The written format. Format 1 omits the kinds of events. Formats 1 and 2 have no chain, no identity and no records of
runs, plans and units; both are readable, and the first new row makes them format 3. Their rows are chained as they are
found then: a change made before that cannot be seen, and what their runs were stays unknown."""
READABLE_VERSIONS = (1, 2, 3)

_FIRST_TABLES = """
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
"""
_TABLES_OF_FORMAT_3 = """
CREATE TABLE identity (id INTEGER PRIMARY KEY, value TEXT NOT NULL, former INTEGER NOT NULL, time REAL NOT NULL);
CREATE TABLE runs (id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, seed_digest TEXT NOT NULL, record TEXT NOT NULL,
    time REAL NOT NULL);
CREATE TABLE terms (id INTEGER PRIMARY KEY, party INTEGER NOT NULL UNIQUE REFERENCES parties, rule TEXT NOT NULL,
    renyi_order REAL NOT NULL, time REAL NOT NULL);
CREATE TABLE plans (id INTEGER PRIMARY KEY, party INTEGER NOT NULL REFERENCES parties, run TEXT NOT NULL,
    events TEXT NOT NULL, delta REAL NOT NULL, epsilon REAL, time REAL NOT NULL);
CREATE UNIQUE INDEX plan_of ON plans (run, party);
CREATE TABLE unit_sets (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, members BLOB NOT NULL,
    time REAL NOT NULL);
CREATE TABLE units (id INTEGER PRIMARY KEY, party TEXT NOT NULL, run TEXT NOT NULL,
    unit_set INTEGER NOT NULL REFERENCES unit_sets, shared INTEGER NOT NULL, time REAL NOT NULL);
CREATE UNIQUE INDEX units_of ON units (run, party);
CREATE TABLE chain (sequence INTEGER PRIMARY KEY, source TEXT NOT NULL, row INTEGER NOT NULL, digest BLOB NOT NULL);
"""
_UNIQUE_COLUMNS = {
    "parties": ("name",),
    "entries": ("run", "round", "attempt", "party"),
    "runs": ("run",),
    "terms": ("party",),
    "plans": ("run", "party"),
    "unit_sets": ("digest",),
    "units": ("run", "party"),
}
"""Columns that no two rows share, besides the row's number."""


def _make_change_triggers(tables: Iterable[str]) -> str:
    """Triggers that refuse UPDATE and DELETE."""
    return "".join(
        f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table} "
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
        for table in tables
        for verb in ("UPDATE", "DELETE")
    )


def _make_replace_triggers(tables: Iterable[str]) -> str:
    """Triggers that refuse an INSERT in the place of a row: REPLACE deletes without calling a DELETE trigger."""
    script = ""
    for table in tables:
        keys = [(_KEY_COLUMNS[table],)] + ([_UNIQUE_COLUMNS[table]] if table in _UNIQUE_COLUMNS else [])
        taken = " OR ".join(
            f"EXISTS (SELECT 1 FROM {table} WHERE {' AND '.join(f'{name} = NEW.{name}' for name in key)})"
            for key in keys
        )
        script += (
            f"CREATE TRIGGER {table}_replace BEFORE INSERT ON {table} WHEN {taken} "
            "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
        )
    return script


_KEY_COLUMNS = {**CHAINED_TABLES, "chain": "sequence"}
_FIRST_TABLE_NAMES = ("parties", "budgets", "entries", "settlements")
_NEW_TABLE_NAMES = tuple(name for name in _KEY_COLUMNS if name not in _FIRST_TABLE_NAMES)


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
    for statement in _split_statements(_FIRST_TABLES + _make_change_triggers(_FIRST_TABLE_NAMES)):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {SQLITE_APPLICATION_ID}")
    _add_tables_of_format_3(db, former=FORMAT_VERSION)


def _add_tables_of_format_3(db: sqlite3.Connection, former: int) -> None:
    """Add what format 3 has and earlier ones lack, within the open transaction: identity, records, chain."""
    script = _TABLES_OF_FORMAT_3 + _make_change_triggers(_NEW_TABLE_NAMES) + _make_replace_triggers(_KEY_COLUMNS)
    for statement in _split_statements(script):
        db.execute(statement)
    db.execute(
        "INSERT INTO identity (id, value, former, time) VALUES (1, ?, ?, ?)",
        (secrets.token_hex(16), former, time.time()),
    )
    end = ChainEnd()
    for table in CHAINED_TABLES:
        end = append_table(db, end, table)
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
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a damaged file's names need not be text
        words = "malformed" if isinstance(error, UnicodeDecodeError) else str(error)
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
    """An open file. Use its values within `reading` or `write_transaction`; these bring them up to date.

    accounts: each party's row and current terms, by name. records: registered runs. terms: how each account is
    composed, (rule, Renyi order), by the party's row. plans: party's row -> run -> (plan, its epsilon or None).
    unit_rows: party's name -> (run, number of its set of units), oldest first. Only rows that were added since the last
    transaction are read.
    """

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.db = db
        self.path = path
        self.identity = ""
        self.former = 0
        self.accounts: dict[str, tuple[int, LedgerAccount]] = {}
        self.records: dict[str, RunRecord] = {}
        self.terms: dict[int, tuple[str, float]] = {}
        self.plans: dict[int, dict[str, tuple[RunPlan, float | None]]] = {}
        self.unit_rows: dict[str, list[tuple[str, int]]] = {}
        self.last_runs: dict[int, tuple[float, str]] = {}  # party's row -> (time, run) of its latest reservation
        self.last_units: dict[str, float] = {}  # party's name -> time when its units were last registered
        self.begun: set[str] = set()  # runs with a reservation
        self.has_shared_units = False  # whether a unit was registered by several parties, on purpose
        self._spends: dict[int, Spend] = {}
        self._run_spends: dict[int, dict[str, Spend]] = {}  # party's row -> run -> spend
        self._seen: dict[str, int] = dict.fromkeys(CHAINED_TABLES, 0)  # last row that was read, by table
        self._chained = False  # whether the file has a chain: format 3
        self._end = ChainEnd()  # last row of the chain that was checked
        self._new_end: ChainEnd | None = None  # including the rows of the transaction in progress
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
                db.execute("BEGIN")
                store._check_chain()
                db.execute("ROLLBACK")
                return store
            except BaseException:
                db.close()
                raise

    @contextmanager
    def _exclusive_transaction(self) -> Iterator[None]:
        """One exclusive, atomic transaction: at the end all of it is on disk, or none."""
        with self._lock, _translate_sqlite_errors(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            self._new_end = None
            try:
                yield
                self.db.execute("COMMIT")
                self._end = self._new_end or self._end
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise
            finally:
                self._new_end = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A consistent view, with up-to-date values in memory."""
        with self._lock, _translate_sqlite_errors(self.path):
            outer = self.db.in_transaction
            if not outer:
                self.db.execute("BEGIN")
            try:
                self._refresh()
                yield
            finally:
                if not outer and self.db.in_transaction:
                    self.db.execute("ROLLBACK")

    @contextmanager
    def write_transaction(self) -> Iterator[None]:
        """`reading` with exclusive, atomic writes: at the end all of them are on disk, or none."""
        with self._exclusive_transaction(), self.reading():
            yield

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[int]:
        """Add rows to a table and to the chain, within `write_transaction`; returns their numbers.

        Every table's last column is the time, which is added here. A file of an older format is brought to format 3.
        """
        if not rows:
            return []
        self.bring_to_current_format()
        key, now = CHAINED_TABLES[table], time.time()
        if key in columns:
            numbers = [int(row[columns.index(key)]) for row in rows]
            names, values = [*columns, "time"], [(*row, now) for row in rows]
        else:
            (last,) = self.db.execute(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone()
            numbers = list(range(last + 1, last + 1 + len(rows)))
            names = [key, *columns, "time"]
            values = [(number, *row, now) for number, row in zip(numbers, rows, strict=True)]
        marks = ", ".join("?" * len(names))
        self.db.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", values)
        # Read back: the chain covers what SQLite stored, in its types.
        chosen = set(numbers)
        stored = [
            (row[0], row[1:])
            for row in self.db.execute(
                f"SELECT {key}, * FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}", (min(chosen), max(chosen))
            )
            if row[0] in chosen
        ]
        self._new_end = append_rows(self.db, self._new_end or self._end, table, stored)
        return numbers

    def bring_to_current_format(self) -> None:
        """Before the first new row: add what an older format lacks."""
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        if version != FORMAT_VERSION:
            _add_tables_of_format_3(self.db, former=version)
            self._new_end = read_chain_end(self.db)

    def head(self) -> ChainEnd:
        """The checked end of the chain; sequence 0 for a file of an older format."""
        return self._end

    def _refresh(self) -> None:
        """Check and read the rows that were added since the last transaction, here or by another process."""
        # Only new rows: the cost of a round must not grow with the number of enrolled parties.
        self._check_chain()
        if self._chained:
            self._read_new_records()
        for budget, party, *terms in self.db.execute(
            "SELECT b.id, p.id, p.name, b.epsilon, p.delta, p.accountant, p.unit, p.population FROM budgets b"
            " JOIN parties p ON p.id = b.party WHERE b.id > ? ORDER BY b.id",
            (self._seen["budgets"],),
        ):
            self.accounts[terms[0]] = (party, LedgerAccount(*terms))
            self._seen["budgets"] = budget
        # NOT INDEXED: by row number. To group, SQLite would otherwise walk an index over all rows there ever were.
        rows = self.db.execute(
            "SELECT party, run, events, count(*), max(id), max(time) FROM entries NOT INDEXED WHERE id > ?"
            " GROUP BY party, run, events ORDER BY min(id)",
            (self._seen["entries"],),
        ).fetchall()
        add = SpendAdder()
        for party, run, events, times, last, at in rows:
            self._spends[party] = add(self.get_spend(party), events, times)
            runs = self._run_spends.setdefault(party, {})
            runs[run] = add(runs.get(run, EMPTY_SPEND), events, times)
            self.begun.add(run)
            self.last_runs[party] = max(self.last_runs.get(party, (0.0, "")), (at, run))
            self._seen["entries"] = max(self._seen["entries"], last)

    def _check_chain(self) -> None:
        """Check the rows that were added since the last check."""
        if not self._chained:
            (version,) = self.db.execute("PRAGMA user_version").fetchone()
            (chains,) = self.db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'chain'").fetchone()
            if bool(chains) != (version == FORMAT_VERSION):
                raise InputError(
                    f"ledger {self.path} was changed by something other than Fulcrum: it says format {version} and "
                    f"{'has' if chains else 'lacks'} the chain of format {FORMAT_VERSION}; restore it from a copy."
                )
            self._chained = bool(chains)
            if not self._chained:
                for table in _FIRST_TABLE_NAMES:  # rows without a chain are read as they are, if they have their form
                    key, seen = _KEY_COLUMNS[table], self._seen[table]
                    for row in self.db.execute(f"SELECT * FROM {table} WHERE {key} > ?", (seen,)):
                        refuse_wrong_row(self.path, table, row)
        if self._chained:
            self._end = check_chain(self.db, self.path, self._end)

    def _read_new_records(self) -> None:
        """The rows of identity, runs, terms, plans and units that were not read before."""
        if not self.identity:
            found = self.db.execute("SELECT value, former FROM identity").fetchone()
            if found is None:
                raise InputError(f"ledger {self.path} is damaged: it has no identity; restore it from a copy.")
            self.identity, self.former = found
        for record in self._read_new_rows("runs", "record"):
            known = RunRecord(**json.loads(record[0]))
            self.records[known.id] = known
        for party, rule, order in self._read_new_rows("terms", "party, rule, renyi_order"):
            self.terms[party] = (rule, order)
        for party, run, events, delta, epsilon in self._read_new_rows("plans", "party, run, events, delta, epsilon"):
            self.plans.setdefault(party, {})[run] = (RunPlan(read_events_text(events), delta), epsilon)
        for name, run, members, shared, at in self._read_new_rows("units", "party, run, unit_set, shared, time"):
            self.last_units[name] = at
            self.unit_rows.setdefault(name, []).append((run, members))
            self.has_shared_units = self.has_shared_units or bool(shared)

    def _read_new_rows(self, table: str, columns: str) -> list[tuple[Any, ...]]:
        rows = self.db.execute(
            f"SELECT id, {columns} FROM {table} WHERE id > ? ORDER BY id", (self._seen[table],)
        ).fetchall()
        self._seen[table] = rows[-1][0] if rows else self._seen[table]
        return [row[1:] for row in rows]

    def remember_spends(self, last: int, run: str, spends: Mapping[int, tuple[Spend, Spend]]) -> None:
        """Keep the (total, run's) spends that this process has just written, up to entry `last`."""
        with self._lock:
            self.begun.add(run)
            if self._seen["entries"] < last:
                for row, (total, own) in spends.items():
                    self._spends[row] = total
                    self._run_spends.setdefault(row, {})[run] = own
                    self.last_runs[row] = (time.time(), run)
                self._seen["entries"] = last

    def find_account(self, party: str) -> tuple[int, LedgerAccount]:
        """A party's row and terms; InputError for a party that is not enrolled."""
        if party not in self.accounts:
            raise InputError(f"party {party!r} is not in the ledger {self.path}; enroll it first.")
        return self.accounts[party]

    def get_spend(self, row: int) -> Spend:
        """The total of reservations of the party in this row, of all its units together."""
        return self._spends.get(row, EMPTY_SPEND)

    def get_run_spends(self, row: int) -> Mapping[str, Spend]:
        """The reservations of the party in this row, by run, in the order in which the runs began."""
        return self._run_spends.get(row, {})

    def read_members(self, unit_set: int) -> bytes:
        """The 16-byte digests of a set of units, sorted and concatenated."""
        (members,) = self.db.execute("SELECT members FROM unit_sets WHERE id = ?", (unit_set,)).fetchone()
        return bytes(members)
