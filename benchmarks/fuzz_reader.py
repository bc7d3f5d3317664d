"""A reader to be fuzzed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_inputs import Mutate


@dataclass(frozen=True)
class Reader:
    """A reader of files or bytes. read(content, folder): reads it, in a folder of its own. errors: what it documents.

    share: how many of all inputs it gets, relative to the others.
    """

    name: str
    seeds: Sequence[bytes]
    mutate: Mutate
    read: Callable[[bytes, Path], Any]
    errors: tuple[type[BaseException], ...]
    share: float = 1.0


def of_file(name: str, call: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    """A reader of one file of this name."""

    def read(content: bytes, folder: Path) -> Any:
        path = folder / name
        path.write_bytes(content)
        return call(path)

    return read
