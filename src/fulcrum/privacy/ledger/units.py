"""Who was in which run: sets of units as keyed digests, and how they overlap.

A unit (an example, a person) is known to a ledger by a 16-byte digest, made with a key that stays with the data: the
ledger can tell that a unit was there before, and nothing else about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fulcrum.errors import InputError

UNIT_DIGEST_BYTES = 16
UnitArray = npt.NDArray[np.bytes_]
"""Unit digests [n] of type S16, sorted, each once. Fixed width, so comparing them compares all 16 bytes."""


def parse_units(digests: bytes) -> UnitArray:
    """The distinct units of concatenated 16-byte digests, sorted; InputError if it is cut off."""
    if len(digests) % UNIT_DIGEST_BYTES:
        raise InputError(
            f"unit digests have {len(digests)} bytes; they must be {UNIT_DIGEST_BYTES} bytes per unit, one after another."
        )
    return np.unique(np.frombuffer(digests, dtype=f"S{UNIT_DIGEST_BYTES}"))


def write_units(units: UnitArray) -> bytes:
    """The digests as stored: sorted and concatenated."""
    return units.tobytes()


def name_unit_set(members: bytes) -> bytes:
    """The name of a set of units: a digest of its sorted members."""
    return hashlib.blake2b(members, digest_size=16).digest()


def find_members(units: UnitArray, among: UnitArray) -> npt.NDArray[np.bool_]:
    """Whether each of `units` [n] is in the sorted set `among`."""
    if not len(among):
        return np.zeros(len(units), dtype=bool)
    at = np.minimum(np.searchsorted(among, units), len(among) - 1)
    return np.asarray(among[at] == units)


def group_by_history(units: UnitArray, sets: Sequence[UnitArray]) -> list[tuple[int, ...]]:
    """The distinct histories of these units: for each, the numbers of the sets that hold the unit."""
    if not len(units):
        return []
    held = np.stack([find_members(units, each) for each in sets], axis=1) if sets else np.zeros((len(units), 0), bool)
    packed = np.unique(np.packbits(held, axis=1), axis=0) if sets else np.zeros((1, 0), np.uint8)
    histories = np.unpackbits(packed, axis=1, count=len(sets)) if sets else np.zeros((1, 0), np.uint8)
    return [tuple(np.flatnonzero(row).tolist()) for row in histories]
