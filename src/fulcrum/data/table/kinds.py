"""The kinds of columns: what each declares, how many numbers it becomes, and how its cells become them.

    number     [low, high] -> [-1, 1]; or one of the intervals between `cuts`
    category   one of the declared categories, or "other"; or one of `buckets` by a public hash
    yes-no     1, -1; 0 for what is neither
    date       the parts it `becomes`: its place in [low, high], year, month, weekday, hour
    text       token ids, by a tokenizer file (see tokens.py)

A kind of your own: `KINDS.add("postcode", ColumnKind(...))`. Nothing here looks at more than one cell at a time, so no
record changes how another is encoded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fulcrum.data.table.cells import BoolArray, Cells, FloatArray
from fulcrum.data.table.dates import DATE_PARTS, parse_dates, to_days
from fulcrum.errors import ConfigError
from fulcrum.settings.registry import Registry, suggest_nearest_names

if TYPE_CHECKING:
    from fulcrum.data.table.schema import Column

MAX_CATEGORIES = 10_000
"""The most categories of a column: each is a number of every record and a row of the model."""
YES_WORDS = ("yes", "y", "true", "t", "1")
NO_WORDS = ("no", "n", "false", "f", "0")
OTHER = "other"


@dataclass(frozen=True, eq=False)
class Encoded:
    """n encoded cells. values [n, width]. What the holder of the data is told, each [n] bool: clipped (outside the
    declared range), unknown (no declared category), unreadable (no number, date or text of this kind at all)."""

    values: npt.NDArray[Any]
    clipped: BoolArray | None = None
    unknown: BoolArray | None = None
    unreadable: BoolArray | None = None


@dataclass(frozen=True)
class ColumnKind:
    """One kind of column. fields: what a column of this kind may declare, beside those of all. check: raises
    ConfigError where the declaration is wrong. parts: the name of each number that it becomes. encode: cells to those
    numbers, missing ones to the middle. wanted: what a cell holds, in an error."""

    fields: tuple[str, ...]
    check: Callable[[Column], None]
    parts: Callable[[Column], list[str]]
    encode: Callable[[Column, Cells], Encoded]
    wanted: str


KINDS: Registry[ColumnKind] = Registry("kind", noun="kind", places=False)


# --- numbers ------------------------------------------------------------------------------------


def _check_number(column: Column) -> None:
    low, high = column.low, column.high
    numeric = all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high))
    if column.cuts:
        if list(column.cuts) != sorted(set(column.cuts)) or not all(map(math.isfinite, column.cuts)):
            raise ConfigError(f"column {column.name!r}: cuts must be finite numbers in rising order.")
        if low is None and high is None:
            return
    if low is None or high is None:
        raise ConfigError(
            f"column {column.name!r} declares no range; give low and high from public knowledge (values outside are "
            "clipped): they are never read off private data."
        )
    if not numeric or not float(low) < float(high):
        raise ConfigError(f"column {column.name!r}: low = {low!r} and high = {high!r} must be numbers, low below high.")
    if column.spread is not None and not 0 < column.spread < math.inf:
        raise ConfigError(f"column {column.name!r}: spread = {column.spread!r} must be a finite number above 0.")


def _name_number(column: Column) -> list[str]:
    if not column.cuts:
        return [column.name]
    ends = [f"{cut:g}" for cut in column.cuts]
    return [f"{column.name}<{ends[0]}", *(f"{column.name}>={end}" for end in ends)]


def _encode_number(column: Column, cells: Cells) -> Encoded:
    numbers, unreadable = cells.numbers()
    gone = np.isnan(numbers)
    if column.low is None:
        kept, clipped = numbers, np.zeros(len(numbers), dtype=bool)
    else:
        low, high = float(column.low), float(column.high or 0.0)
        clipped = (numbers < low) | (numbers > high)
        kept = np.clip(numbers, low, high)
    if column.cuts:
        # The number of cuts at or below the value says in which interval it lies.
        place = np.searchsorted(np.asarray(column.cuts), np.where(gone, -math.inf, kept), side="right")
        values = _one_hot(np.where(gone, -1, place), len(column.cuts) + 1)
    else:
        values = np.where(gone, 0.0, _scale(column, kept))[:, None]
    return Encoded(values.astype(np.float32), clipped, None, unreadable)


def _scale(column: Column, numbers: FloatArray) -> FloatArray:
    """Numbers of the declared range onto [-1, 1], evenly or by their logarithm; or as center and spread say."""
    low, high = float(column.low or 0.0), float(column.high or 0.0)
    if column.center is not None or column.spread is not None:
        center = (low + high) / 2 if column.center is None else column.center
        return (numbers - center) / ((high - low) / 2 if column.spread is None else column.spread)
    share = np.log1p(numbers - low) / math.log1p(high - low) if column.log else (numbers - low) / (high - low)
    return np.asarray(2.0 * share - 1.0)


def _one_hot(codes: npt.NDArray[Any], width: int) -> npt.NDArray[np.float32]:
    """A 1 in the place of each code [n, width]; no 1 where the code is negative."""
    found = np.zeros((len(codes), width), dtype=np.float32)
    known = codes >= 0
    found[np.flatnonzero(known), codes[known]] = 1.0
    return found


KINDS.add(
    "number",
    ColumnKind(
        ("low", "high", "center", "spread", "log", "cuts"), _check_number, _name_number, _encode_number, "number"
    ),
)


# --- categories ---------------------------------------------------------------------------------


def _check_category(column: Column) -> None:
    if bool(column.categories) == bool(column.buckets):
        raise ConfigError(
            f"column {column.name!r} must declare its categories from public knowledge (others become 'other'), or "
            "buckets = N to sort any text into N groups by a hash: categories are never read off private data."
        )
    if len(set(column.categories)) < len(column.categories):
        raise ConfigError(f"column {column.name!r} declares a category twice.")
    if max(len(column.categories), column.buckets) > MAX_CATEGORIES or column.buckets < 0:
        raise ConfigError(
            f"column {column.name!r} declares {max(len(column.categories), column.buckets):,} categories; at most "
            f"{MAX_CATEGORIES:,} are possible, so merge them, or say buckets = 64 to sort them into groups by a hash."
        )


def _name_category(column: Column) -> list[str]:
    others = () if OTHER in column.categories else (OTHER,)
    names = [*column.categories, *others] if column.categories else [f"#{bucket}" for bucket in range(column.buckets)]
    return [f"{column.name}={name}" for name in names]


def find_categories(column: Column, cells: Cells) -> npt.NDArray[np.int64]:
    """The number of each cell's category [n]; -1 where it is missing, the number of categories where it is another."""
    places = {name: place for place, name in enumerate(column.categories)}
    for name, place in list(places.items()):  # a truth value of a frame reads "true", however the category is written
        if name.lower() in ("true", "false"):
            places.setdefault(name.lower(), place)
    other = len(column.categories)
    texts, gone = cells.exact_texts(), cells.missing
    # A declared category may be called "none" or "?": it counts before the words that mean missing.
    found = (places.get(text, -1 if empty else other) for text, empty in zip(texts, gone, strict=True))
    return np.fromiter(found, dtype=np.int64, count=len(texts))


def _encode_category(column: Column, cells: Cells) -> Encoded:
    if column.buckets:
        texts, gone = cells.texts(), cells.missing
        codes = np.fromiter(
            (-1 if empty else _hash_bucket(text, column.buckets) for text, empty in zip(texts, gone, strict=True)),
            dtype=np.int64,
            count=len(texts),
        )
        return Encoded(_one_hot(codes, column.buckets))
    codes, other = find_categories(column, cells), len(column.categories)
    # A declared category may be called "other" itself: then there is no second one.
    place = column.categories.index(OTHER) if OTHER in column.categories else other
    shown = np.where(codes == other, place, codes)
    shown = np.where(codes < 0, place, shown) if column.missing == "middle" else shown
    return Encoded(_one_hot(shown, max(other, place + 1)), unknown=codes == other)


def _hash_bucket(text: str, buckets: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % buckets


KINDS.add(
    "category",
    ColumnKind(("categories", "buckets"), _check_category, _name_category, _encode_category, "category"),
)


# --- yes or no ----------------------------------------------------------------------------------


def _check_yes_no(column: Column) -> None:
    both = {word.lower() for word in column.yes or YES_WORDS} & {word.lower() for word in column.no or NO_WORDS}
    if both:
        raise ConfigError(f"column {column.name!r} declares {sorted(both)[0]!r} both as yes and as no.")


def find_answers(column: Column, cells: Cells) -> npt.NDArray[np.int64]:
    """1 for yes, 0 for no, -1 for missing, 2 for anything else [n]; upper and lower case alike."""
    answers = {word.lower(): 0 for word in column.no or NO_WORDS} | {
        word.lower(): 1 for word in column.yes or YES_WORDS
    }
    texts, gone = cells.exact_texts(), cells.missing
    found = (answers.get(text.lower(), -1 if empty else 2) for text, empty in zip(texts, gone, strict=True))
    return np.fromiter(found, dtype=np.int64, count=len(texts))


def _encode_yes_no(column: Column, cells: Cells) -> Encoded:
    codes = find_answers(column, cells)
    values = np.array([-1.0, 1.0, 0.0, 0.0], dtype=np.float32)[codes]  # no, yes, other, and -1: missing
    return Encoded(values[:, None], unknown=codes == 2)


KINDS.add("yes-no", ColumnKind(("yes", "no"), _check_yes_no, lambda column: [column.name], _encode_yes_no, "yes or no"))


# --- dates --------------------------------------------------------------------------------------


def _check_date(column: Column) -> None:
    for name in column.becomes:
        if name not in DATE_PARTS:
            near = suggest_nearest_names(name, DATE_PARTS)
            raise ConfigError(f"column {column.name!r}: becomes holds {name!r}, which a date does not become; {near}")
    low, high = (None if end is None else to_days(end) for end in (column.low, column.high))
    if low is None or high is None or not low < high:
        raise ConfigError(
            f"column {column.name!r} needs low and high, two dates such as low = 2000-01-01, from public knowledge; "
            "dates outside are clipped."
        )


def _name_date(column: Column) -> list[str]:
    return [f"{column.name}.{part}" for name in column.becomes for part in DATE_PARTS[name].names]


def _encode_date(column: Column, cells: Cells) -> Encoded:
    days, unreadable = parse_dates(cells, column.format)
    low, high = to_days(column.low) or 0.0, to_days(column.high) or 0.0  # both are dates: `_check_date`
    clipped = (days < low) | (days >= high + 1)
    kept = np.where(np.isnan(days), low, np.clip(days, low, np.nextafter(high + 1, low)))
    values = np.concatenate([DATE_PARTS[name].compute(kept, low, high) for name in column.becomes], axis=1)
    values[np.isnan(days)] = 0.0
    return Encoded(values.astype(np.float32), clipped, None, unreadable)


KINDS.add("date", ColumnKind(("low", "high", "format", "becomes"), _check_date, _name_date, _encode_date, "date"))


def count_rows(marks: Sequence[BoolArray | None]) -> int:
    """The number of cells that any of the marks holds for."""
    known = [mark for mark in marks if mark is not None]
    return int(np.logical_or.reduce(known).sum()) if known else 0
