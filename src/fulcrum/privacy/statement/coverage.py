"""The runs that a statement covers, and the worst of each of their properties: a ledger is as good as its worst row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

UNKNOWN = "unknown"
"""A property that the ledger does not have on record: its rows were written by an earlier version."""
RANDOMNESS_FROM_WORST = ("recorded", "seeded", UNKNOWN, "secure")
ARITHMETIC_FROM_WORST = ("fast", UNKNOWN, "proven")
LEVELS_FROM_WORST = ("none", "nominal", UNKNOWN, "assumed", "simulation", "yes")
"""What an epsilon is worth. unknown: an earlier version wrote rows that do not say whether their rule was sound."""
MAX_IDS_NAMED = 3
"""Sentences name so many runs by their id, and count the others."""


@dataclass(frozen=True)
class CoveredRun:
    """What a statement must know of a run within its scope. None or "unknown": the ledger does not say.

    rule: the clipping rule's name. sound: whether C follows from released values alone. private: whether noise was
    added. randomness: "secure", "seeded" or "recorded". arithmetic: "proven" or "fast". simulation: whether whoever
    made the run called it one.
    """

    id: str
    rule: str = UNKNOWN
    sound: bool | None = None
    private: bool | None = None
    randomness: str = UNKNOWN
    arithmetic: str = UNKNOWN
    simulation: bool | None = None


@dataclass(frozen=True)
class Coverage:
    """All runs of a statement's scope, this one included, in the order in which they began."""

    runs: tuple[CoveredRun, ...]

    @property
    def private(self) -> bool:
        """Whether no run is known to have released anything without noise."""
        return not self.list_runs(lambda run: run.private is False)

    @property
    def sound(self) -> bool:
        """Whether every run is known to have used a sound rule."""
        return not self.list_runs(lambda run: run.sound is not True)

    @property
    def simulation(self) -> bool:
        """Whether a run is a simulation: declared as one, or its random numbers can be drawn again."""
        return self.randomness in ("recorded", "seeded") or bool(self.list_runs(lambda run: run.simulation is True))

    @property
    def randomness(self) -> str:
        """The worst randomness of any run."""
        return _find_worst((run.randomness for run in self.runs), RANDOMNESS_FROM_WORST)

    @property
    def arithmetic(self) -> str:
        """The worst arithmetic of any run."""
        return _find_worst((run.arithmetic for run in self.runs), ARITHMETIC_FROM_WORST)

    def list_runs(self, holds: Callable[[CoveredRun], bool]) -> list[CoveredRun]:
        """The runs for which something holds."""
        return [run for run in self.runs if holds(run)]

    def level(self, shares_noise: bool) -> str:
        """What the epsilon of the scope is worth: the first of `LEVELS_FROM_WORST` that any run gives cause for.

        shares_noise: whether a secure aggregation is assumed.
        """
        causes = {
            "none": not self.private,
            "nominal": bool(self.list_runs(lambda run: run.sound is False)),
            UNKNOWN: not self.sound or self.randomness == UNKNOWN,
            "assumed": shares_noise,
            "simulation": self.simulation,
            "yes": True,
        }
        return next(level for level in LEVELS_FROM_WORST if causes[level])


def name_runs(runs: list[CoveredRun], own: str) -> str:
    """The runs in a sentence: "this run", "run f00d", "runs f00d, beef and 3 others"."""
    if [run.id for run in runs] == [own]:
        return "this run"
    ids = [run.id for run in runs[:MAX_IDS_NAMED]]
    rest = len(runs) - len(ids)
    listed = ", ".join(ids) + (f" and {rest} other{'s' if rest > 1 else ''}" if rest else "")
    return f"{'run' if len(runs) == 1 else 'runs'} {listed}"


def _find_worst(values: Iterable[str], from_worst: tuple[str, ...]) -> str:
    found = {value if value in from_worst else UNKNOWN for value in values}
    return next((value for value in from_worst if value in found), from_worst[-1])
