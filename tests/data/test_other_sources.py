"""Images in folders, folders of arrays, Hugging Face data sets, torch data sets, generators, and text."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fulcrum
from fulcrum.data import load, read_object, split
from fulcrum.data.table import Schema
from fulcrum.errors import ConfigError, DataError, ModelError
from fulcrum.settings.schema import Data, Images, Table, TaskSettings

# --- images -------------------------------------------------------------------------------------


def draw(path, colour, size=(6, 4)):
    """An image of one colour, width 6 and height 4."""
    image = pytest.importorskip("PIL.Image", reason="images need the extra `images`")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, (colour, 0, 255)).save(path)


DECLARED = Images(size=(4, 6), class_names=("cat", "dog"))


def draw_animals(folder, test=False):
    for i in range(6):
        draw(folder / ("train" if test else "") / ("cat" if i % 2 else "dog") / f"{i}.png", 40 * i)
    if test:
        draw(folder / "test" / "cat" / "0.png", 3)
    return str(folder)


def test_a_folder_per_class(tmp_path):
    data = load(draw_animals(tmp_path / "scans"), images=DECLARED)
    assert data.x.shape == (6, 3, 4, 6)
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.x[0, :, 0, 0].tolist() == pytest.approx([40 / 127.5 - 1, -1, 1])
    assert not data.public
    assert data.classes == 2
    grey = load(str(tmp_path / "scans"), images=Images(size=(2, 2), class_names=("cat", "dog"), colours="grey"))
    assert grey.x.shape == (6, 1, 2, 2)
    public = load(str(tmp_path / "scans"), public=True)  # size and classes as they are
    assert torch.equal(public.x, data.x)


def test_images_of_persons_at_parties_and_public_ones(tmp_path):
    for party in ("north", "south"):
        for person in range(3):
            draw(tmp_path / "s" / "train" / party / f"p{person}" / "cat" / "a.png", 10 * person)
            draw(tmp_path / "s" / "train" / party / f"p{person}" / "dog" / "b.png", 10 * person)
            draw(tmp_path / "s" / "test" / party / f"q{person}" / "dog" / "b.png", 10 * person)
    settings = Images(size=(4, 6), class_names=("cat", "dog"), folders="party/person/class")
    data = load(str(tmp_path / "s"), images=settings)
    assert data.party_names == ("north", "south")
    assert data.person is not None
    assert len(data.person.unique()) == 3
    assert len(data.test_records) == 6
    assert data.test_records.party is not None
    assert data.test_records.party.tolist() == [0, 0, 0, 1, 1, 1]
    assert load(draw_animals(tmp_path / "t", test=True), images=DECLARED).y_test.tolist() == [0]


def test_a_table_of_labels(tmp_path):
    for i in range(4):
        draw(tmp_path / "s" / f"{i}.png", 50 * i)
    labels = tmp_path / "s" / "labels.csv"
    labels.write_text("file,label,person,age\n3.png,dog,a,30\n0.png,cat,b,40\n1.png,cat,a,500\n")
    settings = Images(size=(4, 6), class_names=("cat", "dog"), labels="labels.csv")
    data = load(str(tmp_path / "s"), images=settings)
    assert data.y.tolist() == [1, 0, 0]
    assert data.x[0, 0, 0, 0].item() == pytest.approx(150 / 127.5 - 1)
    assert data.person_names == ("a", "b")
    age = Table(target="age", columns={"age": {"low": 0, "high": 100}})
    ages = load(str(tmp_path / "s"), images=settings, table=age)
    assert ages.task.name == "regression"
    assert ages.y.tolist() == [30, 40, 100]
    labels.write_text("file,label\n9.png,dog\n")
    with pytest.raises(DataError, match="names files that are not in"):
        load(str(tmp_path / "s"), images=settings)
    draw(tmp_path / "outside.png", 0)
    labels.write_text("file,label\n../outside.png,dog\n")
    with pytest.raises(DataError, match="names files that are not in"):
        load(str(tmp_path / "s"), images=settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": ()}, "images.size is not declared"),
        ({"class_names": ()}, "images.class_names is not declared"),
        ({"class_names": ("cat", "cow")}, "sub-folder 'dog', which is none of"),
        ({"folders": "party/class"}, "says 2"),
        ({"folders": "party/kind"}, "'kind' must be one of"),
        ({"folders": "party"}, "names no class"),
        ({"size": (3,)}, "height and width"),
        ({"colours": "cmyk"}, "rgb, grey"),
        ({"labels": "none.csv"}, "was not found"),
    ],
)
def test_wrong_image_settings(tmp_path, changes, words):
    folder = draw_animals(tmp_path / "scans")
    usual = {"size": (4, 6), "class_names": ("cat", "dog"), **changes}
    with pytest.raises((ConfigError, DataError)) as caught:
        load(folder, images=Images(**usual))
    assert words in str(caught.value)


def test_broken_images(tmp_path):
    folder = draw_animals(tmp_path / "scans")
    file = tmp_path / "scans" / "cat" / "1.png"
    content = file.read_bytes()
    for damaged in (b"no image", content[: len(content) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="image"):
            load(folder, images=DECLARED)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="folder without images"):
        load(str(tmp_path / "empty"))


# --- arrays on disk -----------------------------------------------------------------------------


def save_arrays(folder, **arrays):
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return str(folder)


def test_a_folder_of_arrays_is_not_read_into_memory(tmp_path):
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    y = np.arange(20) % 2
    folder = save_arrays(tmp_path / "a", x=x, y=y, classes=np.array(2), person=np.array([f"p{i}" for i in range(20)]))
    data = load(folder)
    assert torch.equal(data.x, torch.from_numpy(x))
    assert data.person_names[0] == "p0"
    assert isinstance(np.load(tmp_path / "a" / "x.npy", mmap_mode="r"), np.memmap)
    maps = Path("/proc/self/maps")
    if maps.is_file():  # the tensor lies on the file
        assert str(tmp_path / "a" / "x.npy") in maps.read_text()
    other = load(save_arrays(tmp_path / "b", x=x.astype(np.float64), y=y, classes=np.array(2)))
    assert torch.equal(other.x, data.x)
    tokens = load(save_arrays(tmp_path / "c", x=np.arange(40).reshape(20, 2), y=y, classes=np.array(2)))
    assert tokens.x.dtype == torch.int64
    assert torch.equal(load(str(tmp_path / "a" / "x.npy")).x, data.x)  # the file in its folder
    (tmp_path / "a" / "x.npy").write_bytes(b"x")
    with pytest.raises(DataError, match=r"no readable \.npy file"):
        load(folder)
    np.save(tmp_path / "a" / "x.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="Python objects"):
        load(folder)


# --- Hugging Face -------------------------------------------------------------------------------

REVIEWS: dict[str, list[Any]] = {
    "words": ["good", "bad", "good", "so bad"] * 5,
    "grade": [1, 0, 1, 0] * 5,
    "user": ["a", "b"] * 10,
}
REVIEW_TABLE = Table(
    target="grade", person="user", columns={"words": {"kind": "text", "buckets": 16}, "grade": {"kind": "yes-no"}}
)


def save_by_hand(folder, given):
    """As `save_to_disk` writes it."""
    arrow = pytest.importorskip("pyarrow", reason="Hugging Face data sets need the extra `tables`")
    folder.mkdir(parents=True)
    found = arrow.table(given)
    name = "data-00000-of-00001.arrow"
    with arrow.OSFile(str(folder / name), "wb") as sink, arrow.ipc.new_stream(sink, found.schema) as writer:
        writer.write_table(found, max_chunksize=3)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_data_set(tmp_path):
    save_by_hand(tmp_path / "one", REVIEWS)
    data = load(str(tmp_path / "one"), table=REVIEW_TABLE)
    assert data.x.shape == (20, 16)
    assert data.person_names == ("a", "b")
    save_by_hand(tmp_path / "two" / "train", REVIEWS)
    save_by_hand(tmp_path / "two" / "test", {name: values[:6] for name, values in REVIEWS.items()})
    (tmp_path / "two" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    both = load(str(tmp_path / "two"), table=REVIEW_TABLE)
    assert torch.equal(both.x, data.x)
    assert len(both.test_records) == 6
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="is missing"):
        load(str(tmp_path / "one"), table=REVIEW_TABLE)


@pytest.mark.filterwarnings("ignore")  # of the package's own dependencies
def test_a_data_set_of_the_package(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the package `datasets` is not installed")
    # With a given fingerprint: some versions cannot compute one beside a newer pyarrow.
    arrow = pytest.importorskip("pyarrow", reason="Hugging Face data sets need the extra `tables`")
    made = datasets.Dataset(datasets.table.InMemoryTable(arrow.table(REVIEWS)), fingerprint="x")
    save_by_hand(tmp_path / "hand", REVIEWS)
    expected = load(str(tmp_path / "hand"), table=REVIEW_TABLE)
    made.save_to_disk(str(tmp_path / "saved"))
    assert torch.equal(load(str(tmp_path / "saved"), table=REVIEW_TABLE).x, expected.x)
    assert torch.equal(read_object(made, REVIEW_TABLE).x, expected.x)


# --- torch and generators -----------------------------------------------------------------------


class Points(torch.utils.data.Dataset):
    """Map-style: (x, y)."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((2, 3), float(i)), i % 2


class Stream(torch.utils.data.IterableDataset):
    """Iterable: dicts with persons and parties."""

    def __iter__(self):
        for i in range(12):
            yield {"x": torch.full((2, 3), float(i)), "y": i % 2, "person": f"p{i // 2}", "party": i // 6}


def make_records():
    for i in range(12):
        yield np.full((2, 3), i, dtype=np.float32), i % 2


def test_torch_data_sets_and_generators():
    expected = torch.arange(12.0)[:, None, None].expand(12, 2, 3)
    task = TaskSettings(classes=2)
    for given in (Points(), Stream(), make_records(), make_records):
        data = read_object(given, task=task)
        assert torch.equal(data.x, expected)
        assert data.y.tolist() == [0, 1] * 6
        assert not data.public
    owned = read_object(Stream(), task=task)
    assert owned.person_names == tuple(f"p{i}" for i in range(6))
    assert split(owned, Data(partition="given", min_examples=1), 0).parties == 2
    several = ({"x": {"ids": np.arange(3), "mask": np.ones(3)}, "y": i % 2} for i in range(4))
    assert read_object(several, task=task).shape == {"ids": (3,), "mask": (3,)}


def test_training_and_public_test_records():
    both = read_object({"train": Stream(), "test": Points()})
    assert both.test is not None
    assert torch.equal(both.x, both.x_test)
    assert both.classes == 2  # as the public targets show
    assert not both.public
    assert both.person_names[0] == "p0"
    assert len(both.party_names) == 2
    table = Table(target="sick", columns={"age": {"low": 0, "high": 100}, "sick": {"kind": "yes-no"}})
    rows = [{"age": 20 + i, "sick": i % 2} for i in range(10)]
    tables = read_object({"train": rows, "test": {"age": [1, 2], "sick": [0, 1]}}, table)
    assert (len(tables.records), len(tables.test_records)) == (10, 2)
    arrays = read_object({"x": np.ones((4, 2)), "y": [0, 1, 0, 1], "classes": 2})
    assert arrays.x.shape == (4, 2)


def test_generators_of_table_rows():
    rows = ({"age": 20 + i, "sick": i % 2} for i in range(10))
    table = Table(target="sick", columns={"age": {"low": 0, "high": 100}, "sick": {"kind": "yes-no"}})
    assert read_object(rows, table).x.shape == (10, 1)
    again = ({"age": 20 + i, "sick": i % 2} for i in range(10))
    assert read_object(again, Table(target="sick"), public=True).x.shape == (10, 1)
    with pytest.raises(ConfigError, match="not declared"):
        read_object(({"age": 1, "sick": 0} for _ in range(3)), Table(target="sick"))


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "yields no records"),
        ([([1.0], 0), ([1.0, 2.0], 1)], "record 2: x has shape [2]"),
        ([([1.0, 2.0], 0), {"x": [1.0, 2.0], "y": 0, "person": 3}], "other parts than the first"),
        ([5, 6], "it must be (x, y)"),
        ([("text", 0), ("more", 1)], "not numbers"),
        ([{"x": [1.0], "z": 3}], "dict with x, z"),
    ],
)
def test_wrong_records(records, words):
    with pytest.raises(DataError) as caught:
        read_object(iter(records), task=TaskSettings(classes=2))
    assert words in str(caught.value)


def test_a_function_may_return_any_of_them(tmp_path, monkeypatch):
    (tmp_path / "my_stream_source.py").write_text(
        "def records():\n    for i in range(12):\n        yield [float(i), 1.0], i % 2\n"
        "def rows():\n    return ({'age': i, 'sick': i % 2} for i in range(12))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_stream_source", raising=False)
    assert load("my_stream_source:records", task=TaskSettings(classes=2)).x.shape == (12, 2)
    table = Table(target="sick", columns={"age": {"low": 0, "high": 100}, "sick": {"kind": "yes-no"}})
    assert load("my_stream_source:rows", table=table).x.shape == (12, 1)


def test_what_is_no_data_is_refused():
    with pytest.raises(DataError, match="data is a int"):
        fulcrum.train(data=3, epsilon=1.0)


# --- text ---------------------------------------------------------------------------------------

TEXTS = ["the cat sat", "the dog", "a cat and a dog and a cat", "unheard"]


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer of seven words, as a file."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizer files need the extra `text`")
    words = {"[PAD]": 0, "[UNK]": 1, "the": 2, "cat": 3, "dog": 4, "a": 5, "and": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)  # the file's own; the declared length goes before it
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def text_schema(**column):
    return Schema.from_mapping({"columns": {"t": {"kind": "text", **column}}})


def test_token_ids(tokenizer):
    found = text_schema(tokenizer=str(tokenizer), length=4).encode({"t": TEXTS})
    assert found.tolist() == [[2, 3, 1, 0], [2, 4, 0, 0], [5, 3, 6, 5], [1, 0, 0, 0]]
    bag = text_schema(tokenizer=str(tokenizer), form="bag").encode({"t": TEXTS})
    assert bag.shape == (4, 7)
    assert bag.norm(dim=1).tolist() == pytest.approx([1] * 4)
    assert bag[1].tolist() == pytest.approx([0, 0, 0.5**0.5, 0, 0.5**0.5, 0, 0])
    with pytest.raises(DataError, match=r"ids up to 6, and vocabulary = 5 is declared"):
        text_schema(tokenizer=str(tokenizer), length=4, vocabulary=5).encode({"t": TEXTS})
    with pytest.raises(DataError, match="cannot be read"):
        text_schema(tokenizer="none.json", length=4).encode({"t": TEXTS})
    tokenizer.write_text("{}")
    with pytest.raises(DataError, match="no tokenizer file"):
        text_schema(tokenizer=str(tokenizer), length=4).encode({"t": TEXTS})


def test_bags_of_words_need_no_package():
    bag = text_schema(buckets=32).encode({"t": [*TEXTS, "The DOG!"]})
    assert bag.shape == (5, 32)
    assert torch.equal(bag[1], bag[4])
    assert bag.norm(dim=1).tolist() == pytest.approx([1] * 5)


def test_a_text_table_keeps_its_tokenizer(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    lines = ["t,sick", *(f"{TEXTS[i % 4]},{'yes' if i % 2 else 'no'}" for i in range(60))]
    (tmp_path / "r.csv").write_text("\n".join(lines))
    words = f'target = "sick"\n[columns.t]\nkind = "text"\ntokenizer = "{tokenizer.name}"\nlength = 4\nform = "FORM"\n'
    words += '[columns.sick]\nkind = "yes-no"\n'
    (tmp_path / "r.schema.toml").write_text(words.replace("FORM", "bag"))
    usual: dict[str, Any] = {"epsilon": 4.0, "rounds": 1, "parties": 2, "run": {"engine": "reference"}}
    fulcrum.train(data=str(tmp_path / "r.csv"), out=tmp_path / "run", **usual)
    tokenizer.rename(tmp_path / "elsewhere.json")
    kept = Schema.read(tmp_path / "run" / "schema.toml")
    assert kept.encode({"t": TEXTS}).shape == (4, 7)
    (tmp_path / "elsewhere.json").rename(tokenizer)
    (tmp_path / "r.schema.toml").write_text(words.replace("FORM", "ids"))
    with pytest.raises(ModelError, match="is token ids; name a model with an embedding"):
        fulcrum.train(data=str(tmp_path / "r.csv"), **usual)
    next_token = load(str(tmp_path / "r.csv"), task=TaskSettings(name="next-token"))
    assert next_token.task.outputs == 7
    mixed = Schema.from_toml(words.replace("FORM", "ids")).with_folder(tmp_path).to_mapping()
    mixed["columns"]["age"] = {"kind": "number", "low": 0, "high": 1}
    found = Schema.from_mapping(mixed).encode({"t": TEXTS, "age": [0, 1, 0, 1]})
    assert {name: tuple(part.shape) for name, part in found.items()} == {"numbers": (4, 1), "t": (4, 4)}
