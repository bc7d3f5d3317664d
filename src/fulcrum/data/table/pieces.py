"""A table as pieces of some thousand rows each: what every reader yields, so that no reader holds a whole file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum.errors import DataError

CELLS_PER_PIECE = 500_000
"""Cells that are held at a time; a piece has as many rows as this allows."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a table. cells: by column, equally many each (lists, or arrays of numbers). rows: the number of each
    row as its reader counts them (lines of a file, rows of a frame), for errors."""

    cells: Mapping[str, Any]
    rows: Sequence[int]

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


def choose_piece_rows(columns: int) -> int:
    """Rows of one piece."""
    return max(16, CELLS_PER_PIECE // max(1, columns))
