"""Loads a Dataset by name, by the path of a file, or from package.module:function.

    load("mnist")
    load("patients.npz", task=TaskSettings("regression"))
    load("hospital.npz", need=("train",))           # a party: training records, no test set
    load("public.npz", need=("test",))              # a coordinator: test records alone

named.py   digits, mnist, fashion-mnist, cifar10
own.py     .npz files, and arrays by name -> Dataset
tables.py  tables: files, databases and frames, with a declared schema (fulcrum.data.table)
images.py  images in folders     arrays_on_disk.py  folders of .npy files     huggingface.py  data sets of `datasets`
objects.py frames, torch data sets and generators from Python     streams.py  records one by one
public/    the public files: locations, download and checks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fulcrum.data.arrays import recheck_dataset
from fulcrum.data.dataset import Dataset, declare_public
from fulcrum.data.sources.arrays_on_disk import is_array_folder, read_array_folder
from fulcrum.data.sources.huggingface import is_saved_dataset, read_saved_dataset
from fulcrum.data.sources.images import is_image_folder, read_images
from fulcrum.data.sources.named import load_digits, load_public_dataset
from fulcrum.data.sources.objects import is_readable_object, read_object
from fulcrum.data.sources.own import (
    dataset_from_mapping,
    find_file,
    find_files,
    find_folder,
    read_npz,
    require_records,
)
from fulcrum.data.sources.public.registry import PUBLIC_DATASETS
from fulcrum.data.sources.tables import read_table
from fulcrum.data.table.reading import TABLE_FILES, find_table_ending, is_database_url
from fulcrum.errors import DataError, FulcrumError
from fulcrum.settings.registry import (
    Registry,
    call_with_supported_arguments,
    current_folder_importable,
    suggest_nearest_names,
)
from fulcrum.settings.schema import Images, Table, TaskSettings

F = TypeVar("F", bound=Callable[..., Any])
SourceReader = Callable[..., Dataset | Mapping[str, Any]]
"""Returns a Dataset, or a dict of arrays with the keys of an .npz file. Its arguments are those of `source`, `path` (of
a file or folder), `folder`, `seed`, `task`, `table`, `images`, `public` and `need` that it has as parameters."""

SOURCES: Registry[SourceReader] = Registry(
    "data.source", noun="function", entry_points="fulcrum.sources", error=DataError
)
"""Readers by name ("mnist") or by the ending of a file (".npz")."""
SOURCES.add("digits", load_digits)
for _name in PUBLIC_DATASETS:
    SOURCES.add(_name, partial(load_public_dataset, _name))
CHECKED_READERS = tuple(SOURCES.values())
"""Readers whose data sets need no second check."""
SOURCES.add(".npz", read_npz)
SOURCES.add(".npy", read_array_folder)

FOLDERS: list[tuple[Callable[[Path], bool], SourceReader]] = [
    (is_array_folder, read_array_folder),
    (is_saved_dataset, read_saved_dataset),
    (is_image_folder, read_images),
]
"""Readers of folders, in the order in which a folder is recognised."""
TASK_READERS: tuple[SourceReader, ...] = (read_table, read_saved_dataset, read_images)
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
    images: Images | None = None,
) -> Dataset:
    """Load a data set by name, path or function.

    source: a name (digits, mnist, fashion-mnist, cifar10 and what `register_source` or an installed package adds); a
    path to a file with a known ending (.npz, see `own.read_npz`; tables, see `tables.read_table`; a pattern such as
    visits-*.csv for several), or to a folder of images, arrays or a Hugging Face data set; the URL of a database; or
    package.module:function, importable from here or from the current folder. folder: searched first, before
    FULCRUM_DATA (a path list) and the user's cache. seed: passed to your function if it has this parameter; named
    sources and files do not depend on it. task: what is predicted, where the settings say more than the data. need: the
    required records, "train", "test" or both; others are loaded if present. public: whether the user declares own data
    public (data.public); by default it is private, unless a source returns a Dataset that says public=True. table,
    images: the [table] and [images] settings. Raises DataError, one sentence.
    """
    wanted = task or TaskSettings()
    reader, paths = _find_reader(source, folder)
    path = paths[0] if paths else None
    if not callable(reader):
        raise DataError(f"data.source = {source!r}: {source.partition(':')[2]!r} is not a function.")
    offers = {
        "source": source,
        "folder": folder,
        "seed": seed,
        "task": wanted,
        "table": table or Table(),
        "images": images or Images(),
        "public": public,
        "need": tuple(need),
        **({"path": path, "paths": paths} if path else {}),
    }
    with current_folder_importable():
        try:
            found = call_with_supported_arguments(reader, offers)
        except FulcrumError:
            raise
        except Exception as error:  # a user's function may raise anything
            # Of our own readers only the kind: an error's words may quote a private cell.
            own = getattr(reader, "__module__", "").startswith("fulcrum.")
            words = f"{type(error).__name__}: {error}" if str(error) and not own else type(error).__name__
            raise DataError(f"data.source = {source!r}: the function failed ({words}).") from error
    if isinstance(found, Dataset):
        ready = reader in TASK_READERS or (reader in CHECKED_READERS and wanted == TaskSettings())
        found = declare_public(found) if public else found
        return require_records(found if ready else recheck_dataset(found, source, wanted), need)
    if isinstance(found, Mapping) and set(found) != {"train", "test"}:
        where, name = (str(path), path.name) if path else (f"what {source} returned", source)
        return dataset_from_mapping(found, where, name, wanted, need, public)
    if is_readable_object(found):
        return require_records(read_object(found, table, wanted, public, source), need)
    raise DataError(
        f"data.source = {source!r}: the function returned {type(found).__name__}; it must return a fulcrum Dataset or "
        "a dict with x and y, x_test and y_test (or a table, a torch Dataset, a generator of records)."
    )


def _find_reader(source: str, folder: str) -> tuple[SourceReader, list[Path]]:
    """The reader of a source, and the paths if it is a file, several or a folder."""
    names = SOURCES.names()
    if source in names:
        return SOURCES.find(source), []
    endings = [name for name in names if name.startswith(".") and source.lower().endswith(name)]
    if endings:
        return SOURCES.find(max(endings, key=len)), [find_file(source, folder)]
    if is_database_url(source):
        return read_table, []
    if find_table_ending(source):  # after SOURCES: a user may have registered another reader for .csv
        return read_table, find_files(source, folder)
    place = find_folder(source, folder)
    if place is not None:
        return _find_folder_reader(place), [place]
    if ":" in source:
        return SOURCES.find(source), []
    files = ", ".join((*(name for name in names if name.startswith(".")), *TABLE_FILES))
    raise DataError(
        f"data.source = {source!r} is not known; "
        f"{suggest_nearest_names(source, [name for name in names if not name.startswith('.')])} "
        f"A path to a file ({files}) or folder, or package.module:function, is fine too."
    )


def _find_folder_reader(path: Path) -> SourceReader:
    found = next((reader for fits, reader in FOLDERS if fits(path)), None)
    if found is None:
        raise DataError(
            f"{path} is a folder without images, .npy arrays or a Hugging Face data set; for several tables write a "
            f"pattern, such as {path.name}/*.csv."
        )
    return found
