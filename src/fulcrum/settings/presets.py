"""Methods: named presets of independent parts.

A method is a set of initial settings and nothing more: no code depends on the method's name. The parts are a
clipping rule, an activation, a noise schedule, a unit and a server optimiser. Presets at example level do not
set C0 and the learning rate, so that methods can be compared from the same start. A new method is a new row.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulcrum.errors import ConfigError


@dataclass(frozen=True)
class MethodPreset:
    """A preset: `parts` overrides settings by section, e.g. {"clip": {"rule": "moo"}}.

    unit: the protected unit of this method ("" where it protects nothing).
    """

    name: str
    summary: str
    parts: Mapping[str, Mapping[str, Any]]
    unit: str
    reference: str

    @property
    def sections(self) -> dict[str, Mapping[str, Any]]:
        """`parts`, and whether it rehearses: no preset inherits that from the method of a settings file."""
        return {**self.parts, "clip": {"rehearse": False, **self.parts.get("clip", {})}}


CLIENT_LEVEL_TRAINING: Mapping[str, Any] = {
    "participation": 0.2,
    "weights": "uniform",
    "epochs": 1.0,
    "rate": 0.2,
    "lr": 0.1,
}
"""Training at unit client: a fifth of the parties join a round, each for one epoch in five steps."""

METHODS: dict[str, MethodPreset] = {
    method.name: method
    for method in (
        MethodPreset(
            name="moo",
            summary="private; C and the step length are found on made-up data first, then from what is released anyway",
            parts={"clip": {"rule": "moo", "rehearse": True}},
            unit="example",
            reference="after Ranaweera et al., multi-objective clipping; here C moves on released values only",
        ),
        MethodPreset(
            name="moo-rehearsed",
            summary="the same as moo",
            parts={"clip": {"rule": "moo", "rehearse": True}},
            unit="example",
            reference="this project",
        ),
        MethodPreset(
            name="moo-unrehearsed",
            summary="as moo, with the first step by a formula instead of made-up data (moo --no-rehearsal)",
            parts={"clip": {"rule": "moo", "rehearse": False}},
            unit="example",
            reference="this project",
        ),
        MethodPreset(
            name="dp-sgd-rehearsed",
            summary="as dp-sgd, with C and the learning rate chosen beforehand on made-up data",
            parts={"clip": {"rule": "fixed", "rehearse": True}},
            unit="example",
            reference="this project; Abadi et al. 2016",
        ),
        MethodPreset(
            name="moo-c",
            summary="private; C alone is learned, the learning rate stays yours",
            parts={"clip": {"rule": "moo-c", "beta": 0.95, "eta_C": 0.05}},
            unit="example",
            reference="after Ranaweera et al.; the plain form of moo",
        ),
        MethodPreset(
            name="dp-sgd",
            summary="private; C stays at clip.C0",
            parts={"clip": {"rule": "fixed"}},
            unit="example",
            reference="Abadi et al. 2016",
        ),
        MethodPreset(
            name="dp-fedavg",
            summary="private for whole parties: a trusted server clips their updates to clip.C0 and adds the noise",
            parts={"clip": {"rule": "fixed", "C0": 1.0}, "privacy": {"unit": "client"}, "train": CLIENT_LEVEL_TRAINING},
            unit="client",
            reference="McMahan et al. 2018",
        ),
        MethodPreset(
            name="median",
            summary="dp-fedavg with C the median of the updates' norms, read from private values",
            parts={
                "clip": {"rule": "median", "C0": 1.0},
                "privacy": {"unit": "client"},
                "train": CLIENT_LEVEL_TRAINING,
            },
            unit="client",
            reference="Geyer et al. 2017",
        ),
        MethodPreset(
            name="none",
            summary="not private: plain federated averaging, the ceiling to compare with on public data",
            parts={"clip": {"rule": "none"}},
            unit="",
            reference="McMahan et al. 2017",
        ),
        MethodPreset(
            name="dynamic",
            summary="C and the noise both fall by public schedules",
            parts={"clip": {"rule": "dynamic"}, "privacy": {"noise_schedule": "growth"}},
            unit="example",
            reference="Du et al. 2021",
        ),
        MethodPreset(
            name="wav",
            summary="clips each level of a Haar wavelet transform apart (WAV-style)",
            parts={"clip": {"rule": "wav"}},
            unit="example",
            reference="after Ranaweera et al. 2023",
        ),
        MethodPreset(
            name="tempered",
            summary="fixed C, and a bounded activation that keeps gradients small",
            parts={"clip": {"rule": "fixed"}, "model": {"activation": "tempered"}},
            unit="example",
            reference="Papernot et al. 2021",
        ),
        MethodPreset(
            name="quantile",
            summary="C follows a quantile of the norms",
            parts={"clip": {"rule": "quantile", "eta_C": 0.2}},
            unit="example",
            reference="Andrew et al. 2021",
        ),
        MethodPreset(
            name="auto-s",
            summary="gradients scaled to one norm, so that C is a step size",
            parts={"clip": {"rule": "auto-s"}},
            unit="example",
            reference="Bu et al. 2022",
        ),
        MethodPreset(
            name="psac",
            summary="as auto-s, with small gradients kept smaller",
            parts={"clip": {"rule": "psac", "stability": 0.1}},
            unit="example",
            reference="Xia et al. 2023",
        ),
        MethodPreset(
            name="units-of-c",
            summary="fixed C, and the step in units of C",
            parts={"clip": {"rule": "units-of-c"}},
            unit="example",
            reference="folklore; the cheapest rival of a learned C",
        ),
        MethodPreset(
            name="oso",
            summary="C learned by privatised gradient descent on a second noised vector (OSO-style)",
            parts={"clip": {"rule": "oso", "eta_C": 0.05}},
            unit="example",
            reference="after Galli et al. 2024",
        ),
        MethodPreset(
            name="dc-sgd",
            summary="C of the least squared error, from a noised histogram of norms each epoch",
            parts={"clip": {"rule": "dc-sgd", "statistics_interval": 1.0}},
            unit="example",
            reference="Wei et al. 2025",
        ),
        MethodPreset(
            name="hyfreedp",
            summary="gradients scaled to one norm, and the step length from noised losses every fifth round",
            parts={"clip": {"rule": "hyfree", "statistics_rounds": 5}},
            unit="example",
            reference="Liu and Bu 2025 (HyFreeDP), accounted as one release per batch",
        ),
        MethodPreset(
            name="dp-macadam",
            summary="centre, scale per coordinate and Adam's step from one set of released moments",
            parts={"clip": {"rule": "macadam"}, "train": {"server": "sgd"}},
            unit="example",
            reference="Tasnim, Sankar and Kosut 2026",
        ),
        MethodPreset(
            name="dp-adambc",
            summary="fixed C, and Adam on the server with the noise's variance taken off its second moment",
            parts={
                "clip": {"rule": "fixed"},
                "train": {"server": "adam-bc", "server_lr": 0.01, "server_beta2": 0.999},
            },
            unit="example",
            reference="Tang, Shpilevskiy and Lecuyer 2024",
        ),
        MethodPreset(
            name="d-adaptation",
            summary="fixed C, and on the server a step from a lower bound on the distance to a solution",
            parts={"clip": {"rule": "fixed"}, "train": {"server": "d-adaptation"}},
            unit="example",
            reference="Defazio and Mishchenko 2023",
        ),
        MethodPreset(
            name="moo-client",
            summary="as moo-c, one C a party, from its own releases",
            parts={"clip": {"rule": "moo-client", "beta": 0.95, "eta_C": 0.05}},
            unit="example",
            reference="this project",
        ),
        MethodPreset(
            name="moo-scalar",
            summary="as moo-c, from a noised scalar that each party pays for",
            parts={"clip": {"rule": "moo-scalar", "beta": 0.95, "eta_C": 0.07, "kappa": 0.001}},
            unit="example",
            reference="this project",
        ),
        MethodPreset(
            name="moo-paper",
            summary="the paper's Algorithm 1 as printed: C moves example by example, from raw losses or norms",
            parts={"clip": {"rule": "moo-paper", "kappa": 0.3, "eta_C": 0.1}},
            unit="example",
            reference="Ranaweera et al., Algorithm 1",
        ),
        MethodPreset(
            name="moo-paper-batch",
            summary="Algorithm 1 with one step of C a batch: fast",
            parts={"clip": {"rule": "moo-paper-batch", "kappa": 0.3, "eta_C": 0.1}},
            unit="example",
            reference="Ranaweera et al., Algorithm 1",
        ),
    )
}


def find_method(name: str) -> MethodPreset:
    """The method of that name, or ConfigError with the nearest name."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]}? `fulcrum methods` lists all" if near else f"choose one of {', '.join(METHODS)}"
    raise ConfigError(f"method = {name!r} is not known; {hint}.")
