"""Clean cases: settings over rules, engines, units and epsilons on which no detector may raise an alarm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulcrum.analysis.detectors.planted import BASE
from fulcrum.clipping import RULES
from fulcrum.settings.schema import Settings

SOUND_RULES = tuple(name for name, rule in RULES.items() if rule.sound and rule.private)
ENGINES = ("reference", "parallel", "stacked")
UNITS = ("example", "person", "client")
EPSILONS = (1.64, 3.61, 6.38, None)
"""The noise of each budget, and that of a given sigma."""


def make_case(number: int) -> Settings:
    """Case `number` of an endless list in which every rule, engine, unit and epsilon comes with every other."""
    rule = SOUND_RULES[number % len(SOUND_RULES)]
    turn = number // len(SOUND_RULES)
    unit = UNITS[turn % 3]
    engine = ENGINES[(turn // 3 + number) % 3]
    epsilon = EPSILONS[(turn // 9 + number) % 4]
    if unit == "person" and engine == "stacked":  # it knows single records only
        engine = "parallel"
    if unit == "client" and not _clips_at_a_server(rule):
        rule = "fixed"
    changes: dict[str, dict[str, Any]] = {
        "clip": {"rule": rule, "groups": "layer" if number % 5 == 0 and rule != "wav" else "flat"},
        "privacy": {
            "unit": unit,
            "epsilon": epsilon,
            "sigma": None if epsilon else 1.3,
            "randomness": "secure" if turn % 2 else "seeded",
        },
        "train": {"steps": 1 + number % 2 if unit != "client" else 1, "rate": 0.25},
        "run": {"engine": engine},
    }
    if unit == "client":
        changes["train"] |= {"participation": 0.5, "weights": "uniform"}
    elif number % 7 == 3:
        changes |= {"data": {"validation": 0.25}}
        changes["privacy"] |= {"evaluation_epsilon": 2.0}
        changes["run"] |= {"evaluate_every": 1}
    elif number % 11 == 5 and rule == "fixed":
        changes["privacy"] |= {"aggregation": "pairwise"}
        changes["train"]["steps"] = 1
        changes["run"]["engine"] = "reference"  # the one that carries masks
    return BASE.replace(**changes)


def _clips_at_a_server(rule: str) -> bool:
    """Whether a rule can clip updates at a trusted server: it keeps one C, and looks at no losses."""
    found = RULES[rule]
    return found.where == "server" and rule not in ("hyfree", "wav")


def list_cases(count: int, start: int = 0) -> Iterator[tuple[int, Settings]]:
    """(number, settings) of `count` cases."""
    for number in range(start, start + count):
        yield number, make_case(number)


def describe_case(settings: Settings) -> dict[str, Any]:
    """What a case is, in a few words."""
    privacy = settings.privacy
    return {
        "rule": settings.clip.rule,
        "groups": settings.clip.groups,
        "engine": settings.run.engine,
        "unit": privacy.unit,
        "epsilon": privacy.epsilon,
        "sigma": privacy.sigma,
        "randomness": privacy.randomness,
        "steps": settings.train.steps,
        "aggregation": privacy.aggregation,
        "validation": settings.data.validation,
    }
