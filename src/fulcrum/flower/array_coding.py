"""Arrays as the body of a message: safetensors, with large float32 arrays coded without loss.

A float32 has one byte of sign and exponent, and three of mantissa. Weights and noised updates have mantissas like
random numbers, and few exponents: the first byte of every number is compressed (Huffman codes alone, fast both ways),
the other three stay. A model of ten million numbers travels in 0.83 of its bytes, at 0.15 s to write and 0.1 s to read.

Nothing here trusts what it reads: the size of every array is known before, so a body that would grow beyond it is
refused before it does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

MIN_CODED_NUMBERS = 1024
"""Smaller arrays travel as they are."""
CODED_PIECE = 1 << 20
"""Numbers that are coded at once, to bound the memory."""
LOW, HIGH = "#low", "#high"
"""Endings of the two arrays that stand for a coded one: three bytes per number, and the compressed first bytes."""


def encode_arrays(arrays: Mapping[str, Tensor]) -> bytes:
    """The body of a message with these arrays; the same arrays give the same bytes."""
    parts: dict[str, Tensor] = {}
    for name, value in sorted(arrays.items()):
        plain = value.detach().cpu()
        if is_coded(plain.dtype, tuple(plain.shape)):
            parts[name + LOW], parts[name + HIGH] = _split(plain)
        else:
            parts[name] = plain.clone().contiguous()
    return save(parts) if parts else b""


def decode_arrays(body: bytes, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The arrays in a body. wanted: name -> (type, shape) of what is expected; a coded array must be one of these.

    Raises ValueError where a coded array is not what is expected; other arrays are returned as they are found.
    """
    found: dict[str, Tensor] = load(body) if body else {}
    for name, (dtype, shape) in wanted.items():
        if is_coded(dtype, shape) and name + LOW in found and name + HIGH in found and name not in found:
            found[name] = _join(found.pop(name + LOW), found.pop(name + HIGH), shape)
    return found


def is_coded(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether an array of this type and shape travels coded."""
    return dtype == torch.float32 and math.prod(shape) >= MIN_CODED_NUMBERS


def decode_own_arrays(body: bytes) -> dict[str, Tensor]:
    """The arrays of a body that this process wrote itself, coded arrays as vectors."""
    found: dict[str, Tensor] = load(body) if body else {}
    wanted = {
        name.removesuffix(LOW): (torch.float32, (value.shape[0],))
        for name, value in found.items()
        if name.endswith(LOW)
    }
    return decode_arrays(body, wanted)


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    numbers = np.ascontiguousarray(values.reshape(-1).numpy()).view(np.uint8).reshape(-1, 4)
    low = np.empty((len(numbers), 3), dtype=np.uint8)
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    high = bytearray()
    for start in range(0, len(numbers), CODED_PIECE):
        piece = numbers[start : start + CODED_PIECE]
        low[start : start + CODED_PIECE] = piece[:, :3]
        high += coder.compress(np.ascontiguousarray(piece[:, 3]).data)
    high += coder.flush()
    return torch.from_numpy(low), torch.frombuffer(high, dtype=torch.uint8)


def _join(low: Tensor, high: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if low.dtype != torch.uint8 or tuple(low.shape) != (count, 3) or high.dtype != torch.uint8 or high.dim() != 1:
        raise ValueError("a coded array is not of the right type or shape")
    numbers = np.empty((count, 4), dtype=np.uint8)
    numbers[:, :3] = low.numpy()
    reader, rest, at = zlib.decompressobj(-zlib.MAX_WBITS), high.numpy().tobytes(), 0
    while at < count:
        try:
            piece = reader.decompress(rest, min(CODED_PIECE, count - at))
        except zlib.error:
            raise ValueError("a coded array cannot be read") from None
        if not piece:
            raise ValueError("a coded array is too short")
        numbers[at : at + len(piece), 3] = np.frombuffer(piece, dtype=np.uint8)
        at, rest = at + len(piece), reader.unconsumed_tail
    if reader.decompress(rest, 1) or reader.unconsumed_tail or reader.unused_data or not reader.eof:
        raise ValueError("a coded array is too long")
    return torch.from_numpy(numbers.reshape(-1).view(np.float32)).reshape(shape)
