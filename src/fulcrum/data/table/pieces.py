"""A table as pieces of some thousand rows each: what every reader yields, so that no reader holds a whole file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum.errors import ConfigError, DataError

CELLS_PER_PIECE = 500_000
"""Cells that are held at a time; a piece has as many rows as this allows."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a table. cells: by column, equally many each (lists, or arrays of numbers). rows: the number of each
    row as its reader counts them (lines of a file, rows of a frame), for errors. name: of the file, where a table has
    several."""

    cells: Mapping[str, Any]
    rows: Sequence[int]
    name: str = ""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class TableSource:
    """A table that can be read in pieces. name: in errors. columns: in order, each once. pieces: reads from the start,
    and may be called again. row: what a row's number counts, "line" or "row"."""

    name: str
    columns: tuple[str, ...]
    pieces: Callable[[], Iterator[Piece]]
    row: str = "row"


def check_column_names(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The names of a table's columns; DataError where there are none, or one is there twice."""
    if not names:
        raise DataError(f"{where} has no columns.")
    seen: set[str] = set()
    for place, name in enumerate(names, start=1):
        if name in seen:
            what = f"{name!r}" if name else "an empty name"
            raise DataError(f"{where} has two columns called {what} (the second is column {place}); rename one.")
        seen.add(name)
    return tuple(names)


def join_tables(parts: Sequence[TableSource]) -> TableSource:
    """Several tables with the same columns as one, such as a file per month; DataError where their columns differ."""
    first = parts[0]
    for other in parts[1:]:
        changed = set(first.columns) ^ set(other.columns)
        if changed:
            raise DataError(f"{other.name} has not the columns of {first.name}: {sorted(changed)[0]!r} is in one only.")

    def pieces() -> Iterator[Piece]:
        for part in parts:
            for piece in part.pieces():
                yield dataclasses.replace(piece, name=part.name)

    return TableSource(f"{first.name} and {len(parts) - 1} more", first.columns, pieces, first.row)


def choose_piece_rows(columns: int) -> int:
    """Rows of one piece; FULCRUM_TABLE_CELLS changes the number of cells."""
    return max(16, read_limit("FULCRUM_TABLE_CELLS", CELLS_PER_PIECE) // max(1, columns))


def read_limit(name: str, usual: int) -> int:
    """A whole number from the environment; ConfigError where it is none."""
    given = os.environ.get(name, "")
    if given and not given.isdigit():
        raise ConfigError(f"the environment variable {name} = {given!r} must be a whole number.")
    return int(given or usual)
