"""What a check of a statement found: a status, and the numbers that support it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HOLDS = "holds"
CONDITIONAL = "holds under stated conditions"
FAILS = "fails as printed"
UNMEASURED = "not measured here"
"""Of a statement whose data is not at hand: it neither agrees with a page nor differs from it."""
Row = tuple[str, str]
"""What was measured, and the value."""


@dataclass(frozen=True)
class Finding:
    """What a check found: the status that its numbers support, and the numbers."""

    status: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Statement:
    """A claim. source: where it stands. status: what docs/theory.md says. check: measures it."""

    name: str
    source: str
    claim: str
    status: str
    check: Callable[[], Finding]


def format_numbers(*values: float) -> str:
    """Four digits of each number, with commas between."""
    return ", ".join(f"{value:.4g}" for value in values)
