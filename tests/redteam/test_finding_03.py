"""Finding 3: factors were bounded from above only, so a "sound" rule with a factor of -1000 added 1000 C.

At 243f1c8 `enforce_bounds` returned min(factor, allowed): negative factors passed, NaN passed, and so did a negative
`stability` of auto-s. Now factors lie in [0, allowed] and what is not a finite number counts as 0, for the sum, the
second sum, the statistics and the weights, in every engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fulcrum.clipping.fixed import FIXED
from fulcrum.clipping.normalise import AUTO_S, PSAC
from fulcrum.clipping.oso import OSO
from fulcrum.clipping.rule import ClipRule
from fulcrum.engines.neighbours import STEP_SUMS, build_replay_problem, replay_neighbours
from fulcrum.privacy.bounds import apply_rule
from fulcrum.settings.schema import Clip
from fulcrum.training.clipped_sum import compute_contribution, keep_weights
from fulcrum.types import Bounds, RuleState, Stats
from support.federations import toy_data, toy_model

WILD = [-1000.0, -1e-3, 1e30, float("nan"), float("inf"), -float("inf")]
STATS = Stats(torch.tensor([[3.0, 1e-3], [0.5, 0.0], [1e30, 1e-30], [2.0, 2.0]]), torch.tensor([True] * 3 + [False]))
STATE = {"C": torch.tensor([1.0, 0.5])}


def lie(value: float) -> ClipRule:
    """A rule that calls itself sound, and returns this number wherever it may return one."""

    def clip(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
        wild = torch.full_like(stats.norms, value)
        return wild, wild[:, :1].expand(-1, 2), state

    return dataclasses.replace(
        FIXED,
        clip=clip,
        second=lambda stats, state: torch.full_like(stats.norms, value),
        bounds=lambda state: Bounds(state["C"], 2.0),
        share=OSO.share,
    )


def largest_reach(
    rule: ClipRule, stats: Stats, factors: torch.Tensor, extra: torch.Tensor, second: torch.Tensor
) -> float:
    """The largest contribution in units of the bounds; NaN and negative factors count as infinite."""
    if not bool(((factors >= 0) & torch.isfinite(factors)).all()) or not bool(torch.isfinite(extra).all()):
        return float("inf")
    norms = stats.norms.double()
    own = (factors.double() * norms / STATE["C"].double()).max()
    joint = extra.double().square().sum(dim=1) + (second.double() * norms).square().sum(dim=1)
    return max(float(own), float(joint.sqrt().max()) / 2.0)


@pytest.mark.parametrize("value", WILD)
def test_what_a_rule_returns_is_clamped_from_both_sides(value: float) -> None:
    rule = lie(value)
    decided = apply_rule(rule, STATS, STATE)
    assert largest_reach(rule, STATS, decided.factors, decided.extra, decided.second_factors) <= 1
    assert not decided.extra[3].any()  # padding


@pytest.mark.parametrize("value", [-1000.0, float("nan")])
def test_the_old_clamp_is_rejected_by_this_check(value: float) -> None:
    factors, extra, _ = lie(value).clip(STATS, STATE)
    old = torch.minimum(factors, STATE["C"] * (1 + 1e-6) / STATS.norms.clamp_min(1e-38))
    second = torch.zeros_like(old)
    assert largest_reach(lie(value), STATS, old, extra * 0 if value == value else extra, second) == float("inf")


@pytest.mark.parametrize("value", WILD)
@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("engine", STEP_SUMS)
def test_no_engine_lets_a_lie_through(engine: str, proven: bool, value: float) -> None:
    data = toy_data(12)
    problem = build_replay_problem(data.x, data.y, toy_model(), lie(value), proven=proven)
    state = {"C": torch.tensor([0.5])}
    for target in range(3):
        found = replay_neighbours(problem, engine, state, torch.arange(12), target)
        assert found.ratio <= 1 + (0 if proven else 1e-5)


@pytest.mark.parametrize("rule", [AUTO_S, PSAC], ids=lambda rule: rule.name)
@pytest.mark.parametrize("stability", [-1.0, -0.49999, 0.0, 1e-30, float("nan")])
@pytest.mark.parametrize("engine", STEP_SUMS)
def test_a_stability_that_was_sent_by_somebody_else_does_no_harm(engine: str, rule: ClipRule, stability: float) -> None:
    data = toy_data(12)
    problem = build_replay_problem(data.x, data.y, toy_model(), rule, proven=True)
    state = rule.init(Clip(C0=1.0), problem.shape) | {"stability": torch.tensor(stability)}  # type: ignore[operator]
    for target in range(4):
        assert replay_neighbours(problem, engine, state, torch.arange(12), target).ratio <= 1


@pytest.mark.parametrize("C", [-1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_lets_nothing_through(C: float) -> None:
    decided = apply_rule(FIXED, STATS, {"C": torch.tensor([C, 0.5])})
    assert not decided.factors[:, 0].any()
    assert decided.bounds.C.tolist() == [0.0, 0.5]
    assert bool(decided.factors[:, 1].any())


def test_rules_without_a_guarantee_give_no_garbage_either() -> None:
    for value in WILD:
        decided = apply_rule(dataclasses.replace(lie(value), sound=False), STATS, STATE)
        for found in (decided.factors, decided.second_factors):
            assert bool((torch.isfinite(found) & (found >= 0)).all())
        assert bool(torch.isfinite(decided.extra).all())


@pytest.mark.parametrize("weight", [-5.0, 7.0, float("nan"), float("inf")])
def test_weights_of_clients_are_clamped_too(weight: float) -> None:
    rows = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    groups = torch.zeros(2, dtype=torch.int64)
    given: dict[str, Any] = {"weights": torch.tensor([weight, 0.0])}
    found = compute_contribution(FIXED, FIXED.view({}, 0, 1), {"C": torch.ones(1)}, rows, rows[:, 0], groups, **given)
    assert float(found.sum.norm()) <= 1
    assert float(keep_weights(torch.tensor([weight]))) in (0.0, 1.0)
