"""Runs that differ in their seed alone, and their means."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulcrum.analysis.report.model import RunView
from fulcrum.privacy.accounting import format_epsilon

SEED_SETTINGS = ("run.seed", "privacy.seed")
IRRELEVANT_SETTINGS = (
    "run.device",
    "run.engine",
    "run.workers",
    "run.precision",
    "run.checkpoint_every",
    "run.ledger",
    "data.dir",
)
"""Settings that do not decide a result."""


@dataclass(frozen=True)
class SeedGroup:
    """Runs with the same settings but for the seed. colour: of its first run."""

    name: str
    runs: tuple[RunView, ...]
    colour: int


def group_by_seed(runs: Sequence[RunView]) -> list[SeedGroup]:
    """The groups of runs that differ in their seed alone; none where no two runs do."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        groups.setdefault(make_group_key(run), []).append(place)
    if all(len(places) == 1 for places in groups.values()):
        return []
    found = []
    for places in groups.values():
        members = tuple(runs[i] for i in places)
        first = members[0]
        name = first.name if len(members) == 1 else f"{describe_run(first)}, {len(members)} seeds"
        found.append(SeedGroup(name, members, places[0]))
    return found


def make_group_key(run: RunView) -> str:
    """Equal for runs that differ in their seed alone."""
    kept = {name: value for name, value in run.settings.items() if name not in (*SEED_SETTINGS, *IRRELEVANT_SETTINGS)}
    return json.dumps(kept, sort_keys=True, default=str) if kept else f"?{run.folder}"


def describe_run(run: RunView) -> str:
    """Method and epsilon."""
    target = f" ε {format_epsilon(run.target, 6)}" if math.isfinite(run.target) else ""
    return f"{run.method or 'run'}{target}"


def average_columns(
    runs: Sequence[RunView], column: str
) -> tuple[dict[str, tuple[float, ...]], tuple[float, ...], tuple[float, ...]]:
    """Means of a column and of epsilon over the runs, by round, and the column's smallest and largest values.

    Only rounds that all of the runs have are in it.
    """
    by_round = [_index_by_round(run.columns, column) for run in runs]
    rounds = sorted(set.intersection(*(set(each) for each in by_round))) if by_round else []
    means, low, high, spent = [], [], [], []
    for number in rounds:
        values = [each[number][0] for each in by_round]
        means.append(math.fsum(values) / len(values))
        low.append(min(values))
        high.append(max(values))
        spent.append(math.fsum(each[number][1] for each in by_round) / len(runs))
    columns = {"round": tuple(rounds), "epsilon": tuple(spent), column: tuple(means)}
    return columns, tuple(low), tuple(high)


def _index_by_round(columns: Mapping[str, Sequence[float]], column: str) -> dict[float, tuple[float, float]]:
    """round -> (value, epsilon), where the value is a number."""
    values, rounds = columns.get(column, ()), columns.get("round", ())
    spent = columns.get("epsilon") or [math.nan] * len(rounds)
    return {
        number: (value, cost)
        for number, value, cost in zip(rounds, values, spent, strict=False)
        if math.isfinite(value)
    }
