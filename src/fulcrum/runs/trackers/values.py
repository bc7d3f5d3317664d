"""What trackers are sent of a run: released values and public settings.

A tracker's files and servers are read by many, so less goes there than into the run's folder: no diagnostics, which no
epsilon covers; with unit client no durations, which would tell how many parties joined; and no seed that the noise of
private data follows from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fulcrum.runs.folder import compute_total_C
from fulcrum.runs.observers import RunInfo
from fulcrum.types import RoundResult

MAX_PARTIES_SENT = 50
"""Of more parties, only means are sent."""


def list_round_values(run: RunInfo, result: RoundResult) -> dict[str, float]:
    """name -> number of one round; names are grouped by a word before a slash. Numbers that are not finite are left
    out."""
    found: dict[str, float] = {f"metrics/{name}": value for name, value in result.metrics.items()}
    found |= {f"mean_over_parties/{name}": value for name, value in result.mean_over_parties.items()}
    found |= {"privacy/epsilon": result.epsilon, "clipping/C": compute_total_C(result.C)}
    found |= {f"course/{name}": value for name, value in result.course.items()}
    if result.participants is not None:
        found["parties/participants"] = len(result.participants)
    if run.public or run.settings.privacy.unit != "client":
        found["time/seconds"] = result.seconds
    if len(result.party_metrics) <= MAX_PARTIES_SENT:
        for party, metrics in result.party_metrics.items():
            found |= {f"party/{party}/{name}": value for name, value in metrics.items()}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def list_settings_sent(run: RunInfo) -> dict[str, Any]:
    """section.name -> value of the settings, without seeds that the noise of private data follows from."""
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(run.settings).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    if not run.public:
        flat.pop("privacy.seed")
        if run.settings.privacy.seed is None and run.settings.privacy.randomness != "secure":
            flat.pop("run.seed")
    return flat


def list_final_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished run ends with: its metrics, its cost, and what that is worth."""
    names = ("epsilon", "delta", "unit", "guarantee", "sound", "status", "rounds", "parties", "parameters")
    return {name: summary[name] for name in names if name in summary}
