"""Dates: from cells to days since 1970, and the numbers that a date becomes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fulcrum.data.table.cells import BoolArray, Cells, FloatArray

EPOCH = datetime.datetime(1970, 1, 1)
ISO = "iso"
"""The format of dates such as 2024-02-29 and 2024-02-29T12:30:00; others are patterns, as for `strptime`."""


def to_days(value: Any, formats: Sequence[str] = (ISO,)) -> float | None:
    """Days since 1970-01-01 of a date or of its text; None where it is none. A time zone is taken off."""
    if isinstance(value, np.datetime64):
        whole = value.astype("datetime64[us]")
        return None if np.isnat(whole) else float(whole.astype(np.int64)) / 86_400_000_000
    if isinstance(value, datetime.datetime):
        return (value.replace(tzinfo=None) - EPOCH) / datetime.timedelta(days=1)
    if isinstance(value, datetime.date):
        return float((value - EPOCH.date()).days)
    if not isinstance(value, str):
        return None
    for pattern in formats:
        try:
            text = value.strip()
            found = (
                datetime.datetime.fromisoformat(text) if pattern == ISO else datetime.datetime.strptime(text, pattern)
            )
        except ValueError:
            continue
        if pattern == ISO and text.isdigit():  # 20240229 is a date to Python, and more often a number
            continue
        return to_days(found)
    return None


def parse_dates(cells: Cells, formats: Sequence[str]) -> tuple[FloatArray, BoolArray]:
    """Days since 1970 [n], NaN where a cell is missing or no date in these formats; and which are no dates."""
    known: dict[Any, float] = {}  # dates repeat, and parsing one takes microseconds
    days = np.full(len(cells), np.nan)
    for place, (value, gone) in enumerate(zip(cells.values, cells.missing, strict=True)):
        if not gone:
            if value not in known:
                found = to_days(value, formats)
                known[value] = np.nan if found is None else found
            days[place] = known[value]
    unreadable: BoolArray = np.isnan(days) & ~cells.missing
    return days, unreadable


@dataclass(frozen=True)
class DatePart:
    """What a date may become: the names of the numbers, and (days [n], low, high) -> numbers [n, len(names)]."""

    names: tuple[str, ...]
    compute: Callable[[FloatArray, float, float], FloatArray]


def _place(days: FloatArray, low: float, high: float) -> FloatArray:
    return np.asarray(2.0 * (days - low) / (high + 1.0 - low) - 1.0)[:, None]


def _year(days: FloatArray, low: float, high: float) -> FloatArray:
    years = _to_calendar(days, "Y")
    first, last = _to_calendar(np.array([low, high]), "Y")
    return np.asarray(2.0 * (years - first) / max(1.0, last - first) - 1.0)[:, None]


def _month(days: FloatArray, low: float, high: float) -> FloatArray:
    return _circle((_to_calendar(days, "M") % 12) / 12.0)


def _weekday(days: FloatArray, low: float, high: float) -> FloatArray:
    return _circle(((np.floor(days) + 3) % 7) / 7.0)  # 1970-01-01 was a Thursday


def _hour(days: FloatArray, low: float, high: float) -> FloatArray:
    return _circle(days % 1.0)


def _to_calendar(days: FloatArray, unit: str) -> FloatArray:
    return np.floor(days).astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.float64)


def _circle(turns: FloatArray) -> FloatArray:
    """Where on a circle: two numbers, so that December is next to January."""
    return np.stack([np.sin(2 * math.pi * turns), np.cos(2 * math.pi * turns)], axis=1)


DATE_PARTS: dict[str, DatePart] = {
    "place": DatePart(("place",), _place),
    "year": DatePart(("year",), _year),
    "month": DatePart(("month-sin", "month-cos"), _month),
    "weekday": DatePart(("weekday-sin", "weekday-cos"), _weekday),
    "hour": DatePart(("hour-sin", "hour-cos"), _hour),
}
"""place: where it lies between low and high, -1 to 1; year: the same by years; month, weekday, hour: as a circle."""
