"""From a table to arrays, piece by piece: inputs, targets, persons, parties; and what its holder alone is told.

What is counted here (cells outside their range, unknown categories, empty ones) follows from private values. It goes
into `EncodedTable.notes`, which are shown to whoever holds the data, and are never stored or sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.data.records import ModelInputs
from fulcrum.data.table.cells import LARGEST_EXACT, BoolArray, Cells
from fulcrum.data.table.growing import GrowingArray
from fulcrum.data.table.kinds import KINDS, find_answers, find_categories
from fulcrum.data.table.pieces import Piece, TableSource
from fulcrum.data.table.reading import open_table
from fulcrum.data.table.schema import Column, Schema, get_answer_words, get_missing_words, list_places
from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.registry import find_nearest_name

AnyArray = npt.NDArray[Any]

PERSON_NAMES = ("person", "person_id", "patient", "patient_id", "subject", "subject_id", "user", "user_id")
PARTY_NAMES = ("party", "party_id", "hospital", "site", "centre", "center", "institution")
"""Columns that are taken for persons and parties where the schema says nothing, upper and lower case alike."""
MAX_WIDTH = 100_000
"""The most numbers per record."""


@dataclass(frozen=True, eq=False)
class EncodedTable:
    """A table's arrays. numbers [n, width] float32, None where all columns are text; texts: token ids by column;
    targets by column, empty where none were asked for; person, party, record: the number of each record's, with their
    names.
    notes: sentences for whoever holds the data, and for nobody else."""

    schema: Schema
    numbers: Tensor | None
    texts: Mapping[str, Tensor]
    target_columns: Mapping[str, AnyArray]
    person: AnyArray | None
    person_names: tuple[str, ...]
    party: AnyArray | None
    party_names: tuple[str, ...]
    record: AnyArray | None
    record_names: tuple[str, ...]
    notes: tuple[str, ...]

    def inputs(self) -> ModelInputs:
        """The model's inputs: one tensor, or several by name where there are numbers and texts."""
        parts: dict[str, Tensor] = {} if self.numbers is None else {"numbers": self.numbers}
        parts |= self.texts
        return next(iter(parts.values())) if len(parts) == 1 else parts

    def targets(self) -> AnyArray:
        """The targets [n]; [n, k] where there are several."""
        columns = list(self.target_columns.values())
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)


def encode_table(
    schema: Schema, given: Any, *, targets: bool = True, others: bool = False, query: str = ""
) -> EncodedTable:
    """Read a table in pieces and encode it.

    targets: whether to read those, and persons and parties, too. others: whether columns may be there that the schema
    does not name. Raises DataError: one sentence with column, count and first row, never a cell's value.
    """
    source = open_table(given, schema, query)
    roles = find_roles(schema, source.columns) if targets else {}
    _check_columns(schema, source, roles, targets, others)
    if schema.width > MAX_WIDTH:
        raise ConfigError(f"the schema makes {schema.width:,} numbers of a record; at most {MAX_WIDTH:,} are possible.")
    state = _Encoding(schema, source, roles, targets)
    try:
        for piece in source.pieces():
            state.add(piece)
        return state.finish()
    finally:
        for grown in (state.numbers, *state.texts.values()):
            grown.close()


def find_roles(schema: Schema, columns: Sequence[str]) -> dict[str, str]:
    """The columns that say whose a record is, who holds it and which it is: as declared, or by a conventional name."""
    used = {column.place for column in (*schema.columns, *schema.targets)} | set(schema.ignore)
    by_lower = {name.lower(): name for name in reversed(columns) if name not in used}
    found = {}
    for role, wanted, usual in (
        ("person", schema.person, PERSON_NAMES),
        ("party", schema.party, PARTY_NAMES),
        ("record", schema.record, ()),
    ):
        if wanted == "auto":
            wanted = next((by_lower[name] for name in usual if name in by_lower), "none")
        if wanted != "none":
            found[role] = wanted
    return found


def _check_columns(schema: Schema, source: TableSource, roles: Mapping[str, str], targets: bool, others: bool) -> None:
    """DataError where declared columns are not there, or others are that the schema does not name."""
    wanted = [*list_places(schema.columns), *(list_places(schema.targets) if targets else ()), *roles.values()]
    missing = [name for name in wanted if name not in source.columns]
    if missing:
        near = find_nearest_name(missing[0], source.columns)
        hint = f"is it {near!r}? Rename it, or write source = {near!r}" if near else "the columns have changed"
        many = f" and {len(missing) - 1} more of the schema's columns" if len(missing) > 1 else ""
        raise DataError(f"{source.name} has no column {missing[0]!r}{many} (it has {len(source.columns)}); {hint}.")
    known = {*wanted, *list_places(schema.targets), *schema.ignore, *_role_names(schema), ""}
    unknown = [name for name in source.columns if name not in known]
    if unknown and not others and "*" not in schema.ignore:
        many = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise DataError(
            f"{source.name} has the column {unknown[0]!r}{many}, which the schema does not name; declare it, or list "
            'it under ignore (["*"] for all others).'
        )


def _role_names(schema: Schema) -> set[str]:
    return {schema.person, schema.party, schema.record} - {"auto", "none"}


# --- pieces -------------------------------------------------------------------------------------


class _Encoding:
    """What was encoded so far."""

    def __init__(self, schema: Schema, source: TableSource, roles: Mapping[str, str], targets: bool) -> None:
        self.schema, self.source, self.roles = schema, source, roles
        self.columns = schema.columns
        self.target_list = schema.targets if targets else ()
        self.numbers = GrowingArray(np.float32, (schema.width,))
        self.texts = {column.name: GrowingArray(np.int64, (column.length,)) for column in schema.texts}
        self.targets: dict[str, list[AnyArray]] = {column.name: [] for column in self.target_list}
        self.ids = {role: _Ids(role, name) for role, name in roles.items()}
        self.counts: dict[tuple[str, str], int] = {}
        self.rows = 0
        self.dropped = 0

    def add(self, piece: Piece) -> None:
        """Encode some rows and append them."""
        found = {column.name: self._encode_target(column, piece) for column in self.target_list}
        kept = self._find_labelled(found)
        numbers = [self._encode(column, piece) for column in self.schema.numbers]
        if numbers:
            self.numbers.append(_pick(np.concatenate(numbers, axis=1), kept))
        for column in self.schema.texts:
            self.texts[column.name].append(_pick(self._encode(column, piece), kept))
        for name, (values, _) in found.items():
            self.targets[name].append(_pick(values, kept))
        for role, ids in self.ids.items():
            cells = self._cells(self.roles[role], None, piece)
            ids.add(cells, piece, self.source, kept)
        count = len(piece) if kept is None else int(kept.sum())
        self.rows += count
        self.dropped += len(piece) - count

    def finish(self) -> EncodedTable:
        """All rows."""
        if not self.rows:
            what = "no rows with a target" if self.dropped else "no rows below its column names"
            raise DataError(f"{self.source.name} has {what}; at least one is needed.")
        person, person_names = self._finish_ids("person")
        party, party_names = self._finish_ids("party")
        record, record_names = self._finish_ids("record")
        return EncodedTable(
            schema=self.schema,
            numbers=self.numbers.finish() if self.schema.numbers else None,
            texts={name: part.finish() for name, part in self.texts.items()},
            target_columns={name: np.concatenate(parts) for name, parts in self.targets.items()},
            person=person,
            person_names=person_names,
            party=party,
            party_names=party_names,
            record=record,
            record_names=record_names,
            notes=tuple(self._list_notes()),
        )

    def _finish_ids(self, role: str) -> tuple[AnyArray | None, tuple[str, ...]]:
        return self.ids[role].finish() if role in self.ids else (None, ())

    def _cells(self, place: str, column: Column | None, piece: Piece) -> Cells:
        schema = self.schema
        return Cells(piece.cells[place], get_missing_words(schema, column), schema.decimal, schema.thousands)

    def _encode(self, column: Column, piece: Piece) -> AnyArray:
        kind, cells = KINDS.find(column.kind), self._cells(column.place, column, piece)
        found = kind.encode(column, cells)
        self._refuse(found.unreadable, column, piece, f"holds no {kind.wanted}", ADVICE.get(column.kind, ""))
        gone = cells.missing
        if column.categories and gone.any():  # a category may be called "none"
            gone = find_categories(column, cells) < 0
        if column.missing == "refuse":
            self._refuse(gone, column, piece, "is empty", ADVICE["missing"])
        for word, marks in (("clipped", found.clipped), ("unknown", found.unknown), ("missing", gone)):
            self._count(column.name, word, marks)
        if column.missing != "column":
            return found.values
        return np.concatenate([found.values, gone[:, None].astype(np.float32)], axis=1)

    def _encode_target(self, column: Column, piece: Piece) -> tuple[AnyArray, BoolArray]:
        """The targets of some rows, and which are empty; DataError for those that are none."""
        cells = self._cells(column.place, column, piece)
        values, gone, wrong, words = TARGET_KINDS[column.kind](column, cells)
        self._refuse(wrong, column, piece, words, ADVICE.get(column.kind, ""))
        if self.schema.unlabelled == "refuse":
            self._refuse(gone, column, piece, "is empty", ADVICE["target"])
        return values, gone

    def _find_labelled(self, found: Mapping[str, tuple[AnyArray, BoolArray]]) -> BoolArray | None:
        """Which rows have all their targets; None for all."""
        empty = [gone for _, gone in found.values() if gone.any()]
        return ~np.logical_or.reduce(empty) if empty else None

    def _count(self, column: str, word: str, marks: BoolArray | None) -> None:
        if marks is not None:
            self.counts[column, word] = self.counts.get((column, word), 0) + int(marks.sum())

    def _refuse(self, marks: BoolArray | None, column: Column, piece: Piece, words: str, advice: str) -> None:
        """DataError where any cell of the column is marked: how many in this piece, and the first one's row."""
        if marks is None or not marks.any():
            return
        first = piece.rows[int(np.flatnonzero(marks)[0])]
        cells, row = _count_cells(marks), f"{self.source.row} {first}"
        where = piece.name or self.source.name
        raise DataError(f"{where}: column {column.place!r} {words} in {cells} (first: {row}){advice}.")

    def _list_notes(self) -> Iterable[str]:
        """What the holder of the data is told: counts per column."""
        told = {
            "clipped": "{count} of {rows} values of column {name!r} lie outside its declared range and were clipped.",
            "unknown": "{count} of {rows} values of column {name!r} are none of its declared ones and became 'other'.",
            "missing": "{count} of {rows} cells of column {name!r} are empty.",
        }
        rows = self.rows + self.dropped
        for (name, word), count in self.counts.items():
            if count:
                yield told[word].format(count=f"{count:,}", rows=f"{rows:,}", name=name)
        if self.dropped:
            yield f"{self.dropped:,} of {rows:,} rows have no target and were left out."
        if self.schema.party != "none" and len(self.target_list) == 1:
            yield from self._note_single_class_parties()

    def _note_single_class_parties(self) -> Iterable[str]:
        (column,) = self.target_list
        party, names = self._finish_ids("party")
        if column.kind == "number" or party is None:
            return
        labels = np.concatenate(self.targets[column.name])
        for code, name in enumerate(names):
            if len(np.unique(labels[party == code])) == 1:
                yield f"all records of party {name!r} have the same {column.name!r}: it teaches no difference."


ADVICE = {
    "number": "; write numbers plainly, or declare decimal, thousands or missing_values",
    "date": '; declare format, such as "%d.%m.%Y" (dates are taken as 2024-02-29 otherwise), or missing_values',
    "category": "; declare the category",
    "yes-no": "; declare the words under yes and no",
    "missing": '; declare missing = "column" (a number of its own) or "middle"',
    "target": ', and it is the target; fill it in, or say unlabelled = "drop" to leave such records out',
}
"""What would be right, by the kind of a column."""


def _count_cells(marks: BoolArray) -> str:
    count = int(marks.sum())
    return "1 cell" if count == 1 else f"{count:,} cells"


def _pick(values: AnyArray, kept: BoolArray | None) -> AnyArray:
    return values if kept is None else values[kept]


# --- targets ------------------------------------------------------------------------------------


def _encode_number_target(column: Column, cells: Cells) -> tuple[AnyArray, BoolArray, BoolArray, str]:
    numbers, unreadable = cells.numbers()
    return np.clip(numbers, column.low, column.high), cells.missing, unreadable, "holds no number"


def _encode_category_target(column: Column, cells: Cells) -> tuple[AnyArray, BoolArray, BoolArray, str]:
    codes = find_categories(column, cells)
    return codes, codes < 0, codes == len(column.categories), "holds none of its declared categories"


def _encode_yes_no_target(column: Column, cells: Cells) -> tuple[AnyArray, BoolArray, BoolArray, str]:
    codes = find_answers(column, cells)
    return codes, codes < 0, codes == 2, "is neither yes nor no"


TARGET_KINDS = {
    "number": _encode_number_target,
    "category": _encode_category_target,
    "yes-no": _encode_yes_no_target,
}
"""How a target's cells become numbers, by kind: values, which are empty, which are wrong, and how that is said."""


def decode_targets(schema: Schema, predictions: Any) -> list[Any]:
    """Predictions in the table's own words; a list per record where there are several targets."""
    values = np.asarray(predictions.detach().cpu() if isinstance(predictions, Tensor) else predictions)
    if values.ndim == 1:
        return [_decode(schema.targets[0], value) for value in values]
    return [[_decode(column, value) for column, value in zip(schema.targets, row, strict=True)] for row in values]


def _decode(column: Column, value: Any) -> Any:
    if column.kind == "number":
        return float(value)
    words = column.categories if column.kind == "category" else get_answer_words(column)
    return words[int(value)]


# --- ids ----------------------------------------------------------------------------------------


class _Ids:
    """The ids of persons, parties or records, numbered in the order of their text."""

    def __init__(self, role: str, column: str) -> None:
        self.role, self.column = role, column
        self.known: dict[str, int] = {}
        self.codes: list[npt.NDArray[np.int64]] = []

    def add(self, cells: Cells, piece: Piece, source: TableSource, kept: BoolArray | None) -> None:
        """Number the ids of some rows."""
        gone = cells.missing if kept is None else cells.missing & kept
        if gone.any():
            first = piece.rows[int(np.flatnonzero(gone)[0])]
            raise DataError(
                f"{piece.name or source.name}: column {self.column!r}, which says the {self.role} of each record, is "
                f"empty in {_count_cells(gone)} (first: {source.row} {first}); fill them in, or leave those records "
                "out."
            )
        _refuse_rounded_ids(cells, self.column, source)
        texts = cells.texts()
        if self.role == "record":
            self._refuse_repeated(texts, piece, source)
        codes = np.fromiter(
            (self.known.setdefault(text, len(self.known)) for text in texts), dtype=np.int64, count=len(texts)
        )
        self.codes.append(_pick(codes, kept))

    def _refuse_repeated(self, texts: Sequence[str], piece: Piece, source: TableSource) -> None:
        seen = set(self.known)
        for text, row in zip(texts, piece.rows, strict=True):
            if text in seen:
                raise DataError(
                    f"{piece.name or source.name}: column {self.column!r} names a record that was there before "
                    f"({source.row} {row}); each record's id must be there once, and whose record it is belongs into a "
                    "column for persons."
                )
            seen.add(text)

    def finish(self) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        """The number of each row's id, and the ids, sorted: the order of the rows says nothing then."""
        names = sorted(self.known)
        place = np.empty(len(names), dtype=np.int64)
        place[[self.known[name] for name in names]] = np.arange(len(names))
        codes = place[np.concatenate(self.codes)]
        used = np.unique(codes)  # an id whose only rows had no target is left out
        if len(used) < len(names):
            codes, names = np.searchsorted(used, codes), [names[code] for code in used]
        return codes, tuple(names)


def _refuse_rounded_ids(cells: Cells, column: str, source: TableSource) -> None:
    """DataError for ids that are decimal numbers: two people could have become one by rounding."""
    array = cells.values if isinstance(cells.values, np.ndarray) else None
    if array is not None and array.dtype.kind == "f":
        known = array[~np.isnan(array)]
        if (np.abs(known) > LARGEST_EXACT).any() or (known % 1 != 0).any():
            raise DataError(
                f"{source.name}: column {column!r} holds ids as decimal numbers, which are rounded; read it as text."
            )


def as_tensor(values: AnyArray) -> Tensor:
    """The values as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(values))
