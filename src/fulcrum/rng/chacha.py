"""ChaCha20 (RFC 8439) as a source of random 64-bit words: the same words on every device, from a 256-bit key.

A stream is a key of 32 bytes and a nonce of three 32-bit numbers. Its words are the keystream, read as little-endian
64-bit integers. Three implementations give the same words: OpenSSL through `cryptography` on a CPU, a triton kernel on
a GPU, and plain torch where neither is available.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

KEY_BYTES = 32
WORDS_PER_BLOCK = 8
"""64-bit words per ChaCha20 block."""
MAX_WORDS_PER_STREAM = 2**32 * WORDS_PER_BLOCK
"""The block counter has 32 bits."""
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
"""The words "expand 32-byte k"."""

Nonce = tuple[int, int, int]


def draw_words(key: bytes, nonce: Nonce, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The first `count` words of one stream: int64 [count] on the device, every bit pattern equally likely."""
    place = torch.device(device)
    if place.type == "cpu":
        return _draw_on_host(key, nonce, count)
    return draw_many_words([(key, nonce)], count, place)[0]


def draw_many_words(streams: Sequence[tuple[bytes, Nonce]], count: int, device: torch.device) -> Tensor:
    """The first `count` words of several streams: int64 [streams, count] on the device."""
    if device.type == "cpu":
        found = torch.empty((len(streams), count), dtype=torch.int64)
        for row, (key, nonce) in zip(found, streams, strict=True):
            _fill_on_host(row, key, nonce)
        return found
    table = [[*struct.unpack("<8I", key), *nonce] for key, nonce in streams]
    # Two's complement: torch has signed integers only, and the bits are the same.
    signed = torch.tensor(table, dtype=torch.int64).to(torch.int32) if table else torch.zeros((0, 11)).to(torch.int32)
    return draw_keyed_words(signed.to(device), count)


def draw_keyed_words(table: Tensor, count: int) -> Tensor:
    """As `draw_many_words`, from a table int32 [streams, 11] on the device: 8 words of key, 3 of nonce."""
    _check_count(count)
    blocks = max(1, -(-count // WORDS_PER_BLOCK))
    found = _run_kernel(table, blocks)
    if found is None:
        found = _run_torch(table, blocks)
    return found.view(torch.int64).view(len(table), blocks * WORDS_PER_BLOCK)[:, :count]


def _check_count(count: int) -> None:
    if count > MAX_WORDS_PER_STREAM:
        raise ValueError(f"a stream has {MAX_WORDS_PER_STREAM} words, and {count} were asked for")


# --- on the host -------------------------------------------------------------------------------


@cache
def _openssl() -> Any:
    """The module with OpenSSL's ciphers; None where `cryptography` is not installed."""
    try:
        return importlib.import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError:
        return None


ZEROS = bytes(2**18)
"""What is encrypted, piece by piece: the keystream is what comes out."""


def _draw_on_host(key: bytes, nonce: Nonce, count: int) -> Tensor:
    words = torch.empty(count, dtype=torch.int64)
    _fill_on_host(words, key, nonce)
    return words


def _fill_on_host(words: Tensor, key: bytes, nonce: Nonce) -> None:
    """Write the first words of a stream into a contiguous tensor [count]."""
    _check_count(len(words))
    open_stream(key, nonce)(words)


def open_stream(key: bytes, nonce: Nonce, start: int = 0) -> Callable[[Tensor], None]:
    """A reader on the host: each call writes the next words of the stream, from word `start` on, into int64 [n]."""
    _check_count(start)
    block, skipped = divmod(start, WORDS_PER_BLOCK)
    ciphers = _openssl()
    if ciphers is None:
        return _open_torch_stream(key, nonce, start)
    initial = struct.pack("<4I", block, *nonce)  # the block counter, then the nonce
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, initial), mode=None).encryptor()
    cipher.update(ZEROS[: 8 * skipped])

    def read(words: Tensor) -> None:
        size = 8 * len(words)
        buffer = memoryview(words.numpy().data).cast("B") if size else memoryview(bytearray())
        for first in range(0, size, len(ZEROS)):
            last = min(first + len(ZEROS), size)
            cipher.update_into(memoryview(ZEROS)[: last - first], buffer[first:last])

    return read


def _open_torch_stream(key: bytes, nonce: Nonce, start: int) -> Callable[[Tensor], None]:
    table = torch.tensor([[*struct.unpack("<8I", key), *nonce]], dtype=torch.int64).to(torch.int32)
    place = [start]

    def read(words: Tensor) -> None:
        block, skipped = divmod(place[0], WORDS_PER_BLOCK)
        blocks = max(1, -(-(skipped + len(words)) // WORDS_PER_BLOCK))
        words.copy_(_run_torch(table, blocks, block).view(torch.int64).view(-1)[skipped : skipped + len(words)])
        place[0] += len(words)

    return read


# --- plain torch, on any device -----------------------------------------------------------------


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | ((x >> (32 - bits)) & ((1 << bits) - 1))  # the right shift keeps the sign: mask it


def _quarter_round(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = a + b
    d = _rotate_left(d ^ a, 16)
    c = c + d
    b = _rotate_left(b ^ c, 12)
    a = a + b
    d = _rotate_left(d ^ a, 8)
    c = c + d
    b = _rotate_left(b ^ c, 7)
    return a, b, c, d


def _run_torch(table: Tensor, blocks: int, first: int = 0) -> Tensor:
    """Words of the blocks from number `first` on, int32 [streams, blocks, 16].

    The four columns (or diagonals) of a round go together.
    """
    streams, device = len(table), table.device
    constants = torch.tensor([value - (value >> 31 << 32) for value in CONSTANTS], dtype=torch.int32, device=device)
    numbers = torch.arange(first, first + blocks, dtype=torch.int64, device=device)
    counter = numbers.to(torch.int32).expand(streams, 1, blocks)
    start = torch.stack(
        [
            constants[None, :, None].expand(streams, 4, blocks),
            table[:, :4, None].expand(streams, 4, blocks),
            table[:, 4:8, None].expand(streams, 4, blocks),
            torch.cat([counter, table[:, 8:11, None].expand(streams, 3, blocks)], dim=1),
        ]
    )  # [4 rows, streams, 4 columns, blocks]
    a, b, c, d = start.unbind(0)
    for _ in range(10):
        a, b, c, d = _quarter_round(a, b, c, d)
        b, c, d = b.roll(-1, 1), c.roll(-2, 1), d.roll(-3, 1)
        a, b, c, d = _quarter_round(a, b, c, d)
        b, c, d = b.roll(1, 1), c.roll(2, 1), d.roll(3, 1)
    end = torch.stack([a, b, c, d]) + start
    return end.permute(1, 3, 0, 2).reshape(streams, blocks, 16).contiguous()


# --- a triton kernel ----------------------------------------------------------------------------

kernel_failures: list[str] = []
"""Why the kernel is not used on a GPU; empty if it works."""


def _run_kernel(table: Tensor, blocks: int) -> Tensor | None:
    """As `_run_torch`; None where triton is missing or the kernel does not compile."""
    if table.device.type != "cuda" or kernel_failures or not len(table):
        return None
    try:
        kernels = importlib.import_module("fulcrum.rng.kernels")
        out = torch.empty((len(table), blocks, 16), dtype=torch.int32, device=table.device)
        size = 128
        programs = -(-blocks // size)
        with torch.cuda.device_of(table):
            kernels.chacha20_kernel[(len(table) * programs,)](table.contiguous(), out, blocks, programs, SIZE=size)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        kernel_failures.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
        return None
    return out
