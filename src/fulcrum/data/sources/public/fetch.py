"""Download of public data sets: checksums, resume, retries, several mirrors, nothing half-written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fulcrum.data.sources.public import registry
from fulcrum.data.sources.public.archive import file_digest, unpack
from fulcrum.data.sources.public.download import Accept, Job, Report, download, on_disk
from fulcrum.data.sources.public.registry import Archive, File, Known
from fulcrum.data.sources.public.verify import file_status, find
from fulcrum.errors import ConfigError, DataError, DownloadError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of the whole data set; done falls when a mirror's bytes are discarded."""

Bring = Callable[[Path, int, Accept, Report], None]
"""(target, expected bytes, accept, report): downloads one file."""

SLACK = 1 << 20  # bytes above the expected size before a mirror is called a liar


def fetch(
    name: str,
    folder: str | Path | None = None,
    mirrors: Sequence[str] | None = None,
    progress: Progress | None = None,
    *,
    pause: float = 0.5,
    timeout: float = 30.0,
) -> Path:
    """Download mnist, fashion-mnist or cifar10 and return the folder that holds its files.

    folder: where to put it (default: the user's cache); it gets a folder of its own inside. mirrors:
    base addresses to use in place of the public ones. Files that are already there and public are
    kept; corrupt ones are replaced; changed ones are never overwritten. Interrupted downloads go on
    where they stopped. pause: seconds before the first retry, doubled each time. timeout: seconds
    without a byte. Raises DownloadError when no mirror delivers the right bytes.
    """
    if name == "digits":
        raise DataError("digits comes with scikit-learn; there is nothing to fetch.")
    known = find(name)
    bases = tuple(mirrors) if mirrors is not None else known.mirrors
    if not bases or not all(base.startswith(("http://", "https://")) for base in bases):
        raise ConfigError(f"mirrors = {list(bases)} must be one or more addresses with http:// or https://.")
    root = Path(folder).expanduser() if folder else registry.user_cache()
    place = root / known.folders[0]
    with on_disk(place):
        place.mkdir(parents=True, exist_ok=True)

    def bring(target: Path, limit: int, accept: Accept, report: Report) -> None:
        urls = [f"{base.rstrip('/')}/{target.name}" for base in bases]
        download(urls, Job(target, limit + SLACK, accept, report, pause, timeout))

    with _locked(place):
        wanted = [file for file in known.files if _is_wanted(known, file, place)]
        if known.archive is None:
            _fetch_files(known, wanted, place, progress, bring)
        elif wanted:
            _fetch_archive(known, known.archive, wanted, place, progress, bring)
    return place


def _is_wanted(known: Known, file: File, place: Path) -> bool:
    path = registry.file_path(known, file, place) or place / file.name
    status = file_status(known, file, path)
    if status == "changed":
        raise DataError(f"{path} is not the public file and would be overwritten; move it away, or fetch elsewhere.")
    return status != "public"


def _fetch_files(
    known: Known,
    wanted: list[File],
    place: Path,
    progress: Progress | None,
    bring: Bring,
) -> None:
    expected = {file.name: file.download for file in known.files}
    done = {file.name: file.download for file in known.files if file not in wanted}
    for file in wanted:

        def report(received: int, total: int | None, name: str = file.name) -> None:
            done[name] = received
            expected[name] = max(received, expected[name] if total is None else total)
            if progress:
                progress(sum(done.values()), sum(expected.values()))

        def accept(path: Path, file: File = file) -> bool:
            return file_status(known, file, path) == "public"

        target = place / (file.name + known.suffixes[0])
        bring(target, known.limit(file.shape), accept, report)


def _fetch_archive(
    known: Known,
    archive: Archive,
    wanted: list[File],
    place: Path,
    progress: Progress | None,
    bring: Bring,
) -> None:
    def report(received: int, total: int | None) -> None:
        if progress:
            progress(received, max(received, archive.download if total is None else total))

    def accept(path: Path) -> bool:
        return file_digest(path, archive.digest) == archive.digest

    target = place / archive.name
    if not (target.is_file() and accept(target)):
        bring(target, archive.download, accept, report)
    unpack(target, archive, known.files, {file.name for file in wanted}, place)
    with on_disk(target):
        target.unlink()


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """One download at a time: two processes that append to one `.part` file would spoil it."""
    with on_disk(place):
        handle = (place / ".fetch.lock").open("wb")
    with handle:
        if not _lock(handle):
            raise DownloadError(f"another process is downloading into {place}; wait for it to end.")
        yield


def _lock(handle: BinaryIO) -> bool:
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
