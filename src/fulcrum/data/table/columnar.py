"""Parquet, Feather and Arrow, one batch of rows at a time; needs pyarrow (`pip install 'fulcrum-fl[tables]'`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fulcrum.data.table.delimited import check_unchanged, describe_file
from fulcrum.data.table.pieces import Piece, TableSource, check_column_names, choose_piece_rows
from fulcrum.data.table.schema import Schema
from fulcrum.errors import DataError


def require_pyarrow(what: str) -> Any:
    """The package pyarrow; DataError that says how to get it."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{what} needs pyarrow; run `pip install 'fulcrum-fl[tables]'`.") from None
    return pyarrow


@contextlib.contextmanager
def _sentences(path: Path, kind: str) -> Iterator[None]:
    """Errors of pyarrow as one sentence, and one where the file changes while it is read."""
    arrow = require_pyarrow(str(path))
    try:
        before = describe_file(path)
        yield
        check_unchanged(path, before)
    except (arrow.ArrowException, OSError):
        # Not the library's own words: they may quote a cell.
        raise DataError(
            f"{path} is no readable {kind} file: it was cut short, damaged, or is of another kind."
        ) from None


def open_parquet(path: Path, schema: Schema) -> TableSource:
    """A Parquet file, read by row groups and batches."""
    require_pyarrow(str(path))
    import pyarrow.parquet as parquet

    with _sentences(path, "Parquet"), parquet.ParquetFile(path) as file:
        names = check_column_names(list(file.schema_arrow.names), str(path))

    def pieces() -> Iterator[Piece]:
        with _sentences(path, "Parquet"), parquet.ParquetFile(path) as opened:
            yield from cut_batches(opened.iter_batches(batch_size=choose_piece_rows(len(names))), names)

    return TableSource(str(path), names, pieces)


def open_feather(path: Path, schema: Schema) -> TableSource:
    """A Feather (version 2) or Arrow file, or an Arrow stream, read by its batches."""
    return open_arrow_files([path], str(path))


def open_arrow_files(paths: list[Path], where: str) -> TableSource:
    """Several Arrow files with the same columns, one after the other."""

    def batches(path: Path) -> Iterator[Any]:
        with _sentences(path, "Arrow"), _opened_arrow(path) as reader:
            yield from reader

    names: tuple[str, ...] = ()
    for path in paths:
        with _sentences(path, "Arrow"), _opened_arrow(path) as reader:
            found = check_column_names(list(reader.names), str(path))
        if names and found != names:
            raise DataError(f"{path} has other columns than the file before it.")
        names = found

    def pieces() -> Iterator[Piece]:
        start = 1
        for path in paths:
            for piece in cut_batches(batches(path), names, start):
                start += len(piece)
                yield piece

    return TableSource(where, names, pieces)


class _Reader:
    """The batches of an Arrow file, and the names of its columns."""

    def __init__(self, names: list[str], batches: Iterable[Any]) -> None:
        self.names, self.batches = names, batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@contextlib.contextmanager
def _opened_arrow(path: Path) -> Iterator[_Reader]:
    import pyarrow as arrow

    with path.open("rb") as file:
        start = file.read(6)
    with arrow.memory_map(str(path)) as mapped:
        if start == b"ARROW1":
            whole = arrow.ipc.open_file(mapped)
            yield _Reader(whole.schema.names, (whole.get_batch(at) for at in range(whole.num_record_batches)))
        else:
            stream = arrow.ipc.open_stream(mapped)
            yield _Reader(stream.schema.names, stream)


def open_arrow_table(table: Any, where: str) -> TableSource:
    """An Arrow table or batch from Python."""
    names = check_column_names([str(name) for name in table.schema.names], where)
    batches = table.to_batches if hasattr(table, "to_batches") else lambda: [table]
    return TableSource(where, names, lambda: cut_batches(batches(), names))


def cut_batches(batches: Iterable[Any], names: tuple[str, ...], start: int = 1) -> Iterator[Piece]:
    """Pieces of Arrow batches, large ones cut."""
    size = choose_piece_rows(len(names))
    for whole in batches:
        for at in range(0, whole.num_rows, size):
            part = whole.slice(at, size)
            cells = {name: _to_cells(part.column(place)) for place, name in enumerate(names)}
            yield Piece(cells, range(start, start + part.num_rows))
            start += part.num_rows


def _to_cells(column: Any) -> Any:
    """Numbers without gaps as an array, all others as a list: None where empty."""
    kind = str(column.type)
    if column.null_count == 0 and kind.startswith(("int", "uint", "float", "double")):
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()
