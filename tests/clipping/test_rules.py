"""Every rule keeps the contract; and the contract rejects rules that break it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from fulcrum.clipping import RULES, ModelFacts, find_rule, moo, testing
from fulcrum.clipping.fixed import FIXED, clip_to_C, no_extra, shrink
from fulcrum.clipping.moo import MOO, MOO_C
from fulcrum.clipping.oso import OSO
from fulcrum.clipping.quantile import QUANTILE
from fulcrum.clipping.rule import ClipRule, no_statistics_share
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, Released


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_every_rule_keeps_the_contract(rule: ClipRule) -> None:
    testing.check_rule(rule)


def _peek(stats, state):
    """Sets C to the median norm of the private batch, and says nothing of it."""
    factors, extra, _ = clip_to_C(stats, state)
    return factors, extra, {**state, "C": state["C"] * 0 + (stats.norms.sum() + 1).clamp_max(1e6)}


HIDDEN = [torch.zeros(())]


def _stash(stats, state):
    """Keeps a norm of the private batch where the state does not show it."""
    HIDDEN[-1] = stats.norms.sum().clamp_max(1e6).detach()
    return clip_to_C(stats, state)


def _shared(stats, C):
    """Clips, then scales everybody by the number of units."""
    return shrink(stats.norms, C) / max(1, stats.norms.shape[0])


WRONG = {
    "understates its bound": (
        dataclasses.replace(FIXED, bounds=lambda state: Bounds(state["C"] / 2)),
        "bounds say",
    ),
    "does not clip": (
        dataclasses.replace(FIXED, clip=lambda stats, state: (torch.ones_like(stats.norms), no_extra(stats), state)),
        "bounds say",
    ),
    "divides by a zero norm": (
        dataclasses.replace(FIXED, clip=lambda stats, state: (state["C"] / stats.norms, no_extra(stats), state)),
        "not finite",
    ),
    "looks at the private batch": (dataclasses.replace(FIXED, clip=_peek), "depends on the private batch"),
    "hides what it saw outside its state": (
        dataclasses.replace(FIXED, clip=_stash, adapt=lambda state, released: {**state, "C": state["C"] + HIDDEN[-1]}),
        "depends on the private batch",
    ),
    "treats a unit by the company it keeps": (
        dataclasses.replace(FIXED, clip=lambda stats, state: (_shared(stats, state["C"]), no_extra(stats), state)),
        "depend on the other units",
    ),
    "lets padding move its C": (
        dataclasses.replace(
            FIXED,
            sound=False,
            clip=lambda stats, state: (*clip_to_C(stats, state)[:2], {"C": state["C"] + stats.norms.shape[0]}),
        ),
        "padding changes the C",
    ),
    "releases extra statistics without a bound": (
        dataclasses.replace(FIXED, clip=lambda stats, state: (clip_to_C(stats, state)[0], stats.norms, state)),
        "extra statistics have norm",
    ),
    "understates a second sum": (
        dataclasses.replace(OSO, bounds=lambda state: Bounds(state["C"], extra=0.5)),
        "extra statistics have norm",
    ),
    "has a second sum that is not finite": (
        dataclasses.replace(OSO, second=lambda stats, state: 1 / stats.norms),
        "second sum are not finite",
    ),
    "gives its statistics no share of the noise": (
        dataclasses.replace(QUANTILE, share=no_statistics_share),
        "a share of 0.0 for 1 extra",
    ),
    "takes all the precision for its statistics": (
        dataclasses.replace(QUANTILE, share=lambda sigma, batch: 1.0),
        "not a part of the precision",
    ),
    "looks at values with Python's if": (
        dataclasses.replace(FIXED, adapt=lambda state, released: {"C": state["C"] / 2} if state["C"][0] > 1 else state),
        "cannot be stacked",
    ),
    "keeps something that is not a tensor": (
        dataclasses.replace(FIXED, init=lambda settings, shape: {"C": torch.ones(shape.count), "t": 0}),  # type: ignore[dict-item]
        "not a tensor",
    ),
    "changes the shape of its state": (
        dataclasses.replace(FIXED, adapt=lambda state, released: {"C": state["C"].repeat(2)}),
        "the shape of C changes",
    ),
    "lets C become zero": (
        dataclasses.replace(FIXED, adapt=lambda state, released: {"C": state["C"] * 0}),
        "C is not above 0",
    ),
    "never clips small": (
        dataclasses.replace(FIXED, init=lambda settings, shape: {"C": torch.full((shape.count,), 1e3)}),
        "does not clip",
    ),
}


@pytest.mark.parametrize(("rule", "complaint"), WRONG.values(), ids=WRONG.keys())
def test_the_contract_rejects_a_rule_that(rule: ClipRule, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        testing.check_rule(rule)


@pytest.mark.parametrize("reading", ["loss", "hypergradient", "derivative"])
def test_other_settings_keep_the_contract_too(reading: str) -> None:
    for rule in ("moo-paper", "moo-paper-batch"):
        testing.check_rule(find_rule(rule), Clip(rule=rule, reading=reading, kappa=0.3))
    for settings in (Clip(rule="moo", phi="identity", kappa=0.1), Clip(rule="moo-scalar", phi="identity")):
        testing.check_rule(find_rule(settings.rule), settings)


def _round(D: list[float], t: int = 1, lr: float = 0.5, steps: float = 2.0) -> Released:
    return Released(torch.tensor(D), torch.zeros(0), lr, steps, t, 10)


def test_moo_follows_a_trajectory_computed_by_hand() -> None:
    settings = Clip(C0=2.0, eta_C=0.1, beta=0.5, kappa=0.01)
    state = MOO_C.init(settings, ModelFacts(2, (2,)))
    state = MOO_C.adapt(state, _round([1.0, 0.0]))  # no memory yet: C stays
    assert float(state["C"]) == pytest.approx(2.0)
    assert state["memory"].tolist() == pytest.approx([0.5, 0.0])
    state = MOO_C.adapt(state, _round([0.6, 0.8]))  # A = 0.6 / (0.5 * 2 * 2) = 0.3 > 0.01 * 2: C grows
    assert float(state["C"]) == pytest.approx(2.0 * math.exp(0.1))
    assert state["memory"].tolist() == pytest.approx([0.55, 0.4])
    state = MOO_C.adapt(state, _round([-0.1, 0.0]))  # against the memory: C shrinks
    assert float(state["C"]) == pytest.approx(2.0)


def test_moo_with_identity_moves_in_proportion_and_never_far() -> None:
    settings = Clip(C0=2.0, eta_C=0.1, beta=0.5, phi="identity")
    state = MOO_C.adapt(MOO_C.init(settings, ModelFacts(2, (2,))), _round([1.0, 0.0]))
    moved = MOO_C.adapt(state, _round([0.6, 0.8]))
    assert float(moved["C"]) == pytest.approx(2.0 * math.exp(0.1 * 0.3))
    leap = MOO_C.adapt(state, _round([1e6, 0.0]))
    assert float(leap["C"]) == pytest.approx(2.0 * math.exp(0.3))


def test_moo_stays_between_its_limits() -> None:
    settings = Clip(C0=1.0, eta_C=5.0, beta=0.5, C_min=0.5, C_max=3.0)
    state = MOO_C.adapt(MOO_C.init(settings, ModelFacts(1, (1,))), _round([1.0]))
    up = MOO_C.adapt(state, _round([1.0]))
    assert float(up["C"]) == pytest.approx(3.0)
    down = MOO_C.adapt(state, _round([-1.0]))
    assert float(down["C"]) == pytest.approx(0.5)


def test_layer_groups_share_C_so_that_the_whole_is_bounded_by_C0() -> None:
    for rule in (FIXED, MOO):
        C = rule.init(Clip(C0=3.0), ModelFacts(12, (8, 4), (0, 1)))["C"]
        assert C.shape == (2,)
        assert float(torch.linalg.vector_norm(C)) == pytest.approx(3.0)


def test_a_rule_of_ones_own_is_found_by_module_and_name() -> None:
    assert find_rule("fulcrum.clipping.fixed:FIXED") is FIXED
    for name, words in {
        "mooo": "did you mean 'moo'",
        "nowhere.module:rule": "cannot be imported",
        "fulcrum.clipping.fixed:nothing": "cannot be imported",
        "fulcrum.clipping.fixed:shrink": "not a fulcrum.clipping.ClipRule",
    }.items():
        with pytest.raises(ConfigError, match=words):
            find_rule(name)


# --- moo: step length and C apart ---------------------------------------------------------------

DIM = 400


def _start(C0: float = 1.0, lr: float = 1.0, noise: float = 0.02, **settings: Any) -> dict[str, torch.Tensor]:
    shape = ModelFacts(DIM, (DIM,), start=5.0, noise=noise, rounds=100, lr=lr)
    return dict(MOO.init(Clip(C0=C0, **settings), shape))


def _seen(state: dict[str, torch.Tensor], u: torch.Tensor, lr: float = 1.0, noise: float = 0.02) -> Released:
    """What the server sees when the mean clipped gradient, in units of C, is u (noise left out)."""
    C = float(torch.linalg.vector_norm(state["C"]))
    return Released(u * lr * C, torch.zeros(0), lr, 1.0, 0, 100, noise)


def _signal(length: float) -> torch.Tensor:
    """A direction whose square, after the noise's is taken off, is length^2."""
    u = torch.ones(DIM)
    return u / torch.linalg.vector_norm(u) * math.sqrt(length**2 + 0.02**2 * DIM)


def test_the_first_step_length_is_the_noise_the_weights_can_bear() -> None:
    state = _start(balance=3.0)  # of one layer, which bears three times as much
    assert float(state["step"]) == pytest.approx(3 * 3.0 * 5.0 / (0.02 * math.sqrt(DIM * 100)))
    deep = ModelFacts(DIM, (DIM,), start=5.0, depth=2, noise=0.02, rounds=100)
    assert float(MOO.init(Clip(balance=3.0), deep)["step"]) == pytest.approx(3.0 * 5.0 / (0.02 * math.sqrt(DIM * 100)))
    assert float(_start(noise=0.0, C0=2.0, lr=0.5)["step"]) == pytest.approx(1.0)  # no noise: eta C0, as set


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"depth": 1}, 112.5),  # a single layer: the noise alone decides
        ({"depth": 2}, 4.0),
        ({"depth": 2, "steps": 4.0, "rounds": 200}, 16.0),
        ({"depth": 2, "steps": 4.0, "rounds": 400}, 16.0),
        ({"depth": 2, "steps": 4.0, "rounds": 50}, 8.0),  # a short run cannot afford to overshoot
        ({"depth": 2, "steps": 4.0, "rounds": 2}, 4.0),  # but no shorter than with one step
        ({"depth": 2, "steps": 1.0, "rounds": 2}, 4.0),
        ({"depth": 2, "larger": 2.0}, 2.0),  # learned weights
        ({"depth": 2, "larger": 2.0, "first": 0.1}, 4.0),  # with momentum on the server
        ({"depth": 2, "larger": 2.0, "steps": 4.0, "rounds": 200}, 16.0),
        ({"depth": 2, "larger": 2.0, "steps": 4.0, "rounds": 2}, 2.0),
    ],
)
def test_with_little_noise_the_first_step_length_of_deep_models_is_bounded(facts: dict, expected: float) -> None:
    shape = ModelFacts(DIM, (DIM,), start=5.0, noise=0.02 / 12, **{"rounds": 100, **facts})
    assert float(MOO.init(Clip(balance=2.5, reach=0.8), shape)["step"]) == pytest.approx(expected)


@pytest.mark.parametrize("lr", [0.0625, 1.0, 16.0])
@pytest.mark.parametrize("C0", [0.01, 1.0, 100.0])
def test_what_is_applied_depends_neither_on_C0_nor_on_the_learning_rate(C0: float, lr: float) -> None:
    state = _start(C0=C0, lr=lr)
    u = _signal(0.3)
    applied = MOO.apply(state, _seen(state, u, lr))
    torch.testing.assert_close(applied, u * float(_start()["step"]))
    assert float(state["C"]) * lr <= float(state["step"]) * (1 + 1e-6), "local steps must not run ahead of the server"


def test_a_schedule_of_the_learning_rate_still_counts() -> None:
    state = _start(lr=1.0)
    u = _signal(0.3)
    late = Released(u * 0.1 * float(state["C"]), torch.zeros(0), 0.1, 1.0, 9, 100, 0.02)
    torch.testing.assert_close(MOO.apply(state, late), 0.1 * MOO.apply(state, _seen(state, u)))


def _search(knee: float, C0: float, rounds: int = 14) -> list[float]:
    """C over rounds in which every gradient has norm `knee`: |u| is 0.3 below it and falls as 1/C above."""
    state, course = _start(C0=C0, lr=1e-3), []
    for _ in range(rounds):
        C = float(torch.linalg.vector_norm(state["C"]))
        course.append(C)
        state = dict(MOO.adapt(state, _seen(state, _signal(0.3 * min(1.0, knee / C)), lr=1e-3)))
    return course


@pytest.mark.parametrize("knee", [0.5, 5.0])
@pytest.mark.parametrize("C0", [0.01, 1.0, 30.0, 1000.0])
def test_C_is_found_near_the_norm_of_the_gradients_from_far_above_and_below(knee: float, C0: float) -> None:
    course = _search(knee, C0)
    assert knee / 10 <= course[-1] <= knee * 1.8, course
    assert course[-1] == course[-3], "the search has ended"


def test_the_search_would_not_end_there_if_the_knee_were_elsewhere() -> None:
    assert _search(0.05, 1.0)[-1] < 0.1 < _search(5.0, 1.0)[-1]


def _noisy_search(seed: int, knee: float, C0: float, length: float, rounds: int = 12) -> float:
    """Where C ends when |u| is `length` below the knee, falls as 1/C above, and the noise is really there."""
    generator = torch.Generator().manual_seed(seed)
    state = _start(C0=C0, lr=1e-3)
    direction = torch.ones(DIM) / math.sqrt(DIM)
    for _ in range(rounds):
        C = float(torch.linalg.vector_norm(state["C"]))
        u = direction * length * min(1.0, knee / C) + 0.02 * torch.randn(DIM, generator=generator)
        state = dict(MOO.adapt(state, _seen(state, u, lr=1e-3)))
    return float(torch.linalg.vector_norm(state["C"]))


SHOWN = math.sqrt(moo.MIN_SIGNAL_DEVIATIONS * 0.02**2 * math.sqrt(2 * DIM))
"""The length of a signal that just shows."""


def test_C_does_not_return_to_where_no_signal_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    def course(lengths: list[float]) -> list[float]:
        state, found = _start(C0=9.0, lr=1e-3), []
        for length in lengths:
            found.append(float(torch.linalg.vector_norm(state["C"])))
            state = dict(MOO.adapt(state, _seen(state, _signal(length), lr=1e-3)))
        return found

    # Nothing at C = 9, hardly anything at 3: that is no reason to try 27 and to settle at 9.
    hidden = [0.6 * SHOWN, 1.05 * SHOWN, 0.3 * SHOWN, 0.6 * SHOWN, 0.6 * SHOWN]
    assert course(hidden) == pytest.approx([9.0, 3.0, 1.0, 1.0, 1.0])
    clear = [2.0 * SHOWN, 2.0 * SHOWN, 0.3 * SHOWN, 2.0 * SHOWN, 2.0 * SHOWN]
    assert course(clear) == pytest.approx([9.0, 3.0, 27.0, 9.0, 9.0]), "clear signals are compared, and C rises"
    monkeypatch.setattr(moo, "CLEAR_SIGNAL_RATIO", 0.0)
    assert course(hidden) == pytest.approx([9.0, 3.0, 27.0, 9.0, 9.0]), "what the comparison does without the condition"


def test_noise_that_hides_the_signal_does_not_leave_C_far_above_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large() -> int:
        return sum(_noisy_search(seed, knee=3.0, C0=10.0, length=1.05 * SHOWN) > 6.0 for seed in range(60))

    assert too_large() <= 2
    monkeypatch.setattr(moo, "CLEAR_SIGNAL_RATIO", 0.0)
    assert too_large() >= 8, "the test must be able to fail"


def test_noise_that_hides_nothing_leaves_the_search_as_good_as_without() -> None:
    ends = [_noisy_search(seed, knee=3.0, C0=C0, length=4 * SHOWN) for seed in range(20) for C0 in (0.1, 100.0)]
    assert sum(0.9 <= C <= 6.0 for C in ends) >= 36, ends


def test_without_any_signal_C_falls_to_its_floor_and_no_further() -> None:
    state = _start(C0=10.0, lr=1e-3, C_min=0.01)
    for _ in range(12):
        state = dict(MOO.adapt(state, _seen(state, _signal(0.0), lr=1e-3)))
    assert float(state["C"]) == pytest.approx(0.01)


@pytest.mark.parametrize(("C0", "floor"), [(10.0, 0.1), (0.03, 0.03), (0.01, 0.01)])
def test_where_no_round_can_show_a_signal_C_does_not_fall_all_the_way(C0: float, floor: float) -> None:
    def ends(noise: float) -> float:
        state = _start(C0=C0, lr=1e-3, C_min=0.01, noise=noise)
        for _ in range(12):
            state = dict(MOO.adapt(state, _seen(state, _signal(0.0), lr=1e-3)))
        return float(state["C"])

    border = (
        moo.MAX_CLEAR_THRESHOLD / (moo.CLEAR_SIGNAL_RATIO * moo.MIN_SIGNAL_DEVIATIONS * (2 * DIM) ** 0.5)
    ) ** 0.5  # beyond it, nothing can be clear
    assert ends(1.01 * border) == pytest.approx(floor)
    assert ends(0.99 * border) == pytest.approx(0.01), "noise that a signal may rise above leaves the search as it was"


def test_the_step_length_grows_while_releases_agree_and_shrinks_when_they_turn() -> None:
    state = _start(eta_C=0.1)
    first = float(state["step"])
    for _ in range(3):
        state = dict(MOO.adapt(state, _seen(state, _signal(0.3))))
    assert float(state["step"]) == pytest.approx(first * math.exp(0.2))  # not in the first round
    state = dict(MOO.adapt(state, _seen(state, -_signal(0.3))))
    assert float(state["step"]) == pytest.approx(first * math.exp(0.1))


@pytest.mark.parametrize(("growth", "reached"), [(1.5, 1.5), (1.0, 1.0), (math.inf, math.exp(0.9))])
def test_the_step_length_never_exceeds_its_first_value_by_more_than_growth(growth: float, reached: float) -> None:
    state = _start(eta_C=0.1, growth=growth)
    first = float(state["step"])
    for _ in range(10):
        state = dict(MOO.adapt(state, _seen(state, _signal(0.3))))
    assert float(state["step"]) == pytest.approx(first * reached)
    state = dict(MOO.adapt(state, _seen(state, -_signal(0.3))))
    assert float(state["step"]) == pytest.approx(first * reached * math.exp(-0.1)), "it can shrink from there"
