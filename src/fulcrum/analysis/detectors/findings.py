"""What detectors say: readings with p-values, the alarms among them, and the level over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LEVEL = 1e-5
"""The chance of any alarm in a run of code that is right, over all parties and detectors."""


@dataclass(frozen=True)
class Reading:
    """One comparison of what was measured with what is declared.

    detector: its name in the registry. what: what was compared. p: the chance of a reading this far off where the code
    is right; 0 where such code cannot give it. says: one sentence, for the case of an alarm. party: whose release.
    """

    detector: str
    what: str
    p: float
    says: str
    party: str = ""

    def to_json(self) -> dict[str, Any]:
        """The reading as plain values."""
        return {"detector": self.detector, "what": self.what, "party": self.party, "p": self.p, "says": self.says}


def contradict(detector: str, what: str, wrong: bool, says: str, party: str = "") -> Reading:
    """A comparison without chance in it: right code is never wrong."""
    return Reading(detector, what, 0.0 if wrong else 1.0, says, party)


@dataclass(frozen=True)
class Report:
    """All readings of one run of the detectors, and the level over all of them together."""

    readings: tuple[Reading, ...]
    level: float = LEVEL

    @property
    def alarms(self) -> tuple[Reading, ...]:
        """The readings that right code would give with a chance of at most the level, all of them together.

        Bonferroni: each reading has the same share of the level.
        """
        share = self.level / max(1, len(self.readings))
        return tuple(each for each in self.readings if each.p <= share)

    @property
    def detectors(self) -> tuple[str, ...]:
        """The detectors that raised an alarm, in the order of their first one."""
        return tuple(dict.fromkeys(each.detector for each in self.alarms))

    @property
    def smallest(self) -> float:
        """The smallest p-value times the number of readings: the level at which this run would be an alarm."""
        return min((each.p for each in self.readings), default=1.0) * len(self.readings)


def collect(readings: Iterable[Reading], level: float = LEVEL) -> Report:
    """A report of these readings."""
    return Report(tuple(readings), level)


def list_sentences(alarms: Sequence[Reading], most: int = 3) -> list[str]:
    """The alarms in words, one sentence each, the same thing of several parties once."""
    found: dict[tuple[str, str], str] = {}
    for each in alarms:
        found.setdefault((each.detector, each.what), f"{each.detector}: {each.says}")
    return list(found.values())[:most]
