"""Data that is handed over in Python: frames, arrays, torch data sets, generators. Nothing is imported to know them.

fulcrum.train(data=frame, schema="patients.schema.toml", epsilon=4.0)
fulcrum.train(data=torch_dataset, classes=10, epsilon=4.0)
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset
from fulcrum.data.sources.huggingface import open_dataset_object
from fulcrum.data.sources.own import dataset_from_mapping
from fulcrum.data.sources.streams import list_torch_items, read_records
from fulcrum.data.sources.tables import make_table_dataset
from fulcrum.data.table.delimited import cut_mappings
from fulcrum.data.table.pieces import Piece, TableSource, check_column_names
from fulcrum.data.table.reading import is_frame
from fulcrum.errors import DataError
from fulcrum.settings.schema import Table, TaskSettings

ReadObject = Callable[[Any, str, Table, TaskSettings, bool], Dataset]
"""(object, name, columns of a table, task, whether it is public) -> Dataset"""


def read_object(
    given: Any, table: Table | None = None, task: TaskSettings | None = None, public: bool = False, name: str = ""
) -> Dataset:
    """A Dataset from what a user has in Python; DataError where nothing fits."""
    for matches, read in OBJECT_KINDS:
        if matches(given):
            return read(given, name or name_object(given), table or Table(), task or TaskSettings(), public)
    raise DataError(
        f"data is a {type(given).__name__}; give a name or path, a fulcrum Dataset, a pandas, polars or Arrow table, a "
        'torch Dataset, a generator of records, or {"train": ..., "test": ...} with two of these.'
    )


def name_object(given: Any) -> str:
    """What messages call it."""
    kind = type(given)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _read_frame(given: Any, name: str, table: Table, task: TaskSettings, public: bool) -> Dataset:
    return make_table_dataset(given, table, test=table.test or None, task=task, name=name, public=public)


def _read_saved(given: Any, name: str, table: Table, task: TaskSettings, public: bool) -> Dataset:
    source = open_dataset_object(given)
    return make_table_dataset(source, table, test=table.test or None, task=task, name=name, public=public)


def _read_torch(given: Any, name: str, table: Table, task: TaskSettings, public: bool) -> Dataset:
    return read_records(list_torch_items(given), name, task, public)


def _read_generator(given: Any, name: str, table: Table, task: TaskSettings, public: bool) -> Dataset:
    """Records of a generator: rows of a table where they are dicts without x, else (x, y) or dicts with x."""
    items = iter(given() if callable(given) else given)
    first = next(items, None)
    if first is None:
        raise DataError(f"{name} yields no records.")
    rest = itertools.chain([first], items)
    if isinstance(first, Mapping) and "x" not in first:
        source = _RowsOnce(rest, name, first, public).open()
        return make_table_dataset(source, table, task=task, name=name, public=public)
    return read_records(rest, name, task, public)


class _RowsOnce:
    """Rows that come once; of public ones a schema may be read off first, so those are held."""

    def __init__(self, rows: Iterable[Any], name: str, first: Mapping[str, Any], public: bool) -> None:
        self.rows: Iterable[Any] = list(rows) if public else rows
        self.name, self.columns = name, check_column_names([str(key) for key in first], name)

    def open(self) -> TableSource:
        def pieces() -> Iterator[Piece]:
            return cut_mappings(enumerate(self.rows, start=1), self.columns, self.name)

        return TableSource(self.name, self.columns, pieces)


def _read_arrays(given: Any, name: str, table: Table, task: TaskSettings, public: bool) -> Dataset:
    return dataset_from_mapping(given, name, name, task, ("train",), public)


def _read_pair(given: Any, name: str, table: Table, task: TaskSettings, public: bool) -> Dataset:
    """Training and public test records: two tables, two torch data sets or two generators."""
    parts = {key: given[key] for key in ("train", "test")}
    if all(is_table(part) for part in parts.values()):
        return make_table_dataset(parts["train"], table, test=parts["test"], task=task, name=name, public=public)
    train, test = (read_object(part, table, task, public=True, name=f"{name}[{key}]") for key, part in parts.items())
    return from_arrays(
        train.x,
        train.y,
        test.x,
        test.y,
        person=train.person,
        person_names=train.person_names,
        party=train.party,
        party_names=train.party_names,
        name=name,
        task=task,
        public=public,
    )


def is_table(given: Any) -> bool:
    """Whether it is a frame, a dict of columns, or a list of dicts."""
    rows = isinstance(given, list | tuple) and bool(given) and all(isinstance(row, Mapping) for row in given)
    return is_frame(given) or rows or (isinstance(given, Mapping) and not {"x", "x_test", "train"} & set(given))


def _is_pair(given: Any) -> bool:
    return isinstance(given, Mapping) and set(given) == {"train", "test"}


def _is_arrays(given: Any) -> bool:
    return isinstance(given, Mapping) and any(str(name).partition(".")[0] in ("x", "x_test") for name in given)


def _is_hugging_face(given: Any) -> bool:
    return _has_base(given, "datasets", "Dataset")


def _is_torch_dataset(given: Any) -> bool:
    return _has_base(given, "torch", "Dataset")


def _is_generator(given: Any) -> bool:
    return isinstance(given, Iterator) or inspect.isgeneratorfunction(given)


def _has_base(given: Any, package: str, name: str) -> bool:
    return any(kind.__module__.partition(".")[0] == package and kind.__name__ == name for kind in type(given).__mro__)


OBJECT_KINDS: list[tuple[Callable[[Any], bool], ReadObject]] = [
    (_is_pair, _read_pair),
    (_is_arrays, _read_arrays),
    (is_table, _read_frame),
    (_is_hugging_face, _read_saved),
    (_is_torch_dataset, _read_torch),
    (_is_generator, _read_generator),
]
"""What users hand over, in the order in which it is recognised."""


def is_readable_object(given: Any) -> bool:
    """Whether `read_object` takes it."""
    return any(matches(given) for matches, _ in OBJECT_KINDS)
