"""Every rule keeps the contract; and the contract rejects rules that break it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fulcrum import testing
from fulcrum.clip import RULES, Shape, find_rule
from fulcrum.clip.fixed import FIXED, clip_to_C, no_extra, shrink
from fulcrum.clip.moo import MOO
from fulcrum.clip.oso import OSO
from fulcrum.clip.quantile import QUANTILE
from fulcrum.clip.rule import ClipRule, no_share
from fulcrum.config import Clip
from fulcrum.errors import ConfigError
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
        dataclasses.replace(QUANTILE, share=no_share),
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
        dataclasses.replace(FIXED, init=lambda settings, shape: {"C": torch.ones(shape.count), "t": 0}),
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
    state = MOO.init(settings, Shape(2, (2,)))
    state = MOO.adapt(state, _round([1.0, 0.0]))  # no memory yet: C stays
    assert float(state["C"]) == pytest.approx(2.0)
    assert state["memory"].tolist() == pytest.approx([0.5, 0.0])
    state = MOO.adapt(state, _round([0.6, 0.8]))  # A = 0.6 / (0.5 * 2 * 2) = 0.3 > 0.01 * 2: C grows
    assert float(state["C"]) == pytest.approx(2.0 * math.exp(0.1))
    assert state["memory"].tolist() == pytest.approx([0.55, 0.4])
    state = MOO.adapt(state, _round([-0.1, 0.0]))  # against the memory: C shrinks
    assert float(state["C"]) == pytest.approx(2.0)


def test_moo_with_identity_moves_in_proportion_and_never_far() -> None:
    settings = Clip(C0=2.0, eta_C=0.1, beta=0.5, phi="identity")
    state = MOO.adapt(MOO.init(settings, Shape(2, (2,))), _round([1.0, 0.0]))
    moved = MOO.adapt(state, _round([0.6, 0.8]))
    assert float(moved["C"]) == pytest.approx(2.0 * math.exp(0.1 * 0.3))
    leap = MOO.adapt(state, _round([1e6, 0.0]))
    assert float(leap["C"]) == pytest.approx(2.0 * math.exp(0.3))


def test_moo_stays_between_its_limits() -> None:
    settings = Clip(C0=1.0, eta_C=5.0, beta=0.5, C_min=0.5, C_max=3.0)
    state = MOO.adapt(MOO.init(settings, Shape(1, (1,))), _round([1.0]))
    up = MOO.adapt(state, _round([1.0]))
    assert float(up["C"]) == pytest.approx(3.0)
    down = MOO.adapt(state, _round([-1.0]))
    assert float(down["C"]) == pytest.approx(0.5)


def test_layer_groups_share_C_so_that_the_whole_is_bounded_by_C0() -> None:
    for rule in (FIXED, MOO):
        C = rule.init(Clip(C0=3.0), Shape(12, (8, 4), (0, 1)))["C"]
        assert C.shape == (2,)
        assert float(torch.linalg.vector_norm(C)) == pytest.approx(3.0)


def test_a_rule_of_ones_own_is_found_by_module_and_name() -> None:
    assert find_rule("fulcrum.clip.fixed:FIXED") is FIXED
    for name, words in {
        "mooo": "did you mean moo",
        "nowhere.module:rule": "cannot be imported",
        "fulcrum.clip.fixed:nothing": "cannot be imported",
        "fulcrum.clip.fixed:shrink": "not a fulcrum.clip.ClipRule",
    }.items():
        with pytest.raises(ConfigError, match=words):
            find_rule(name)
