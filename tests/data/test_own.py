"""A user's own data: .npz files and functions, and every way in which they can be wrong."""

import sys

import numpy as np
import pytest
import torch

from fulcrum.data import SOURCES, load, register_source, split
from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.schema import Data, TaskSettings


def arrays(n=30, test=10):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "y": np.arange(n) % 3,
        "x_test": rng.normal(size=(test, 3)).astype(np.float32),
        "y_test": np.arange(test) % 3,
    }


def save(path, **changes):
    given = {key: value for key, value in {**arrays(), **changes}.items() if value is not None}
    np.savez_compressed(path, **given)
    return str(path)


def test_npz_is_loaded(tmp_path):
    data = load(save(tmp_path / "my.npz"))
    assert data.name == "my.npz"
    assert np.array_equal(data.x.numpy(), arrays()["x"])
    assert data.y_test.tolist() == arrays()["y_test"].tolist()
    assert (data.person, data.party) == (None, None)


def test_npz_with_people_parties_and_classes(tmp_path):
    path = save(
        tmp_path / "p.npz",
        person=np.array([f"patient {i // 3}" for i in range(30)]),
        party=np.array(["north", "south"] * 15),
        classes=np.array(7),
    )
    data = load(path)
    assert data.person is not None
    assert len(data.person.unique()) == 10
    assert data.party_names == ("north", "south")
    assert data.classes == 7
    partition = split(data, Data(partition="given"), 0)
    assert [partition.name(k) for k in range(2)] == ["north", "south"]
    named = load(save(tmp_path / "q.npz", party=np.arange(30) % 2, party_names=np.array(["left", "right"])))
    assert named.party_names == ("left", "right")


def test_npz_is_found_in_the_data_folders(tmp_path, monkeypatch):
    save(tmp_path / "mine.npz")
    assert len(load("mine.npz", str(tmp_path)).x) == 30
    monkeypatch.setenv("FULCRUM_DATA", str(tmp_path))
    assert len(load("mine.npz").x) == 30
    monkeypatch.setenv("FULCRUM_DATA", "")
    with pytest.raises(DataError, match="not found"):
        load("mine.npz")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": None}, "lacks y; it holds x, x_test, y_test"),
        ({"x_test": None, "X_test": np.ones((10, 3))}, "lacks x_test"),
        ({"persons": np.arange(30)}, "'persons', which has no meaning here; did you mean 'person'"),
        ({"x": np.full((30, 3), np.nan)}, "NaN"),
        ({"y": np.arange(29) % 3}, "29 entries"),
        ({"y": np.arange(30) - 1}, "-1"),
        ({"classes": np.array(2)}, "0..1"),
        ({"classes": np.array([2, 3])}, "one whole number"),
        ({"classes": np.array(2.5)}, "one whole number"),
        ({"x_test": np.ones((10, 4))}, "same"),
        ({"x": np.array([[1, None]] * 30, dtype=object)}, "x holds Python objects"),
    ],
)
def test_wrong_npz_is_refused_with_its_path(tmp_path, changes, words):
    path = save(tmp_path / "wrong.npz", **changes)
    with pytest.raises(DataError) as caught:
        load(path)
    assert words in str(caught.value)
    assert path in str(caught.value)


# --- training and test records apart --------------------------------------------------------------


def test_training_alone_test_alone_and_both(tmp_path):
    party = save(tmp_path / "party.npz", x_test=None, y_test=None)
    public = save(tmp_path / "public.npz", x=None, y=None, classes=np.array(3))
    whole = save(tmp_path / "whole.npz")
    assert load(party).test is None
    assert len(load(public, need=("test",)).test_records) == 10
    assert load(public, need=("test",)).train is None
    assert load(whole, need=("train", "test")).classes == load(public, need=("test",)).classes == 3
    for path, need, words in (
        (party, ("test",), "party.npz has no test set; add x_test and y_test"),
        (party, ("train", "test"), "no test set"),
        (public, ("train",), "public.npz has no training records; add x and y."),
    ):
        with pytest.raises(DataError) as caught:
            load(path, need=need)
        assert words in str(caught.value)
    with pytest.raises(DataError, match="has no training records"):
        _ = load(public, need=("test",)).x


def test_test_records_name_their_party(tmp_path):
    party, of_test = np.array(["north", "south"] * 15), np.array(["south"] * 9 + ["north"])
    data = load(save(tmp_path / "p.npz", party=party, party_test=of_test))
    assert data.test_records.party is not None
    assert [data.party_names[k] for k in data.test_records.party] == of_test.tolist()
    public = load(save(tmp_path / "t.npz", x=None, y=None, classes=3, party_test=of_test), need=("test",))
    assert public.party_names == ("north", "south")


def test_several_inputs_and_integers(tmp_path):
    ids, mask = np.arange(90).reshape(30, 3), np.ones((30, 3), np.float32)
    parts = {"x": None, "x_test": None, "x.ids": ids, "x.mask": mask, "x_test.ids": ids[:10], "x_test.mask": mask[:10]}
    data = load(save(tmp_path / "two.npz", **parts))
    assert data.shape == {"ids": (3,), "mask": (3,)}
    assert data.x["ids"].dtype == torch.int64
    assert data.x["mask"].dtype == torch.float32
    assert torch.equal(data.x_test["ids"], torch.from_numpy(ids[:10]))
    assert load(save(tmp_path / "i.npz", x=ids, x_test=ids[:10])).x.dtype == torch.int64
    small = load(save(tmp_path / "s.npz", x=ids.astype(np.uint8), x_test=ids[:10].astype(np.uint8)))
    assert small.x.dtype == torch.float32
    assert "bytes 0..255" in small.warnings[0]
    for wrong, words in (
        ({**parts, "x": mask}, "both 'x' and 'x.ids'"),
        ({**parts, "x.a b": ids}, "'x.a b'; what follows x."),
        ({**parts, "x_test.mask": None}, "they must be the same"),
    ):
        with pytest.raises(DataError) as caught:
            load(save(tmp_path / "wrong.npz", **wrong))
        assert words in str(caught.value)


def test_the_task_decides_what_targets_may_be(tmp_path):
    numbers = {"y": np.linspace(0, 1, 30), "y_test": np.linspace(0, 1, 10)}
    path = save(tmp_path / "r.npz", **numbers)
    with pytest.raises(DataError, match="--task regression"):
        load(path)
    data = load(path, task=TaskSettings("regression"))
    assert (data.task.name, data.y.dtype) == ("regression", torch.float32)
    assert "task.scale = 1" in data.warnings[0]
    told = load(path, task=TaskSettings("regression", low=0.25, high=0.75))
    assert float(told.y.min()) == 0.25
    assert not told.warnings
    text = save(tmp_path / "t.npz", x=np.arange(90).reshape(30, 3), y=None, x_test=None, y_test=None)
    assert load(text, task=TaskSettings("next-token")).y[0].tolist() == [1, 2, -100]
    assert load("digits", task=TaskSettings("regression")).task.outputs == 1


# --- sources of one's own -------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Names that a test registers are taken away again."""
    before = dict(SOURCES._values)
    yield register_source
    SOURCES._values.clear()
    SOURCES._values.update(before)


def test_a_registered_source_has_a_name_or_a_file_ending(tmp_path, registered):
    @registered("my-clinic")
    def clinic(seed, folder):
        return {**arrays(), "y": (arrays()["y"] + seed) % 3}

    @registered(".table")
    def table(path):
        rows = np.loadtxt(path)
        return {"x": rows[:, :-1], "y": rows[:, -1].astype(int)}

    assert load("my-clinic").y[0] == 0
    assert load("my-clinic", seed=1).y[0] == 1
    np.savetxt(tmp_path / "a.TABLE", np.column_stack([arrays()["x"], arrays()["y"]]))
    data = load("a.TABLE", str(tmp_path))
    assert (data.name, len(data.x)) == ("a.TABLE", 30)
    with pytest.raises(DataError, match="did you mean 'my-clinic'"):
        load("my-clinc")
    with pytest.raises(DataError, match=r"a\.TABLE lacks|not found"):
        load("b.table")
    with pytest.raises(ConfigError, match="is taken"):
        registered("mnist")(clinic)


def test_a_registered_source_is_checked(registered):
    made = load("digits")

    @registered("spoiled")
    def spoiled():
        return made.with_changes(x=made.x * float("nan"))

    with pytest.raises(DataError, match="NaN"):
        load("spoiled")


def test_damaged_npz_is_refused(tmp_path):
    path = tmp_path / "damaged.npz"
    save(path)
    whole = path.read_bytes()
    spoiled = bytearray(whole)
    spoiled[60:90] = bytes(30)
    single = tmp_path / "single.npy"
    np.save(single, np.ones(3))
    for data in (b"", b"hello", whole[:-30], whole[: len(whole) // 2], bytes(spoiled), single.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(DataError) as caught:
            load(str(path))
        assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="not found"):
        load(str(tmp_path / "absent.npz"))
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError, match="not found"):
        load(str(tmp_path / "folder.npz"))


MODULE = """
import numpy as np
from fulcrum.data import from_arrays

n = 30
LIST = [1, 2]

def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 3)), "y": np.arange(n) % 3,
            "x_test": np.ones((4, 3)), "y_test": np.arange(4) % 3}

def plain():
    return arrays()

def dataset():
    given = arrays()
    return from_arrays(given["x"], given["y"], given["x_test"], given["y_test"], name="made", party=np.arange(n) % 2)

def unchecked():
    d = dataset()
    return d.with_changes(x=d.x * float("nan"))

def few():
    return {"x": [[1.0]]}

def number():
    return 7

def failing():
    raise RuntimeError("no connection")

def needy(path):
    return arrays()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module in the current folder, as a user of the installed command has it."""
    (tmp_path / "my_data_source.py").write_text(MODULE)
    (tmp_path / "my_broken_source.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    yield "my_data_source"
    for name in ("my_data_source", "my_broken_source"):
        sys.modules.pop(name, None)


def test_functions_may_return_a_dict_or_a_dataset(mine):
    assert load(f"{mine}:plain").classes == 3
    made = load(f"{mine}:dataset")
    assert made.name == "made"
    assert made.party_names == ("party-0", "party-1")


def test_the_seed_reaches_functions_that_take_one(mine):
    first, again, other = (load(f"{mine}:arrays", seed=seed) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


def test_the_import_path_is_left_as_it_was(mine):
    before = list(sys.path)
    load(f"{mine}:plain")
    assert sys.path == before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("my_data_source:plan", "no attribute 'plan'; did you mean 'plain'?"),
        ("my_data_source:zzzzzz", "no attribute 'zzzzzz'."),
        ("my_data_source:LIST", "'LIST' is not a function"),
        ("my_data_source:number", "returned int; it must return a fulcrum Dataset or a dict"),
        ("my_data_source:few", "lacks y; it holds x"),
        ("my_data_source:failing", "RuntimeError: no connection"),
        ("my_data_source:needy", "TypeError"),
        ("my_data_source:unchecked", "NaN"),
        ("my_broken_source:f", "cannot be imported: module 'my_broken_source' fails (ZeroDivisionError"),
        ("no_such_module_here:f", "cannot be imported: module 'no_such_module_here' fails (ModuleNotFoundError"),
        (":f", "not of the form package.module:name"),
        ("module:", "not of the form package.module:name"),
        ("module:a b", "not of the form package.module:name"),
    ],
)
def test_wrong_functions_are_refused(mine, source, words):
    with pytest.raises(DataError) as caught:
        load(source)
    assert words in str(caught.value)
