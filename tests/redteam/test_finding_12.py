"""Finding 12: underflow at legal settings. stability 1e-30 gave 6e9 C, C0 1e-22 gave 63 C.

At 243f1c8 any positive number was legal, and norms below 1e-19 underflowed to 0 when squared. Now settings keep to what
the arithmetic bears, and what underflows is part of the norm's bound (finding 3's clamp comes on top).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fulcrum.clipping import RULES
from fulcrum.engines.neighbours import STEP_SUMS, build_replay_problem, replay_neighbours
from fulcrum.errors import ConfigError
from fulcrum.gradients.rounding import squared_norms
from fulcrum.settings.checks import check_settings
from fulcrum.settings.schema import Clip, Settings

SOUND = [name for name, rule in RULES.items() if rule.sound and rule.private]


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("clip", {"stability": 1e-30}),
        ("clip", {"stability": 1e30}),
        ("clip", {"C0": 1e-22, "C_min": 1e-22}),
        ("clip", {"C0": 1e22, "C_max": 1e22}),
        ("clip", {"C_min": 1e-40}),
        ("clip", {"C_max": float("inf")}),
        ("clip", {"kappa": 1e30}),
        ("clip", {"eta_C": 1e30}),
        ("clip", {"rho_c": 1e-30}),
        ("clip", {"shrink": 1e30}),
        ("privacy", {"sigma": 1e-30}),
        ("privacy", {"sigma": 1e30}),
        ("privacy", {"rho_mu": 1e-30}),
    ],
    ids=str,
)
def test_a_setting_beyond_what_arithmetic_bears_is_refused(section: str, change: dict[str, Any]) -> None:
    name = next(iter(change))
    with pytest.raises(ConfigError, match=rf"{section}\.{name} = .* is out of range"):
        check_settings(Settings().replace(**{section: change}))


@pytest.mark.parametrize("C0", [1e-12, 1e-3, 1e12])
@pytest.mark.parametrize("stability", [1e-9, 1e6])
@pytest.mark.parametrize("rule", SOUND)
@pytest.mark.parametrize("engine", STEP_SUMS)
@pytest.mark.every(4)
def test_every_rule_keeps_its_bound_at_the_ends_of_the_ranges(
    engine: str, rule: str, stability: float, C0: float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))
    x = torch.randn(5, 3)
    scales = (1e-30, 1e-20, 1.0, 1e10, 1e18)
    x = torch.stack([row * scale for row, scale in zip(x, scales, strict=True)])
    problem = build_replay_problem(x, torch.arange(5) % 3, model, rule, proven=True)
    state = problem.rule.init(Clip(C0=C0, C_min=1e-12, C_max=1e12, stability=stability), problem.shape)
    for theta in (None, problem.layout.flatten(model).detach() * 1e-18):
        for target in range(5):
            found = replay_neighbours(problem, engine, state, torch.arange(5), target, theta=theta)
            assert found.ratio <= 1, (scales[target], found)


def test_numbers_too_small_to_square_are_part_of_the_bound() -> None:
    rows = torch.full((1, 1000), 1e-30)
    found = squared_norms(rows)
    assert float(found.values) == 0  # the old norm: any factor would have passed
    assert float(found.bounds) >= float(rows.double().square().sum())
