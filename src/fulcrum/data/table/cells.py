"""Cells of a table, whatever it was read from: text from a CSV file, numbers and objects from frames and databases.

cells = Cells(values, words, decimal=",")
cells.missing            # [n] bool
cells.numbers()          # [n] float64, NaN where missing or unreadable; and which are unreadable
cells.texts()            # n texts, "" where missing
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
MISSING_WORDS = ("", "na", "n/a", "nan", "null", "none", "?", "<na>", "nat")
"""Texts that mean that a cell is empty, in lower case; a table may declare others."""
LARGEST_EXACT = 2**53
"""Whole numbers above this are not all different as 64-bit decimal numbers."""
DECIMAL_ZEROS = re.compile(r"[+-]?\d+\.0+\Z")


@dataclass(frozen=True, eq=False)
class Cells:
    """n cells of one column. words: texts that mean missing, in lower case. decimal, thousands: how numbers are written
    ("" for no thousands separator)."""

    values: Any
    words: frozenset[str] = frozenset(MISSING_WORDS)
    decimal: str = "."
    thousands: str = ""

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def _array(self) -> npt.NDArray[Any] | None:
        """The values as an array of numbers, where they are one already."""
        return self.values if isinstance(self.values, np.ndarray) and self.values.dtype.kind in "biuf" else None

    @cached_property
    def missing(self) -> BoolArray:
        """Which cells are empty [n]."""
        array, words = self._array, self.words
        if array is not None:
            found: BoolArray = np.isnan(array) if array.dtype.kind == "f" else np.zeros(len(array), dtype=bool)
            coded = [float(word) for word in words if _is_plain_number(word)]  # such as -9 for "not measured"
            return found | np.isin(array, coded) if coded else found
        if self._all_text:  # each different text is looked at once
            empty = {value for value in set(self.values) if value.strip().lower() in words}
            if not empty:
                return np.zeros(len(self.values), dtype=bool)
            return np.fromiter((value in empty for value in self.values), dtype=bool, count=len(self.values))
        return np.fromiter((_is_missing(value, words) for value in self.values), dtype=bool, count=len(self.values))

    @cached_property
    def _all_text(self) -> bool:
        return self._array is None and set(map(type, self.values)) <= {str}

    def numbers(self) -> tuple[FloatArray, BoolArray]:
        """The numbers [n] float64, NaN where a cell is missing or no number; and which are no numbers."""
        empty, array = self.missing, self._array
        if array is not None:
            numbers = array.astype(np.float64)
            numbers[empty] = np.nan
            return numbers + 0.0, np.zeros(len(numbers), dtype=bool)  # + 0.0: minus zero and zero are the same record
        parsed = self._parse_at_once(empty)
        if parsed is None:
            parsed = np.fromiter(
                (
                    np.nan if gone else parse_number(value, self.decimal, self.thousands)
                    for value, gone in zip(self.values, empty, strict=True)
                ),
                dtype=np.float64,
                count=len(empty),
            )
        unreadable: BoolArray = np.isnan(parsed) & ~empty
        return parsed + 0.0, unreadable

    def _parse_at_once(self, empty: BoolArray) -> FloatArray | None:
        """The numbers of plainly written texts, in one call; None where a cell needs a closer look."""
        if self.decimal != "." or self.thousands or not self._all_text:
            return None
        plain = self.values
        if empty.any():
            plain = ["nan" if gone else value for value, gone in zip(self.values, empty, strict=True)]
        try:
            numbers = np.array(plain, dtype=np.float64)
        except (ValueError, OverflowError):
            return None
        return None if "_" in "".join(plain) else numbers  # NumPy also reads 1_000, which is no number here

    def texts(self) -> list[str]:
        """The cells as text, "" where missing: 3.0 is "3", so that whole numbers read as decimals stay the same."""
        if not self.missing.any():
            return self.exact_texts()
        return ["" if gone else to_text(value) for value, gone in zip(self.values, self.missing, strict=True)]

    def exact_texts(self) -> list[str]:
        """As `texts`, where the words that mean missing count as text too: a declared category may be called None."""
        if self._all_text:
            known = {value: to_text(value) for value in set(self.values)}
            return [known[value] for value in self.values]
        return [to_text(value) for value in self.values]


def _is_missing(value: Any, words: frozenset[str]) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in words
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # those of pandas, which compare with nothing
        return True
    if isinstance(value, float | np.floating | np.datetime64) and value != value:  # NaN, NaT
        return True
    if isinstance(value, bool | np.bool_ | datetime.date | np.datetime64):
        return False
    return to_text(value).lower() in words


def _is_plain_number(word: str) -> bool:
    return bool(re.fullmatch(r"[+-]?\d+(\.\d+)?", word))


def parse_number(value: Any, decimal: str = ".", thousands: str = "") -> float:
    """The number in a cell, NaN where it holds none. A separator of thousands counts only between groups of three."""
    if not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            return np.nan
    text = value.strip().replace("\u2212", "-")
    if thousands and thousands in text:
        whole, point, rest = text.partition(decimal)
        if not re.fullmatch(rf"[+-]?\d{{1,3}}({re.escape(thousands)}\d{{3}})+", whole):
            return np.nan
        text = whole.replace(thousands, "") + point + rest
    if decimal != ".":
        if "." in text:
            return np.nan
        text = text.replace(decimal, ".")
    if "_" in text:
        return np.nan
    try:
        return float(text)
    except ValueError:
        return np.nan


def to_text(value: Any) -> str:
    """A cell as text without outer spaces; whole numbers without a decimal point."""
    if isinstance(value, str):
        text = value.strip()
        return text.partition(".")[0] if DECIMAL_ZEROS.match(text) else text
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace").strip()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    return str(value).strip()


def join_cells(parts: Sequence[Any]) -> Any:
    """The cells of several pieces of a column, one after the other."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [value for part in parts for value in part]
