"""Poisson samples of examples and of persons."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fulcrum.data import PartyData, build_party_data, from_arrays, poisson_sample_units, split
from fulcrum.data.sampling import _find_words_below
from fulcrum.errors import ConfigError
from fulcrum.rng import RecordedRandomness, SecureRandomness, SeededRandomness
from fulcrum.rng.normals import words_to_uniforms
from fulcrum.settings.schema import Data

PERSON = np.array([5, 5, 9, 2, 9, 5, 2, 7, 8, 8, 5, 1])


def dataset(person=None):
    x = np.arange(12, dtype=np.float32)[:, None]
    return from_arrays(x, np.arange(12) % 2, x, np.arange(12) % 2, person=person)


def one_party(data):
    return split(data, Data(partition="iid", parties=1, min_examples=1), 0)


def recorded(*values):
    return RecordedRandomness({("sample", 0): torch.tensor(values, dtype=torch.float64)}, {})


def test_examples_are_their_own_units():
    data = dataset()
    partition = split(data, Data(partition="iid", parties=2, min_examples=1), 0)
    party = build_party_data(data, partition, 1, "example")
    assert torch.equal(party.index, partition.indices(1))
    assert party.unit_of.tolist() == list(range(6))
    assert party.units == 6


def test_persons_are_numbered_within_their_party():
    data = dataset(PERSON)
    party = build_party_data(data, one_party(data), 0, "person")
    assert party.units == 6
    assert torch.equal(torch.unique(torch.from_numpy(PERSON))[party.unit_of], torch.from_numpy(PERSON))


def test_a_person_unit_needs_ids_and_units_are_named():
    data = dataset()
    with pytest.raises(ConfigError, match="no person ids"):
        build_party_data(data, one_party(data), 0, "person")
    with pytest.raises(ConfigError, match="choose example or person"):
        build_party_data(data, one_party(data), 0, "patient")


def test_a_unit_joins_exactly_when_its_number_is_below_the_rate():
    party = PartyData(torch.tensor([40, 41, 42, 43]), torch.arange(4), 4)
    rows, slots, count = poisson_sample_units(recorded(0.3, 0.1, 0.2999, 0.9), ("sample", 0), party, 0.3)
    assert rows.tolist() == [41, 42]
    assert slots.tolist() == [0, 1]
    assert count == 2


def test_all_records_of_a_sampled_person_come_with_their_slot():
    data = dataset(PERSON)
    party = build_party_data(data, one_party(data), 0, "person")
    # persons in order 1, 2, 5, 7, 8, 9: take 2, 5 and 9
    rows, slots, count = poisson_sample_units(recorded(0.9, 0.1, 0.1, 0.9, 0.9, 0.1), ("sample", 0), party, 0.5)
    assert count == 3
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 10]
    assert slots.tolist() == [1, 1, 2, 0, 2, 1, 0, 1]
    assert [int(PERSON[r]) for r in rows] == [[2, 5, 9][s] for s in slots]


@pytest.mark.parametrize("randomness", [SeededRandomness(0), SecureRandomness()])
def test_rate_one_takes_everyone_and_a_sample_may_be_empty(randomness):
    party = PartyData(torch.arange(50), torch.arange(50), 50)
    rows, slots, count = poisson_sample_units(randomness, ("sample", 1), party, 1.0)
    assert rows.tolist() == slots.tolist() == list(range(50))
    assert count == 50
    rows, slots, count = poisson_sample_units(recorded(*[0.5] * 50), ("sample", 0), party, 0.5)
    assert (len(rows), len(slots), count) == (0, 0, 0)
    assert rows.dtype == slots.dtype == torch.int64


def test_seeded_samples_repeat_by_key_and_differ_between_keys():
    party = PartyData(torch.arange(200), torch.arange(200), 200)
    first, again, other = (
        poisson_sample_units(SeededRandomness(3), ("sample", k), party, 0.5)[0].tolist() for k in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_counts_are_binomial_and_not_of_a_fixed_size():
    units, rate, steps = 400, 0.1, 2000
    party = PartyData(torch.arange(units), torch.arange(units), units)
    counts = np.array([poisson_sample_units(SeededRandomness(0), ("sample", t), party, rate)[2] for t in range(steps)])
    shuffled = np.full(steps, 40)  # what batches cut from a shuffled list would give

    def p_values(observed):
        """Two-sided tests of the mean and of the variance against Binomial(units, rate)."""
        mean, variance = units * rate, units * rate * (1 - rate)
        z = (observed.mean() - mean) / np.sqrt(variance / steps)
        spread = ((observed - mean) ** 2).sum() / variance
        tail = stats.chi2.cdf(spread, steps)
        return 2 * stats.norm.sf(abs(z)), 2 * min(tail, 1 - tail)

    assert min(p_values(counts)) > 1e-3
    assert min(p_values(shuffled)) < 1e-9
    assert min(p_values(counts + 2)) < 1e-9  # a rate of 0.105


@pytest.mark.parametrize("rate", [0.0, 1e-300, 0.01, 1 / 3, 0.5, 1 - 2.0**-53, 1.0])
def test_a_sample_from_words_is_the_one_from_uniform_numbers(rate):
    party = PartyData(torch.arange(500).flip(0), torch.arange(500), 500, apart=True)
    for t in range(5):
        rows, slots, count = poisson_sample_units(SeededRandomness(3), ("sample", t), party, rate)
        joins = SeededRandomness(3).uniform(("sample", t), 500) < rate
        assert torch.equal(rows, party.index[joins])
        assert slots.tolist() == list(range(count))
        assert count == int(joins.sum())


def test_a_word_at_the_limit_is_not_below_it():
    limit = math.ceil(0.3 * 2**53) << 11
    unsigned = [0, limit - 1, limit, limit + 1, 2**63 - 1, 2**63, 2**64 - 1]
    words = torch.from_numpy(np.array(unsigned, dtype=np.uint64).view(np.int64))
    found = _find_words_below(words, 0.3)
    assert found.tolist() == [0, 1]
    assert torch.equal(found, torch.nonzero(words_to_uniforms(words) < 0.3)[:, 0])
