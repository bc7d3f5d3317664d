"""What is on this machine: which data sets, where, and whether their files are the public ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fulcrum.data.sources.named import DIGITS_FILE, read_digits
from fulcrum.data.sources.public import registry
from fulcrum.errors import DataError
from fulcrum.settings.registry import suggest_nearest_names

FILE_STATUSES = ("public", "changed", "missing", "corrupt")
"""From best to worst: the public bytes; readable but other bytes; not there; unreadable."""


@dataclass(frozen=True)
class DatasetAvailability:
    """One line of `fulcrum data list`: examples counts training and test records."""

    name: str
    examples: int
    where: Path | None
    status: str


def list_available_datasets(folder: str = "") -> list[DatasetAvailability]:
    """All named data sets, the folder of each (None: not found) and its status. Reads every file."""
    rows = []
    for name, examples in (
        ("digits", 1797),
        *((known.name, known.examples) for known in registry.PUBLIC_DATASETS.values()),
    ):
        files = verify_dataset(name, folder)
        status = max((status for _, status in files), key=FILE_STATUSES.index)
        present = [path for path, state in files if state != "missing"]
        rows.append(DatasetAvailability(name, examples, _containing_folder(present), status))
    return rows


def verify_dataset(name: str, folder: str = "") -> list[tuple[Path, str]]:
    """(path, status) of each file: public, changed, missing or corrupt. Raises DataError on an unknown name."""
    if name == "digits":
        return [_verify_digits()]
    known = find_public_dataset(name)
    place, partial = registry.locate_dataset(known, folder)
    place = place or (partial[0] if partial else registry.search_folders(folder)[0] / known.folders[0])
    paths = [registry.find_data_file(known, file, place) or place / file.name for file in known.files]
    return [(path, check_file_status(known, file, path)) for file, path in zip(known.files, paths, strict=True)]


def check_file_status(known: registry.PublicDataset, file: registry.DataFile, path: Path) -> str:
    """Status of one file of a data set."""
    if not path.is_file():
        return "missing"
    try:
        return "public" if registry.read_data_file(known, file, path)[1] else "changed"
    except DataError:
        return "corrupt"


def find_public_dataset(name: str) -> registry.PublicDataset:
    """The registry's entry, or a DataError that suggests the nearest name."""
    if name not in registry.PUBLIC_DATASETS:
        raise DataError(
            f"data set {name!r} is not known; {suggest_nearest_names(name, ['digits', *registry.PUBLIC_DATASETS])}"
        )
    return registry.PUBLIC_DATASETS[name]


def _verify_digits() -> tuple[Path, str]:
    try:
        return DIGITS_FILE, "public" if read_digits()[2] else "changed"
    except DataError:
        return DIGITS_FILE, "corrupt" if DIGITS_FILE.is_file() else "missing"


def _containing_folder(paths: list[Path]) -> Path | None:
    return (paths[0] if paths[0].is_dir() else paths[0].parent) if paths else None
