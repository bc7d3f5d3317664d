"""`Ledger`: the changes to an open ledger and their guarantees."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np

from fulcrum.errors import BudgetError, ConfigError
from fulcrum.privacy.accounting import Spend, check_accounting_terms, format_epsilon
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.checks import check_budget_value, check_same_account_terms
from fulcrum.privacy.ledger.composition import (
    DELTA_ROUNDING,
    SLICES_RULE,
    Cost,
    fits_into,
)
from fulcrum.privacy.ledger.pricing import price_plans, total_of
from fulcrum.privacy.ledger.reader import LedgerReader
from fulcrum.privacy.ledger.rows import (
    UNKNOWN,
    LedgerAccount,
    RunPlan,
    RunRecord,
    read_events_text,
    write_events_text,
)
from fulcrum.privacy.ledger.store import EMPTY_SPEND, LedgerStore, SpendAdder
from fulcrum.privacy.ledger.units import (
    UnitArray,
    find_shared_units,
    name_unit_set,
    parse_units,
    write_units,
)


class Ledger(LedgerReader):
    """An open ledger. Use `with Ledger.open(path) as ledger:`; safe to share between threads and processes.

    Every change is one transaction, on disk when the call returns. Spends are kept in memory; each call
    first reads the rows that were added since the last one.
    """

    @staticmethod
    def open(path: str | Path, wait: float = 30.0) -> Ledger:
        """Open a ledger, or start a new one where there is no file; `wait` seconds for other processes.

        ":memory:" is a ledger without a file.
        """
        return Ledger(LedgerStore.open(Path(path), wait))

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
            check_budget_value(account.name, account.budget)
        if all(account.name in known for account in given):  # terms never change: no need to read them
            for account in given:
                if known[account.name][1].population != account.population:  # but units may have been registered
                    with self._store.reading():
                        pass
                check_same_account_terms(known[account.name][1], account, account.name in self._store.unit_rows)
            return
        with self._store.write_transaction():
            added: dict[str, LedgerAccount] = {}
            for account in given:
                before = known[account.name][1] if account.name in known else added.get(account.name)
                if before is not None:
                    check_same_account_terms(before, account, account.name in self._store.unit_rows)
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
        check_budget_value(party, budget)
        with self._store.write_transaction():
            self._store.insert("budgets", ("party", "epsilon"), [(self._store.find_account(party)[0], budget)])

    # --- the file as a whole -------------------------------------------------------------------

    def bring_to_current_format(self) -> None:
        """Give a file of an older format an identity and a chain now, rather than with its next row."""
        if not self.identity:
            with self._store.write_transaction():
                self._store.bring_to_current_format()

    # --- runs ------------------------------------------------------------------------------------

    def register_run(self, record: RunRecord, plans: Mapping[str, RunPlan] = MappingProxyType({})) -> None:
        """Say what a run is, and the most that each party will release in it, before its first release.

        Again with equal content (to resume): nothing changes. Other content under the same id is refused, and so is a
        private seed that another run of this ledger released with, since its noise would be the same; a run that never
        reserved anything has used up no seed.
        """
        with self._store.write_transaction():
            known = self._store.records.get(record.id)
            if known is None:
                self._check_new_seed(record)
                self._store.insert(
                    "runs",
                    ("run", "seed_digest", "record"),
                    [(record.id, record.seed_digest, json.dumps(vars(record), sort_keys=True))],
                )
            elif known != record:
                raise ConfigError(_describe_other_record(known, record))
        self.register_plans(record.id, plans)

    def register_plans(self, run: str, plans: Mapping[str, RunPlan]) -> None:
        """The most that enrolled parties will release in a run, before its first release. One transaction.

        Equal plans that are registered already change nothing; other ones are refused. The first plan of an account
        fixes how its runs add up (`composition.py`). Where runs add up as slices, the plan is priced here, once, and
        BudgetError is raised if it does not fit into the budget or the delta that is left; rounds within it need no
        accountant. Where they add up at a Renyi order nothing is refused here: each round is, once it does not fit.
        """
        if not plans:
            return
        store = self._store
        with store.write_transaction():
            new: dict[str, RunPlan] = {}
            for party, plan in plans.items():
                row = store.find_account(party)[0]
                known = store.plans.get(row, {}).get(run)
                if known is None:
                    new[party] = RunPlan(tuple(plan.events), float(plan.delta))
                elif known[0] != plan:
                    raise ConfigError(
                        f"party {party!r} registered another plan for run {run!r}; a plan is fixed before the first "
                        "release: resume with the same settings, or start another run."
                    )
            accounts = {party: store.find_account(party) for party in new}
            terms = {
                party: self._pricer.choose_terms(row, account, run, total_of(new[party].events))
                for party, (row, account) in accounts.items()
            }
            sliced = {party: plan for party, plan in new.items() if terms[party][0] == SLICES_RULE}
            prices = price_plans(sliced, {party: account for party, (_, account) in accounts.items()})
            for party, plan in sliced.items():
                self._check_slice(party, run, terms[party], plan, prices[party])
            self._insert_terms({accounts[party][0]: terms[party] for party in new})
            store.insert(
                "plans",
                ("party", "run", "events", "delta", "epsilon"),
                [
                    (accounts[party][0], run, write_events_text(plan.events), plan.delta, _stored(prices.get(party)))
                    for party, plan in new.items()
                ],
            )

    def _check_slice(self, party: str, run: str, terms: tuple[str, float], plan: RunPlan, epsilon: float) -> None:
        """BudgetError where a plan's (epsilon, delta) does not fit beside what the party's other runs took."""
        row, account = self._store.find_account(party)
        cost = self._pricer.compute_cost(account, row, terms, run, plan=(plan, epsilon))
        if fits_into(cost, account.budget, account.delta):
            return
        if not fits_into(cost, None, account.delta):
            left = account.delta - (cost.delta - plan.delta)
            advice = f"at most {left:.4g}" if left > DELTA_ROUNDING * account.delta else "nothing"
            raise BudgetError(
                f"the plan of party {party!r} has delta = {plan.delta:g}, and {advice} is left of the "
                f"delta = {account.delta:g} of its account, since the deltas of runs add up: give each run a smaller "
                "--delta and the account their sum (privacy.budget_delta), or use accountant rdp, which needs no parts."
            )
        raise BudgetError(
            f"the plan of party {party!r} costs epsilon = {format_epsilon(epsilon)}, which with its earlier runs makes "
            f"{format_epsilon(cost.epsilon)} of its budget {format_epsilon(account.budget or 0.0)}; plan fewer rounds "
            "or more noise."
        )

    def _insert_terms(self, terms: Mapping[int, tuple[str, float]]) -> None:
        """Fix the rules of composition of accounts that have none."""
        new = [(row, *pair) for row, pair in terms.items() if row not in self._store.terms]
        self._store.insert("terms", ("party", "rule", "renyi_order"), new)

    def _check_new_seed(self, record: RunRecord) -> None:
        """Refuse a private seed that another run has released with."""
        if record.seed_digest in ("", UNKNOWN):
            return
        for other in self._store.records.values():
            if other.seed_digest == record.seed_digest and other.id != record.id and other.id in self._store.begun:
                raise ConfigError(
                    f"the private seed of this run was used by run {other.id} in this ledger; its noise would repeat: "
                    "give another --private-seed, or privacy.randomness = secure."
                )

    # --- units -----------------------------------------------------------------------------------

    def register_units(self, run: str, party: str, digests: bytes, allow_shared: bool = False) -> None:
        """The units of a party in a run, before its first release: concatenated 16-byte keyed digests.

        Units that this ledger knows under another party's name are refused unless `allow_shared`: then what any party
        released of a unit counts in the accounts of all parties that have it.
        """
        self.register_all_units(run, {party: digests}, allow_shared)

    def register_all_units(self, run: str, digests: Mapping[str, bytes], allow_shared: bool = False) -> None:
        """`register_units` of many parties in one transaction; if one is refused none is added."""
        given = {party: parse_units(each) for party, each in digests.items()}
        store = self._store
        with store.write_transaction():
            before = {party: dict(store.unit_rows.get(party, ())) for party in given}
            for party, units in given.items():
                if run in before[party] and not np.array_equal(self._pricer.read_set(before[party][run]), units):
                    raise ConfigError(
                        f"party {party!r} registered other records for run {run!r}; resume a run with the data that it "
                        "began with, or start another run."
                    )
            new = {party: units for party, units in given.items() if run not in before[party]}
            known = {party: self._read_party_units(party) for party in store.unit_rows}
            shared = find_shared_units(known, new)
            if shared is not None and not allow_shared:
                party, other, count = shared
                raise BudgetError(
                    f"{count} of the {len(new[party])} records of party {party!r} are in this ledger as records of "
                    f"party {other!r}, whose budget counts what was released of them; use the parties' names of before."
                )
            numbers = self._store_unit_sets(new.values())
            store.insert(
                "units",
                ("party", "run", "unit_set", "shared"),
                [
                    (party, run, numbers[name_unit_set(write_units(units))], shared is not None)
                    for party, units in new.items()
                ],
            )

    def _store_unit_sets(self, sets: Iterable[UnitArray]) -> dict[bytes, int]:
        """Store sets of units that are not stored yet; returns the number of each set by its name."""
        contents = {name_unit_set(write_units(units)): write_units(units) for units in sets}
        numbers: dict[bytes, int] = {}
        if self._store.identity:  # a file of an older format has no sets
            for name in contents:
                found = self._store.db.execute("SELECT id FROM unit_sets WHERE digest = ?", (name,)).fetchone()
                numbers |= {name: found[0]} if found else {}
        missing = [(name, content) for name, content in contents.items() if name not in numbers]
        added = self._store.insert("unit_sets", ("digest", "members"), missing)
        return numbers | {name: number for (name, _), number in zip(missing, added, strict=True)}

    # --- releases --------------------------------------------------------------------------------

    def reserve(self, run: str, round: int, wanted: Mapping[str, Sequence[Event]], attempt: int = 0) -> dict[str, bool]:
        """Record what each party is about to release, before the release. One transaction for all parties.

        True: granted, and counted from now on, whether or not the release happens. False: it would exceed
        the party's budget, or the plan of a run that was priced as a whole (`register_plans`; without a plan such an
        account grants nothing); nothing was written for the party, and it must not take part. Repeating a
        reservation with the same (party, run, round, attempt) and events is granted and costs nothing
        (after a crash); other events under the same key raise BudgetError. For a new release in a round
        that was already reserved, increase `attempt`: it is paid again.
        """
        asked = {party: tuple(events) for party, events in wanted.items()}
        store, add = self._store, SpendAdder()
        with store.write_transaction():
            if run in store.records:
                self._check_new_seed(store.records[run])  # two runs may have been registered before either began
            held = dict(
                store.db.execute(
                    "SELECT party, events FROM entries WHERE run = ? AND round = ? AND attempt = ?",
                    (run, round, attempt),
                )
            )
            fresh: dict[str, _Asked] = {}
            for party, events in asked.items():
                (row, account), text = store.find_account(party), write_events_text(events)
                if row not in held:
                    own = store.get_run_spends(row).get(run, EMPTY_SPEND)
                    after = (add(store.get_spend(row), text), add(own, text))
                    terms = self._pricer.choose_terms(row, account, first=after[0])
                    fresh[party] = _Asked(row, account, text, terms, after)
                elif read_events_text(held[row]) != events:
                    raise BudgetError(
                        f"party {party!r} already reserved other events for round {round} of run {run!r} (attempt "
                        f"{attempt}); what is released must be what was reserved, so nothing was released."
                    )
            with self._pricer.assume(run, {each.row: each.after[1] for each in fresh.values()}):
                fits = {party: self._is_affordable(run, each) for party, each in fresh.items()}
            granted = [fresh[party] for party in fresh if fits[party]]
            self._insert_terms({each.row: each.terms for each in granted})
            numbers = store.insert(
                "entries",
                ("party", "run", "round", "attempt", "events"),
                [(each.row, run, round, attempt, each.text) for each in granted],
            )
        if numbers:
            # The rows are on disk now. The transaction excluded other writers, so there are no other new rows.
            store.remember_spends(numbers[-1], run, {each.row: each.after for each in granted})
        return {party: fits.get(party, True) for party in asked}

    def _is_affordable(self, run: str, asked: _Asked) -> bool:
        """Whether a reservation is within the plan of its run and the account's budget."""
        account = asked.account
        if asked.terms[0] != SLICES_RULE:
            return account.budget is None or self._compute_cost_after(run, asked).epsilon <= account.budget
        plan = self._store.plans.get(asked.row, {}).get(run)
        return (
            plan is not None
            and self._pricer.is_covered(asked.after[1], plan[0])
            and fits_into(self._compute_cost_after(run, asked), account.budget, account.delta)
        )

    def _compute_cost_after(self, run: str, asked: _Asked) -> Cost:
        return self._pricer.compute_cost(asked.account, asked.row, asked.terms, run, asked.after)

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


@dataclass(frozen=True)
class _Asked:
    """A party's wish to release. after: its (total, run's) spend with it. text: the events as a row has them."""

    row: int
    account: LedgerAccount
    text: str
    terms: tuple[str, float]
    after: tuple[Spend, Spend]


def _stored(epsilon: float | None) -> float | None:
    """An epsilon as SQLite keeps it: it has infinities."""
    return None if epsilon is None else float(epsilon)


def _describe_other_record(known: RunRecord, given: RunRecord) -> str:
    """The first difference between two records of one run, in a sentence."""
    name = next(name for name, value in vars(known).items() if value != getattr(given, name))
    return (
        f"run {known.id} is in the ledger with {name} = {getattr(known, name)!r}, not {getattr(given, name)!r}; a run "
        "is resumed with the settings and data that it began with, or started under another id."
    )
