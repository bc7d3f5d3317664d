"""Numbers as people read them on a page."""

from __future__ import annotations

import math
from typing import Any

from fulcrum.privacy.accounting import format_epsilon
from fulcrum.study.records import StudyScore

ABSENT = "\N{EN DASH}"
"""What stands for a value that is not known."""


def format_number(value: float, digits: int = 4) -> str:
    """Four digits, ∞, or a dash for none."""
    if math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.{digits}g}"


def format_metric(name: str, value: float) -> str:
    """A metric as people read it: 91.2%, or four digits."""
    fraction = StudyScore(name).is_fraction and math.isfinite(value)
    return f"{100 * value:.1f}%" if fraction else format_number(value)


def format_spent(value: float) -> str:
    """An epsilon, rounded up; a dash for none."""
    return ABSENT if math.isnan(value) else "∞" if math.isinf(value) else format_epsilon(value)


def format_seconds(value: float) -> str:
    """12 s, 3 min 20 s, 2 h 5 min."""
    if math.isnan(value):
        return ABSENT
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def format_setting(value: Any) -> str:
    """A setting's value as a settings file would have it, but for quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return '""' if value == "" else str(value)
