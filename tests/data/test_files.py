"""idx and CIFAR files: right ones are read, wrong ones refused, hostile ones never run; where they are looked for."""

import builtins
import dataclasses
import gzip
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulcrum.data import list_available_datasets, load, search_folders, user_cache_folder, verify_dataset
from fulcrum.data.sources import named
from fulcrum.data.sources.public import cifar, idx, registry
from fulcrum.errors import DataError

WHERE = Path("some/file")


def idx_bytes(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([0, 9, 5], dtype=np.uint8)


# --- idx --------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [IMAGES, LABELS])
def test_idx_is_read_back(array):
    assert np.array_equal(idx.parse_idx_array(idx_bytes(array), array.shape, WHERE), array)
    assert idx.compute_idx_size(array.shape) == len(idx_bytes(array))


GOOD = idx_bytes(IMAGES)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "starts with nothing"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "starts with 00000d03"),
        (b"\x00\x00\x08\x01" + GOOD[4:], "instead of 00000803"),
        (GOOD[:9], "within its header"),
        (idx_bytes(IMAGES[:2]), r"says shape \[2, 4, 5\]"),
        (GOOD[:-1], "ends after 75 of 76"),
        (GOOD + b"\x00", "longer than 76"),
    ],
)
def test_broken_idx_is_refused(data, words):
    with pytest.raises(DataError, match=words) as caught:
        idx.parse_idx_array(data, IMAGES.shape, WHERE)
    assert str(WHERE) in str(caught.value)


def test_idx_labels_must_be_digits():
    with pytest.raises(DataError, match="label 10"):
        idx.parse_idx_array(idx_bytes(np.array([0, 10, 5], dtype=np.uint8)), (3,), WHERE)


def test_content_is_unzipped_by_what_it_is_not_by_its_name(tmp_path):
    for name, data in (("a.gz", gzip.compress(GOOD)), ("b", gzip.compress(GOOD)), ("c.gz", GOOD), ("d", GOOD)):
        (tmp_path / name).write_bytes(data)
        assert idx.read_maybe_gzipped(tmp_path / name, len(GOOD)) == GOOD


def test_a_zip_bomb_is_cut_short(tmp_path):
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(10_000_000)))
    assert len(idx.read_maybe_gzipped(tmp_path / "bomb.gz", 76)) == 77


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-12],  # truncated
        lambda data: data[:-6] + bytes(6),  # wrong checksum and length
        lambda data: data[:20] + bytes(b ^ 255 for b in data[20:40]) + data[40:],
        lambda data: data[:2],
    ],
)
def test_bad_gzip_is_a_data_error_with_the_path(tmp_path, spoil):
    path = tmp_path / "train.gz"
    path.write_bytes(spoil(gzip.compress(GOOD)))
    with pytest.raises(DataError, match="corrupt") as caught:
        idx.read_maybe_gzipped(path, len(GOOD))
    assert str(path) in str(caught.value)


def test_unreadable_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        idx.read_maybe_gzipped(tmp_path, 10)


# --- CIFAR ------------------------------------------------------------------------------------

ROWS = 6
SHAPE = (ROWS, 3072)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
NUMBERS = [6, 9, 9, 4, 1, 0]


def python2_batch(pixels=PIXELS, module=b"numpy.core.multiarray", fortran=False, dtype=b"u1", twice=False):
    """A batch as Python 2's cPickle wrote the originals: protocol 2, byte strings, numpy.core."""
    slot = 0

    def put():
        nonlocal slot
        slot += 1
        return b"q" + bytes([slot])

    def text(value):
        return b"U" + bytes([len(value)]) + value + put()

    raw = pixels.tobytes(order="F" if fortran else "C")
    rows, columns = pixels.shape
    return b"".join(
        [
            b"\x80\x02}" + put() + b"(",
            text(b"batch_label") + text(b"training batch 1 of 5"),
            text(b"labels") + b"]" + put() + b"(" + b"".join(b"K" + bytes([n]) for n in NUMBERS) + b"e",
            text(b"data") + b"c" + module + b"\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put(),
            b"K\x00\x85" + put() + text(b"b") + b"\x87" + put() + b"R" + put(),
            b"(K\x01" + b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86" + put(),
            b"cnumpy\ndtype\n" + put() + text(dtype) + b"K\x00K\x01\x87" + put() + b"R" + put(),
            b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t" + put() + b"b",
            (b"\x88" if fortran else b"\x89") + b"T" + struct.pack("<i", len(raw)) + raw + put() + b"t" + put() + b"b",
            b"h" + bytes([slot]) + b"b" if twice else b"",
            text(b"filenames") + b"]" + put() + b"(" + text(b"leptodactylus_pentadactylus_s_000004.png") + b"e",
            b"u.",
        ]
    )


def python3_batch(protocol=4, **changes):
    """A batch as today's Python and NumPy write it."""
    batch: dict[Any, Any] = {b"batch_label": b"test_batch", b"labels": list(NUMBERS), b"data": PIXELS, **changes}
    return pickle.dumps(batch, protocol=protocol)


def numpy1_batch():
    """The same as NumPy 1 spells it. The frame around it (its first instruction) may be left out."""
    data = python3_batch(4)
    assert data[2:3] == b"\x95"
    renamed = data[11:].replace(b"\x8c\x16numpy._core", b"\x8c\x15numpy.core")
    assert len(renamed) == len(data) - 12
    return data[:2] + renamed


def test_the_hand_made_python2_batch_is_a_true_pickle():
    batch = pickle.loads(python2_batch(), encoding="bytes")
    assert np.array_equal(batch[b"data"], PIXELS)
    assert batch[b"labels"] == NUMBERS


@pytest.mark.parametrize(
    "data",
    [
        python2_batch(),
        python2_batch(fortran=True),
        python3_batch(4),
        numpy1_batch(),
        pickle.dumps({"labels": NUMBERS, "data": PIXELS}, protocol=4),
    ],
    ids=["python2", "fortran", "numpy2", "numpy1", "text-keys"],
)
def test_cifar_batches_are_read(data):
    pixels, labels = cifar.parse_cifar_batch(data, SHAPE, WHERE)
    assert np.array_equal(pixels, PIXELS)
    assert labels.tolist() == NUMBERS


class Calls:
    """Pickles to a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


ATTACKS = {
    "os.system": lambda mark: Calls(os.system, f"touch {mark}"),
    "eval": lambda mark: Calls(builtins.eval, f"open({str(mark)!r}, 'w').close()"),
    "exec": lambda mark: Calls(builtins.exec, f"open({str(mark)!r}, 'w').close()"),
    "open": lambda mark: Calls(builtins.open, str(mark), "w"),
    "getattr": lambda mark: Calls(builtins.getattr, Path(mark), "touch"),
    "numpy.save": lambda mark: Calls(np.save, str(mark), 1),
}


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in ("getattr", "open")])
@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_attacks_do_not_run(name, protocol, tmp_path):
    mark = tmp_path / "mark.npy"
    attack = pickle.dumps({b"labels": NUMBERS, b"data": PIXELS, b"x": ATTACKS[name](mark)}, protocol=protocol)
    with pytest.raises(DataError, match="not a CIFAR-10 batch"):
        cifar.parse_cifar_batch(attack, SHAPE, WHERE)
    assert not mark.exists()
    pickle.loads(attack)  # the same bytes do harm elsewhere, so the attack is real
    assert mark.exists()


@pytest.mark.parametrize("name", ["getattr", "open"])
def test_other_names_are_refused(name, tmp_path):
    with pytest.raises(DataError, match=r"not allowed|no place"):
        cifar.parse_cifar_batch(pickle.dumps({b"data": ATTACKS[name](tmp_path / "m")}, protocol=4), SHAPE, WHERE)
    assert not (tmp_path / "m").exists()


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x02cposix\nsystem\nU\x02id\x85R.", "posix.system"),
        (b"\x80\x02cnumpy\nload\nU\x01x\x85R.", "numpy.load"),
        (b"\x80\x04\x8c\x05numpy\x8c\x04load\x93\x8c\x01x\x85R.", "numpy.load"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "ndarray.tofile"),
        (b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.", "builtins.getattr"),
        (b"\x80\x02cnumpy.core.multiarray\nfromfile\n.", "fromfile"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "call numpy.ndarray"),
        (b"\x80\x02cnumpy\ndtype\n)\x81.", "NEWOBJ"),
        (b"\x80\x02cnumpy\ndtype\n}U\x08__call__Nsb.", "change a NumPy function"),
        (b"\x80\x02cnumpy\ndtype\nN}U\x08__call__Ns\x86b.", "change a NumPy function"),
        (b"(S'id'\nios\nsystem\n.", "STRING"),
        (b"(cos\nsystem\nS'id'\no.", "os.system"),
        (b"\x80\x02U\x01xQ.", "BINPERSID"),
        (b"Px\n.", "PERSID"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "slot 2147483647"),
        (b"\x80\x02}p999999999\n.", "slot 999999999|PUT"),
        (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".", "BYTEARRAY8|expected"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".", "expected"),
        (RECONSTRUCT + b")R}b.", "malformed"),
        (python2_batch()[:2000], "expected"),
        (python2_batch(twice=True), "malformed"),
        (python2_batch(dtype=b"O8"), "type b'O8'"),
        (python2_batch(dtype=b"f4"), "type b'f4'"),
        (python2_batch(PIXELS[:5]), "shape"),
        (python2_batch(module=b"numpy.lib.format"), "numpy.lib.format"),
        (python3_batch(5), "BYTEARRAY8"),
        (python3_batch(**{"data": None})[:-5] + b".", "not a CIFAR"),
        (pickle.dumps([1, 2], protocol=4), "holds a list"),
        (pickle.dumps({b"labels": NUMBERS}, protocol=4), "no array called data"),
        (pickle.dumps({b"labels": NUMBERS, b"data": PIXELS.tobytes()}, protocol=4), "no array called data"),
        (pickle.dumps({b"data": PIXELS}, protocol=4), "6 labels"),
        (pickle.dumps({b"labels": NUMBERS[:5], b"data": PIXELS}, protocol=4), "6 labels"),
        (pickle.dumps({b"labels": [0, 1, 2, 3, 4, 10], b"data": PIXELS}, protocol=4), "integers in 0..9"),
        (pickle.dumps({b"labels": [0, 1, 2, 3, 4, True], b"data": PIXELS}, protocol=4), "integers in 0..9"),
        (b"", "not a CIFAR"),
        (b"hello", "not a CIFAR"),
    ],
)
def test_what_is_not_a_batch_is_refused(data, words):
    with pytest.raises(DataError, match=words) as caught:
        cifar.parse_cifar_batch(data, SHAPE, WHERE)
    assert str(WHERE) in str(caught.value)


def test_the_unpickler_alone_refuses_too():
    """The second wall stands without the first: names are checked again when they are looked up."""
    for data in (b"\x80\x02cposix\nsystem\nU\x02id\x85R.", b"(S'id'\nios\nsystem\n.", b"\x80\x02U\x01xQ."):
        with pytest.raises(ValueError, match=r"not allowed|outside"):
            cifar._SafeUnpickler(io.BytesIO(data), SHAPE).load()


def test_a_refused_attack_leaves_the_reader_as_it_was():
    with pytest.raises(DataError):
        cifar.parse_cifar_batch(b"\x80\x02cnumpy\ndtype\n}U\x08__call__Nsb.", SHAPE, WHERE)
    assert np.array_equal(cifar.parse_cifar_batch(python2_batch(), SHAPE, WHERE)[0], PIXELS)


# --- look-up ----------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No data of this machine is seen: an empty cache, no FULCRUM_DATA."""
    monkeypatch.delenv("FULCRUM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    return tmp_path


def tiny_arrays(seed):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, (8, 28, 28), dtype=np.uint8),
        np.arange(8, dtype=np.uint8),
        rng.integers(0, 256, (4, 28, 28), dtype=np.uint8),
        rng.permutation(4).astype(np.uint8) + np.uint8(seed),
    ]


def tiny(known, arrays):
    """A registry entry of the same layout for a handful of images."""
    files = tuple(
        dataclasses.replace(
            file, shape=array.shape, digest=registry.compute_content_digest(idx_bytes(array), "sha256:")
        )
        for file, array in zip(known.files, arrays, strict=True)
    )
    return dataclasses.replace(known, files=files)


@pytest.fixture
def small(monkeypatch, alone):
    """mnist and fashion-mnist of a few images each, in place of the public ones."""
    arrays = {"mnist": tiny_arrays(0), "fashion-mnist": tiny_arrays(1)}
    for name, values in arrays.items():
        monkeypatch.setitem(registry.PUBLIC_DATASETS, name, tiny(registry.PUBLIC_DATASETS[name], values))
    return arrays


def write(folder, arrays, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for file, array in zip(registry.MNIST.files, arrays, strict=True):
        data = idx_bytes(array)
        (folder / (file.name + (".gz" if zipped else ""))).write_bytes(gzip.compress(data) if zipped else data)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inner", ["mnist", "MNIST/raw", ""])
def test_every_layout_is_found(small, alone, inner, zipped):
    write(alone / "here" / inner, small["mnist"], zipped)
    data = load("mnist", str(alone / "here"))
    assert data.x.shape == (8, 1, 28, 28)
    assert data.x_test.shape == (4, 1, 28, 28)
    assert data.y.tolist() == list(range(8))
    assert data.classes == 10
    expected = (small["mnist"][0][:, None] / 255.0 - 0.5) / 0.5
    assert np.allclose(data.x.numpy(), expected, atol=1e-6)
    assert data.warnings == ()


def test_look_up_order_is_folder_then_environment_then_cache(small, alone, monkeypatch):
    assert user_cache_folder() == alone / "cache" / "fulcrum"
    places = [alone / "given", alone / "env1", alone / "env2", alone / "cache" / "fulcrum"]
    monkeypatch.setenv("FULCRUM_DATA", os.pathsep.join([str(places[1]), "", str(places[2])]))
    assert search_folders(str(places[0])) == places
    assert search_folders() == places[1:]
    for place in reversed(places):
        write(place / "mnist", small["mnist"])
        assert registry.require_dataset(registry.PUBLIC_DATASETS["mnist"], str(places[0])) == place / "mnist"


def test_a_relative_cache_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("LOCALAPPDATA", "relative")
    assert user_cache_folder() == Path.home() / ".cache" / "fulcrum"


def test_missing_data_says_where_it_looked_and_what_to_do(small, alone):
    with pytest.raises(DataError) as caught:
        load("mnist", str(alone / "nowhere"))
    for words in (str(alone / "nowhere"), str(alone / "cache" / "fulcrum"), "`fulcrum data fetch mnist`"):
        assert words in str(caught.value)
    write(alone / "half" / "mnist", small["mnist"])
    (alone / "half" / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="holds only some"):
        load("mnist", str(alone / "half"))


def test_loose_files_of_another_data_set_are_not_mistaken(small, alone):
    write(alone / "loose", small["mnist"])
    assert len(load("mnist", str(alone / "loose")).x) == 8
    with pytest.raises(DataError, match="fashion-mnist was not found"):
        load("fashion-mnist", str(alone / "loose"))


def test_changed_files_load_with_a_warning(small, alone):
    changed = [small["mnist"][0] ^ np.uint8(1), *small["mnist"][1:]]
    write(alone / "mnist", changed)
    data = load("mnist", str(alone))
    assert len(data.warnings) == 1
    assert "not the public file" in data.warnings[0]
    assert "train-images-idx3-ubyte.gz differs" in data.warnings[0]


def test_corrupt_files_are_refused_with_their_path(small, alone):
    write(alone / "mnist", small["mnist"])
    path = alone / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="corrupt") as caught:
        load("mnist", str(alone))
    assert str(path) in str(caught.value)


def test_verify_and_available_tell_the_four_states_apart(small, alone):
    def statuses():
        return [status for _, status in verify_dataset("mnist", str(alone))]

    def line():
        return next(row for row in list_available_datasets(str(alone)) if row.name == "mnist")

    assert statuses() == ["missing"] * 4
    assert (line().status, line().where) == ("missing", None)
    write(alone / "mnist", small["mnist"])
    assert statuses() == ["public"] * 4
    assert (line().status, line().where, line().examples) == ("public", alone / "mnist", 70_000)
    write(alone / "mnist", [*small["mnist"][:3], small["mnist"][3][::-1].copy()])
    assert statuses() == ["public"] * 3 + ["changed"]
    assert line().status == "changed"
    (alone / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    assert statuses() == ["public", "missing", "public", "changed"]
    assert line().status == "missing"
    (alone / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8bno")
    assert statuses() == ["corrupt", "missing", "public", "changed"]
    assert line().status == "corrupt"
    with pytest.raises(DataError, match="did you mean 'mnist'"):
        verify_dataset("mnst")


def test_cifar_folders(alone, monkeypatch):
    entry = registry.CIFAR10
    files = tuple(
        dataclasses.replace(file, shape=SHAPE, digest=registry.compute_content_digest(python3_batch(), "md5:"))
        for file in entry.files
    )
    monkeypatch.setitem(registry.PUBLIC_DATASETS, "cifar10", dataclasses.replace(entry, files=files))
    for inner in ("a/cifar-10-batches-py", "b/cifar10/cifar-10-batches-py", "c"):
        (alone / inner).mkdir(parents=True)
        for file in files:
            (alone / inner / file.name).write_bytes(python3_batch())
        data = load("cifar10", str(alone / inner[0]))
        assert data.x.shape == (30, 3, 32, 32)
        assert data.x_test.shape == (6, 3, 32, 32)
        assert data.y.tolist() == NUMBERS * 5
        expected = (PIXELS[0].reshape(3, 32, 32) / 255.0 - 0.5) / 0.5
        assert np.allclose(data.x[6].numpy(), expected, atol=1e-6)
        assert data.warnings == ()
    (alone / "a/cifar-10-batches-py/data_batch_3").write_bytes(python2_batch())
    changed = load("cifar10", str(alone / "a"))
    assert "data_batch_3 differs" in changed.warnings[0]


def test_unknown_sources_suggest_the_nearest():
    with pytest.raises(DataError, match="did you mean 'fashion-mnist'"):
        load("fashion_mnist")
    with pytest.raises(DataError, match="digits, mnist, fashion-mnist, cifar10"):
        load("???")


def test_digits_are_fixed_and_stratified():
    data = load("digits", seed=1)
    assert data.x.shape == (1437, 1, 8, 8)
    assert data.x_test.shape == (360, 1, 8, 8)
    assert data.classes == 10
    assert float(data.x.min()) == -1.0
    assert float(data.x.max()) == 1.0
    assert data.warnings == ()
    # a fifth of each class, to the nearest record
    share = data.y_test.bincount() / (data.y_test.bincount() + data.y.bincount())
    assert share.min() > 0.195
    assert share.max() < 0.205
    assert data.fingerprint == load("digits", seed=2).fingerprint == "c34d70858ecb0a16"
    assert verify_dataset("digits")[0][1] == "public"


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn's copy is the other side of the comparison")
    images, labels, public = named.read_digits()
    theirs, their_labels = datasets.load_digits(return_X_y=True)
    assert public
    assert images.dtype == labels.dtype == np.uint8
    assert np.array_equal(images.reshape(-1, 64), theirs)
    assert np.array_equal(labels, their_labels)


def test_changed_digits_are_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(named, "DIGITS_SHA256", "0")
    assert "does not hold the public digits" in load("digits").warnings[0]
    assert verify_dataset("digits")[0][1] == "changed"
    for content, status in ((b"PK damaged", "corrupt"), (None, "missing")):
        file = tmp_path / status
        if content is not None:
            file.write_bytes(content)
        monkeypatch.setattr(named, "DIGITS_FILE", file)
        monkeypatch.setattr("fulcrum.data.sources.public.verify.DIGITS_FILE", file)
        with pytest.raises(DataError, match="install fulcrum-fl again"):
            load("digits")
        assert verify_dataset("digits")[0] == (file, status)
