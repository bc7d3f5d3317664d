"""The ledger: what every party has spent, in one SQLite file that outlives runs.

What a round will release is reserved before anything leaves a party, and a reservation counts at
once; `settle` later adds the digest of what was released. Rows are only ever added: triggers in the
file refuse changes. A crash at any moment leaves either the whole reservation or none of it, so the
ledger may show more than was released, never less.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from fulcrum.accounting import Spend, check_terms, epsilons
from fulcrum.errors import BudgetError, ConfigError, InputError
from fulcrum.types import Event, Gaussian, Unprotected

APPLICATION = 0x46554C43  # "FULC": tells a ledger from any other SQLite file
VERSION = 1
SLACK = 1e-9
"""Relative tolerance of the budget check: rounding in a sum, nothing else."""

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


@dataclass(frozen=True)
class Account:
    """A party as the ledger knows it. budget is the epsilon over all runs; None records without a limit.

    unit, delta, accountant and population (which data it holds: a name or fingerprint) are fixed once
    enrolled, since sums over different ones would mean nothing.
    """

    name: str
    budget: float | None
    delta: float
    accountant: str
    unit: str
    population: str


@dataclass(frozen=True)
class Entry:
    """One reservation. digest and released (seconds since 1970) are None until it is settled."""

    party: str
    run: str
    round: int
    attempt: int
    events: tuple[Event, ...]
    reserved: float
    digest: str | None
    released: float | None


@dataclass(frozen=True)
class Line:
    """What one run cost one party, for display. epsilon is that run's alone; epsilons of runs do not simply add."""

    party: str
    run: str
    first_round: int
    last_round: int
    reservations: int
    settled: int
    releases: int
    epsilon: float


_NOTHING = Spend.none()

# --- events as text -----------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def _write_events(events: tuple[Event, ...]) -> str:
    rows = [
        [float(e.rate), float(e.sigma), int(e.count)] if isinstance(e, Gaussian) else [int(e.count)] for e in events
    ]
    return json.dumps(rows, separators=(",", ":"), allow_nan=False)


@lru_cache(maxsize=65536)
def _read_events(text: str) -> tuple[Event, ...]:
    return tuple(Gaussian(*row) if len(row) == 3 else Unprotected(*row) for row in json.loads(text))


# --- the file -----------------------------------------------------------------------------------


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors as one sentence each."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise  # a defect of the program, not of the file
    except sqlite3.DatabaseError as error:
        words = str(error)
        reasons = {
            "locked": "is in use by another process; wait until that is done, or close it",
            "full": "cannot grow because the disk is full; free some space and run again (nothing was released)",
            "not a database": "is not a Fulcrum ledger; give the path of a ledger or of a new file",
            "malformed": "is damaged; restore it from a copy",
            "readonly": "cannot be written to; check the file's and the folder's permissions",
            "unable to open": "cannot be opened; check that the folder exists and can be written to",
        }
        reason = next((text for sign, text in reasons.items() if sign in words), f"failed: {words}")
        raise InputError(f"ledger {path} {reason}.") from error


def _is_ready(db: sqlite3.Connection, path: Path) -> bool:
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


def _create(db: sqlite3.Connection) -> None:
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


class Ledger:
    """An open ledger. Use `with Ledger.open(path) as ledger:`; safe to share between threads and processes.

    Every change is one transaction that is on disk when the call returns. Spends are kept in memory
    and brought up to date, from the rows that were added since, whenever something is asked.
    """

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._db = db
        self._lock = threading.RLock()
        self._seen = 0  # last entry that is in _spends
        self._spends: dict[int, Spend] = {}
        self._accounts: dict[str, tuple[int, Account]] = {}
        self._budgets_seen = 0  # last budget that is in _accounts; every party has one from the start

    @staticmethod
    def open(path: str | Path, wait: float = 30.0) -> Ledger:
        """Open a ledger, or start a new one where there is no file; `wait` seconds for other processes.

        ":memory:" is a ledger that is gone when closed.
        """
        path = Path(path)
        with _explained(path):
            db = sqlite3.connect(path, timeout=wait, isolation_level=None, check_same_thread=False)
            try:
                # A rollback journal keeps the ledger one file that can be copied; EXTRA also syncs the
                # folder, so that a committed reservation survives a power cut and not just kill -9.
                db.execute("PRAGMA journal_mode = DELETE")
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("PRAGMA recursive_triggers = ON")
                ledger = Ledger(db, path)
                if not _is_ready(db, path):
                    with ledger._writing():
                        if not _is_ready(db, path):  # another process may have been faster
                            _create(db)
                return ledger
            except BaseException:
                db.close()
                raise

    def close(self) -> None:
        """Close the file. Nothing is lost without it."""
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction that no other process can come between: all of it is on disk at the end, or none."""
        with self._lock, _explained(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A consistent view, with the spends in memory brought up to date."""
        with self._lock, _explained(self.path):
            outer = self._db.in_transaction
            if not outer:
                self._db.execute("BEGIN")
            try:
                self._refresh()
                yield
            finally:
                if not outer and self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _refresh(self) -> None:
        # Only what was added since: the cost of a round must not grow with the parties that are enrolled.
        fresh = self._db.execute(
            "SELECT b.id, p.id, p.name, b.epsilon, p.delta, p.accountant, p.unit, p.population FROM budgets b"
            " JOIN parties p ON p.id = b.party WHERE b.id > ? ORDER BY b.id",
            (self._budgets_seen,),
        )
        for budget, party, *terms in fresh:
            self._accounts[terms[0]] = (party, Account(*terms))
            self._budgets_seen = budget
        rows = self._db.execute(
            "SELECT party, events, count(*), max(id) FROM entries WHERE id > ? GROUP BY party, events", (self._seen,)
        ).fetchall()
        add = _Adder()
        for party, events, times, last in rows:
            self._spends[party] = add(self._spend(party), events, times)
            self._seen = max(self._seen, last)

    def _spend(self, party: int) -> Spend:
        return self._spends.get(party, _NOTHING)

    def _account(self, party: str) -> tuple[int, Account]:
        if party not in self._accounts:
            raise InputError(f"party {party!r} is not in the ledger {self.path}; enroll it first.")
        return self._accounts[party]

    # --- parties ---------------------------------------------------------------------------------

    def enroll(
        self, party: str, budget: float | None, delta: float, accountant: str, unit: str, population: str
    ) -> None:
        """Open an account. Once enrolled, the same terms change nothing; other terms are a ConfigError.

        A known party keeps its budget whatever is given here; `set_budget` changes it.
        """
        self.enroll_all([Account(party, budget, delta, accountant, unit, population)])

    def enroll_all(self, accounts: Iterable[Account]) -> None:
        """Enroll many parties in one transaction; if one is refused none is added."""
        accounts = list(accounts)
        for account in accounts:
            check_terms(account.delta, account.accountant)
            _check_budget(account.name, account.budget)
        if all(account.name in self._accounts for account in accounts):  # terms never change: no need to look
            for account in accounts:
                _same_terms(self._accounts[account.name][1], account)
            return
        with self._writing(), self._reading():
            added: dict[str, Account] = {}
            for account in accounts:
                known = self._accounts[account.name][1] if account.name in self._accounts else added.get(account.name)
                if known is not None:
                    _same_terms(known, account)
                    continue
                added[account.name] = account
                now = time.time()
                cursor = self._db.execute(
                    "INSERT INTO parties (name, delta, accountant, unit, population, time) VALUES (?, ?, ?, ?, ?, ?)",
                    (account.name, account.delta, account.accountant, account.unit, account.population, now),
                )
                self._db.execute(
                    "INSERT INTO budgets (party, epsilon, time) VALUES (?, ?, ?)",
                    (cursor.lastrowid, account.budget, now),
                )

    def set_budget(self, party: str, budget: float | None) -> None:
        """Give a party another budget from now on; the former one stays on record."""
        _check_budget(party, budget)
        with self._writing(), self._reading():
            row, _ = self._account(party)
            self._db.execute("INSERT INTO budgets (party, epsilon, time) VALUES (?, ?, ?)", (row, budget, time.time()))

    def accounts(self) -> dict[str, Account]:
        """Every party with its present budget and terms, by name."""
        with self._reading():
            return {name: account for name, (_, account) in self._accounts.items()}

    # --- money -----------------------------------------------------------------------------------

    def reserve(self, run: str, round: int, wanted: Mapping[str, Sequence[Event]], attempt: int = 0) -> dict[str, bool]:
        """Write down what each party is about to release, before it does. One transaction for all.

        True: granted, and counted from now on, whether or not anything is released. False: it would
        pass the party's budget; nothing was written for it, and it must sit out. Asking again for the
        same (party, run, round, attempt) and the same events is granted and costs nothing (a crash
        lies between); other events under the same key are a BudgetError. To release something new for
        a round that was already reserved, raise `attempt`: it is paid again.
        """
        asked = {party: tuple(events) for party, events in wanted.items()}
        with self._writing(), self._reading():
            held = dict(
                self._db.execute(
                    "SELECT party, events FROM entries WHERE run = ? AND round = ? AND attempt = ?",
                    (run, round, attempt),
                )
            )
            fresh: list[tuple[str, int, Account, str, Spend]] = []
            add = _Adder()
            for party, events in asked.items():
                row, account = self._account(party)
                text = _write_events(events)
                if held.get(row, text) != text:
                    raise BudgetError(
                        f"party {party!r} already reserved other events for round {round} of run {run!r} (attempt "
                        f"{attempt}); what is released must be what was reserved, so nothing was released."
                    )
                if row not in held:
                    fresh.append((party, row, account, text, add(self._spend(row), text)))
            within = _within_budget([(account, spend) for _, _, account, _, spend in fresh])
            granted = [line for line, fits in zip(fresh, within, strict=True) if fits]
            now = time.time()
            self._db.executemany(
                "INSERT INTO entries (party, run, round, attempt, events, time) VALUES (?, ?, ?, ?, ?, ?)",
                [(row, run, round, attempt, text, now) for _, row, _, text, _ in granted],
            )
            (last,) = self._db.execute("SELECT coalesce(max(id), 0) FROM entries").fetchone()
        # Only now is it on disk; the transaction kept every other writer out, so these are all the news.
        with self._lock:
            if self._seen < last:
                self._spends.update({row: spend for _, row, _, _, spend in granted})
                self._seen = last
        refused = {line[0] for line, fits in zip(fresh, within, strict=True) if not fits}
        return {party: party not in refused for party in asked}

    def settle(self, run: str, round: int, digests: Mapping[str, str], attempt: int | None = None) -> None:
        """Mark reservations as released, with the digest of what each party released. One transaction.

        Settles each party's latest attempt unless told which. Again with the same digest changes
        nothing; with another one it is a BudgetError, since the second release was not paid for.
        """
        with self._writing(), self._reading():
            rows = self._db.execute(
                "SELECT e.party, e.attempt, e.id, s.digest FROM entries e LEFT JOIN settlements s ON s.entry = e.id"
                " WHERE e.run = ? AND e.round = ? ORDER BY e.attempt",
                (run, round),
            ).fetchall()
            latest = {party: (entry, old) for party, tried, entry, old in rows if attempt in (None, tried)}
            new = []
            for party, digest in digests.items():
                entry, old = latest.get(self._account(party)[0], (None, None))
                if entry is None:
                    raise BudgetError(f"party {party!r} settles round {round} of run {run!r}, which it never reserved.")
                if old not in (None, digest):
                    raise BudgetError(
                        f"party {party!r} already released something else in round {round} of run {run!r}; reserve a "
                        "new attempt before releasing again."
                    )
                if old is None:
                    new.append((entry, digest, time.time()))
            self._db.executemany("INSERT INTO settlements (entry, digest, time) VALUES (?, ?, ?)", new)

    def settled_attempts(self, run: str, round: int) -> int:
        """The first attempt at this round that has not been settled: 0 unless something was released before."""
        with self._reading():
            (last,) = self._db.execute(
                "SELECT coalesce(max(e.attempt), -1) FROM entries e JOIN settlements s ON s.entry = e.id"
                " WHERE e.run = ? AND e.round = ?",
                (run, round),
            ).fetchone()
            return int(last) + 1

    # --- questions -------------------------------------------------------------------------------

    def spent(self, party: str) -> Spend:
        """All that the party has reserved so far, over all runs."""
        with self._reading():
            return self._spend(self._account(party)[0])

    def spends(self, run: str | None = None) -> dict[str, Spend]:
        """What every party has reserved so far: over all runs, or in one run."""
        with self._reading():
            if run is None:
                return {name: self._spend(row) for name, (row, _) in self._accounts.items()}
            totals = {name: Spend.none() for name in self._accounts}
            for name, events, times in self._db.execute(
                "SELECT p.name, e.events, count(*) FROM entries e JOIN parties p ON p.id = e.party"
                " WHERE e.run = ? GROUP BY p.name, e.events",
                (run,),
            ):
                totals[name] = totals[name].plus(_read_events(events), times)
            return totals

    def epsilon(self, party: str) -> float:
        """The epsilon the party has reserved so far, over all runs, by its own delta and accountant."""
        with self._reading():
            row, account = self._account(party)
            return self._spend(row).epsilon(account.delta, account.accountant)

    def epsilons(self) -> dict[str, float]:
        """`epsilon` of every party."""
        with self._reading():
            pairs = [(account, self._spend(row)) for row, account in self._accounts.values()]
            return dict(zip(self._accounts, _costs(pairs), strict=True))

    def entries(self, party: str) -> list[Entry]:
        """Every reservation of a party, oldest first."""
        with self._reading():
            rows = self._db.execute(
                "SELECT e.run, e.round, e.attempt, e.events, e.time, s.digest, s.time FROM entries e"
                " LEFT JOIN settlements s ON s.entry = e.id WHERE e.party = ? ORDER BY e.id",
                (self._account(party)[0],),
            )
            return [
                Entry(party, run, round, attempt, _read_events(events), reserved, digest, released)
                for run, round, attempt, events, reserved, digest, released in rows
            ]

    def history(self) -> list[Line]:
        """What each run cost each party, in the order in which they began."""
        with self._reading():
            rows = self._db.execute(
                "SELECT p.name, e.run, e.events, min(e.round), max(e.round), count(*), count(s.entry)"
                " FROM entries e JOIN parties p ON p.id = e.party LEFT JOIN settlements s ON s.entry = e.id"
                " GROUP BY e.party, e.run, e.events ORDER BY min(e.id)"
            ).fetchall()
            totals: dict[tuple[str, str], tuple[int, int, int, int, Spend]] = {}
            for name, run, events, first, last, count, settled in rows:
                old = totals.get((name, run), (first, last, 0, 0, Spend.none()))
                spend = old[4].plus(_read_events(events), count)
                totals[name, run] = min(old[0], first), max(old[1], last), old[2] + count, old[3] + settled, spend
            costs = _costs([(self._accounts[name][1], total[4]) for (name, _), total in totals.items()])
        return [
            Line(*key, *total[:4], total[4].releases, cost)
            for (key, total), cost in zip(totals.items(), costs, strict=True)
        ]


class _Adder:
    """Spend plus events, computed once for all parties with the same past: they share one object."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, str, int], tuple[Spend, Spend]] = {}

    def __call__(self, past: Spend, events: str, times: int = 1) -> Spend:
        key = (id(past), events, times)
        if key not in self._done:
            # The past is kept beside the sum, so that its id cannot pass to another object.
            self._done[key] = (past, past.plus(_read_events(events), times))
        return self._done[key][1]


def _costs(pairs: Sequence[tuple[Account, Spend]]) -> list[float]:
    """Epsilon of each spend by the terms of its account, many at once."""
    terms: dict[tuple[float, str], dict[int, Spend]] = {}
    for account, spend in pairs:
        terms.setdefault((account.delta, account.accountant), {})[id(spend)] = spend
    costs = {
        term: dict(zip(spends, epsilons(list(spends.values()), *term).tolist(), strict=True))
        for term, spends in terms.items()
    }
    return [costs[account.delta, account.accountant][id(spend)] for account, spend in pairs]


def _within_budget(pairs: Sequence[tuple[Account, Spend]]) -> list[bool]:
    limited = [(account, spend) for account, spend in pairs if account.budget is not None]
    costs = iter(_costs(limited))
    return [a.budget is None or next(costs) <= a.budget * (1 + SLACK) for a, _ in pairs]


def _check_budget(party: str, budget: float | None) -> None:
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(
            f"budget of party {party!r} = {budget!r} is out of range; it must be a finite number above 0."
        )


def _same_terms(known: Account, given: Account) -> None:
    for term in ("unit", "delta", "accountant", "population"):
        if getattr(known, term) != getattr(given, term):
            raise ConfigError(
                f"party {known.name!r} is in the ledger with {term} = {getattr(known, term)!r}, not "
                f"{getattr(given, term)!r}; use the same {term}, or another ledger."
            )
