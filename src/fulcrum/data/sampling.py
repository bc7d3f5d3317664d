"""The data of one party, and the Poisson sample of a local step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fulcrum.data.dataset import Dataset
from fulcrum.data.partition import Partition
from fulcrum.errors import ConfigError
from fulcrum.rng import CipherRandomness, Randomness, StreamKey


@dataclass(frozen=True, eq=False)
class PartyData:
    """A party's records, grouped by privacy unit.

    index [m] int64: rows of the Dataset. unit_of [m] int64: the unit (0..units-1) of each row:
    the row itself when examples are protected (apart is then True), its person when persons are.
    """

    index: Tensor
    unit_of: Tensor
    units: int
    apart: bool = False


def build_party_data(dataset: Dataset, partition: Partition, k: int, unit: str) -> PartyData:
    """Party k's records, with "example" or "person" as the unit of privacy."""
    index = partition.indices(k)
    if unit == "example":
        return PartyData(index, torch.arange(len(index)), len(index), apart=True)
    if unit != "person":
        raise ConfigError(f"privacy.unit = {unit!r} is not known; choose example or person.")
    if dataset.person is None:
        raise ConfigError(
            f'privacy.unit = "person", but {dataset.name} has no person ids; add an array called person with the '
            'id of each record\'s person, or use privacy.unit = "example".'
        )
    persons, unit_of = torch.unique(dataset.person[index], return_inverse=True)
    return PartyData(index, unit_of, len(persons))


def poisson_sample_units(
    randomness: Randomness, key: StreamKey, party: PartyData, rate: float
) -> tuple[Tensor, Tensor, int]:
    """A Poisson sample: every unit joins independently with probability `rate`.

    Returns rows [b] (Dataset rows of all records of the sampled units), slots [b] (0..count-1, the
    sampled unit of each row) and count, which may be 0: for an empty sample, noise is still added and a step is taken.
    """
    own = isinstance(randomness, CipherRandomness) and type(randomness).uniform is CipherRandomness.uniform
    if party.apart and own:  # the same sample, without a float64 for each unit
        chosen = _find_words_below(cast(CipherRandomness, randomness).words(key, party.units), rate)
        return party.index[chosen], party.unit_of[: len(chosen)], len(chosen)
    joins = randomness.uniform(key, party.units) < rate  # uniform is in [0, 1), so rate 1 samples every unit
    if party.apart:
        rows = party.index[joins]
        return rows, party.unit_of[: len(rows)], len(rows)
    slot = joins.cumsum(0) - 1
    here = joins[party.unit_of]
    return party.index[here], slot[party.unit_of[here]], int(joins.sum())


def _find_words_below(words: Tensor, rate: float) -> Tensor:
    """Where `words_to_uniforms` of words int64 [n] is below rate: places [b] int64, from the words themselves.

    A number is k / 2^53 with k the word's first 53 bits, unsigned. It is below the rate if k is below 2^53 times the
    rate, which float64 holds exactly; so if the word is below the next integer, followed by 11 zero bits.
    """
    limit = math.ceil(math.ldexp(rate, 53)) << 11
    if limit >= 2**64:
        return torch.arange(len(words))
    return torch.from_numpy(np.flatnonzero(words.numpy().view(np.uint64) < np.uint64(max(0, limit))))


def count_units_per_party(dataset: Dataset, partition: Partition, unit: str) -> Tensor:
    """Number of units n_k of every party [K] int64: its examples, or its persons where persons are protected."""
    if unit != "person" or dataset.person is None:
        return partition.sizes
    parties = torch.repeat_interleave(torch.arange(partition.parties), partition.sizes)
    pairs = torch.stack([parties, dataset.person[partition.order]])
    return torch.bincount(torch.unique(pairs, dim=1)[0], minlength=partition.parties)
