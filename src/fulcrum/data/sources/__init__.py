"""Loads a Dataset by name, by the path of a file, or from package.module:function.

    load("mnist")
    load("patients.npz", task=TaskSettings("regression"))
    load("hospital.npz", need=("train",))           # a party: training records, no test set
    load("public.npz", need=("test",))              # a coordinator: test records alone

named.py   digits, mnist, fashion-mnist, cifar10
own.py     .npz files, and arrays by name -> Dataset
tables.py  tables: files, databases and frames, with a declared schema
public/    the public files: locations, download and checks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fulcrum.data.arrays import recheck_dataset
from fulcrum.data.dataset import Dataset, declare_public
from fulcrum.data.sources.named import load_public_dataset, load_sklearn_digits
from fulcrum.data.sources.own import dataset_from_mapping, find_file, read_npz, require_records
from fulcrum.data.sources.public.registry import PUBLIC_DATASETS
from fulcrum.data.sources.tables import read_table
from fulcrum.data.table.reading import TABLE_FILES, is_database_url
from fulcrum.errors import DataError, FulcrumError
from fulcrum.settings.registry import (
    Registry,
    call_with_supported_arguments,
    current_folder_importable,
    suggest_nearest_names,
)
from fulcrum.settings.schema import Table, TaskSettings

F = TypeVar("F", bound=Callable[..., Any])
SourceReader = Callable[..., Dataset | Mapping[str, Any]]
"""Returns a Dataset, or a dict of arrays with the keys of an .npz file. Its arguments are those of `source`, `path` (of
a file), `folder`, `seed`, `task`, `table`, `public` and `need` that it has as parameters."""

SOURCES: Registry[SourceReader] = Registry(
    "data.source", noun="function", entry_points="fulcrum.sources", error=DataError
)
"""Readers by name ("mnist") or by the ending of a file (".npz")."""
SOURCES.add("digits", load_sklearn_digits)
for _name in PUBLIC_DATASETS:
    SOURCES.add(_name, partial(load_public_dataset, _name))
CHECKED_READERS = tuple(SOURCES.values())
"""Readers whose data sets need no second check."""
SOURCES.add(".npz", read_npz)
for _ending in TABLE_FILES:
    SOURCES.add(_ending, read_table)


TASK_READERS: tuple[SourceReader, ...] = (read_table,)
"""Readers that check their records by the task of the settings already."""


def register_source(name: str) -> Callable[[F], F]:
    """A decorator that registers a function as a data source: by name, or for files with an ending such as ".csv"."""
    return SOURCES.register(name)


def load(
    source: str,
    folder: str = "",
    seed: int = 0,
    task: TaskSettings | None = None,
    need: Sequence[str] = ("train",),
    public: bool = False,
    table: Table | None = None,
) -> Dataset:
    """Load a data set by name, path or function.

    source: a name (digits, mnist, fashion-mnist, cifar10 and what `register_source` or an installed package adds); a
    path to a file with a known ending (.npz, see `own.read_npz`; tables, see `tables.read_table`); the URL of a
    database; or package.module:function, importable from here or
    from the current folder. folder: searched first, before FULCRUM_DATA (a path list) and the user's cache. seed:
    passed to your function if it has this parameter; named sources and files do not depend on it. task: what is
    predicted, where the settings say more than the data. need: the required records, "train", "test" or both; others
    are loaded if present. public: whether the user declares own data public (data.public); by default it is private,
    unless a source returns a Dataset that says public=True. table: the columns of a table. Raises DataError, one
    sentence.
    """
    wanted = task or TaskSettings()
    reader, path = _find_reader(source, folder)
    if not callable(reader):
        raise DataError(f"data.source = {source!r}: {source.partition(':')[2]!r} is not a function.")
    offers = {
        "source": source,
        "folder": folder,
        "seed": seed,
        "task": wanted,
        "table": table or Table(),
        "public": public,
        "need": tuple(need),
        **({"path": path} if path else {}),
    }
    with current_folder_importable():
        try:
            found = call_with_supported_arguments(reader, offers)
        except FulcrumError:
            raise
        except Exception as error:  # a user's function may raise anything
            words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise DataError(f"data.source = {source!r}: the function failed ({words}).") from error
    if isinstance(found, Dataset):
        ready = reader in TASK_READERS or (reader in CHECKED_READERS and wanted == TaskSettings())
        found = declare_public(found) if public else found
        return require_records(found if ready else recheck_dataset(found, source, wanted), need)
    if isinstance(found, Mapping):
        where, name = (str(path), path.name) if path else (f"what {source} returned", source)
        return dataset_from_mapping(found, where, name, wanted, need, public)
    raise DataError(
        f"data.source = {source!r}: the function returned {type(found).__name__}; it must return a fulcrum Dataset "
        "or a dict with x and y, x_test and y_test."
    )


def _find_reader(source: str, folder: str) -> tuple[SourceReader, Path | None]:
    """The reader of a source, and the path if the source is a file."""
    names = SOURCES.names()
    if source in names:
        return SOURCES.find(source), None
    endings = [name for name in names if name.startswith(".") and source.lower().endswith(name)]
    if endings:
        return SOURCES.find(max(endings, key=len)), find_file(source, folder)
    if is_database_url(source):
        return read_table, None
    if ":" in source:
        return SOURCES.find(source), None
    files = " or ".join(f"{name} file" for name in names if name.startswith("."))
    raise DataError(
        f"data.source = {source!r} is not known; "
        f"{suggest_nearest_names(source, [name for name in names if not name.startswith('.')])} "
        f"A path to an {files} or package.module:function is fine too."
    )
