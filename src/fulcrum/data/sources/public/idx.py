"""Reader for the idx files of MNIST and Fashion-MNIST, gzipped or not, with strict checks."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fulcrum.data.tasks.arrays import AnyArray
from fulcrum.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
UNSIGNED_BYTE_CODE = 0x08  # idx's code for unsigned bytes, the only type these data sets use
IDX_CLASSES = 10


def read_maybe_gzipped(path: Path, limit: int) -> bytes:
    """The file's bytes, unzipped when they are gzipped (whatever the file is called).

    At most `limit` bytes plus one are read, so that a hostile file cannot fill the memory; the extra
    byte lets the caller see that there is more. Raises DataError naming the path.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not zipped:
                return file.read(limit + 1)
            with gzip.GzipFile(fileobj=file) as unzipped:
                return unzipped.read(limit + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is corrupt: {error}; fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def compute_idx_size(shape: tuple[int, ...]) -> int:
    """Bytes of an idx file with this shape: magic number, one length per dimension, the values."""
    return 4 + 4 * len(shape) + math.prod(shape)


def parse_idx_array(data: bytes, shape: tuple[int, ...], path: Path) -> AnyArray:
    """The array [shape] of uint8 in the content of an idx file; `path` is for the error message.

    The magic number, every dimension and the length must be exactly right. One-dimensional files are
    labels and must lie in 0..9.
    """
    header = 4 + 4 * len(shape)
    magic = bytes((0, 0, UNSIGNED_BYTE_CODE, len(shape)))
    if data[:4] != magic:
        raise DataError(f"{path} is corrupt: it starts with {data[:4].hex() or 'nothing'} instead of {magic.hex()}.")
    if len(data) < header:
        raise DataError(f"{path} is corrupt: it ends within its header, after {len(data)} bytes.")
    found = tuple(int(v) for v in np.frombuffer(data, dtype=">u4", count=len(shape), offset=4))
    if found != shape:
        raise DataError(f"{path} is corrupt: its header says shape {list(found)}, it should be {list(shape)}.")
    if len(data) != compute_idx_size(shape):
        problem = f"ends after {len(data):,} of" if len(data) < compute_idx_size(shape) else "is longer than"
        raise DataError(f"{path} is corrupt: it {problem} {compute_idx_size(shape):,} bytes.")
    values = np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)
    if len(shape) == 1 and values.size and int(values.max()) >= IDX_CLASSES:
        raise DataError(f"{path} is corrupt: it holds label {int(values.max())}; labels lie in 0..{IDX_CLASSES - 1}.")
    return values
