"""`Ledger`: the operations on an open ledger and their guarantees."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from fulcrum.errors import BudgetError, ConfigError
from fulcrum.privacy.accounting import Spend, check_accounting_terms, compute_epsilons
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.rows import LedgerAccount, LedgerEntry, RunCostLine, read_events_text, write_events_text
from fulcrum.privacy.ledger.store import EMPTY_SPEND, LedgerStore, SpendAdder

Key = TypeVar("Key")
BUDGET_TOLERANCE = 1e-9
"""Relative tolerance of the budget check, for rounding errors only."""


class Ledger:
    """An open ledger. Use `with Ledger.open(path) as ledger:`; safe to share between threads and processes.

    Every change is one transaction, on disk when the call returns. Spends are kept in memory; each call
    first reads the rows that were added since the last one.
    """

    def __init__(self, store: LedgerStore) -> None:
        self._store = store

    @staticmethod
    def open(path: str | Path, wait: float = 30.0) -> Ledger:
        """Open a ledger, or start a new one where there is no file; `wait` seconds for other processes.

        ":memory:" is a ledger without a file.
        """
        return Ledger(LedgerStore.open(Path(path), wait))

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._store.path

    def close(self) -> None:
        """Close the file. No data is lost without this call."""
        self._store.db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- parties ---------------------------------------------------------------------------------

    def enroll(
        self, party: str, budget: float | None, delta: float, accountant: str, unit: str, population: str
    ) -> None:
        """Open an account. For an enrolled party the same terms change nothing; other terms raise ConfigError.

        An enrolled party keeps its budget, whatever is given here; `change_budget` changes it.
        """
        self.enroll_parties([LedgerAccount(party, budget, delta, accountant, unit, population)])

    def enroll_parties(self, accounts: Iterable[LedgerAccount]) -> None:
        """Enroll many parties in one transaction; if one is refused none is added."""
        given, known = list(accounts), self._store.accounts
        for delta, accountant in {(account.delta, account.accountant) for account in given}:
            check_accounting_terms(delta, accountant)
        for account in given:
            _check_budget_value(account.name, account.budget)
        if all(account.name in known for account in given):  # terms never change: no need to read them
            for account in given:
                _check_same_account_terms(known[account.name][1], account)
            return
        with self._store.write_transaction():
            added: dict[str, LedgerAccount] = {}
            for account in given:
                before = known[account.name][1] if account.name in known else added.get(account.name)
                if before is not None:
                    _check_same_account_terms(before, account)
                    continue
                added[account.name] = account
                cursor = self._store.db.execute(
                    "INSERT INTO parties (name, delta, accountant, unit, population, time) VALUES (?, ?, ?, ?, ?, ?)",
                    (account.name, account.delta, account.accountant, account.unit, account.population, time.time()),
                )
                self._insert_budget(cursor.lastrowid, account.budget)

    def change_budget(self, party: str, budget: float | None) -> None:
        """Change a party's budget from now on; the former one stays on record."""
        _check_budget_value(party, budget)
        with self._store.write_transaction():
            self._insert_budget(self._store.find_account(party)[0], budget)

    def _insert_budget(self, row: int | None, budget: float | None) -> None:
        values = (row, budget, time.time())
        self._store.db.execute("INSERT INTO budgets (party, epsilon, time) VALUES (?, ?, ?)", values)

    def accounts(self) -> dict[str, LedgerAccount]:
        """Every party with its current budget and terms, by name."""
        with self._store.reading():
            return {name: account for name, (_, account) in self._store.accounts.items()}

    # --- releases --------------------------------------------------------------------------------

    def reserve(self, run: str, round: int, wanted: Mapping[str, Sequence[Event]], attempt: int = 0) -> dict[str, bool]:
        """Record what each party is about to release, before the release. One transaction for all parties.

        True: granted, and counted from now on, whether or not the release happens. False: it would exceed
        the party's budget; nothing was written for the party, and it must not take part. Repeating a
        reservation with the same (party, run, round, attempt) and events is granted and costs nothing
        (after a crash); other events under the same key raise BudgetError. For a new release in a round
        that was already reserved, increase `attempt`: it is paid again.
        """
        asked = {party: tuple(events) for party, events in wanted.items()}
        store, add = self._store, SpendAdder()
        with store.write_transaction():
            held = dict(
                store.db.execute(
                    "SELECT party, events FROM entries WHERE run = ? AND round = ? AND attempt = ?",
                    (run, round, attempt),
                )
            )
            fresh: dict[str, tuple[int, str, Spend]] = {}  # party -> its row, its events, its spend including them
            for party, events in asked.items():
                row, text = store.find_account(party)[0], write_events_text(events)
                if row not in held:
                    fresh[party] = (row, text, add(store.get_spend(row), text))
                elif read_events_text(held[row]) != events:
                    raise BudgetError(
                        f"party {party!r} already reserved other events for round {round} of run {run!r} (attempt "
                        f"{attempt}); what is released must be what was reserved, so nothing was released."
                    )
            fits = _check_within_budgets(
                {party: (store.find_account(party)[1], spend) for party, (_, _, spend) in fresh.items()}
            )
            granted, now = [fresh[party] for party in fresh if fits[party]], time.time()
            if granted:
                store.mark_current_format()
            store.db.executemany(
                "INSERT INTO entries (party, run, round, attempt, events, time) VALUES (?, ?, ?, ?, ?, ?)",
                [(row, run, round, attempt, text, now) for row, text, _ in granted],
            )
            (last,) = store.db.execute("SELECT coalesce(max(id), 0) FROM entries").fetchone()
        # The rows are on disk now. The transaction excluded other writers, so there are no other new rows.
        store.remember_spends(last, {row: spend for row, _, spend in granted})
        return {party: fits.get(party, True) for party in asked}

    def settle(self, run: str, round: int, digests: Mapping[str, str], attempt: int | None = None) -> None:
        """Mark reservations as released, with the digest of what each party released. One transaction.

        Settles each party's latest attempt unless `attempt` is given. Settling again with the same digest
        changes nothing; another digest raises BudgetError, since the second release was not paid for.
        """
        with self._store.write_transaction():
            rows = self._store.db.execute(
                "SELECT e.party, e.attempt, e.id, s.digest FROM entries e LEFT JOIN settlements s ON s.entry = e.id"
                " WHERE e.run = ? AND e.round = ? ORDER BY e.attempt",
                (run, round),
            ).fetchall()
            latest = {party: (entry, old) for party, tried, entry, old in rows if attempt in (None, tried)}
            new = []
            for party, digest in digests.items():
                entry, old = latest.get(self._store.find_account(party)[0], (None, None))
                if entry is None:
                    raise BudgetError(f"party {party!r} settles round {round} of run {run!r}, which it never reserved.")
                if old not in (None, digest):
                    raise BudgetError(
                        f"party {party!r} already released something else in round {round} of run {run!r}; reserve a "
                        "new attempt before releasing again."
                    )
                if old is None:
                    new.append((entry, digest, time.time()))
            self._store.db.executemany("INSERT INTO settlements (entry, digest, time) VALUES (?, ?, ?)", new)

    def count_settled_attempts(self, run: str, round: int) -> int:
        """The first attempt at this round that was not settled: 0 unless this round was released before."""
        with self._store.reading():
            (last,) = self._store.db.execute(
                "SELECT coalesce(max(e.attempt), -1) FROM entries e JOIN settlements s ON s.entry = e.id"
                " WHERE e.run = ? AND e.round = ?",
                (run, round),
            ).fetchone()
            return int(last) + 1

    # --- queries ---------------------------------------------------------------------------------

    def spent(self, party: str) -> Spend:
        """The party's total of reservations so far, over all runs."""
        with self._store.reading():
            return self._store.get_spend(self._store.find_account(party)[0])

    def get_spends(self, run: str | None = None) -> dict[str, Spend]:
        """The total of reservations per party so far: over all runs, or in one run."""
        store = self._store
        with store.reading():
            if run is None:
                return {name: store.get_spend(row) for name, (row, _) in store.accounts.items()}
            totals = dict.fromkeys(store.accounts, EMPTY_SPEND)
            for name, events, times in store.db.execute(
                "SELECT p.name, e.events, count(*) FROM entries e JOIN parties p ON p.id = e.party"
                " WHERE e.run = ? GROUP BY p.name, e.events",
                (run,),
            ):
                totals[name] = totals[name].add_events(read_events_text(events), times)
            return totals

    def list_round_reservations(self, run: str, rounds: range) -> list[tuple[str, tuple[Event, ...]]]:
        """(party, events) of every reservation of a run in these rounds, in the order of rounds and attempts."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT p.name, e.events FROM entries e JOIN parties p ON p.id = e.party"
                " WHERE e.run = ? AND e.round >= ? AND e.round < ? ORDER BY e.round, e.attempt, e.id",
                (run, rounds.start, rounds.stop),
            )
            return [(name, read_events_text(events)) for name, events in rows]

    def epsilon(self, party: str) -> float:
        """The epsilon that the party has reserved so far, over all runs, with its own delta and accountant."""
        with self._store.reading():
            row, account = self._store.find_account(party)
            return self._store.get_spend(row).epsilon(account.delta, account.accountant)

    def epsilons(self) -> dict[str, float]:
        """`epsilon` of every party."""
        with self._store.reading():
            return _compute_spend_epsilons(
                {name: (terms, self._store.get_spend(row)) for name, (row, terms) in self._store.accounts.items()}
            )

    def entries(self, party: str) -> list[LedgerEntry]:
        """Every reservation of a party, oldest first."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT e.run, e.round, e.attempt, e.events, e.time, s.digest, s.time FROM entries e"
                " LEFT JOIN settlements s ON s.entry = e.id WHERE e.party = ? ORDER BY e.id",
                (self._store.find_account(party)[0],),
            )
            return [
                LedgerEntry(party, run, round, attempt, read_events_text(events), reserved, digest, released)
                for run, round, attempt, events, reserved, digest, released in rows
            ]

    def list_run_costs(self) -> list[RunCostLine]:
        """The cost of each run for each party, in the order in which the runs began."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT p.name, e.run, e.events, min(e.round), max(e.round), count(*), count(s.entry)"
                " FROM entries e JOIN parties p ON p.id = e.party LEFT JOIN settlements s ON s.entry = e.id"
                " GROUP BY e.party, e.run, e.events ORDER BY min(e.id)"
            ).fetchall()
            totals: dict[tuple[str, str], tuple[int, int, int, int, Spend]] = {}
            for name, run, events, first, last, count, settled in rows:
                old = totals.get((name, run), (first, last, 0, 0, EMPTY_SPEND))
                spend = old[4].add_events(read_events_text(events), count)
                totals[name, run] = min(old[0], first), max(old[1], last), old[2] + count, old[3] + settled, spend
            costs = _compute_spend_epsilons(
                {key: (self._store.accounts[key[0]][1], total[4]) for key, total in totals.items()}
            )
        return [RunCostLine(*key, *total[:4], total[4].releases, costs[key]) for key, total in totals.items()]

    def list_round_entries(self, party: str, run: str, round: int) -> list[LedgerEntry]:
        """A party's reservations for one round of one run, first attempt first. Uses an index."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT e.attempt, e.events, e.time, s.digest, s.time FROM entries e LEFT JOIN settlements s"
                " ON s.entry = e.id WHERE e.run = ? AND e.round = ? AND e.party = ? ORDER BY e.attempt",
                (run, round, self._store.find_account(party)[0]),
            )
            return [
                LedgerEntry(party, run, round, attempt, read_events_text(events), reserved, digest, released)
                for attempt, events, reserved, digest, released in rows
            ]


def _compute_spend_epsilons(spends: Mapping[Key, tuple[LedgerAccount, Spend]]) -> dict[Key, float]:
    """Epsilon of each spend with the terms of its account; spends that are the same object are computed once."""
    by_terms: dict[tuple[float, str], dict[int, Spend]] = {}
    for account, spend in spends.values():
        by_terms.setdefault((account.delta, account.accountant), {})[id(spend)] = spend
    found = {
        terms: dict(zip(same, compute_epsilons(list(same.values()), *terms).tolist(), strict=True))
        for terms, same in by_terms.items()
    }
    return {key: found[account.delta, account.accountant][id(spend)] for key, (account, spend) in spends.items()}


def _check_within_budgets(spends: Mapping[str, tuple[LedgerAccount, Spend]]) -> dict[str, bool]:
    """Whether each party's spend fits into the budget of its account."""
    costs = _compute_spend_epsilons({party: pair for party, pair in spends.items() if pair[0].budget is not None})
    return {
        party: account.budget is None or costs[party] <= account.budget * (1 + BUDGET_TOLERANCE)
        for party, (account, _) in spends.items()
    }


def _check_budget_value(party: str, budget: float | None) -> None:
    """Refuse a budget that is not a finite number above 0."""
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(
            f"budget of party {party!r} = {budget!r} is out of range; it must be a finite number above 0."
        )


def _check_same_account_terms(known: LedgerAccount, given: LedgerAccount) -> None:
    for term in ("unit", "delta", "accountant", "population"):
        if getattr(known, term) != getattr(given, term):
            raise ConfigError(
                f"party {known.name!r} is in the ledger with {term} = {getattr(known, term)!r}, not "
                f"{getattr(given, term)!r}; use the same {term}, or another ledger."
            )
