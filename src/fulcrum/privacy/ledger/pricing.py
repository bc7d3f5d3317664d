"""What an account's runs cost by its rule of composition, over the histories of the units that are there now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

from fulcrum.privacy.accounting import Spend, compute_epsilons
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.composition import (
    ORDER_RULE,
    SLICES_RULE,
    Cost,
    add_slices,
    choose_order_for_budget,
    choose_order_for_plan,
    compute_epsilon_at_order,
    is_within_plan,
)
from fulcrum.privacy.ledger.rows import LedgerAccount, RunPlan
from fulcrum.privacy.ledger.store import EMPTY_SPEND, LedgerStore
from fulcrum.privacy.ledger.units import UnitArray, group_by_history, merge_units, parse_units

MIN_PRICES_KEPT = 500
"""Prices of pasts are kept: at least so many, and four for each account. All are forgotten beyond that, since a long
run has a new past after each round."""
Place = tuple[int, str]
"""A party's row and a run."""
History = tuple[frozenset[str], frozenset[Place]]
"""The runs of its party that a unit was NOT in (runs without registered units count for everybody), and the places
where other parties had it."""
NOWHERE: frozenset[Place] = frozenset()
EVERYBODY: History = (frozenset(), NOWHERE)
"""The history of a unit that was in all runs of its party."""


class Pricer:
    """Costs of the accounts of a store. Use within its `reading` or `write_transaction`."""

    def __init__(self, store: LedgerStore) -> None:
        self.store = store
        self._prices: dict[tuple[int, float, float], tuple[Spend, float]] = {}
        self._covered: dict[tuple[int, int], tuple[Spend, tuple[Event, ...], bool]] = {}
        self._merged: dict[tuple[int, frozenset[str]], tuple[tuple[int, ...], Spend]] = {}
        self._histories: dict[str, tuple[tuple[int, int, bool, frozenset[int]], tuple[History, ...]]] = {}
        self._assumed: dict[Place, Spend] = {}
        self._sets: dict[int, UnitArray] = {}

    # --- rules -----------------------------------------------------------------------------------

    def choose_terms(
        self, row: int, account: LedgerAccount, run: str = "", plan: Spend | None = None, first: Spend = EMPTY_SPEND
    ) -> tuple[str, float]:
        """(rule, Renyi order) of an account: those on record, else those that its first releases ask for.

        run and plan: a plan to be registered. first: releases to be reserved without a plan. An account of an older
        file has releases and no rule; its order is the best one for its first run.
        """
        if row in self.store.terms:
            return self.store.terms[row]
        past = self.store.get_run_spends(row)
        if plan is not None and set(past) <= {run}:
            sliced = account.accountant != "rdp" and is_within_plan(past.get(run, EMPTY_SPEND), plan)
            return SLICES_RULE if sliced else ORDER_RULE, choose_order_for_plan(plan, account.delta, account.budget)
        if past:
            return ORDER_RULE, choose_order_for_plan(next(iter(past.values())), account.delta, account.budget)
        return ORDER_RULE, choose_order_for_budget(first, account.delta, account.budget)

    def is_covered(self, released: Spend, plan: RunPlan) -> bool:
        """Whether a run's releases are within its plan; computed once for parties with the same past and plan."""
        key = (id(released), id(plan.events))
        if key not in self._covered:
            if len(self._covered) > self._prices_kept:
                self._covered.clear()
            self._covered[key] = (released, plan.events, is_within_plan(released, total_of(plan.events)))
        return self._covered[key][2]

    # --- costs -----------------------------------------------------------------------------------

    def compute_cost(
        self,
        account: LedgerAccount,
        row: int,
        terms: tuple[str, float],
        run: str = "",
        after: tuple[Spend, Spend] | None = None,
        plan: tuple[RunPlan, float] | None = None,
    ) -> Cost:
        """The largest cost over the histories of the party's present units.

        run: the run in progress; after: the party's (total, run's) spend with what is about to be reserved; plan: of
        that run, with its epsilon, where it is not registered yet.
        """
        if terms[0] == SLICES_RULE:
            begun = dict.fromkeys((*self.store.get_run_spends(row), *([run] if run else [])))
            known = self.store.plans.get(row, {})
            slices = {
                each: _read_slice(plan if each == run and plan is not None else known.get(each)) for each in begun
            }
            costs = [
                add_slices(
                    [pair for each, pair in slices.items() if each not in out]
                    + [self._get_other_slice(place) for place in others]
                )
                for out, others in self.list_histories(account.name, row, run)
            ]
        else:
            costs = [
                Cost(self._price(self._sum_runs(row, out, others, run, after), account.delta, terms[1]), account.delta)
                for out, others in self.list_histories(account.name, row, run)
            ]
        return Cost(
            max((cost.epsilon for cost in costs), default=0.0), max((cost.delta for cost in costs), default=0.0)
        )

    def compute_history_cost(self, account: LedgerAccount, row: int, history: History) -> Cost:
        """The cost of one unit: of the runs of its party that it was in, and of those of other parties."""
        out, others = history
        terms = self.choose_terms(row, account)
        if terms[0] != SLICES_RULE:
            return Cost(self._price(self._sum_runs(row, out, others), account.delta, terms[1]), account.delta)
        known = self.store.plans.get(row, {})
        slices = [_read_slice(known.get(each)) for each in self.store.get_run_spends(row) if each not in out]
        return add_slices([*slices, *(self._get_other_slice(place) for place in others)])

    def compute_run_cost(self, account: LedgerAccount, row: int, run: str, spend: Spend | None = None) -> Cost:
        """What one run alone cost a party; spend: a part of what it released in the run, None for all."""
        spend = self.store.get_run_spends(row).get(run) if spend is None else spend
        if spend is None or not spend.releases:
            return Cost(0.0, 0.0)
        rule, order = self.choose_terms(row, account)
        if rule == SLICES_RULE:
            return Cost(*_read_slice(self.store.plans.get(row, {}).get(run)))
        return Cost(self._price(spend, account.delta, order), account.delta)

    def find_largest_spend(self, account: LedgerAccount, row: int) -> Spend:
        """All releases of the history that costs the most by the Renyi order of the account."""
        spends = [self._sum_runs(row, out, others) for out, others in self.list_histories(account.name, row)]
        if len(spends) == 1:
            return spends[0]
        order = self.choose_terms(row, account)[1]
        return max(spends, key=lambda spend: self._price(spend, account.delta, order), default=EMPTY_SPEND)

    @property
    def _prices_kept(self) -> int:
        return max(MIN_PRICES_KEPT, 4 * len(self.store.accounts))

    def _price(self, spend: Spend, delta: float, order: float) -> float:
        key = (id(spend), delta, order)  # equal pasts share one object; it is kept with its price, so its id stays
        if key not in self._prices:
            if len(self._prices) > self._prices_kept:
                self._prices.clear()
            self._prices[key] = (spend, compute_epsilon_at_order(spend, delta, order))
        return self._prices[key][1]

    def _sum_runs(
        self,
        row: int,
        out: frozenset[str],
        others: frozenset[Place] = NOWHERE,
        run: str = "",
        after: tuple[Spend, Spend] | None = None,
    ) -> Spend:
        """The party's releases less those of the runs in `out`, with those of other parties in `others`."""
        if others:
            total = self._sum_runs(row, out, NOWHERE, run, after)
            for place in sorted(others):
                total = total.add_events(self._get_run_spend(place).events)
            return total
        if not out:
            return after[0] if after else self.store.get_spend(row)
        runs = self.store.get_run_spends(row)
        kept = {each: spend for each, spend in runs.items() if each not in out and not (after and each == run)}
        ids = tuple(map(id, kept.values()))
        if self._merged.get((row, out), ((-1,), EMPTY_SPEND))[0] != ids:
            total = EMPTY_SPEND
            for spend in kept.values():
                total = total.add_events(spend.events)
            self._merged[row, out] = (ids, total)
        merged = self._merged[row, out][1]
        return merged.add_events(after[1].events) if after and run not in out else merged

    # --- histories -------------------------------------------------------------------------------

    def list_histories(self, party: str, row: int, run: str = "") -> tuple[History, ...]:
        """The histories of the party's units that are there: in this run, else in the latest ones."""
        rows = self.store.unit_rows.get(party, [])
        if len({unit_set for _, unit_set in rows}) <= 1 and not (rows and self.store.has_shared_units):
            return (EVERYBODY,)
        known = {each for each, _ in rows}
        unknown = any(each not in known for each in (*self.store.get_run_spends(row), *([run] if run else [])))
        every = self.store.unit_rows if self.store.has_shared_units else {party: rows}
        present = self._find_present_sets(party, row, rows, run)
        state = (sum(map(len, every.values())), len(self.store.accounts), unknown, present)
        kept = self._histories.get(party)
        if kept is None or kept[0] != state:
            kept = (state, self._find_histories(party, every, unknown, present))
            self._histories[party] = kept
        return kept[1]

    def _find_present_sets(self, party: str, row: int, rows: Sequence[tuple[str, int]], run: str) -> frozenset[int]:
        """The sets of units that count as present: that of a run in progress, else the latest registered.

        Where an older run was resumed since, what is said of the party covers its units too.
        """
        of_run = dict(rows)
        if run in of_run:
            return frozenset({of_run[run]})
        latest, (at, last) = rows[-1][1], self.store.last_runs.get(row, (0.0, ""))
        return frozenset({latest, of_run.get(last, latest) if at > self.store.last_units[party] else latest})

    def _find_histories(
        self,
        party: str,
        every: Mapping[str, Sequence[tuple[str, int]]],
        unknown: bool,
        present_sets: frozenset[int],
    ) -> tuple[History, ...]:
        """every: the runs with registered units, by party: this one, and all others where units are shared."""
        rows, present = every[party], merge_units([self.read_set(number) for number in sorted(present_sets)])
        sets: dict[int, list[tuple[str, str]]] = {}  # number of a set -> (party, run)
        for name, theirs in every.items():
            for run, number in theirs:
                sets.setdefault(number, []).append((name, run))
        groups = group_by_history(present, [self.read_set(number) for number in sets])
        held = [{place for at in group for place in list(sets.values())[at]} for group in groups]
        row_of = {name: row for name, (row, _) in self.store.accounts.items()}
        found = {
            (
                frozenset(run for run, _ in rows if (party, run) not in places),
                frozenset((row_of[name], run) for name, run in places if name != party and name in row_of),
            )
            for places in held
        }
        if unknown:  # units that nobody registered were in these runs at most
            found.add((frozenset(run for run, _ in rows), NOWHERE))
        # Who was in more runs has spent more.
        return tuple(each for each in found if not any(_is_in_more(other, each) for other in found))

    def read_party_units(self, party: str) -> UnitArray:
        """All units that a party ever had in this ledger."""
        numbers = {number for _, number in self.store.unit_rows.get(party, ())}
        return merge_units([self.read_set(number) for number in sorted(numbers)])

    @contextmanager
    def assume(self, run: str, spends: Mapping[int, Spend]) -> Iterator[None]:
        """Count these spends of parties' rows in a run, where others share their units, before they are written."""
        self._assumed = {(row, run): spend for row, spend in spends.items()} if self.store.has_shared_units else {}
        try:
            yield
        finally:
            self._assumed = {}

    def _get_other_slice(self, place: Place) -> tuple[float, float]:
        """(epsilon, delta) of another party's run, from its first reservation on."""
        begun = place in self._assumed or place[1] in self.store.get_run_spends(place[0])
        return _read_slice(self.store.plans.get(place[0], {}).get(place[1])) if begun else (0.0, 0.0)

    def _get_run_spend(self, place: Place) -> Spend:
        return self._assumed.get(place) or self.store.get_run_spends(place[0]).get(place[1], EMPTY_SPEND)

    def read_set(self, number: int) -> UnitArray:
        """The units of a stored set."""
        if number not in self._sets:
            self._sets[number] = parse_units(self.store.read_members(number))
        return self._sets[number]


def _is_in_more(one: History, other: History) -> bool:
    """Whether a unit of one history was in all that a unit of the other was in, and in more."""
    return one != other and one[0] <= other[0] and one[1] >= other[1]


def _read_slice(plan: tuple[RunPlan, float | None] | None) -> tuple[float, float]:
    """(epsilon, delta) of a run; without a priced plan nothing finite is known."""
    if plan is None or plan[1] is None:
        return float("inf"), 0.0
    return plan[1], plan[0].delta


@lru_cache(maxsize=1024)
def total_of(events: tuple[Event, ...]) -> Spend:
    """The spend of a plan's events."""
    return EMPTY_SPEND.add_events(events)


def price_plans(plans: Mapping[str, RunPlan], accounts: Mapping[str, LedgerAccount]) -> dict[str, float]:
    """The epsilon of each party's plan alone, at the plan's delta, by the party's accountant; equal plans once."""
    found: dict[tuple[tuple[Event, ...], float, str], float] = {}
    prices = {}
    for party, plan in plans.items():
        key = (plan.events, plan.delta, accounts[party].accountant)
        if key not in found:
            found[key] = float(compute_epsilons([total_of(plan.events)], plan.delta, key[2])[0])
        prices[party] = found[key]
    return prices
