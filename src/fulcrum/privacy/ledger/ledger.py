"""`Ledger`: the operations on an open ledger and their guarantees."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np

from fulcrum.errors import BudgetError, ConfigError, InputError
from fulcrum.privacy.accounting import Spend, check_accounting_terms, format_epsilon
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.composition import (
    DELTA_ROUNDING,
    SLICES_RULE,
    Cost,
    describe_rule,
    fits_into,
    is_within_plan,
)
from fulcrum.privacy.ledger.pricing import Pricer, price_plans, total_of
from fulcrum.privacy.ledger.rows import (
    SUMS_ONLY,
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
from fulcrum.privacy.ledger.store import EMPTY_SPEND, FORMAT_VERSION, LedgerStore, SpendAdder
from fulcrum.privacy.ledger.units import (
    UnitArray,
    find_members,
    find_shared_units,
    name_unit_set,
    parse_units,
    write_units,
)


class Ledger:
    """An open ledger. Use `with Ledger.open(path) as ledger:`; safe to share between threads and processes.

    Every change is one transaction, on disk when the call returns. Spends are kept in memory; each call
    first reads the rows that were added since the last one.
    """

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._pricer = Pricer(store)

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
                if known[account.name][1].population != account.population:  # but units may have been registered
                    with self._store.reading():
                        pass
                _check_same_account_terms(known[account.name][1], account, account.name in self._store.unit_rows)
            return
        with self._store.write_transaction():
            added: dict[str, LedgerAccount] = {}
            for account in given:
                before = known[account.name][1] if account.name in known else added.get(account.name)
                if before is not None:
                    _check_same_account_terms(before, account, account.name in self._store.unit_rows)
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

    def bring_to_current_format(self) -> None:
        """Give a file of an older format an identity and a chain now, rather than with its next row."""
        if not self.identity:
            with self._store.write_transaction():
                self._store.bring_to_current_format()

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
                    f"ledger {self.path} is another ledger ({self._store.identity or 'none'}) than the one that this "
                    f"run was charged to ({head.ledger or 'none'}); give the path of that one."
                )
            if not head.sequence:
                return
            end = self._store.head()
            if end.sequence < head.sequence:
                raise InputError(
                    f"ledger {self.path} was rolled back: it has {end.sequence} rows, and this run knows "
                    f"{head.sequence}; give its latest copy."
                )
            (digest,) = self._store.db.execute(
                "SELECT digest FROM chain WHERE sequence = ?", (head.sequence,)
            ).fetchone()
            if bytes(digest).hex() != head.digest:
                raise InputError(
                    f"ledger {self.path} was rewritten: its row {head.sequence} is not the one that this run knows; "
                    "give the copy that this run was charged to."
                )

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
            f"{format_epsilon(cost.epsilon)} of its budget {account.budget:g}; plan fewer rounds or more noise."
        )

    def has_plan(self, run: str, party: str) -> bool:
        """Whether the party's plan for this run is registered."""
        with self._store.reading():
            known = self._store.accounts.get(party)
            return known is not None and run in self._store.plans.get(known[0], {})

    def list_planned_parties(self, run: str, parties: Iterable[str]) -> set[str]:
        """Those of these parties whose plan for this run is registered."""
        with self._store.reading():
            rows = {name: self._store.accounts[name][0] for name in parties if name in self._store.accounts}
            return {name for name, row in rows.items() if run in self._store.plans.get(row, {})}

    def identify_past(self, party: str) -> object:
        """A value that is equal only for parties that spent the same: their accounts have equal room."""
        with self._store.reading():
            row, account = self._store.find_account(party)
            cost = self._pricer.compute_cost(account, row, self._pricer.choose_terms(row, account))
            return cost, self._store.terms.get(row), self._pricer.find_largest_spend(account, row).key

    def fits(self, party: str, run: str, plan: RunPlan) -> bool:
        """Whether a party's account has room for a plan in addition to its other runs. Nothing is written."""
        with self._store.reading():
            if party not in self._store.accounts:
                return True
            row, account = self._store.accounts[party]
            spend = total_of(tuple(plan.events))
            terms = self._pricer.choose_terms(row, account, run, spend)
            if terms[0] == SLICES_RULE:
                price = price_plans({party: plan}, {party: account})[party]
                cost = self._pricer.compute_cost(account, row, terms, run, plan=(plan, price))
                return fits_into(cost, account.budget, account.delta)
            before = self._store.get_run_spends(row).get(run, EMPTY_SPEND)
            others = [each for name, each in self._store.get_run_spends(row).items() if name != run]
            total = spend
            for each in others:
                total = total.add_events(each.events)
            larger = spend if is_within_plan(before, spend) else before.add_events(spend.events)
            cost = self._pricer.compute_cost(account, row, terms, run, after=(total, larger))
            return account.budget is None or cost.epsilon <= account.budget

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

    def _read_party_units(self, party: str) -> UnitArray:
        """All units that a party ever had in this ledger."""
        return self._pricer.read_party_units(party)

    def find_known_units(self, party: str, digests: bytes) -> KnownUnits:
        """How many of these units this ledger knows, from the party's earlier runs or from other parties."""
        units = parse_units(digests)
        with self._store.reading():
            before = self._read_party_units(party)
            staying = int(find_members(units, before).sum())
            others = {
                name: int(find_members(units, self._read_party_units(name)).sum())
                for name in self._store.unit_rows
                if name != party
            }
        elsewhere = {name: count for name, count in others.items() if count}
        return KnownUnits(len(units) - staying, staying, len(before) - staying, elsewhere)

    def describe_composition(self, party: str) -> str:
        """One sentence: how the party's runs add up."""
        with self._store.reading():
            row, account = self._store.find_account(party)
            rule, order = self._pricer.choose_terms(row, account)
            runs = self._store.get_run_spends(row)
            words = describe_rule(rule, order, account.delta, account.accountant, len(runs))
            older = (
                self._store.former < FORMAT_VERSION and runs and next(iter(runs)) not in self._store.plans.get(row, {})
            )
            return f"{words[:-1]}; rows of an earlier version count as if it had been so then." if older else words

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
        """The party's total of reservations so far, over all runs: that of the present unit that was in most of it."""
        with self._store.reading():
            row, account = self._store.find_account(party)
            return self._pricer.find_largest_spend(account, row)

    def get_spends(self, run: str | None = None) -> dict[str, Spend]:
        """The total of reservations per party so far: over all runs, or in one run."""
        store = self._store
        with store.reading():
            if run is None:
                find = self._pricer.find_largest_spend
                return {name: find(account, row) for name, (row, account) in store.accounts.items()}
            return {name: store.get_run_spends(row).get(run, EMPTY_SPEND) for name, (row, _) in store.accounts.items()}

    def list_round_reservations(self, run: str, rounds: range) -> list[tuple[str, tuple[Event, ...]]]:
        """(party, events) of every reservation of a run in these rounds, in the order of rounds and attempts."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT p.name, e.events FROM entries e JOIN parties p ON p.id = e.party"
                " WHERE e.run = ? AND e.round >= ? AND e.round < ? ORDER BY e.round, e.attempt, e.id",
                (run, rounds.start, rounds.stop),
            )
            return [(name, read_events_text(events)) for name, events in rows]

    def cost(self, party: str, run: str | None = None) -> Cost:
        """(epsilon, delta) that the party has spent so far, over all runs or in one, by its rule of composition."""
        with self._store.reading():
            return self._compute_costs([party], run)[party]

    def costs(self, run: str | None = None) -> dict[str, Cost]:
        """`cost` of every party."""
        with self._store.reading():
            return self._compute_costs(self._store.accounts, run)

    def _compute_costs(self, parties: Iterable[str], run: str | None) -> dict[str, Cost]:
        found = {}
        for party in parties:
            row, account = self._store.find_account(party)
            if run is not None:
                found[party] = self._pricer.compute_run_cost(account, row, run)
            else:
                terms = self._pricer.choose_terms(row, account)
                found[party] = self._pricer.compute_cost(account, row, terms)
        return found

    def price_run(self, run: str, spends: Mapping[str, Spend]) -> dict[str, float]:
        """The epsilon of a run alone, had each of these parties released no more in it than this, as `cost` counts."""
        with self._store.reading():
            found = {}
            for party, spend in spends.items():
                row, account = self._store.find_account(party)
                found[party] = self._pricer.compute_run_cost(account, row, run, spend).epsilon
            return found

    def epsilon(self, party: str, run: str | None = None) -> float:
        """The epsilon of `cost`."""
        return self.cost(party, run).epsilon

    def epsilons(self, run: str | None = None) -> dict[str, float]:
        """`epsilon` of every party."""
        return {name: cost.epsilon for name, cost in self.costs(run).items()}

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
            accounts = self._store.accounts
            costs = {
                key: self._pricer.compute_run_cost(accounts[key[0]][1], accounts[key[0]][0], key[1]).epsilon
                for key in totals
            }
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


def _check_budget_value(party: str, budget: float | None) -> None:
    """Refuse a budget that is not a finite number above 0."""
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(
            f"budget of party {party!r} = {budget!r} is out of range; it must be a finite number above 0."
        )


def _check_same_account_terms(known: LedgerAccount, given: LedgerAccount, has_units: bool) -> None:
    """Refuse other terms. has_units: the party's units are known by digests, so its data may change."""
    for term in ("unit", "delta", "accountant"):
        if getattr(known, term) != getattr(given, term):
            raise ConfigError(
                f"party {known.name!r} is in the ledger with {term} = {getattr(known, term)!r}, not "
                f"{getattr(given, term)!r}; use the same {term}, or another ledger."
            )
    if (SUMS_ONLY in known.population) != (SUMS_ONLY in given.population):
        raise ConfigError(
            f"party {known.name!r} is in the ledger with population = {known.population!r}, not {given.population!r}; "
            "epsilons against different adversaries do not add up: use the same privacy.aggregation, or another ledger."
        )
    if known.population != given.population and not has_units:
        raise ConfigError(
            f"party {known.name!r} is in the ledger with population = {known.population!r}, not {given.population!r}; "
            "use the same data, or register the digests of its records with every run (Ledger.register_units), so that "
            "the people who stay keep what was spent."
        )
