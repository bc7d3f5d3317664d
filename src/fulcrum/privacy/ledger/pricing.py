"""What an account's runs cost by its rule of composition, over the histories of the units that are there now."""

from __future__ import annotations

from collections.abc import Mapping
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
from fulcrum.privacy.ledger.units import UnitArray, group_by_history, parse_units

MAX_PRICES_KEPT = 200_000
EVERYBODY: frozenset[str] = frozenset()
"""The history of a unit that was in all runs: no run is left out."""


class Pricer:
    """Costs of the accounts of a store. Use within its `reading` or `write_transaction`.

    A history is the set of runs that a unit was NOT in: runs without registered units count for everybody.
    """

    def __init__(self, store: LedgerStore) -> None:
        self.store = store
        self._prices: dict[tuple[int, float, float], tuple[Spend, float]] = {}
        self._covered: dict[tuple[int, int], tuple[Spend, tuple[Event, ...], bool]] = {}
        self._merged: dict[tuple[int, frozenset[str]], tuple[tuple[int, ...], Spend]] = {}
        self._histories: dict[str, tuple[int, int, tuple[frozenset[str], ...]]] = {}
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
            if len(self._covered) > MAX_PRICES_KEPT:
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
                add_slices(pair for each, pair in slices.items() if each not in out)
                for out in self.list_histories(account.name, row, run)
            ]
        else:
            costs = [
                Cost(self._price(self._sum_runs(row, out, run, after), account.delta, terms[1]), account.delta)
                for out in self.list_histories(account.name, row, run)
            ]
        return Cost(
            max((cost.epsilon for cost in costs), default=0.0), max((cost.delta for cost in costs), default=0.0)
        )

    def compute_run_cost(self, account: LedgerAccount, row: int, run: str) -> Cost:
        """What one run alone cost a party."""
        spend = self.store.get_run_spends(row).get(run)
        if spend is None:
            return Cost(0.0, 0.0)
        rule, order = self.choose_terms(row, account)
        if rule == SLICES_RULE:
            return Cost(*_read_slice(self.store.plans.get(row, {}).get(run)))
        return Cost(self._price(spend, account.delta, order), account.delta)

    def find_largest_spend(self, account: LedgerAccount, row: int) -> Spend:
        """All releases of the history that costs the most by the Renyi order of the account."""
        spends = [self._sum_runs(row, out) for out in self.list_histories(account.name, row)]
        if len(spends) == 1:
            return spends[0]
        order = self.choose_terms(row, account)[1]
        return max(spends, key=lambda spend: self._price(spend, account.delta, order), default=EMPTY_SPEND)

    def _price(self, spend: Spend, delta: float, order: float) -> float:
        key = (id(spend), delta, order)  # equal pasts share one object; it is kept with its price, so its id stays
        if key not in self._prices:
            if len(self._prices) > MAX_PRICES_KEPT:
                self._prices.clear()
            self._prices[key] = (spend, compute_epsilon_at_order(spend, delta, order))
        return self._prices[key][1]

    def _sum_runs(
        self, row: int, out: frozenset[str], run: str = "", after: tuple[Spend, Spend] | None = None
    ) -> Spend:
        """The party's releases less those of the runs in `out`."""
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

    def list_histories(self, party: str, row: int, run: str = "") -> tuple[frozenset[str], ...]:
        """The histories of the party's units of the latest run whose units were registered."""
        rows = self.store.unit_rows.get(party, [])
        if len({unit_set for _, unit_set in rows}) <= 1:
            return (EVERYBODY,)
        known = {each for each, _ in rows}
        others = sum(each not in known for each in (*self.store.get_run_spends(row), *([run] if run else [])))
        kept = self._histories.get(party)
        if kept is None or kept[:2] != (len(rows), others):
            kept = (len(rows), others, self._find_histories(rows, others > 0))
            self._histories[party] = kept
        return kept[2]

    def _find_histories(self, rows: list[tuple[str, int]], others: bool) -> tuple[frozenset[str], ...]:
        numbers = sorted({unit_set for _, unit_set in rows})
        groups = group_by_history(self.read_set(rows[-1][1]), [self.read_set(number) for number in numbers])
        found = {
            frozenset(run for run, unit_set in rows if unit_set not in {numbers[i] for i in group}) for group in groups
        }
        if others:  # units that nobody registered were in these runs at most
            found.add(frozenset(run for run, _ in rows))
        # Who was in more runs has spent more.
        return tuple(sorted((out for out in found if not any(less < out for less in found)), key=sorted))

    def read_set(self, number: int) -> UnitArray:
        """The units of a stored set."""
        if number not in self._sets:
            self._sets[number] = parse_units(self.store.read_members(number))
        return self._sets[number]


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
