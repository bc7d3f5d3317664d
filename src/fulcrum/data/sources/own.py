"""A user's own data: an .npz file, or arrays by name; train or test records may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset
from fulcrum.data.sources.public.registry import search_folders
from fulcrum.errors import DataError
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.schema import TaskSettings

RECORD_ARRAYS = ("x", "y", "x_test", "y_test")
OPTIONAL_ARRAYS = ("person", "party", "party_names", "party_test", "classes")
MISSING_RECORDS_ADVICE = {
    "train": "has no training records; add x and y.",
    "test": "has no test set; add x_test and y_test, public records to evaluate on.",
}


def read_npz(path: Path) -> dict[str, Any]:
    """The arrays of an .npz file: x, y, x_test, y_test and, where wanted, person, party.

    x [n, ...] numbers or token ids; several inputs are x.NAME and x_test.NAME, such as x.ids and x.mask. y [n, ...]
    the targets of the task. person [n] and party [n] integers or text, party_test the party of each test record. Also
    read: party_names (then party holds indices into it) and classes (one number). Nothing is unpickled.
    """
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds a single array; save x, y, x_test and y_test with numpy.savez.")
            return {key: _read_npz_array(archive, key, path) for key in archive.files}
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a damaged or hostile archive can make NumPy and zipfile raise almost anything
        raise DataError(f"{path} is not a readable .npz file: {_describe(error)}.") from error


def find_file(source: str, folder: str) -> Path:
    """The path of a file: a relative path is searched for here, then in `folder`, FULCRUM_DATA and the user's cache."""
    path = Path(source).expanduser()
    tried = [path] if path.is_absolute() else [path, *(base / path for base in search_folders(folder))]
    found = next((candidate for candidate in tried if candidate.is_file()), None)
    if found is None:
        raise DataError(f"data.source = {source!r} was not found; looked for {', '.join(map(str, tried))}.")
    return found


def find_files(source: str, folder: str) -> list[Path]:
    """The files of a source: one path, or all that fit a pattern such as visits-*.csv, in the order of their names."""
    path = Path(source).expanduser()
    if path.is_file() or not any(sign in source for sign in "*?["):
        return [find_file(source, folder)]
    tried = [Path("/")] if path.is_absolute() else [Path(), *search_folders(folder)]
    for base in tried:
        pattern = str(path.relative_to("/")) if path.is_absolute() else str(path)
        found = sorted(file for file in base.glob(pattern) if file.is_file())
        if found:
            return found
    raise DataError(f"data.source = {source!r} fits no file.")


def find_folder(source: str, folder: str) -> Path | None:
    """The folder that a source names: from here, then in `folder`, FULCRUM_DATA and the user's cache; None: none."""
    path = Path(source).expanduser()
    tried = [path] if path.is_absolute() else [path, *(base / path for base in search_folders(folder))]
    return next((candidate for candidate in tried if candidate.is_dir()), None)


def dataset_from_mapping(
    given: Mapping[str, Any],
    where: str,
    name: str,
    task: TaskSettings,
    need: Sequence[str] = ("train",),
    public: bool = False,
) -> Dataset:
    """A Dataset from arrays by name (see `read_npz`); where: name of their source in error messages.

    public: whether the user declared the data public; nothing in a file can.
    """
    arrays = _join_inputs(given, where)
    # Unknown keys are refused, not ignored: "persons" for "person" would silently protect the wrong unit.
    unknown = [key for key in arrays if key not in RECORD_ARRAYS + OPTIONAL_ARRAYS]
    for part, (x, y) in {"train": ("x", "y"), "test": ("x_test", "y_test")}.items():
        # The targets of a next-token task follow from its inputs.
        wanted = (x,) if task.name == "next-token" else (x, y)
        missing = [key for key in wanted if key not in arrays]
        begun = x in arrays or y in arrays
        if missing and begun:
            got = ", ".join(map(str, given))
            raise DataError(f"{where} lacks {', '.join(missing)}; it holds {got}, and {x} and {y} go together.")
        if missing and part in need and not unknown:
            raise DataError(f"{where} {MISSING_RECORDS_ADVICE[part]}")
    if unknown:
        tail = suggest_nearest_names(unknown[0], [*RECORD_ARRAYS, *OPTIONAL_ARRAYS])
        raise DataError(f"{where} holds {unknown[0]!r}, which has no meaning here; {tail}")
    options: dict[str, Any] = {key: arrays[key] for key in OPTIONAL_ARRAYS if key in arrays}
    if "classes" in options:
        options["classes"] = _parse_class_count(options["classes"], where)
    if "party_names" in options:
        options["party_names"] = tuple(str(item) for item in np.asarray(options["party_names"]).reshape(-1))
    try:
        return from_arrays(*(arrays.get(key) for key in RECORD_ARRAYS), name=name, task=task, public=public, **options)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def require_records(data: Dataset, need: Sequence[str]) -> Dataset:
    """The data set; DataError if required records are missing."""
    for part in need:
        if getattr(data, part) is None:
            raise DataError(f"{data.name} {MISSING_RECORDS_ADVICE[part]}")
    return data


def _join_inputs(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arrays with x.NAME gathered into x, a dict by NAME; x_test.NAME likewise."""
    joined: dict[str, Any] = {}
    for key in map(str, given):
        whole, dot, inner = key.partition(".")
        if not dot or whole not in ("x", "x_test"):
            joined[key] = given[key]
        elif whole in given:
            raise DataError(f"{where} holds both {whole!r} and {key!r}; give one input, or several as {whole}.NAME.")
        elif not inner.isidentifier():
            raise DataError(f"{where} holds {key!r}; what follows {whole}. must be the name of a model's argument.")
        else:
            joined.setdefault(whole, {})[inner] = given[key]
    return joined


def _read_npz_array(archive: Any, key: str, path: Path) -> Any:
    try:
        found = archive[key]
        if found.dtype.kind == "U" and found.size and found.dtype.itemsize:
            # A code beyond Unicode ends the interpreter's own conversion to text with an error of its own.
            codes = np.ascontiguousarray(found).view(np.dtype(np.uint32).newbyteorder(found.dtype.byteorder))
            if int(codes.max()) > 0x10FFFF:
                raise ValueError("its text is not Unicode")
        return found
    except Exception as error:
        if "pickle" in str(error):
            raise DataError(f"{path}: {key} holds Python objects; it must hold numbers.") from error
        raise DataError(f"{path} is corrupt: {key[:100]} cannot be read ({_describe(error)}).") from error


def _describe(error: Exception) -> str:
    """What a library said, in one short line."""
    words = " ".join(str(error).split())[:200].rstrip(".")
    if "allow_pickle" in words:  # NumPy's advice is to unpickle, which nobody should do with a file from outside
        words = "it is no archive of plain arrays"
    return "it asks for more memory than there is" if isinstance(error, MemoryError) else words or type(error).__name__


def _parse_class_count(value: Any, where: str) -> int:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{where}: classes must be one whole number.")
    return int(array.reshape(-1)[0])
