"""Noise and certified rounding by the compiled loop (`gradients/compiled/noise.c`), from the cipher's key to integers.

The integers and the rules for what is noted are those of `host_noise`, which takes this loop where there is one. They
are the same because the stream defines them: the loop's errors, stated and derived in its source, are below those that
docs/privacy/gaussian-release.md allows, and what lies within them of a boundary is decided in arbitrary precision.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.gradients.compiled import find_kernels
from fulcrum.rng.chacha import Nonce

Numbers = npt.NDArray[Any]

Rounder = Callable[..., int]
"""The loop: see `fulcrum_round` in noise.c."""

COLUMNS = 6
"""Numbers per coordinate that is noted: those of `host_noise.Noted`, in its order."""

ROOM = 512
"""Coordinates that are noted at once, at least: two per pair of a group (GROUP in noise.c), and more."""

PAIRS_PER_NOTE = 2**10
"""Room is for a coordinate per so many pairs: usually 1 in 1,700 pairs has one. The loop returns when it is full."""

EXAMPLE = "7b122487e121e35d"
"""Digest of the integers of `_digest_example`."""

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS = (
    *(ctypes.c_char_p, ctypes.c_char_p),  # key, nonce
    *(_POINTER, ctypes.c_int, _POINTER, ctypes.c_int),  # x, is it float64; into, is it float32
    *(_LONG, _LONG, _LONG),  # numbers; the first pair, and the one after the last
    *(_DOUBLE, _DOUBLE, _DOUBLE, ctypes.c_uint64),  # s / g, g; what is near; which first words are rare
    *(_POINTER, _LONG, ctypes.POINTER(_LONG)),  # the list, its places, how many were used
)


@lru_cache(maxsize=1)
def find_rounder() -> Rounder | None:
    """The compiled loop; None where there is none, or where it does not reproduce an example of 301 numbers."""
    library = find_kernels()
    if library is None or not hasattr(library, "fulcrum_round"):
        return None
    found = declare_rounder(library)
    return found if _digest_example(found) == EXAMPLE else None


def declare_rounder(library: ctypes.CDLL) -> Rounder:
    """The loop of a library, with the types of its arguments."""
    found = library.fulcrum_round
    found.restype, found.argtypes = _LONG, _ARGUMENTS
    return found


def accepts(x: Tensor, into: Tensor) -> bool:
    """Whether the loop reads and writes such tensors: contiguous, on a CPU, of one length."""
    return (
        x.dtype in (torch.float32, torch.float64)
        and into.dtype in (torch.int32, torch.float32)
        and x.dim() == into.dim() == 1
        and len(x) == len(into)
        and x.is_contiguous()
        and into.is_contiguous()
        and x.device.type == into.device.type == "cpu"
    )


def round_pairs(
    rounder: Rounder,
    x: Tensor,
    scale: float,
    grid: float,
    stream: tuple[bytes, Nonce],
    into: Tensor,
    pairs: range,
    near: float,
    smallest_usual: float,
) -> list[Numbers]:
    """The coordinates of some pairs, j and half + j of each, as `host_noise.round_on_host` describes.

    Returns tables [k, COLUMNS] of what is noted: coordinates within `near` of a boundary, and both coordinates of pairs
    whose U is within `smallest_usual` of 0 or 1.
    """
    key, nonce = stream
    room = ROOM + len(pairs) // PAIRS_PER_NOTE
    table, used, found = np.empty((room, COLUMNS)), _LONG(0), []
    start, words = pairs.start, struct.pack("=3I", *nonce)
    rare = int(smallest_usual * 2.0**64)
    while start < pairs.stop:
        start = rounder(
            key, words, x.data_ptr(), x.dtype == torch.float64, into.data_ptr(), into.dtype == torch.float32,
            len(x), start, pairs.stop, scale / grid, grid, near, rare, table.ctypes.data, room, ctypes.byref(used),
        )  # fmt: skip
        if used.value:
            found.append(table[: used.value].copy())
    return found


def _digest_example(rounder: Rounder) -> str:
    """Of a fixed release in units of 2^-20: another cipher, other functions or another rounding would show."""
    x, into = torch.arange(-150.0, 151.0) / 64, torch.empty(301, dtype=torch.int32)
    noted = round_pairs(rounder, x, 1.5, 2.0**-20, (bytes(range(32)), (1, 2, 3)), into, range(151), 2.0**-13, 2.0**-16)
    return "" if noted else hashlib.sha256(into.numpy().tobytes()).hexdigest()[:16]
