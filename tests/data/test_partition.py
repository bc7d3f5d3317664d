"""Splits over parties: exact, above the floor, by the seed alone, with the law they promise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fulcrum.data import Partition, from_arrays, split
from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.schema import Data

KINDS = ("iid", "dirichlet", "shards", "quantity")


def dataset(labels, person=None, party=None):
    labels = np.asarray(labels)
    x = np.arange(len(labels), dtype=np.float32)[:, None]
    return from_arrays(x, labels, x[:1], labels[:1], person=person, party=party, classes=max(2, int(labels.max()) + 1))


def check_exact(partition: Partition, n: int):
    """Every record lies at exactly one party."""
    parts = [partition.indices(k) for k in range(partition.parties)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))
    assert partition.sizes.tolist() == [len(part) for part in parts]
    assert all(bool((part.diff() > 0).all()) for part in parts)


def together(partition: Partition, person) -> bool:
    owners = np.empty(len(person), dtype=int)
    for k in range(partition.parties):
        owners[partition.indices(k).numpy()] = k
    return all(len(set(owners[np.asarray(person) == p])) == 1 for p in set(person))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 60),
    parties=st.integers(1, 12),
    floor=st.integers(1, 8),
    shards=st.integers(1, 4),
    alpha=st.sampled_from([1e-300, 0.01, 0.5, 100.0]),
    classes=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_a_split_is_exact_and_above_the_floor_or_impossible(kind, n, parties, floor, shards, alpha, classes, seed):
    data = dataset(np.arange(n) % classes)
    wanted = Data(partition=kind, parties=parties, min_examples=floor, shards=shards, alpha=alpha)
    if floor * parties > n or (kind == "shards" and shards * parties > n):
        with pytest.raises(ConfigError):
            split(data, wanted, seed)
        return
    partition = split(data, wanted, seed)
    assert partition.parties == parties
    check_exact(partition, n)
    assert int(partition.sizes.min()) >= floor
    again = split(data, wanted, seed)
    assert torch.equal(partition.order, again.order)
    assert torch.equal(partition.starts, again.starts)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    person=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    parties=st.integers(1, 6),
    floor=st.integers(1, 8),
    alpha=st.sampled_from([0.01, 0.5, 100.0]),
    seed=st.integers(0, 3),
)
def test_people_stay_whole(kind, person, parties, floor, alpha, seed):
    data = dataset(np.arange(len(person)) % 3, person=np.array(person))
    wanted = Data(partition=kind, parties=parties, min_examples=floor, shards=1, alpha=alpha)
    try:
        partition = split(data, wanted, seed)
    except ConfigError:
        # refused at once, or because whole people cannot be cut to fit
        assert parties > len(set(person)) or floor * parties > len(person) or floor > 1
        return
    check_exact(partition, len(person))
    assert int(partition.sizes.min()) >= floor
    assert together(partition, person)


def test_without_ids_people_would_be_torn():
    person = np.arange(60) // 6
    torn = split(dataset(np.arange(60) % 3), Data(partition="iid", parties=4), 0)
    assert not together(torn, person)  # so that the check above can fail


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_and_no_global_generator_is_touched(kind):
    data = dataset(np.arange(300) % 5)
    before = np.random.get_state(legacy=False)["state"]["key"].copy(), torch.get_rng_state()
    first, other = (split(data, Data(partition=kind, parties=5), seed) for seed in (0, 1))
    assert not torch.equal(first.order, other.order)
    assert np.array_equal(before[0], np.random.get_state(legacy=False)["state"]["key"])
    assert torch.equal(before[1], torch.get_rng_state())


def test_iid_is_even_and_blind_to_labels():
    data = dataset(np.arange(5003) % 10)

    def p_value(kind):
        partition = split(data, Data(partition=kind, parties=5, alpha=0.5), 1)
        table = [data.y[partition.indices(k)].bincount(minlength=10).tolist() for k in range(5)]
        return stats.chi2_contingency(table).pvalue, partition.sizes

    p, sizes = p_value("iid")
    assert sizes.tolist() == [1001, 1001, 1001, 1000, 1000]
    assert p > 1e-3
    assert p_value("quantity")[0] > 1e-3
    assert p_value("dirichlet")[0] < 1e-9  # the test sees label skew where there is some
    assert p_value("shards")[0] < 1e-9


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_dirichlet_shares_follow_their_law(alpha):
    """One party's share of a class is Beta(alpha, alpha (K - 1)); half and twice alpha are rejected."""
    parties, per_class = 4, 1000
    data = dataset(np.repeat(np.arange(10), per_class))
    shares = []
    for seed in range(300):
        partition = split(data, Data(partition="dirichlet", parties=parties, alpha=alpha, min_examples=1), seed)
        shares += (data.y[partition.indices(0)].bincount(minlength=10) / per_class).tolist()

    def p_value(a):
        return stats.kstest(shares, stats.beta(a, a * (parties - 1)).cdf).pvalue

    assert p_value(alpha) > 1e-3
    assert p_value(alpha / 2) < 1e-6
    assert p_value(alpha * 2) < 1e-6


def test_quantity_sizes_follow_their_law():
    data = dataset(np.arange(2000) % 2)
    sizes = []
    for seed in range(2000):
        partition = split(data, Data(partition="quantity", parties=4, alpha=2.0, min_examples=1), seed)
        sizes.append(float(partition.sizes[0]) / 2000)
    assert stats.kstest(sizes, stats.beta(2.0, 6.0).cdf).pvalue > 1e-3
    assert stats.kstest(sizes, stats.beta(1.0, 3.0).cdf).pvalue < 1e-6
    assert stats.kstest(sizes, stats.beta(4.0, 12.0).cdf).pvalue < 1e-6


def test_shards_give_few_labels_each():
    data = dataset(np.random.default_rng(0).permutation(np.arange(1000) % 10))

    def labels(kind):
        partition = split(data, Data(partition=kind, parties=10, shards=2), 0)
        assert partition.sizes.tolist() == [100] * 10
        return max(len(data.y[partition.indices(k)].unique()) for k in range(10))

    assert labels("shards") <= 2
    assert labels("iid") == 10


def test_the_floor_is_reached_even_where_nothing_is_left_over():
    data = dataset(np.arange(100) % 4)
    for kind in KINDS:
        partition = split(data, Data(partition=kind, parties=10, min_examples=10, alpha=0.01), 0)
        assert partition.sizes.tolist() == [10] * 10
    # without the floor this draw leaves parties almost empty, so the floor did something
    assert int(split(data, Data(partition="quantity", parties=10, min_examples=1, alpha=0.01), 0).sizes.min()) == 1


def test_lifting_keeps_what_need_not_move():
    data = dataset(np.arange(2000) % 10)
    low = split(data, Data(partition="dirichlet", parties=8, min_examples=1, alpha=0.1), 5)
    high = split(data, Data(partition="dirichlet", parties=8, min_examples=60, alpha=0.1), 5)
    assert int(low.sizes.min()) < 60
    moved = sum(len(set(high.indices(k).tolist()) - set(low.indices(k).tolist())) for k in range(8))
    assert moved == int((60 - low.sizes).clamp(min=0).sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["iid", "quantity"])
def test_a_million_parties(kind):
    n = 1_500_000
    data = dataset(np.arange(n) % 2)
    partition = split(data, Data(partition=kind, parties=1_000_000, min_examples=1), 0)
    assert partition.parties == 1_000_000
    assert int(partition.sizes.min()) == 1
    assert int(partition.sizes.sum()) == n
    assert torch.equal(partition.order.sort().values, torch.arange(n))
    assert partition.name(999_999) == "party-999999"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Data(partition="iid", parties=101, min_examples=1), ["101", "100 examples", "at most 100"]),
        (Data(partition="iid", parties=20, min_examples=10), ["200 examples", "has 100", "10 parties", "at most 5"]),
        (Data(partition="shards", parties=20, shards=6, min_examples=1), ["120 shards", "at most 5 shards"]),
        (Data(partition="iid", parties=0), ["data.parties = 0"]),
        (Data(partition="iid", min_examples=0), ["data.min_examples = 0"]),
        (Data(partition="dirichelet"), ["dirichelet", "did you mean 'dirichlet'"]),
    ],
)
def test_impossible_requests_are_explained_with_the_numbers(wanted, words):
    with pytest.raises(ConfigError) as caught:
        split(dataset(np.arange(100) % 4), wanted, 0)
    for word in words:
        assert word in str(caught.value)


# --- people -----------------------------------------------------------------------------------


def test_more_parties_than_people_is_impossible():
    data = dataset(np.arange(100) % 4, person=np.arange(100) // 10)
    with pytest.raises(ConfigError, match="only 10 persons"):
        split(data, Data(partition="iid", parties=11, min_examples=1), 0)


def test_people_are_moved_whole_to_reach_the_floor():
    person = np.repeat(np.arange(40), np.arange(40) % 7 + 1)
    data = dataset(np.arange(len(person)) % 3, person=person)
    for seed in range(5):
        for kind in KINDS:
            partition = split(data, Data(partition=kind, parties=6, min_examples=20, alpha=0.1, shards=2), seed)
            assert int(partition.sizes.min()) >= 20
            check_exact(partition, len(person))
            assert together(partition, person)


def test_nobody_is_pushed_below_the_floor_by_giving():
    # people of three records: 10 records take four people, so 11 people are enough for two parties but not for three
    data = dataset(np.arange(33) % 3, person=np.arange(33) // 3)
    assert int(split(data, Data(partition="iid", parties=2, min_examples=10), 0).sizes.min()) >= 10
    with pytest.raises(ConfigError, match="whole persons"):
        split(data, Data(partition="iid", parties=3, min_examples=10), 0)


def test_a_floor_that_whole_people_cannot_meet_is_explained():
    person = np.array([0] * 30 + [1, 2, 3])  # one person has almost everything
    data = dataset(np.arange(33) % 3, person=person)
    with pytest.raises(ConfigError, match=r"whole persons \(one has up to 30 records"):
        split(data, Data(partition="iid", parties=3, min_examples=10), 0)


def test_people_count_by_their_most_frequent_label():
    # each person has three records of a label of their own and one of label 0
    own = np.arange(40) % 4
    person = np.repeat(np.arange(40), 4)
    labels = np.stack([own, own, own, np.zeros(40, int)], axis=1).reshape(-1)
    partition = split(dataset(labels, person=person), Data(partition="shards", parties=4, shards=1), 0)
    for k in range(4):
        people = np.unique(person[partition.indices(k).numpy()])
        assert len(set(own[people])) == 1


# --- given ------------------------------------------------------------------------------------


def test_given_parties_are_taken_as_they_are():
    party = np.array(["b", "a", "b"] * 20)
    partition = split(dataset(np.arange(60) % 2, party=party), Data(partition="given", parties=17), 0)
    assert partition.parties == 2
    assert [partition.name(k) for k in range(2)] == ["a", "b"]
    assert partition.indices(0).tolist() == list(range(1, 60, 3))
    check_exact(partition, 60)


def test_given_parties_must_exist_and_be_large_enough():
    with pytest.raises(DataError, match="does not name the party"):
        split(dataset(np.arange(60) % 2), Data(partition="given"), 0)
    small = dataset(np.arange(60) % 2, party=np.array(["tiny"] * 3 + ["big"] * 57))
    with pytest.raises(DataError, match=r"party 'tiny' holds 3 examples, fewer than data\.min_examples = 10"):
        split(small, Data(partition="given"), 0)
    assert split(small, Data(partition="given", min_examples=3), 0).sizes.tolist() == [57, 3]


def test_parties_are_counted_from_zero():
    partition = split(dataset(np.arange(60) % 2), Data(parties=3), 0)
    for k in (-1, 3):
        with pytest.raises(IndexError):
            partition.indices(k)


# --- targets that are no classes --------------------------------------------------------------


def numbers(**more):
    x = np.arange(60, dtype=np.float32)[:, None]
    return from_arrays(x, x[:, 0], task="regression", **more)


def test_auto_is_dirichlet_for_classes_and_iid_otherwise():
    labels = np.arange(60) % 3
    x = np.arange(60, dtype=np.float32)[:, None]
    classes = from_arrays(x, labels, public=True)
    answers = from_arrays(x, labels % 2, task="binary", public=True)
    for data, method in ((classes, "dirichlet"), (answers, "dirichlet"), (numbers(public=True), "iid")):
        auto, named = (split(data, Data(parties=4, min_examples=2, partition=name), 0) for name in ("auto", method))
        assert torch.equal(auto.order, named.order)
        assert torch.equal(auto.starts, named.starts)


@pytest.mark.parametrize("method", ["iid", "quantity"])
def test_numbers_are_split_and_persons_stay_whole(method):
    person = np.arange(60) // 5
    part = split(numbers(person=person), Data(parties=3, min_examples=2, partition=method), 0)
    assert sorted(part.order.tolist()) == list(range(60))
    owners = [set(person[part.indices(k).numpy()]) for k in range(3)]
    assert sum(map(len, owners)) == 12


@pytest.mark.parametrize("method", ["dirichlet", "shards"])
def test_a_split_by_class_of_numbers_is_refused(method):
    with pytest.raises(ConfigError, match=f"'{method}' splits by class, and the targets of task 'regression'"):
        split(numbers(), Data(parties=3, partition=method), 0)
