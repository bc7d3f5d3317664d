"""Users' target arrays, checked: errors say what was found and what would be right."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.errors import DataError

AnyArray = npt.NDArray[Any]
DTYPE_KIND_NAMES = {"O": "Python objects", "U": "text", "S": "bytes", "c": "complex numbers", "f": "decimal numbers"}


def to_numpy_array(name: str, value: object) -> AnyArray:
    """A NumPy view or copy of the user's value; tensors are moved to the CPU."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # ragged lists
        raise DataError(f"{name} is not an array: {error}.") from error


def check_whole_numbers(name: str, value: object, dims: int) -> Tensor:
    """Integers or booleans with `dims` dimensions, as int64."""
    array = to_numpy_array(name, value)
    if array.dtype.kind not in "biu":
        held = DTYPE_KIND_NAMES.get(array.dtype.kind, str(array.dtype))
        advice = " (for numbers, say --task regression)" if array.dtype.kind == "f" and dims == 1 else ""
        raise DataError(f"{name} holds {held}; labels must be integers 0..classes-1{advice}.")
    if array.ndim != dims:
        wanted = "one number per record, shape [n]" if dims == 1 else "of shape [n, k]"
        raise DataError(f"{name} has shape {list(array.shape)}; it must be {wanted}.")
    return torch.from_numpy(np.array(array, dtype=np.int64))


def check_class_range(name: str, labels: Tensor, classes: int) -> Tensor:
    """The labels; DataError if one is outside 0..classes-1."""
    if labels.numel() and int(labels.min()) < 0:
        raise DataError(f"the labels hold {int(labels.min())}; they must be integers from 0 to classes - 1.")
    if labels.numel() and int(labels.max()) >= classes:
        raise DataError(
            f"the labels hold {int(labels.max())}; with classes = {classes} they must lie in 0..{classes - 1}."
        )
    return labels
