"""Downloads one file from the first mirror that delivers the right bytes.

Each mirror has its own `.part` file (two mirrors may compress the same
content differently, so their bytes never mix). It is checked, and then renamed in one step.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fulcrum.errors import DownloadError

AcceptFn = Callable[[Path], bool]
"""Whether the downloaded file holds what it should."""
ReportFn = Callable[[int, int | None], None]
"""Called with (bytes of this file so far, total bytes of this file or None)."""

CHUNK_BYTES = 1 << 17
MAX_FRUITLESS_ATTEMPTS = 4  # attempts in a row without a new byte before trying the next mirror
MAX_ATTEMPTS = 100  # total attempts per mirror, for very slow mirrors


class _TransferInterrupted(Exception):
    """Try the same mirror again, from where it stopped."""


class _MirrorFailed(Exception):
    """Go on to the next mirror."""


@dataclass(frozen=True)
class DownloadRequest:
    """One file to download. limit: most bytes to accept. accept(path): whether its content is right."""

    target: Path
    limit: int
    accept: AcceptFn
    report: ReportFn
    pause: float
    timeout: float


def download_from_mirrors(urls: Sequence[str], job: DownloadRequest) -> None:
    """Download job.target from the first address that delivers acceptable bytes, or raise DownloadError."""
    reasons = []
    parts = [_part_file_path(job.target, url) for url in urls]
    for url, part in zip(urls, parts, strict=True):
        try:
            _download_verified(url, part, job)
        except _MirrorFailed as reason:
            reasons.append(f"{url}: {reason}")
            continue
        with translate_disk_errors(job.target):
            os.replace(part, job.target)
            for other in parts:
                other.unlink(missing_ok=True)
        return
    raise DownloadError(f"no mirror delivered {job.target.name} ({'; '.join(reasons)}).")


def _part_file_path(target: Path, url: str) -> Path:
    return target.with_name(f"{target.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")


def _download_verified(url: str, part: Path, job: DownloadRequest) -> None:
    """Download the right bytes to `part`, or raise _MirrorFailed."""
    resumed = _get_file_size(part) > 0
    _download_with_retries(url, part, job)
    if job.accept(part):
        return
    _discard_part_file(part, job)
    # A partial file from an earlier day may be stale, which is not the mirror's fault: start again.
    if resumed:
        _download_with_retries(url, part, job)
        if job.accept(part):
            return
        _discard_part_file(part, job)
    raise _MirrorFailed("the checksum is wrong")


def _download_with_retries(url: str, part: Path, job: DownloadRequest) -> None:
    """Retry and resume until the file is complete; _MirrorFailed when no more bytes arrive."""
    fruitless, reason = 0, ""
    for _ in range(MAX_ATTEMPTS):
        before = _get_file_size(part)
        try:
            _request_once(url, part, job)
            return
        except _TransferInterrupted as error:
            reason = str(error)
        fruitless = 0 if _get_file_size(part) > before else fruitless + 1
        if fruitless >= MAX_FRUITLESS_ATTEMPTS:
            break
        time.sleep(min(job.pause * 2 ** max(fruitless - 1, 0), 8.0))
    raise _MirrorFailed(reason)


def _request_once(url: str, part: Path, job: DownloadRequest) -> None:
    """One request. Returns when the server says that the file is complete."""
    have = _get_file_size(part)
    headers = {"User-Agent": "fulcrum", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=job.timeout)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:
                if error.headers.get("Content-Range", "") == f"bytes */{have}":
                    return  # it was complete already
                _discard_part_file(part, job)
                raise _TransferInterrupted("it no longer has the rest of the file") from error
            lasting = error.code < 500 and error.code not in (408, 425, 429)
            raise (_MirrorFailed if lasting else _TransferInterrupted)(f"HTTP {error.code}") from error
    except (OSError, HTTPException) as error:
        cause = getattr(error, "reason", error)
        raise (_MirrorFailed if isinstance(cause, ssl.SSLError) else _TransferInterrupted)(str(cause)) from error
    with response:
        _receive_body(response, part, have, job)


def _receive_body(response: Any, part: Path, have: int, job: DownloadRequest) -> None:
    start = 0
    if response.status == 206:
        start = have
        if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            _discard_part_file(part, job)
            raise _TransferInterrupted("it sent another range than the one asked for")
    length = response.headers.get("Content-Length", "")
    total = start + int(length) if length.isdecimal() else None
    if total is not None and total > job.limit:
        raise _MirrorFailed(f"it announces {total:,} bytes, more than the file has")
    done = start
    with translate_disk_errors(part), part.open("r+b" if part.exists() else "wb") as file:
        file.truncate(start)  # a server that ignores Range sends everything again
        file.seek(start)
        while chunk := _read_chunk(response):
            file.write(chunk)
            done += len(chunk)
            if done > job.limit:
                break
            job.report(done, total)
        file.flush()
        os.fsync(file.fileno())
    if done > job.limit:
        _discard_part_file(part, job)
        raise _MirrorFailed(f"it sent more than {job.limit:,} bytes, more than the file has")
    # http.client does not complain about an early end when it is read in chunks.
    if total is not None and done < total:
        raise _TransferInterrupted(f"it broke off after {done:,} of {total:,} bytes")


def _read_chunk(response: Any) -> bytes:
    try:
        return bytes(response.read(CHUNK_BYTES))
    except (OSError, HTTPException) as error:
        raise _TransferInterrupted(f"the connection broke ({error})") from error


def _get_file_size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _discard_part_file(part: Path, job: DownloadRequest) -> None:
    with translate_disk_errors(part):
        part.unlink(missing_ok=True)
    job.report(0, None)


@contextmanager
def translate_disk_errors(path: Path) -> Iterator[None]:
    """Reports a full or read-only disk as the user's problem, not as a mirror's."""
    try:
        yield
    except OSError as error:
        raise DownloadError(f"cannot write {path}: {error.strerror or error}; what is there is kept.") from error
