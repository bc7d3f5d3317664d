"""A folder of .npy files with the names of an .npz: x.npy, y.npy, person.npy, ... Mapped, not read into memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fulcrum.data.table.growing import GrowingArray
from fulcrum.errors import DataError

ROWS_PER_PIECE = 4096
KEPT_TYPES = (np.dtype(np.float32), np.dtype(np.int64))
"""Types that are used as they lie on the disk; others become float32, in pieces."""


def is_array_folder(path: Path) -> bool:
    """Whether a folder holds arrays: x.npy, or x_test.npy, or several inputs as x.NAME.npy."""
    return any(path.glob("x.npy")) or any(path.glob("x_test.npy")) or any(path.glob("x.*.npy"))


def read_array_folder(path: Path) -> dict[str, Any]:
    """The arrays of a folder by name, as an .npz holds them; inputs stay on the disk."""
    folder = path if path.is_dir() else path.parent
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.npy")):
        name = file.name.removesuffix(".npy")
        array = _map_array(file)
        found[name] = _to_input(array) if name.partition(".")[0] in ("x", "x_test") else np.array(array)
    if not found:
        raise DataError(f"{folder} holds no .npy files; save x.npy and y.npy with numpy.save.")
    return found


def _map_array(file: Path) -> npt.NDArray[Any]:
    try:
        return np.asanyarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        with file.open("rb") as opened:
            whole = opened.read(6) == b"\x93NUMPY"
        if whole and ("pickle" in str(error) or "Python objects" in str(error)):
            raise DataError(f"{file} holds Python objects; it must hold numbers.") from None
        raise DataError(f"{file} is no readable .npy file: it was cut short, damaged, or is another kind.") from None


def _to_input(array: npt.NDArray[Any]) -> Any:
    """Inputs as a tensor on the map, or converted in pieces."""
    if array.dtype.kind not in "biuf" or not array.ndim or not array.flags.c_contiguous:
        return array
    if array.dtype in KEPT_TYPES:
        with warnings.catch_warnings():
            # Nothing writes to records. A map that may be written to would be charged against the memory.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(array)
    whole = array.dtype.kind in "iu" and array.dtype.itemsize >= 4
    grown = GrowingArray(np.int64 if whole else np.float32, array.shape[1:])
    for start in range(0, len(array), ROWS_PER_PIECE):
        grown.append(array[start : start + ROWS_PER_PIECE])
    return grown.finish()
