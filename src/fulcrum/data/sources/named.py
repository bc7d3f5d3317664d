"""The named data sets: digits, mnist, fashion-mnist, cifar10, each with its own fixed test set."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset
from fulcrum.data.sources.public import registry
from fulcrum.data.tasks.arrays import AnyArray
from fulcrum.errors import DataError

DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
"""SHA-256 of the 1,797 images and labels, as bytes."""
DIGITS_FILE = Path(__file__).with_name("digits.npz")
"""The digits themselves, with the arrays `images` and `labels`; DIGITS.txt beside it says whose they are."""


def scale_pixels(values: AnyArray, top: float) -> Tensor:
    """Whole numbers 0..top as float32 in [-1, 1]: (v/top - 0.5)/0.5. `top` is a public constant."""
    return torch.from_numpy(values.astype(np.float32)).div_(top).sub_(0.5).div_(0.5)


def read_digits() -> tuple[AnyArray, AnyArray, bool]:
    """(images [1797, 8, 8] 0..16, labels [1797], whether they are the public ones) from the file beside this one."""
    try:
        with np.load(DIGITS_FILE, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        raise DataError(f"{DIGITS_FILE} cannot be read; it is part of Fulcrum: install fulcrum-fl again.") from None
    public = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == DIGITS_SHA256
    return images, labels, public


def load_digits() -> Dataset:
    """1,797 handwritten digits: x [1437, 1, 8, 8], x_test [360, 1, 8, 8].

    The test set is every fifth image of the file sorted by class (in file order within a class): the
    same on every machine and for every seed, with a fifth of each class.
    """
    images, labels, public = read_digits()
    by_class = np.argsort(labels, kind="stable")
    test = np.zeros(len(labels), dtype=bool)
    test[by_class[::5]] = True
    x = scale_pixels(images[:, None], 16.0)
    y = labels.astype(np.int64)
    changed = f"{DIGITS_FILE} does not hold the public digits: results are those of a changed copy; install it again."
    note = () if public else (changed,)
    held = torch.from_numpy(test)
    return from_arrays(x[~held], y[~test], x[held], y[test], name="digits", classes=10, warnings=note, public=True)


def load_public_dataset(name: str, folder: str = "") -> Dataset:
    """A data set of the registry, from the first folder that holds all its files.

    Images are channels first, [n, 1, 28, 28] or [n, 3, 32, 32], with bytes scaled to (v/255 - 0.5)/0.5.
    """
    entry = registry.PUBLIC_DATASETS[name]
    place = registry.require_dataset(entry, folder)
    arrays: dict[bool, list[AnyArray]] = {False: [], True: []}  # test file or not -> images, labels, images, labels ...
    changed = []
    for file in entry.files:
        path = registry.find_data_file(entry, file, place)
        if path is None:
            raise DataError(f"{place / file.name} has disappeared; run `fulcrum data fetch {name}`.")
        parts, public = registry.read_data_file(entry, file, path)
        arrays[file.name in entry.test_files] += parts
        if not public:
            changed.append(path.name)
    x, y, x_test, y_test = (
        np.concatenate(arrays[test][kind::2]) if len(arrays[test]) > 2 else arrays[test][kind]
        for test in (False, True)
        for kind in (0, 1)
    )
    note = (
        f"{name} in {place} is not the public file: the checksum of {', '.join(changed)} differs, so results are "
        "those of a changed copy."
    )
    return from_arrays(
        scale_pixels(_to_channels_first(x), 255.0),
        y.astype(np.int64),
        scale_pixels(_to_channels_first(x_test), 255.0),
        y_test.astype(np.int64),
        name=name,
        classes=entry.classes,
        warnings=(note,) if changed else (),
        public=True,
    )


def _to_channels_first(values: AnyArray) -> AnyArray:
    """Channels first: grey images get their channel, CIFAR's rows are already ordered by channel."""
    return values[:, None] if values.ndim == 3 else values.reshape(-1, 3, 32, 32)
