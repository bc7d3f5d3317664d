"""A user's own data: an .npz file, or a function of theirs."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.data.dataset import Dataset, from_arrays, recheck
from fulcrum.data.sources.public.registry import nearest, search_folders
from fulcrum.errors import DataError, FulcrumError

NEEDED = ("x", "y", "x_test", "y_test")
OPTIONAL = ("person", "party", "party_names", "classes")


def load_npz(source: str, folder: str = "") -> Dataset:
    """A Dataset from an .npz file with the arrays x, y, x_test, y_test and, where wanted, person, party.

    x [n, ...] numbers, y [n] integers from 0; person [n] and party [n] integers or text. Also read:
    party_names (then party holds indices into it) and classes (one number). Nothing is unpickled. A
    relative path is looked for here, then in `folder`, FULCRUM_DATA and the user's cache.
    """
    path = _find(source, folder)
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds a single array; save x, y, x_test and y_test with numpy.savez.")
            arrays = {key: _member(archive, key, path) for key in archive.files}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DataError(f"{path} is not a readable .npz file: {error}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return _from_mapping(arrays, str(path), path.name)


def load_function(source: str, seed: int = 0) -> Dataset:
    """A Dataset from package.module:function, importable from here or from the current folder.

    The function is called without arguments (with seed=..., if it has a parameter of that name) and
    returns a Dataset, or a dict with the same keys as an .npz file. What it returns is checked.
    """
    module_name, _, function_name = source.partition(":")
    if not module_name or not function_name.isidentifier():
        raise DataError(f"data.source = {source!r} is not of the form package.module:function.")
    with _current_folder_importable():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # the user's module may raise anything while it is imported
            raise DataError(
                f"data.source = {source!r}: module {module_name!r} cannot be imported ({_say(error)})."
            ) from error
        function = getattr(module, function_name, None)
        if function is None:
            close = nearest(function_name, [name for name in dir(module) if not name.startswith("_")])
            tail = f"; {close}" if close.startswith("did") else "."
            raise DataError(f"data.source = {source!r}: {module_name!r} has no function {function_name!r}{tail}")
        if not callable(function):
            raise DataError(f"data.source = {source!r}: {function_name!r} is not a function.")
        try:
            result = function(seed=seed) if _takes_seed(function) else function()
        except FulcrumError:
            raise
        except Exception as error:
            raise DataError(f"data.source = {source!r}: the function failed ({_say(error)}).") from error
    if isinstance(result, Dataset):
        return recheck(result, source)
    if isinstance(result, Mapping):
        return _from_mapping(result, f"what {source} returned", source)
    raise DataError(
        f"data.source = {source!r}: the function returned {type(result).__name__}; it must return a fulcrum Dataset "
        f"or a dict with {', '.join(NEEDED)}."
    )


def _find(source: str, folder: str) -> Path:
    path = Path(source).expanduser()
    tried = [path] if path.is_absolute() else [path, *(base / path for base in search_folders(folder))]
    found = next((candidate for candidate in tried if candidate.is_file()), None)
    if found is None:
        raise DataError(f"data.source = {source!r} was not found; looked for {', '.join(map(str, tried))}.")
    return found


def _member(archive: Any, key: str, path: Path) -> Any:
    try:
        return archive[key]
    except (ValueError, zlib.error, zipfile.BadZipFile, EOFError, KeyError, OSError) as error:
        if "pickle" in str(error):
            raise DataError(f"{path}: {key} holds Python objects; it must hold numbers.") from error
        raise DataError(f"{path} is corrupt: {key} cannot be read ({error}).") from error


def _from_mapping(arrays: Mapping[str, Any], where: str, name: str) -> Dataset:
    missing = [key for key in NEEDED if key not in arrays]
    # Unknown keys are refused, not ignored: "persons" for "person" would silently protect the wrong unit.
    unknown = [str(key) for key in arrays if key not in NEEDED + OPTIONAL]
    if missing == ["x_test", "y_test"] and not unknown:
        raise DataError(f"{where} has no test set; add x_test and y_test, public records to evaluate on.")
    if missing:
        got = ", ".join(map(str, arrays)) or "nothing"
        raise DataError(f"{where} lacks {', '.join(missing)}; it holds {got}, and {', '.join(NEEDED)} are needed.")
    if unknown:
        tail = nearest(unknown[0], [*NEEDED, *OPTIONAL])
        raise DataError(f"{where} holds {unknown[0]!r}, which has no meaning here; {tail}")
    options: dict[str, Any] = {key: arrays[key] for key in OPTIONAL if key in arrays}
    if "classes" in options:
        options["classes"] = _whole(options["classes"], where)
    if "party_names" in options:
        options["party_names"] = tuple(str(item) for item in np.asarray(options["party_names"]).reshape(-1))
    try:
        return from_arrays(*(arrays[key] for key in NEEDED), name=name, **options)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _whole(value: Any, where: str) -> int:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{where}: classes must be one whole number.")
    return int(array.reshape(-1)[0])


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _takes_seed(function: Any) -> bool:
    try:
        return "seed" in inspect.signature(function).parameters
    except (ValueError, TypeError):  # built-ins without a signature
        return False


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """The installed `fulcrum` command, unlike `python -m`, does not look for modules in the current folder."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
