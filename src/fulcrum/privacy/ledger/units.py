"""Who was in which run: sets of units as keyed digests, and how they overlap.

A unit (an example, a person) is known to a ledger by a 16-byte digest, made with a key that stays with the data: the
ledger can tell that a unit was there before, and nothing else about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

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
            f"unit digests have {len(digests)} bytes; they must be {UNIT_DIGEST_BYTES} bytes per unit, in one piece."
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


def merge_units(sets: Sequence[UnitArray]) -> UnitArray:
    """The union of sets of units."""
    return np.unique(np.concatenate([np.zeros(0, dtype=f"S{UNIT_DIGEST_BYTES}"), *sets]))


def find_shared_units(known: Mapping[str, UnitArray], given: Mapping[str, UnitArray]) -> tuple[str, str, int] | None:
    """(given party, other party, number of units) of the first units of a given party that another party has too.

    known: units by party, on record. given: units by party, now. One sort over all units, whatever their number.
    """
    parts = [(party, units, True) for party, units in given.items()]
    parts += [(party, units, False) for party, units in known.items()]
    if not parts:
        return None
    names = list(dict.fromkeys(party for party, _, _ in parts))
    number = {party: i for i, party in enumerate(names)}
    units = np.concatenate([units for _, units, _ in parts])
    owner = np.concatenate([np.full(len(units), number[party]) for party, units, _ in parts])
    order = np.lexsort((owner, units))
    units, owner = units[order], owner[order]
    # Owners of one unit lie side by side; where two of them differ the unit is shared.
    places = np.flatnonzero((units[1:] == units[:-1]) & (owner[1:] != owner[:-1]))
    for at in places:
        pair = [names[owner[at]], names[owner[at + 1]]]
        mine = next((party for party in pair if party in given), None)
        if mine is not None:
            other = next(party for party in pair if party != mine)
            theirs = merge_units([each[other] for each in (known, given) if other in each])
            return mine, other, int(find_members(given[mine], theirs).sum())
    return None
