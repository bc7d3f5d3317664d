"""The data sets of the suite, as sources: data.source = "fulcrum.study.suite.sources:census".

All are public and small, so that many runs fit on a GPU at once: parts of the named public data sets, census and heart
as they come, and made-up sentences. Each is made in two steps: plain arrays from the original files (`BUILDERS`), and
a Dataset from those. `python -m fulcrum.study.suite.sources FILE` writes the arrays of all into one .npz file; where
`no-tuning.npz` lies in a data folder, it is read instead of the originals.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum.data import Dataset, from_arrays, load
from fulcrum.data.sources.public.registry import search_folders
from fulcrum.errors import DataError
from fulcrum.rng import numpy_generator

Arrays = dict[str, Any]
PACK = "no-tuning.npz"
"""One file with the arrays of every source."""
TRAINING_SIZES: Mapping[str, int] = {
    "digits": 1437,
    "mnist": 12000,
    "fashion": 12000,
    "cifar": 10000,
    "census": 20000,
    "heart": 486,
    "topics": 8000,
    "reviews": 6000,
}
"""Training examples of each source, a public fact."""
TEST_SIZES: Mapping[str, int] = {"mnist": 2000, "fashion": 2000, "cifar": 2000, "census": 5000}

# --- pictures -------------------------------------------------------------------------------------


def build_pictures(name: str, source: str, folder: str) -> Arrays:
    """The first pictures of a public data set, as bytes 0..255."""
    data = load(source, folder)

    def to_bytes(x: torch.Tensor, count: int) -> Any:
        return x[:count].add(1).mul(127.5).round().to(torch.uint8).numpy()

    count, test = TRAINING_SIZES[name], TEST_SIZES[name]
    y, y_test = data.y[:count].numpy().astype(np.int64), data.y_test[:test].numpy().astype(np.int64)
    return {"x": to_bytes(data.x, count), "y": y, "x_test": to_bytes(data.x_test, test), "y_test": y_test}


def build_cifar(folder: str) -> Arrays:
    """CIFAR-10 at 16 x 16 pixels: means over 2 x 2. The public files, or else the JPEG copy beside them."""
    try:
        found = _read_cifar_copy(folder) or build_pictures("cifar", "cifar10", folder)
    except DataError as error:
        raise DataError(f"the suite's cifar needs cifar10, or cifar10-jpeg.npz in a data folder: {error}") from error

    def halve(x: Any) -> Any:
        return x.reshape(len(x), 3, 16, 2, 16, 2).astype(np.float32).mean(axis=(3, 5)).round().astype(np.uint8)

    return {**found, "x": halve(found["x"]), "x_test": halve(found["x_test"])}


def _read_cifar_copy(folder: str) -> Arrays | None:
    """Pictures of cifar10-jpeg.npz in a fixed random order (the file is sorted by class), or None."""
    place = next((path for base in search_folders(folder) if (path := base / "cifar10-jpeg.npz").is_file()), None)
    if place is None:
        return None
    import io

    from PIL import Image

    parts: Arrays = {}
    with np.load(place) as pack:
        header = pack["header"].tobytes()
        for split, end, count in (("train", "", TRAINING_SIZES["cifar"]), ("test", "_test", TEST_SIZES["cifar"])):
            scans, ends = pack[f"{split}_scans"].tobytes(), pack[f"{split}_lengths"].astype(int).cumsum()
            chosen = numpy_generator(0, "suite-cifar", split).permutation(len(ends))[:count]
            starts = ends - pack[f"{split}_lengths"].astype(int)
            rows = [
                np.asarray(Image.open(io.BytesIO(header + scans[starts[i] : ends[i]])).convert("RGB")) for i in chosen
            ]
            parts[f"x{end}"] = np.stack(rows).transpose(0, 3, 1, 2)
            parts[f"y{end}"] = pack[f"{split}_labels"].astype(np.int64)[chosen]
    return parts


# --- tables ---------------------------------------------------------------------------------------

CENSUS_NUMBERS: Mapping[int, Callable[[float], float]] = {
    0: lambda age: (age - 40) / 20,
    4: lambda years: (years - 10) / 3,
    10: lambda gain: float(np.log1p(gain)) / 6,
    11: lambda loss: float(np.log1p(loss)) / 6,
    12: lambda hours: (hours - 40) / 15,
}
"""Numeric columns of the census data and their public scales."""
CENSUS_WORDS: Mapping[int, str] = {
    1: "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    5: "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse",
    6: "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
    "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces",
    7: "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    8: "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    9: "Female Male",
    13: "United-States",
}
"""Categorical columns and their published categories; a missing value is none of them."""


def build_census(folder: str) -> Arrays:
    """UCI Adult: 5 scaled numbers and 43 indicators; y: whether the income is above 50,000."""
    place = next((base for base in search_folders(folder) if (base / "adult" / "adult.data.gz").is_file()), None)
    if place is None:
        raise DataError("the suite's census needs adult/adult.data.gz and adult/adult.test.gz in a data folder.")
    parts: Arrays = {}
    for end, name, count in (
        ("", "adult.data.gz", TRAINING_SIZES["census"]),
        ("_test", "adult.test.gz", TEST_SIZES["census"]),
    ):
        lines = gzip.decompress((place / "adult" / name).read_bytes()).decode().splitlines()
        rows = [[word.strip() for word in line.split(",")] for line in lines if line[:1].isdigit()][:count]
        parts[f"x{end}"] = np.array([_encode_person(row) for row in rows], dtype=np.float32)
        parts[f"y{end}"] = np.array([row[14].startswith(">") for row in rows], dtype=np.int64)
    return parts


def _encode_person(row: list[str]) -> list[float]:
    numbers = [scale(float(row[column])) for column, scale in CENSUS_NUMBERS.items()]
    return numbers + [float(row[column] == word) for column, words in CENSUS_WORDS.items() for word in words.split()]


def build_heart(folder: str) -> Arrays:
    """The heart data of four hospitals in FLamby's split; party names the hospital."""
    place = next((path for b in search_folders(folder) if (path := b / "heart" / "flamby-split.npz").is_file()), None)
    if place is None:
        raise DataError("the suite's heart needs heart/flamby-split.npz in a data folder.")
    with np.load(place) as arrays:
        return {name: arrays[name] for name in ("x", "y", "x_test", "y_test", "party")}


# --- made-up sentences ----------------------------------------------------------------------------

TOPIC_WORDS, TOPIC_LENGTH, TOPIC_CLASSES = 1000, 24, 4
REVIEW_WORDS, REVIEW_LENGTH = 400, 16


def build_topics(folder: str) -> Arrays:
    """Documents of a topic model: 4 classes prefer some of 12 topics; words repeat; a tenth of the labels is random.

    x [n, 24] word numbers from 1 (0: padding at the end). Not the process of the rehearsal's made-up sentences.
    """
    draw = numpy_generator(0, "suite-topics")
    base = 1 / np.arange(1, TOPIC_WORDS) ** 0.9
    words = np.stack([base * np.where(draw.random(TOPIC_WORDS - 1) < 0.04, 12.0, 1.0) for _ in range(12)])
    ladder = (words / words.sum(axis=1, keepdims=True)).cumsum(axis=1)
    taste = draw.dirichlet(np.full(12, 0.25), size=TOPIC_CLASSES)

    def documents(count: int) -> tuple[Any, Any]:
        y = draw.integers(TOPIC_CLASSES, size=count)
        x = np.zeros((count, TOPIC_LENGTH), dtype=np.int64)
        for i in range(count):
            length = draw.integers(8, TOPIC_LENGTH + 1)
            topics = draw.choice(12, size=length, p=draw.dirichlet(0.1 + 4 * taste[y[i]]))
            picks = draw.random(length)
            for j in range(length):
                again = j and draw.random() < 0.2
                x[i, j] = x[i, draw.integers(j)] if again else 1 + np.searchsorted(ladder[topics[j]], picks[j])
        wrong = draw.random(count) < 0.1
        return np.minimum(x, TOPIC_WORDS - 1), np.where(wrong, draw.integers(TOPIC_CLASSES, size=count), y)

    x, y = documents(TRAINING_SIZES["topics"])
    x_test, y_test = documents(2000)
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}


def build_reviews(folder: str) -> Arrays:
    """Sentences whose opinion words count the other way after a negation; y: whether the opinions are good on balance.

    x [n, 16] word numbers from 1: 1 to 8 negate, 9 to 68 are good, 69 to 128 bad, the others say nothing.
    """
    draw = numpy_generator(0, "suite-reviews")

    def sentences(count: int) -> tuple[Any, Any]:
        kind = draw.random((count, REVIEW_LENGTH))
        idle = 129 + np.minimum(draw.zipf(1.3, size=kind.shape), REVIEW_WORDS - 130)
        good = draw.random((count, 1)) < 0.5
        lean = draw.random(kind.shape) < np.where(good, 0.75, 0.25)
        before = np.concatenate([np.zeros((count, 1), dtype=bool), kind[:, :-1] < 0.08], axis=1)
        opinion = (kind > 0.7) & ~(kind < 0.08)
        word = np.where(lean ^ before, 9, 69) + draw.integers(60, size=kind.shape)
        x = np.where(kind < 0.08, 1 + draw.integers(8, size=kind.shape), np.where(opinion, word, idle))
        balance = np.where(opinion, np.where(lean, 1, -1), 0).sum(axis=1) + 0.5 * np.where(good[:, 0], 1, -1)
        return x.astype(np.int64), (balance > 0).astype(np.int64)

    x, y = sentences(TRAINING_SIZES["reviews"])
    x_test, y_test = sentences(2000)
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}


# --- from arrays to data sets ---------------------------------------------------------------------


def build_digits(folder: str) -> Arrays:
    """The digits, as the named source has them."""
    data = load("digits")
    return {name: getattr(data, name).numpy() for name in ("x", "y", "x_test", "y_test")}


BUILDERS: Mapping[str, Callable[[str], Arrays]] = {
    "digits": build_digits,
    "mnist": lambda folder: build_pictures("mnist", "mnist", folder),
    "fashion": lambda folder: build_pictures("fashion", "fashion-mnist", folder),
    "cifar": build_cifar,
    "census": build_census,
    "heart": build_heart,
    "topics": build_topics,
    "reviews": build_reviews,
}
CLASSES: Mapping[str, int] = {
    "digits": 10,
    "mnist": 10,
    "fashion": 10,
    "cifar": 10,
    "census": 2,
    "heart": 2,
    "topics": TOPIC_CLASSES,
    "reviews": 2,
}


def get_source_name(data: str) -> str:
    """The data.source of one of the suite's data sets."""
    if data not in BUILDERS:
        raise DataError(f"data = {data!r} is not of the suite; choose one of {', '.join(BUILDERS)}.")
    return f"{__name__}:{data}"


@lru_cache(maxsize=2)
def _read_pack(path: Path) -> Mapping[str, Any]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _make_dataset(name: str, folder: str) -> Dataset:
    """From the packed arrays where a data folder has them, else from the original files."""
    place = next((path for base in search_folders(folder) if (path := base / PACK).is_file()), None)
    parts = (
        BUILDERS[name](folder)
        if place is None
        else {key.partition("/")[2]: v for key, v in _read_pack(place).items() if key.startswith(f"{name}/")}
    )
    for key in ("x", "x_test"):
        if parts[key].dtype == np.uint8:
            parts[key] = torch.from_numpy(parts[key]).float().div(127.5).sub(1)
    return from_arrays(**parts, name=f"suite-{name}", classes=CLASSES[name], public=True)


def digits(folder: str = "") -> Dataset:
    """Handwritten digits: 1,437 pictures of 1x8x8, 10 classes."""
    return _make_dataset("digits", folder)


def mnist(folder: str = "") -> Dataset:
    """12,000 pictures of MNIST."""
    return _make_dataset("mnist", folder)


def fashion(folder: str = "") -> Dataset:
    """12,000 pictures of Fashion-MNIST."""
    return _make_dataset("fashion", folder)


def cifar(folder: str = "") -> Dataset:
    """10,000 pictures of CIFAR-10, 3x16x16."""
    return _make_dataset("cifar", folder)


def census(folder: str = "") -> Dataset:
    """20,000 people of UCI Adult, 48 columns, 24% positive."""
    return _make_dataset("census", folder)


def heart(folder: str = "") -> Dataset:
    """486 patients of four hospitals, 13 columns."""
    return _make_dataset("heart", folder)


def topics(folder: str = "") -> Dataset:
    """8,000 made-up documents of 24 words, 4 classes."""
    return _make_dataset("topics", folder)


def reviews(folder: str = "") -> Dataset:
    """6,000 made-up sentences of 16 words with negations, 2 classes."""
    return _make_dataset("reviews", folder)


def write_pack(path: Path, folder: str = "") -> Path:
    """All sources' arrays in one compressed file, for machines without the originals."""
    arrays = {f"{name}/{key}": value for name, build in BUILDERS.items() for key, value in build(folder).items()}
    np.savez_compressed(path, **arrays)
    return path


if __name__ == "__main__":
    print(write_pack(Path(sys.argv[1])))
