"""Methods: named presets over parts that are independent of each other.

A method says which settings it starts from and nothing more: no code asks which method is running.
Adding one is adding a row.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulcrum.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """A preset: `parts` overrides settings by section, e.g. {"clip": {"rule": "moo"}}.

    unit is what one epsilon protects under this method ("" where it protects nothing).
    """

    name: str
    summary: str
    parts: Mapping[str, Mapping[str, Any]]
    unit: str
    reference: str


CLIENT_LEVEL: Mapping[str, Any] = {"participation": 0.2, "weights": "uniform", "epochs": 1.0, "rate": 0.2, "lr": 0.1}
"""How parties train where each is one unit: a fifth of them join a round, each for an epoch in five steps."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="moo",
            summary="private; C and the step length find their own values from what is released anyway",
            parts={"clip": {"rule": "moo"}},
            unit="example",
            reference="after Ranaweera et al., multi-objective clipping; here C moves on released values only",
        ),
        Method(
            name="moo-c",
            summary="private; C alone is learned, the learning rate stays yours",
            parts={"clip": {"rule": "moo-c"}},
            unit="example",
            reference="after Ranaweera et al.; the plain form of moo",
        ),
        Method(
            name="dp-sgd",
            summary="private; C stays at clip.C0",
            parts={"clip": {"rule": "fixed"}},
            unit="example",
            reference="Abadi et al. 2016",
        ),
        Method(
            name="dp-fedavg",
            summary="private for whole parties: a trusted server clips their updates to clip.C0 and adds the noise",
            parts={"clip": {"rule": "fixed", "C0": 1.0}, "privacy": {"unit": "client"}, "train": CLIENT_LEVEL},
            unit="client",
            reference="McMahan et al. 2018",
        ),
        Method(
            name="median",
            summary="dp-fedavg with C the median of the updates' norms, read from private values",
            parts={"clip": {"rule": "median", "C0": 1.0}, "privacy": {"unit": "client"}, "train": CLIENT_LEVEL},
            unit="client",
            reference="Geyer et al. 2017",
        ),
        Method(
            name="none",
            summary="not private: plain federated averaging, the ceiling to compare with on public data",
            parts={"clip": {"rule": "none"}},
            unit="",
            reference="McMahan et al. 2017",
        ),
    )
}


def find_method(name: str) -> Method:
    """The method of that name, or ConfigError with the nearest one."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(f"method = {name!r} is not known; choose one of {', '.join(METHODS)}{hint}")
