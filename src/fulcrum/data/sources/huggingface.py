"""Hugging Face data sets on disk (`save_to_disk`): their Arrow files as a table; needs pyarrow, not `datasets`.

A folder with one data set holds the training records; one with several splits holds `train`, and `test` as public
records to evaluate on. The columns are declared as for any table ([table], or a schema file).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fulcrum.data.dataset import Dataset
from fulcrum.data.sources.tables import make_table_dataset
from fulcrum.data.table.columnar import cut_batches, open_arrow_files
from fulcrum.data.table.pieces import TableSource, check_column_names
from fulcrum.errors import DataError
from fulcrum.settings.schema import Table, TaskSettings

ROWS_PER_BATCH = 1000


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def read_saved_dataset(
    path: Path,
    table: Table | None = None,
    task: TaskSettings | None = None,
    public: bool = False,
    need: Sequence[str] = ("train",),
) -> Dataset:
    """A Dataset from a folder that `datasets` wrote."""
    splits = _read_json(path / "dataset_dict.json").get("splits", []) if (path / "dataset_dict.json").is_file() else []
    if splits and "train" not in splits and "train" in need:
        raise DataError(f"{path} has the splits {', '.join(map(str, splits))}; one must be called train.")
    train = _open_split(path / "train") if "train" in splits else None if splits else _open_split(path)
    test = _open_split(path / "test") if "test" in splits else None
    return make_table_dataset(train, table, test=test, task=task, name=path.name, public=public, need=need)


def open_dataset_object(given: Any) -> TableSource:
    """A `datasets.Dataset` from Python, as a table in pieces."""
    names = check_column_names(list(given.column_names), "the data set")

    def batches() -> Iterator[Any]:
        if getattr(given, "_indices", None) is None:  # all rows in their order: as they lie in memory or on the disk
            yield from given.data.table.to_batches()
            return
        for part in given.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
            yield from part.to_batches()

    return TableSource("the data set", names, lambda: cut_batches(batches(), names))


def _open_split(folder: Path) -> TableSource:
    files = [folder / str(entry["filename"]) for entry in _read_json(folder / "state.json").get("_data_files", [])]
    missing = [file for file in files if not file.is_file()]
    if not files or missing:
        what = f"{missing[0].name} is missing" if missing else "it names no files"
        raise DataError(f"{folder} is no whole data set: {what}.")
    return open_arrow_files(files, str(folder))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"{file} cannot be read; is {file.parent} a data set that save_to_disk wrote?") from None
    return found if isinstance(found, dict) else {}
