"""Data that is handed over in Python: frames, torch data sets, generators. Nothing is imported to recognise them.

fulcrum.train(data=frame, schema="patients.schema.toml", epsilon=4.0)
fulcrum.train(data=torch_dataset, classes=10, epsilon=4.0)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fulcrum.data.dataset import Dataset
from fulcrum.data.sources.tables import make_table_dataset
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
        "torch Dataset, or a generator of records."
    )


def name_object(given: Any) -> str:
    """What messages call it."""
    kind = type(given)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _read_frame(given: Any, name: str, table: Table, task: TaskSettings, public: bool) -> Dataset:
    return make_table_dataset(given, table, test=table.test or None, task=task, name=name, public=public)


OBJECT_KINDS: list[tuple[Callable[[Any], bool], ReadObject]] = [(is_frame, _read_frame)]
"""What users hand over, in the order in which it is recognised."""


def is_readable_object(given: Any) -> bool:
    """Whether `read_object` takes it."""
    return any(matches(given) for matches, _ in OBJECT_KINDS)
