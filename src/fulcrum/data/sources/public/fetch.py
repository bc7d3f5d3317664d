"""Download of public data sets: checksums, resume, retries, several mirrors, nothing half-written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fulcrum.data.sources.public import registry
from fulcrum.data.sources.public.archive import compute_file_digest, unpack_archive
from fulcrum.data.sources.public.download import (
    AcceptFn,
    DownloadRequest,
    ReportFn,
    download_from_mirrors,
    translate_disk_errors,
)
from fulcrum.data.sources.public.registry import DataArchive, DataFile, PublicDataset
from fulcrum.data.sources.public.verify import check_file_status, find_public_dataset
from fulcrum.errors import ConfigError, DataError, DownloadError

ProgressFn = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of the whole data set; done decreases when a mirror's bytes are discarded."""

FetchFileFn = Callable[[Path, int, AcceptFn, ReportFn], None]
"""(target, expected bytes, accept, report): downloads one file."""

SIZE_SLACK_BYTES = 1 << 20  # bytes above the expected size before a mirror is rejected


def fetch(
    name: str,
    folder: str | Path | None = None,
    mirrors: Sequence[str] | None = None,
    progress: ProgressFn | None = None,
    *,
    pause: float = 0.5,
    timeout: float = 30.0,
) -> Path:
    """Download mnist, fashion-mnist or cifar10 and return the folder that holds its files.

    folder: where to put it (default: the user's cache); it gets a folder of its own inside. mirrors:
    base addresses to use in place of the public ones. Files that are already there and public are
    kept; corrupt ones are replaced; changed ones are never overwritten. Interrupted downloads
    are resumed. pause: seconds before the first retry, doubled each time. timeout: seconds
    without a byte. Raises DownloadError when no mirror delivers the right bytes.
    """
    if name == "digits":
        raise DataError("digits comes with Fulcrum; there is nothing to fetch.")
    known = find_public_dataset(name)
    bases = tuple(mirrors) if mirrors is not None else known.mirrors
    if not bases or not all(base.startswith(("http://", "https://")) for base in bases):
        raise ConfigError(f"mirrors = {list(bases)} must be one or more addresses with http:// or https://.")
    root = Path(folder).expanduser() if folder else registry.user_cache_folder()
    place = root / known.folders[0]
    with translate_disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)

    def bring(target: Path, limit: int, accept: AcceptFn, report: ReportFn) -> None:
        urls = [f"{base.rstrip('/')}/{target.name}" for base in bases]
        download_from_mirrors(urls, DownloadRequest(target, limit + SIZE_SLACK_BYTES, accept, report, pause, timeout))

    with _exclusive_download(place):
        wanted = [file for file in known.files if _needs_download(known, file, place)]
        if known.archive is None:
            _fetch_files(known, wanted, place, progress, bring)
        elif wanted:
            _fetch_archive(known, known.archive, wanted, place, progress, bring)
    return place


def _needs_download(known: PublicDataset, file: DataFile, place: Path) -> bool:
    path = registry.find_data_file(known, file, place) or place / file.name
    status = check_file_status(known, file, path)
    if status == "changed":
        raise DataError(f"{path} is not the public file and would be overwritten; move it away, or fetch elsewhere.")
    return status != "public"


def _fetch_files(
    known: PublicDataset,
    wanted: list[DataFile],
    place: Path,
    progress: ProgressFn | None,
    bring: FetchFileFn,
) -> None:
    expected = {file.name: file.download for file in known.files}
    done = {file.name: file.download for file in known.files if file not in wanted}
    for file in wanted:

        def report(received: int, total: int | None, name: str = file.name) -> None:
            done[name] = received
            expected[name] = max(received, expected[name] if total is None else total)
            if progress:
                progress(sum(done.values()), sum(expected.values()))

        def accept(path: Path, file: DataFile = file) -> bool:
            return check_file_status(known, file, path) == "public"

        target = place / (file.name + known.suffixes[0])
        bring(target, known.limit(file.shape), accept, report)


def _fetch_archive(
    known: PublicDataset,
    archive: DataArchive,
    wanted: list[DataFile],
    place: Path,
    progress: ProgressFn | None,
    bring: FetchFileFn,
) -> None:
    def report(received: int, total: int | None) -> None:
        if progress:
            progress(received, max(received, archive.download if total is None else total))

    def accept(path: Path) -> bool:
        return compute_file_digest(path, archive.digest) == archive.digest

    target = place / archive.name
    if not (target.is_file() and accept(target)):
        bring(target, archive.download, accept, report)
    unpack_archive(target, archive, known.files, {file.name for file in wanted}, place)
    with translate_disk_errors(target):
        target.unlink()


@contextmanager
def _exclusive_download(place: Path) -> Iterator[None]:
    """One download at a time: two processes that append to one `.part` file would corrupt it."""
    with translate_disk_errors(place):
        handle = (place / ".fetch.lock").open("wb")
    with handle:
        if not _try_lock_file(handle):
            raise DownloadError(f"another process is downloading into {place}; wait for it to end.")
        yield


def _try_lock_file(handle: BinaryIO) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows refuses to replace a file that another process has open
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems cannot lock; the checksum still guards what is kept
        return True
    return True
