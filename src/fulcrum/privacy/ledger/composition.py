"""How the runs of one account add up, so that the sum holds for people who look at one run before they start the next.

A plan that was fixed in advance may be priced by any accountant: its releases are then one mechanism with one
guarantee, whatever the releases turn out to be, and fewer rounds of it are post-processing. What is chosen after seeing
releases is different. The privacy loss distribution of the pooled events, or the best Renyi order for them, says less
than the truth: whoever saw an unlucky first run can start a second one and whoever saw a lucky one can stop
(tests/privacy/test_composition.py has the numbers). Two rules hold for any such choice:

`order`   RDP at one Renyi order, fixed before the party's first release. RDP at a fixed order adds up over releases
          that were chosen adaptively, and may be compared with a budget at every step (Feldman and Zrnic 2021, a
          privacy filter). The order is the best one for the first plan, so that a first run costs what RDP says.
`slices`  (epsilon, delta) of each run's plan, priced alone at the run's own delta; epsilons add up, deltas add up to at
          most the account's. Within a run any accountant serves (PLD). A run counts as its whole plan from its start:
          who stops after looking has seen what the plan allows to see.

The rule is chosen with the account's first plan or reservation and stays. Accountant "rdp" takes `order`; any other
takes `slices` if its first run has a plan, and `order` if it has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fulcrum.privacy.accounting import ORDERS, Spend, compute_order_epsilons, compute_order_offsets, compute_step_rdp

ORDER_RULE, SLICES_RULE = "order", "slices"

UNSTATED_BUDGET = 4.0
"""The epsilon for which the Renyi order is chosen where neither a plan nor a budget says what to expect."""


@dataclass(frozen=True)
class Cost:
    """An account's (epsilon, delta) over its runs."""

    epsilon: float
    delta: float


# --- one Renyi order ----------------------------------------------------------------------------


def choose_order_for_plan(plan: Spend, delta: float, budget: float | None = None) -> float:
    """The Renyi order [one of ORDERS] at which a plan costs the least; of a plan above the budget most of it fits."""
    costs = compute_order_epsilons(plan.rdp, delta)
    if (
        plan.others or not plan.rdp.any()
    ):  # a plan without noise says nothing about later ones: an order that suits many
        usual = 1 + math.log(1 / delta) / (budget or UNSTATED_BUDGET)
        return float(ORDERS[int(np.argmin(np.abs(ORDERS - usual)))])
    if budget is not None and np.isfinite(costs).any() and costs.min() > budget:
        return choose_order_for_budget(plan, delta, budget)
    return float(ORDERS[int(np.argmin(costs))])


def choose_order_for_budget(first: Spend, delta: float, budget: float | None) -> float:
    """The Renyi order at which the first releases fit most often into a budget."""
    room = (budget or UNSTATED_BUDGET) - compute_order_offsets(delta)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(first.rdp > 0, room / first.rdp, 0.0)
    if not np.isfinite(first.rdp).any() or times.max() <= 0:
        return choose_order_for_plan(first, delta)
    return float(ORDERS[int(np.argmax(times))])


def compute_epsilon_at_order(spend: Spend, delta: float, order: float) -> float:
    """The epsilon of a spend by RDP at one order; infinite where an event is not Gaussian.

    The sum is rounded once (fsum), so it depends on what was released and not on the order of rounds, and releasing
    less never costs more: a plan that fits into a budget fits in all its parts, without any tolerance.
    """
    if spend.others:
        return math.inf
    at = int(np.searchsorted(ORDERS, order))
    total = math.fsum(count * float(compute_step_rdp(*pair)[at]) for pair, count in sorted(spend.counts.items()))
    return float(compute_order_epsilons(np.full(len(ORDERS), total), delta)[at]) if total > 0 else 0.0


# --- plans --------------------------------------------------------------------------------------


def is_within_plan(released: Spend, plan: Spend) -> bool:
    """Whether all releases can be matched with different planned ones, each of the same rate and with no more noise.

    More noise than planned is post-processing of the planned release. So for each rate and sigma at most as many
    releases may have that sigma or less as the plan has; other kinds of events must be in the plan as they are.
    """
    if any(count > plan.others.get(event, 0) for event, count in released.others.items()):
        return False
    for rate in {rate for rate, _ in released.counts}:
        planned = sorted((sigma, count) for (of, sigma), count in plan.counts.items() if of == rate)
        done, allowed, i = 0, 0, 0
        for sigma, count in sorted((sigma, count) for (of, sigma), count in released.counts.items() if of == rate):
            done += count
            while i < len(planned) and planned[i][0] <= sigma:
                allowed, i = allowed + planned[i][1], i + 1
            if done > allowed:
                return False
    return True


def add_slices(slices: Iterable[tuple[float, float]]) -> Cost:
    """The sum of (epsilon, delta) of runs."""
    pairs = list(slices)
    return Cost(math.fsum(epsilon for epsilon, _ in pairs), math.fsum(delta for _, delta in pairs))


DELTA_ROUNDING = 1e-12
"""Relative room in sums of deltas: three thirds of a decimal fraction add up to it only nearly."""


def fits_into(cost: Cost, budget: float | None, delta: float) -> bool:
    """Whether a cost is within a budget (None: no limit) and a delta."""
    return cost.delta <= delta * (1 + DELTA_ROUNDING) and (budget is None or cost.epsilon <= budget)


def describe_rule(rule: str, order: float, delta: float, accountant: str, runs: int) -> str:
    """One sentence about how an account is composed, for statements."""
    if rule == ORDER_RULE:
        return (
            f"Runs add up by Renyi DP at order {order:g}, fixed before the first release, so the sum holds for runs "
            "that were chosen after seeing earlier ones; a run that stopped early counts what it released."
        )
    each = "The run counts" if runs == 1 else "Each run counts"
    return (
        f"{each} as its whole plan, fixed in advance and priced by {accountant} at its own delta; epsilons and deltas "
        f"of runs add up, deltas to at most {delta:g}, so the sum holds for runs that were chosen after seeing earlier "
        "ones; a run that stopped early counts whole, since who stops after looking has seen what the plan allows."
    )
