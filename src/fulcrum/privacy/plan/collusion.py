"""What pairwise masks cover: epsilon by how many parties collude with the server, and for a person at two parties."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.pairwise.graph import can_be_cut_off
from fulcrum.privacy.pairwise.persons import compose_two_parties, compute_pair_epsilon
from fulcrum.privacy.pairwise.shares import compute_own_variances, find_least_honest_variance
from fulcrum.privacy.plan.plan import Plan

MAX_LISTED = 12
"""The most lines of the table; of many parties the first ones and then every doubling."""


@dataclass(frozen=True)
class CollusionRow:
    """If any `colluders` parties join the server: sigma_eff is the least of any party, epsilon the largest, at the end
    of the planned run."""

    colluders: int
    sigma_eff: float
    epsilon: float


def list_shown_counts(colluders: int, parties: int) -> list[int]:
    """The numbers of colluders that the table shows: those covered, then more, up to all others."""
    counts = list(range(colluders, parties))
    if len(counts) <= MAX_LISTED:
        return counts
    steps, step = [colluders], 1
    while colluders + step < parties - 1:
        steps.append(colluders + step)
        step *= 2
    return [*steps, parties - 1]


def make_collusion_table(plan: Plan, varying: bool = False) -> list[CollusionRow]:
    """Epsilon of one unit with c, c + 1, ..., all other parties colluding; empty without pairwise masks.

    varying: whether parties may be missing from rounds that the plan has them in, as across machines.
    """
    if not plan.is_pairwise or not plan.private:
        return []
    parties = max(plan.parties + plan.peers, plan.colluders + 1)
    return [_make_row(plan, count, varying) for count in list_shown_counts(plan.colluders, parties)]


def _make_row(plan: Plan, count: int, varying: bool) -> CollusionRow:
    sigmas, epsilons = [], []
    known: dict[tuple[int, float], float] = {}
    for k, ratio in enumerate(_list_ratios(plan, count, varying)):
        group = plan.group(k)
        key = (int(plan.group_of[k]), ratio)
        if key not in known:
            weaker = [
                replace(event, sigma=event.sigma * ratio) if isinstance(event, Gaussian) else event
                for event in group.worst(plan.rounds)
            ]
            known[key] = Spend.empty().add_events(weaker).epsilon(plan.delta, plan.accountant)
        sigmas.append(min(group.sigma * factor for factor in group.factors) * ratio)
        epsilons.append(known[key])
    return CollusionRow(count, min(sigmas), max(epsilons))


def _list_ratios(plan: Plan, count: int, varying: bool) -> Sequence[float]:
    """sigma_eff / sigma of each party if `count` parties collude; at most 1: a party is never charged less.

    Where sets of participants may vary, a set of P' has (P' - j) / (P' - c) of the variance at j colluders, which is
    least for P' = j + 1, all but one colluding: 1 / (j + 1 - c). Where each has masks with few others, j colluders that
    are all of these see its message alone: its own share, 1 / (P - c) at least, is all that it has.
    """
    parties = max(plan.parties + plan.peers, plan.colluders + 1)
    alone = can_be_cut_off(count, parties, plan.colluders)
    planned = plan.participation < 1 or any(group.participations < plan.rounds for group in plan.groups)
    if varying or planned or plan.peers:
        honest = parties if alone else count + 1
        return [math.sqrt(1 / max(1, honest - plan.colluders))] * plan.parties
    needs = plan.compute_needs(range(plan.parties))
    own = compute_own_variances(needs, plan.colluders)
    gone = plan.parties if alone else count
    return [
        min(1.0, math.sqrt(find_least_honest_variance(own, k, gone) / need)) if need else 1.0
        for k, need in enumerate(needs)
    ]


def bound_two_parties(plan: Plan, epsilon: float, delta: float) -> dict[str, Any]:
    """What a person with records at two parties can lose: {epsilon, delta, composed_epsilon, composed_delta}.

    epsilon, delta: of one party, the largest. The mixture is priced for the planned run where its rounds are alike and
    the accountant's package is there; else epsilon is None.
    """
    together = compose_two_parties(epsilon, epsilon, delta, delta)
    found: dict[str, Any] = {"composed_epsilon": together[0], "composed_delta": together[1], "epsilon": None}
    kinds = [event for group in plan.groups for event in group.worst(plan.rounds)]
    gaussians = [event for event in kinds if isinstance(event, Gaussian)]
    if len(gaussians) == len(plan.groups) == len(kinds) and gaussians:
        worst = Gaussian(
            max(event.rate for event in gaussians),
            min(event.sigma for event in gaussians),
            max(event.count for event in gaussians),
        )
        with contextlib.suppress(ImportError):
            found["epsilon"] = compute_pair_epsilon(worst, worst, plan.delta)
    return {**found, "delta": plan.delta}
