"""Arrays become a Dataset only when they are sound; a held-out part replaces the test set."""

import dataclasses

import numpy as np
import pytest
import torch

from fulcrum.data import Dataset, from_arrays, holdout
from fulcrum.errors import ConfigError, DataError


def arrays(n=12, test=6, classes=3):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(n, 4)),
        "y": np.arange(n) % classes,
        "x_test": rng.normal(size=(test, 4)),
        "y_test": np.arange(test) % classes,
    }


def make(**changes):
    return from_arrays(**{**arrays(), "public": True, **changes})


def test_numpy_torch_and_lists_give_the_same_dataset():
    given = arrays()
    from_numpy = make()
    from_torch = make(**{key: torch.from_numpy(value) for key, value in given.items()})
    from_lists = make(**{key: value.tolist() for key, value in given.items()})
    assert from_numpy.x.dtype == torch.float32
    assert from_numpy.y.dtype == torch.int64
    assert from_numpy.classes == 3
    assert from_numpy.shape == (4,)
    assert torch.equal(from_numpy.x, torch.from_numpy(given["x"].astype(np.float32)))
    assert from_numpy.fingerprint == from_torch.fingerprint == from_lists.fingerprint
    assert len(from_numpy.fingerprint) == 16


def test_unusual_but_right_arrays_are_taken():
    big_endian = make(x=arrays()["x"].astype(">f4"), y=arrays()["y"].astype(">i2"))
    assert torch.equal(big_endian.x, make(x=arrays()["x"].astype("<f4")).x)
    frozen = arrays()["x"].astype(np.float32)
    frozen.flags.writeable = False
    made = make(x=frozen)  # torch warns about read-only arrays, and warnings are errors here
    assert made.x.shape == (12, 4)
    assert make(x=torch.ones(12, 4, dtype=torch.bfloat16)).x.dtype == torch.float32
    assert (
        make(x=torch.ones(4, 12).T, x_test=torch.ones(6, 4)).fingerprint
        == make(x=torch.ones(12, 4), x_test=torch.ones(6, 4)).fingerprint
    )


def test_numpy_input_is_copied():
    given = arrays()
    made = make(**given)
    before = made.x.clone()
    given["x"][:] = 7
    assert torch.equal(made.x, before)


@pytest.mark.parametrize(
    "change",
    [
        {"x": arrays()["x"] + 1e-3},
        {"y": (arrays()["y"] + 1) % 3},
        {"y_test": (arrays()["y_test"] + 1) % 3},
        {"person": np.arange(12)},
        {"party": np.arange(12) % 2},
        {"classes": 5},
    ],
)
def test_fingerprint_changes_with_any_content(change):
    assert make(**change).fingerprint != make().fingerprint


def with_value(key, value):
    array = arrays()[key].astype(np.float64 if key.startswith("x") else np.int64)
    array.reshape(-1)[9 if key == "x" else 2] = value
    return {key: array}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_value("x", np.nan), ["x holds NaN", "1 of 12", "record 2"]),
        (with_value("x", np.inf), ["x holds NaN or infinite"]),
        (with_value("x", 1e300), ["x holds NaN or infinite", "32-bit"]),
        (with_value("x_test", -np.inf), ["x_test", "record 0"]),
        (with_value("y", -1), ["-1", "from 0"]),
        ({**with_value("y", 3), "classes": 3}, ["3", "0..2"]),
        ({**with_value("y_test", 3), "classes": 3}, ["3", "0..2"]),
        (with_value("y", 100_000), ["100000", "number the classes"]),
        ({"y": np.zeros(12, int), "y_test": np.zeros(6, int)}, ["two classes"]),
        ({"classes": 1}, ["at least 2"]),
        ({"y": arrays()["y"].astype(float)}, ["y holds decimal numbers", "integers", "--task regression"]),
        ({"y": np.array(["a"] * 12)}, ["y holds text"]),
        ({"y": np.arange(11) % 3}, ["y has 11 entries", "x has 12"]),
        ({"y_test": np.arange(7) % 3}, ["y_test has 7", "x_test has 6"]),
        ({"y": np.eye(12, 3, dtype=int)}, ["y has shape [12, 3]", "[n]"]),
        ({"x_test": np.ones((6, 5))}, ["[4]", "[5]", "same"]),
        ({"x": np.ones((0, 4)), "y": np.ones(0, int)}, ["x is empty"]),
        ({"x_test": np.ones((6, 0))}, ["x_test is empty"]),
        ({"x": np.ones(12)}, ["x has shape [12]", "[n, features]"]),
        ({"x": np.array([[1, "a"]] * 12, dtype=object)}, ["x holds Python objects", "real numbers"]),
        ({"x": np.ones((12, 4), complex)}, ["complex"]),
        ({"x": [[1, 2], [3]]}, ["x is not an array"]),
        ({"x": None}, ["x is missing"]),
        ({"y_test": None}, ["y_test is missing"]),
        ({"x": None, "y": None, "person": np.arange(12)}, ["person is given without"]),
        ({"x_test": None, "y_test": None, "party_test": np.zeros(6, int)}, ["party_test is given without"]),
        ({"x": {}}, ["x is an empty dict"]),
        ({"x": {"ids": np.ones((12, 2)), "mask": np.ones((11, 2))}}, ["ids 12, mask 11", "equally many"]),
        ({"party": ["a", "b"] * 6, "party_test": ["a", "c"] * 3}, ["party_test names 'c'"]),
        ({"person": np.arange(11)}, ["person has 11"]),
        ({"person": np.linspace(0, 1, 12)}, ["person holds decimal numbers"]),
        ({"party": np.arange(12), "party_names": ("a", "b")}, ["0..1"]),
        ({"party": np.arange(12) % 2, "party_names": ("a", "a")}, ["repeats"]),
        ({"party_names": ("a",)}, ["without party"]),
    ],
)
def test_wrong_arrays_are_refused_with_a_sentence(change, words):
    with pytest.raises(DataError) as caught:
        make(**change)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).endswith((".", "..."))


def test_values_whose_sum_overflows_are_still_finite():
    assert make(x=np.full((12, 4), 3e38)).x.max() > 2e38


def test_bytes_come_with_a_warning_and_floats_without():
    assert "127.5" in make(x=np.ones((12, 4), np.uint8)).warnings[0]
    assert make().warnings == ()


def test_people_and_parties_by_text_or_number():
    people = make(person=["eve", "bob", "eve"] * 4)
    assert people.person is not None
    assert people.person[:3].tolist() == [1, 0, 1]
    assert make(person=np.array([70, 7, 70] * 4)).person[:3].tolist() == [70, 7, 70]
    clinics = make(party=np.array(["north", "south", "east"] * 4))
    assert clinics.party_names == ("east", "north", "south")
    assert clinics.party[:3].tolist() == [1, 2, 0]
    numbered = make(party=[3, 9] * 6)
    assert numbered.party_names == ("party-3", "party-9")
    assert numbered.party[:2].tolist() == [0, 1]
    named = make(party=[1, 1] * 6, party_names=("a", "b"))
    assert named.party_names == ("a", "b")
    assert named.party.unique().tolist() == [1]


def test_a_dataset_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().x = None


# --- holdout ----------------------------------------------------------------------------------


def numbered(n=100, **more) -> Dataset:
    """Record i holds the number i, so that rows can be followed."""
    x = np.arange(n, dtype=np.float32)[:, None]
    return from_arrays(x, np.arange(n) % 2, -x[:5] - 1, np.arange(5) % 2, **more)


def test_holdout_splits_the_training_records_and_drops_the_test_set():
    whole = numbered()
    part = holdout(whole, 0.2, seed=3)
    train, held = set(part.x.flatten().tolist()), set(part.x_test.flatten().tolist())
    assert len(held) == 20
    assert train | held == set(range(100))
    assert not train & held
    assert torch.equal(part.y, (part.x.flatten() % 2).long())
    assert torch.equal(part.y_test, (part.x_test.flatten() % 2).long())
    assert part.fingerprint != whole.fingerprint
    assert "20 held-out" in part.warnings[-1]
    assert len(whole.x) == 100


def test_holdout_depends_on_the_seed_alone():
    first, again, other = (holdout(numbered(), 0.3, seed) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


def test_holdout_keeps_people_whole():
    person = np.arange(100) // 7
    part = holdout(numbered(person=person, party=np.arange(100) % 4), 0.25, seed=0)
    held = {int(v) // 7 for v in part.x_test.flatten()}
    assert part.person is not None
    assert part.party is not None
    assert held.isdisjoint(part.person.tolist())
    assert len(part.x_test) >= 25
    assert torch.equal(part.person, part.x.flatten().long() // 7)
    assert torch.equal(part.party, part.x.flatten().long() % 4)
    # without ids the same split would tear people apart: the check above can fail
    torn = holdout(numbered(), 0.25, seed=0)
    assert {int(v) // 7 for v in torn.x_test.flatten()} & {int(v) // 7 for v in torn.x.flatten()}


@pytest.mark.parametrize("seed", range(5))
def test_holdout_takes_no_more_people_than_it_needs(seed):
    sizes = np.array([1, 30, 2, 2, 25, 1, 9, 10, 15, 5])
    person = np.repeat(np.arange(10), sizes)
    part = holdout(numbered(person=person), 0.4, seed)
    held = np.unique(person[part.x_test.flatten().long().numpy()])
    assert len(part.x_test) == sizes[held].sum()
    assert 40 <= len(part.x_test) < 40 + sizes[held].max()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_holdout_refuses_impossible_fractions(fraction):
    with pytest.raises(ConfigError, match=r"data\.validation"):
        holdout(numbered(), fraction, 0)


def test_holdout_leaves_at_least_one_on_each_side():
    assert len(holdout(numbered(), 1e-9, 0).x_test) == 1
    assert len(holdout(numbered(), 1 - 1e-9, 0).x) == 1
    with pytest.raises(DataError, match="single person"):
        holdout(numbered(person=np.zeros(100, int)), 0.5, 0)
