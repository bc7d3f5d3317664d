"""Opens a table, whatever it is: a file by its ending, a database by its URL, a frame or rows from Python.

open_table("patients.csv", schema)          # .csv .tsv .jsonl, each also .gz; .parquet .feather .arrow
open_table("sqlite:///patients.db", schema, query="visits")
open_table(frame, schema)                   # pandas, polars, pyarrow; a dict of columns; a list of dicts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.data.table.columnar import open_arrow_table, open_feather, open_parquet
from fulcrum.data.table.databases import open_database
from fulcrum.data.table.delimited import cut_mappings, open_delimited, open_json_lines
from fulcrum.data.table.pieces import Piece, TableSource, check_column_names, choose_piece_rows, join_tables
from fulcrum.data.table.schema import Schema
from fulcrum.errors import DataError
from fulcrum.settings.registry import Registry

OpenFile = Callable[[Path, Schema], TableSource]

TABLE_FILES: Registry[OpenFile] = Registry("table", noun="function", places=False, error=DataError)
"""Readers of tables by the ending of a file."""
for _ending in (".csv", ".tsv", ".tab", ".csv.gz", ".tsv.gz"):
    TABLE_FILES.add(_ending, open_delimited)
for _ending in (".jsonl", ".jsonl.gz"):
    TABLE_FILES.add(_ending, open_json_lines)
for _ending in (".parquet", ".pq"):
    TABLE_FILES.add(_ending, open_parquet)
for _ending in (".feather", ".arrow"):
    TABLE_FILES.add(_ending, open_feather)


def open_table(given: Any, schema: Schema | None = None, query: str = "") -> TableSource:
    """A table that can be read in pieces; DataError where it is none."""
    schema = schema or Schema()
    if isinstance(given, TableSource):
        return given
    if isinstance(given, str | Path):
        return open_named_table(str(given), schema, query)
    if isinstance(given, list) and given and all(isinstance(each, Path) for each in given):
        return join_tables([open_named_table(str(each), schema) for each in given])
    for matches, opened in FRAME_KINDS:
        if matches(given):
            return opened(given, schema)
    raise DataError(
        f"a {type(given).__name__} is no table; give a pandas, polars or Arrow table, a dict of columns, a list of "
        "dicts, or the path of a file."
    )


def open_named_table(name: str, schema: Schema, query: str = "") -> TableSource:
    """A table in a file or a database."""
    if is_database_url(name):
        return open_database(name, query)
    ending = find_table_ending(name)
    if not ending:
        raise DataError(f"{name} is no table: its name must end in {', '.join(TABLE_FILES.names())}.")
    path = Path(name)
    if not path.is_file():
        raise DataError(f"there is no table {name}.")
    return TABLE_FILES.find(ending)(path, schema)


def is_database_url(name: str) -> bool:
    """Whether a source is the URL of a database, or names a variable that holds one (env:NAME)."""
    return "://" in name or name.startswith("env:")


def find_table_ending(name: str) -> str:
    """The known ending of a table's file, the longest; "" where there is none."""
    return max((end for end in TABLE_FILES.names() if name.lower().endswith(end)), key=len, default="")


# --- frames -------------------------------------------------------------------------------------


def _is_of(package: str, *names: str) -> Callable[[Any], bool]:
    """Whether a value's class is one of a package's, without importing the package."""

    def matches(value: Any) -> bool:
        return any(
            kind.__module__.partition(".")[0] == package and kind.__name__ in names for kind in type(value).__mro__
        )

    return matches


def _open_columns(given: Any, schema: Schema) -> TableSource:
    """A dict of columns, or a frame: what has a value per name and a length."""
    return _slice_columns({str(name): values for name, values in given.items()}, "the table")


def _open_pandas(given: Any, schema: Schema) -> TableSource:
    names = check_column_names([str(name) for name in given.columns], "the pandas frame")
    columns = {name: given.iloc[:, place] for place, name in enumerate(names)}
    return _slice_columns(columns, "the pandas frame", lambda values: _to_plain(values.to_numpy()))


def _open_polars(given: Any, schema: Schema) -> TableSource:
    frame = given.collect() if hasattr(given, "collect") else given
    columns = {name: frame.get_column(name) for name in check_column_names(frame.columns, "the polars frame")}
    return _slice_columns(columns, "the polars frame", _from_polars)


def _from_polars(values: Any) -> Any:
    if values.dtype.is_numeric() and not values.null_count():
        return values.to_numpy()
    return values.to_list()


def _open_arrow(given: Any, schema: Schema) -> TableSource:
    return open_arrow_table(given, "the Arrow table")


def _open_rows(given: Any, schema: Schema) -> TableSource:
    rows = list(given)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise DataError("the table must be a list of dicts, one per row, with at least one row.")
    names = check_column_names(list(dict.fromkeys(str(name) for row in rows for name in row)), "the list of rows")
    return TableSource("the list of rows", names, lambda: cut_mappings(iter(enumerate(rows, 1)), names, "the rows"))


def _to_plain(values: Any) -> Any:
    """An array of numbers as it is; others as a list of their values, dates as numpy's."""
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        return array
    return list(array) if array.dtype.kind == "M" else array.tolist()


def _slice_columns(columns: Mapping[str, Any], where: str, plain: Callable[[Any], Any] = _to_plain) -> TableSource:
    names = check_column_names(list(columns), where)
    counts = {len(values) for values in columns.values()}
    if len(counts) > 1:
        raise DataError(f"{where} has columns of different lengths ({', '.join(map(str, sorted(counts)))}).")
    (count,) = counts

    def pieces() -> Iterator[Piece]:
        size = choose_piece_rows(len(names))
        for start in range(0, count, size):
            end = min(start + size, count)
            yield Piece({name: plain(columns[name][start:end]) for name in names}, range(start + 1, end + 1))

    return TableSource(where, names, pieces)


FRAME_KINDS: list[tuple[Callable[[Any], bool], Callable[[Any, Schema], TableSource]]] = [
    (_is_of("pandas", "DataFrame"), _open_pandas),
    (_is_of("polars", "DataFrame", "LazyFrame"), _open_polars),
    (_is_of("pyarrow", "Table", "RecordBatch"), _open_arrow),
    (lambda value: isinstance(value, Mapping), _open_columns),
    (lambda value: isinstance(value, list | tuple), _open_rows),
]
"""Tables from Python: whether a value is one, and how it is read."""


def is_frame(value: Any) -> bool:
    """Whether a value from Python is a frame of a known package: pandas, polars or Arrow."""
    return any(matches(value) for matches, _ in FRAME_KINDS[:3])
