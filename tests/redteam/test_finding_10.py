"""Finding 10: `quantile` with statistics now and then and equal parties was planned with a batch of 1.

At 243f1c8 a group of equal parties kept the default batch of 1, so the plan's noise of steps without statistics was not
that of the release: the run stopped with BudgetError after the parties had paid. Later the batch was right, but whether
sizes matter was tried at 200 noise levels for the smallest and the largest party: a rule of one's own whose share
differs in between was still planned wrongly. Now every group is compared with what a party of each size releases, at
the noise that was calibrated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fulcrum.clipping import RULES
from fulcrum.clipping.rule import ClipRule
from fulcrum.errors import BudgetError
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.mechanism import compute_planned_events
from fulcrum.privacy.plan import Plan, make_plan
from fulcrum.runs import prepare
from fulcrum.settings.schema import Settings
from fulcrum.training.loop import federate
from support.federations import toy_data

INTERVALS = (0.0, 0.5, 1.0)
SIZES = {"equal": (2000, 2000, 2000), "unequal": (200, 2000, 3000, 2000)}
PRIVATE = [name for name, rule in RULES.items() if rule.private]
PAID = [name for name in PRIVATE if RULES[name].cost.startswith("paid")]


def settings_of(rule: str, interval: float, **privacy: Any) -> Settings:
    return Settings().replace(
        data={"source": "toy"},
        model={"name": "linear"},
        train={"rounds": 5, "rate": 0.25, "lr": 0.5, "steps": 3},
        clip={"rule": rule, "statistics_interval": interval},
        privacy={"epsilon": 5.0, **privacy},
    )


def is_planned_as_released(plan: Plan, rule: ClipRule) -> bool:
    """Whether each party's planned events are those that its own task and batch make, in every round."""
    return all(
        plan.events(k, t) == compute_planned_events(plan.assignment(k, t, 1.0), rule, 0.25 * plan.units(k), t)
        for k in range(plan.parties)
        for t in range(plan.rounds)
    )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rule", PRIVATE)
def test_planned_events_are_released_events(rule: str, sizes: str) -> None:
    for interval in INTERVALS:
        for schedule in ("constant", "growth"):
            settings = settings_of(rule, interval, noise_schedule=schedule)
            plan = make_plan(settings, len(SIZES[sizes]), SIZES[sizes], RULES[rule])
            assert is_planned_as_released(plan, RULES[rule])
            assert max(plan.compute_epsilon_at(5, k) for k in range(plan.parties)) <= 5.0


def test_a_batch_of_one_is_seen() -> None:
    plan = make_plan(settings_of("quantile", 1.0), 3, SIZES["equal"], RULES["quantile"])
    wrong = dataclasses.replace(plan, groups=tuple(dataclasses.replace(g, batch=1.0) for g in plan.groups))
    assert not is_planned_as_released(wrong, RULES["quantile"])


OWN_SHARES: dict[str, Callable[[float, float], float]] = {
    "only in the middle": lambda sigma, batch: 0.3 if 400 < batch < 600 else 0.1,
    "in a narrow band of noise": lambda sigma, batch: 0.3 if batch > 100 and abs(sigma - 1.0) < 0.01 else 0.1,
    "falls with the batch": lambda sigma, batch: 1 / (2 + batch),
}


@pytest.mark.parametrize("share", OWN_SHARES)
def test_a_rule_of_ones_own_may_share_as_it_likes(share: str) -> None:
    rule = dataclasses.replace(RULES["quantile"], share=OWN_SHARES[share])
    for epsilon, sigma in ((5.0, None), (None, 1.0)):
        settings = settings_of("quantile", 1.0, epsilon=epsilon, sigma=sigma)
        assert is_planned_as_released(make_plan(settings, 4, SIZES["unequal"], rule), rule)


@pytest.mark.parametrize("partition", ["iid", "quantity"])
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("rule", PAID)
@pytest.mark.every(4)
def test_a_run_reserves_what_it_releases(rule: str, interval: float, partition: str) -> None:
    settings = settings_of(rule, interval).replace(data={"source": "toy", "parties": 3, "partition": partition})
    federation = prepare(settings, toy_data(900))
    with Ledger.open(":memory:") as ledger:
        assert len(list(federate(federation, ledger, "run"))) == 5  # it would stop where events differ
        assert max(ledger.epsilons().values()) <= 5.0


def test_a_run_with_the_wrong_batch_stops() -> None:
    """The check of the loop, on the plan of 243f1c8."""
    settings = settings_of("quantile", 1.0).replace(data={"source": "toy", "parties": 3, "partition": "iid"})
    federation = prepare(settings, toy_data(6000))
    groups = tuple(dataclasses.replace(group, batch=1.0) for group in federation.plan.groups)
    wrong = dataclasses.replace(federation, plan=dataclasses.replace(federation.plan, groups=groups))
    with Ledger.open(":memory:") as ledger, pytest.raises(BudgetError):
        list(federate(wrong, ledger, "run"))
