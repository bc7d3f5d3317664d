"""An array that grows by pieces: in memory while it is small, then in a file without a name that the system maps."""

from __future__ import annotations

import tempfile
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.data.table.pieces import read_limit
from fulcrum.errors import DataError

SPILL_BYTES = 256 * 1024 * 1024
"""Bytes that are kept in memory; FULCRUM_TABLE_MEMORY (bytes) changes it."""


class GrowingArray:
    """Rows of one type and shape, appended in pieces.

    Above the limit they go to a temporary file in TMPDIR that has no name and is gone with the process; it is mapped
    into memory, so that the system reads what is used and drops the rest.
    """

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self.parts: list[npt.NDArray[Any]] = []
        self.file: IO[bytes] | None = None
        self.rows = 0
        self.limit = read_limit("FULCRUM_TABLE_MEMORY", SPILL_BYTES)

    def append(self, values: npt.NDArray[Any]) -> None:
        """Add rows [m, *shape]."""
        part = np.ascontiguousarray(values, dtype=self.dtype)
        self.rows += len(part)
        if self.file is not None:
            self._write(part)
            return
        self.parts.append(part)
        if sum(each.nbytes for each in self.parts) > self.limit:
            self.file = tempfile.TemporaryFile(prefix="fulcrum-table-")  # noqa: SIM115  lives as long as its map
            for each in self.parts:
                self._write(each)
            self.parts = []

    def _write(self, part: npt.NDArray[Any]) -> None:
        assert self.file is not None
        try:
            self.file.write(part.data)
        except OSError as error:
            raise DataError(
                f"the table does not fit into the temporary folder {tempfile.gettempdir()} ({error.strerror or error});"
                " name one with more space in TMPDIR."
            ) from error

    def finish(self) -> Tensor:
        """All rows [n, *shape]."""
        if self.file is None:
            empty = np.empty((0, *self.shape), dtype=self.dtype)
            return torch.from_numpy(np.concatenate(self.parts) if self.parts else empty)
        self.file.flush()
        # Shared with the file, which nobody else can open: a private map would be charged against the memory.
        mapped = np.memmap(self.file, dtype=self.dtype, mode="r+", shape=(self.rows, *self.shape))
        self.close()  # the map stays
        return torch.from_numpy(mapped)

    def close(self) -> None:
        """Let go of the file."""
        if self.file is not None:
            self.file.close()
