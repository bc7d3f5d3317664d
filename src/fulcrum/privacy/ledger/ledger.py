"""`Ledger`: the operations on an open ledger and their guarantees."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeVar

from fulcrum.errors import BudgetError, ConfigError, InputError
from fulcrum.privacy.accounting import Spend, check_accounting_terms, compute_epsilons
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.rows import (
    UNKNOWN,
    KnownUnits,
    LedgerAccount,
    LedgerEntry,
    LedgerHead,
    RunCostLine,
    RunPlan,
    RunRecord,
    read_events_text,
    write_events_text,
)
from fulcrum.privacy.ledger.store import EMPTY_SPEND, LedgerStore, SpendAdder
from fulcrum.privacy.ledger.units import parse_units

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
            rows = self._store.insert(
                "parties",
                ("name", "delta", "accountant", "unit", "population"),
                [(a.name, a.delta, a.accountant, a.unit, a.population) for a in added.values()],
            )
            budgets = [(row, account.budget) for row, account in zip(rows, added.values(), strict=True)]
            self._store.insert("budgets", ("party", "epsilon"), budgets)

    def change_budget(self, party: str, budget: float | None) -> None:
        """Change a party's budget from now on; the former one stays on record."""
        _check_budget_value(party, budget)
        with self._store.write_transaction():
            self._store.insert("budgets", ("party", "epsilon"), [(self._store.find_account(party)[0], budget)])

    def accounts(self) -> dict[str, LedgerAccount]:
        """Every party with its current budget and terms, by name."""
        with self._store.reading():
            return {name: account for name, (_, account) in self._store.accounts.items()}

    # --- the file as a whole -------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """The ledger's random name, written at its creation; empty for a file of an older format without new rows."""
        with self._store.reading():
            return self._store.identity

    def head(self) -> LedgerHead:
        """The end of the chain of rows, to be kept with a run and compared by `check_contains`."""
        with self._store.reading():
            end = self._store.head()
            return LedgerHead(self._store.identity, end.sequence, end.digest.hex() if end.sequence else "")

    def check_contains(self, head: LedgerHead) -> None:
        """InputError unless this ledger is the one that had this head, with all its rows up to there."""
        with self._store.reading():
            if head.ledger != self._store.identity:
                raise InputError(
                    f"ledger {self.path} is another ledger ({self._store.identity or 'none'}) than the one that this run "
                    f"was charged to ({head.ledger or 'none'}); give the path of that one."
                )
            if not head.sequence:
                return
            end = self._store.head()
            if end.sequence < head.sequence:
                raise InputError(
                    f"ledger {self.path} was rolled back: it has {end.sequence} rows, and this run knows {head.sequence}; "
                    "give its latest copy."
                )
            (digest,) = self._store.db.execute(
                "SELECT digest FROM chain WHERE sequence = ?", (head.sequence,)
            ).fetchone()
            if bytes(digest).hex() != head.digest:
                raise InputError(
                    f"ledger {self.path} was rewritten: its row {head.sequence} is not the one that this run knows; give "
                    "the copy that this run was charged to."
                )

    # --- runs ------------------------------------------------------------------------------------

    def register_run(self, record: RunRecord, plans: Mapping[str, RunPlan] = MappingProxyType({})) -> None:
        """Say what a run is, and the most that each party will release in it, before its first release.

        Again with equal content (to resume): nothing changes. Other content under the same id is refused, and so is a
        private seed that another run of this ledger had, since its noise would be the same.
        """
        with self._store.write_transaction():
            known = self._store.records.get(record.id)
            if known is None:
                _check_new_seed(record, self._store.records.values())
                self._store.insert(
                    "runs",
                    ("run", "seed_digest", "record"),
                    [(record.id, record.seed_digest, json.dumps(vars(record), sort_keys=True))],
                )
            elif known != record:
                raise ConfigError(_describe_other_record(known, record))
        self.register_plans(record.id, plans)

    def register_plans(self, run: str, plans: Mapping[str, RunPlan]) -> None:
        """The plans of enrolled parties for a run; those that are registered stay, and other content is refused."""

    def runs(self) -> dict[str, RunRecord]:
        """Every run of this ledger by its id, in the order of their first rows; unregistered ones are "unknown"."""
        with self._store.reading():
            found = dict(self._store.records)
            for (run,) in self._store.db.execute("SELECT run FROM entries GROUP BY run ORDER BY min(id)"):
                found.setdefault(run, RunRecord.unknown(run))
            return found

    # --- units -----------------------------------------------------------------------------------

    def register_units(self, run: str, party: str, digests: bytes, allow_shared: bool = False) -> None:
        """The units of a party in a run, before its first release: concatenated 16-byte keyed digests.

        Units that this ledger knows under another party's name are refused unless `allow_shared`.
        """
        self.register_all_units(run, {party: digests}, allow_shared)

    def register_all_units(self, run: str, digests: Mapping[str, bytes], allow_shared: bool = False) -> None:
        """`register_units` of many parties in one transaction; if one is refused none is added."""

    def find_known_units(self, party: str, digests: bytes) -> KnownUnits:
        """How many of these units this ledger knows, from the party's earlier runs or from other parties."""
        return KnownUnits(len(parse_units(digests)), 0, 0, {})

    def describe_composition(self, party: str) -> str:
        """One sentence: how the party's runs add up."""
        return ""

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
            granted = [fresh[party] for party in fresh if fits[party]]
            numbers = store.insert(
                "entries",
                ("party", "run", "round", "attempt", "events"),
                [(row, run, round, attempt, text) for row, text, _ in granted],
            )
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
                    new.append((entry, digest))
            self._store.insert("settlements", ("entry", "digest"), new)

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


def _check_new_seed(record: RunRecord, others: Iterable[RunRecord]) -> None:
    """Refuse a private seed that another run had."""
    if record.seed_digest in ("", UNKNOWN):
        return
    for other in others:
        if other.seed_digest == record.seed_digest:
            raise ConfigError(
                f"the private seed of this run was used by run {other.id} in this ledger; its noise would repeat: give "
                "another --private-seed, or privacy.randomness = secure."
            )


def _describe_other_record(known: RunRecord, given: RunRecord) -> str:
    """The first difference between two records of one run, in a sentence."""
    name = next(name for name, value in vars(known).items() if value != getattr(given, name))
    return (
        f"run {known.id} is in the ledger with {name} = {getattr(known, name)!r}, not {getattr(given, name)!r}; a run is "
        "resumed with the settings and data that it began with, or started under another id."
    )


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
