"""Neighbours of finding 3: rules of a user's own that call themselves sound and are not.

Factors are clamped for each unit alone. A rule whose factors depend on the other units, or whose C follows the private
batch, passed every clamp, and its statement said "yes".
"""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch
from torch import nn

from fulcrum.clipping import ClipRule, no_extra
from fulcrum.clipping.fixed import FIXED
from fulcrum.engines.neighbours import build_replay_problem, replay_neighbours
from fulcrum.errors import ConfigError
from fulcrum.runs import prepare
from fulcrum.settings.schema import Clip
from fulcrum.types import RuleState, Stats
from support.federations import toy_data, toy_settings

Clipped = tuple[torch.Tensor, torch.Tensor, RuleState]


def joint(stats: Stats, state: RuleState) -> Clipped:
    largest = stats.norms.max() if len(stats.norms) else state["C"]
    return (state["C"] / largest.clamp_min(1e-12)).expand_as(stats.norms), no_extra(stats), state


def peek(stats: Stats, state: RuleState) -> Clipped:
    C = stats.norms.median().clamp(1e-3, 1e3).reshape(1).expand_as(state["C"]) if len(stats.norms) else state["C"]
    return (C / stats.norms.clamp_min(1e-12)).clamp(max=1), no_extra(stats), {**state, "C": C}


JOINT, PEEK = (dataclasses.replace(FIXED, name=f.__name__, clip=f) for f in (joint, peek))


@pytest.mark.parametrize("rule", [JOINT, PEEK], ids=lambda rule: rule.name)
def test_a_rule_that_looks_at_others_does_not_see_private_data(rule: ClipRule, monkeypatch: pytest.MonkeyPatch) -> None:
    own = types.ModuleType("own_rules")
    own.RULE, own.FINE = rule, dataclasses.replace(FIXED, name="fine")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_rules", own)
    data = toy_data(public=False, classes=3)
    prepare(toy_settings(clip={"rule": "own_rules:FINE"}, privacy={"sigma": 1.0}), data)
    with pytest.raises(ConfigError, match="no epsilon holds"):
        prepare(toy_settings(clip={"rule": "own_rules:RULE"}, privacy={"sigma": 1.0}), data)


def test_why_the_clamp_of_each_unit_is_not_enough() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 6)
    x[0] *= 1e6
    problem = build_replay_problem(x, torch.arange(100) % 3, nn.Linear(6, 3), JOINT, proven=True)
    state = problem.rule.init(Clip(rule="fixed", C0=1.0), problem.shape)
    assert replay_neighbours(problem, "parallel", state, torch.arange(100), 0).sum > 2
