"""Proposes a schema from a table that is public or made up, and marks what would leak if the table were private.

Every range, category and gap of a proposal was seen in the table: whoever reads a schema of private data learns the
oldest patient's age, the rare diagnosis, the column that somebody left empty. Hence a proposal says so beside each
value, and a schema from a table that nobody declared public is refused for private training until a person has
reviewed it (`reviewed = false` in its file).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fulcrum.data.table.cells import Cells, parse_number
from fulcrum.data.table.dates import EPOCH, ISO, parse_dates
from fulcrum.data.table.encoding import find_roles
from fulcrum.data.table.kinds import NO_WORDS, YES_WORDS
from fulcrum.data.table.pieces import TableSource
from fulcrum.data.table.schema import Column, Schema, get_missing_words
from fulcrum.errors import DataError

MOST_CATEGORIES = 50
"""A column of text with more different values is proposed as buckets or left out, not as categories."""
MOST_CLASSES = 20
"""A target of whole numbers with at most this many different values is proposed as classes."""
BUCKETS = 32
LARGEST = 1e100
"""Beyond this a number is no measurement."""
DATE_FORMATS = (ISO, "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d")


@dataclass
class ColumnFacts:
    """What was seen in a column: rows, empty cells, numbers and their range, dates by format, different texts (up to a
    limit, beyond which `many` is True)."""

    rows: int = 0
    empty: int = 0
    numbers: int = 0
    whole: bool = True
    least: float = math.inf
    most: float = -math.inf
    dates: dict[str, int] = field(default_factory=dict)
    first: float = math.inf
    last: float = -math.inf
    texts: dict[str, int] = field(default_factory=dict)
    many: bool = False

    @property
    def filled(self) -> int:
        """Cells that are not empty."""
        return self.rows - self.empty


@dataclass(frozen=True)
class Proposal:
    """A proposed schema. leaks: by column, what would leak if the table were private. rows: rows that were read."""

    schema: Schema
    leaks: Mapping[str, tuple[str, ...]]
    rows: int

    def to_toml(self, public: bool) -> str:
        """The schema's file, with a comment at every value that was read off the table."""
        head = [
            "# Read off a table that was declared public or made up."
            if public
            else "# Read off a table. If it is private, every line marked LEAKS tells something about somebody in it:",
            "# Check every line against what is publicly known, and change it."
            if public
            else "# replace it by public knowledge, and then set reviewed = true.",
        ]
        mark = "read off the data: " if public else "LEAKS if the table is private: "
        comments = {name: "\n".join(mark + words for words in said) for name, said in self.leaks.items() if said}
        start = [] if public else ["reviewed = false"]
        return "\n".join([*head, "", *start, self.schema.to_toml(comments)])


def propose_schema(
    source: TableSource, known: Schema | None = None, target: str = "", numbers: bool = False
) -> Proposal:
    """A schema for a table, from all of its rows. known: how its cells are written (decimal, missing values, ...).

    target: the column to predict; empty: the last one that is no person or party. numbers: whether the target is a
    number to be predicted as such, where it could also be classes.
    """
    base = known or Schema()
    facts = collect_facts(source, base)
    rows = next(iter(facts.values())).rows
    if not rows:
        raise DataError(f"{source.name} has no rows below its column names; a schema needs some.")
    roles = find_roles(base, source.columns)
    inputs = [name for name in source.columns if name not in roles.values() and name]
    target = target or next((name for name in reversed(inputs) if not _is_id(facts[name])), "")
    if target not in source.columns:
        raise DataError(f"{source.name} has no column {target!r} to predict.")
    columns: dict[str, dict[str, Any]] = {}
    leaks: dict[str, tuple[str, ...]] = {}
    ignore: list[str] = list(base.ignore)
    for name in inputs:
        if name in ignore:
            continue
        found, said = _propose(source, name, facts[name], name == target, numbers)
        if found is None:
            ignore.append(name)
        else:
            columns[name], leaks[name] = found, said
    if target not in columns:
        raise DataError(f"{source.name}: column {target!r} cannot be predicted: it is empty, or other in every row.")
    mapping = {**base.to_mapping(), **roles, "target": target, "ignore": ignore}
    schema = Schema.from_mapping({**mapping, "columns": columns}, "the proposal")
    return Proposal(schema, leaks, rows)


def complete_mapping(declared: Mapping[str, Any], source: TableSource, numbers: bool) -> dict[str, Any]:
    """Declared entries of a schema with what they leave open read off a PUBLIC table: all columns where none is
    declared, and targets that are not."""
    target = declared.get("target", "")
    names = [target] if isinstance(target, str) else list(target)
    columns = dict(declared.get("columns", {}))
    base = Schema.from_mapping({**declared, "target": [], "columns": {}})
    facts = collect_facts(source, base)
    roles = find_roles(base, source.columns)
    ignore = list(declared.get("ignore", ()))
    wanted = [name for name in names if name and name not in columns]
    if not any(name not in names for name in columns):
        taken = {*roles.values(), *ignore, *columns, ""}
        wanted = [name for name in source.columns if name not in taken]
    for name in wanted:
        if name not in facts:
            raise DataError(f"{source.name} has no column {name!r}, which table.target names.")
        found, _ = _propose(source, name, facts[name], name in names, numbers)
        if found is not None:
            columns[name] = found
        else:
            ignore.append(name)
    return {**declared, **roles, "columns": columns, "ignore": ignore}


def _propose(
    source: TableSource, name: str, facts: ColumnFacts, target: bool, numbers: bool
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """`propose_column`, with an error that names the column."""
    try:
        return propose_column(facts, target, numbers)
    except DataError as error:
        raise DataError(f"{source.name}: column {name!r} {error}") from None


# --- one column ---------------------------------------------------------------------------------


def collect_facts(source: TableSource, schema: Schema) -> dict[str, ColumnFacts]:
    """What was seen in each column, in one pass over the table."""
    facts = {name: ColumnFacts() for name in source.columns}
    words = get_missing_words(schema)
    for piece in source.pieces():
        for name, found in facts.items():
            _add_cells(found, Cells(piece.cells[name], words, schema.decimal, schema.thousands))
    return facts


def _add_cells(facts: ColumnFacts, cells: Cells) -> None:
    facts.rows += len(cells)
    facts.empty += int(cells.missing.sum())
    numbers, unreadable = cells.numbers()
    known = numbers[~np.isnan(numbers)]
    facts.numbers += len(known)
    if len(known):
        facts.least, facts.most = min(facts.least, float(known.min())), max(facts.most, float(known.max()))
        facts.whole = facts.whole and bool((known == np.floor(known)).all())
    if unreadable.any():
        for pattern in DATE_FORMATS:
            days, _ = parse_dates(cells, (pattern,))
            seen = days[~np.isnan(days)]
            facts.dates[pattern] = facts.dates.get(pattern, 0) + len(seen)
            if len(seen):
                facts.first, facts.last = min(facts.first, float(seen.min())), max(facts.last, float(seen.max()))
    if not facts.many:
        for text in cells.texts():
            if text:
                facts.texts[text] = facts.texts.get(text, 0) + 1
        if len(facts.texts) > 100 * MOST_CATEGORIES:
            facts.texts, facts.many = {}, True


def propose_column(
    facts: ColumnFacts, target: bool = False, numbers: bool = False
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """A column's declaration, and what of it would leak; (None, ()) where it should be left out."""
    if not facts.filled:
        return None, ()
    found, said = _choose_kind(facts, target, numbers)
    if found is None:
        return None, ()
    if facts.empty and not target:
        found["missing"] = "column"
        said = (*said, "missing: some cells are empty.")
    elif facts.empty:
        said = (*said, "some targets are empty.")
    return found, said


def _choose_kind(facts: ColumnFacts, target: bool, numbers: bool) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    words = {text.lower() for text in facts.texts}
    some = not facts.many and len(facts.texts) <= MOST_CATEGORIES
    if some and len(words) == 2 and words & set(YES_WORDS) and words & set(NO_WORDS) and not numbers:
        return {"kind": "yes-no"}, ()
    numeric = facts.numbers == facts.filled
    if numeric and target and not numbers and facts.whole and some and len(facts.texts) <= MOST_CLASSES:
        return _categories(facts, sorted(facts.texts, key=_sort_as_number))
    if numeric:
        low, high = round_outwards(facts.least, facts.most)
        found: dict[str, Any] = {"kind": "number", "low": low, "high": high}
        return found, ("low and high: the smallest and the largest value that were seen, rounded.",)
    for pattern, count in facts.dates.items():
        if count == facts.filled:
            return _date(facts, pattern)
    if some and len(facts.texts) <= max(10, facts.filled // 2):
        return _categories(facts, sorted(facts.texts))
    if target or _is_id(facts):
        return None, ()
    return {"kind": "category", "buckets": BUCKETS}, ()


def _sort_as_number(text: str) -> tuple[bool, float, str]:
    number = parse_number(text)
    return math.isnan(number), 0.0 if math.isnan(number) else number, text


def _categories(facts: ColumnFacts, names: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    rare = ", some of them once only" if min(facts.texts.values()) == 1 else ""
    return {"kind": "category", "categories": names}, (f"categories: those that were seen{rare}.",)


def _date(facts: ColumnFacts, pattern: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    import datetime

    first, last = ((EPOCH + datetime.timedelta(days=days)).year for days in (facts.first, facts.last))
    found: dict[str, Any] = {"kind": "date", "low": f"{first}-01-01", "high": f"{last}-12-31"}
    if pattern != ISO:
        found["format"] = [pattern]
    return found, ("low and high: the years of the first and the last date that were seen.",)


def _is_id(facts: ColumnFacts) -> bool:
    """Whether the values are as many as the rows, so that they name records or are free text."""
    if facts.many:
        return True
    numeric = facts.numbers == facts.filled
    return not numeric and len(facts.texts) > MOST_CATEGORIES and len(facts.texts) > 0.5 * facts.filled


def round_outwards(least: float, most: float) -> tuple[float, float]:
    """A range of round numbers around two numbers, low below high."""
    if not math.isfinite(most - least) or max(abs(least), abs(most)) > LARGEST:
        raise DataError("holds numbers of no sensible range, so none can be proposed; declare low and high.")
    width = most - least or max(abs(most), 1.0) / 10
    unit = 10.0 ** math.floor(math.log10(width))
    low, high = math.floor(least / unit) * unit, math.ceil(most / unit) * unit
    if low >= high:
        high = low + unit * 10
    return _tidy(low), _tidy(high)


def _tidy(value: float) -> float:
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def list_proposed(schema: Schema) -> list[Column]:
    """The columns of a proposal with the target last."""
    return [*schema.columns, *schema.targets]
