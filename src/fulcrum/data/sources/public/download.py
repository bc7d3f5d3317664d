"""One file from the first of several mirrors that delivers the right bytes.

A download goes into a `.part` file of its own for each mirror (two mirrors may compress the same
content differently, so their bytes never mix), is checked there, and then renamed in one step.
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

Accept = Callable[[Path], bool]
"""Whether the downloaded file holds what it should."""
Report = Callable[[int, int | None], None]
"""Called with (bytes of this file so far, bytes of this file in all or None)."""

CHUNK = 1 << 17
FRUITLESS = 4  # attempts in a row without a new byte before a mirror is given up
ATTEMPTS = 100  # attempts in all at one mirror, for one that drips


class _BrokenOff(Exception):
    """Try the same mirror again, from where it stopped."""


class _GivenUp(Exception):
    """Go on to the next mirror."""


@dataclass(frozen=True)
class Job:
    """One file to download. limit: most bytes to accept. accept(path): whether its content is right."""

    target: Path
    limit: int
    accept: Accept
    report: Report
    pause: float
    timeout: float


def download(urls: Sequence[str], job: Job) -> None:
    """Bring job.target from the first address that delivers acceptable bytes, or raise DownloadError."""
    reasons = []
    parts = [_part(job.target, url) for url in urls]
    for url, part in zip(urls, parts, strict=True):
        try:
            _from_mirror(url, part, job)
        except _GivenUp as reason:
            reasons.append(f"{url}: {reason}")
            continue
        with on_disk(job.target):
            os.replace(part, job.target)
            for other in parts:
                other.unlink(missing_ok=True)
        return
    raise DownloadError(f"no mirror delivered {job.target.name} ({'; '.join(reasons)}).")


def _part(target: Path, url: str) -> Path:
    return target.with_name(f"{target.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")


def _from_mirror(url: str, part: Path, job: Job) -> None:
    """Leave the right bytes in `part`, or raise _GivenUp."""
    resumed = _size(part) > 0
    _pull(url, part, job)
    if job.accept(part):
        return
    _discard(part, job)
    # What was left of an earlier day may be stale, which is not the mirror's fault: once more from the start.
    if resumed:
        _pull(url, part, job)
        if job.accept(part):
            return
        _discard(part, job)
    raise _GivenUp("the checksum is wrong")


def _pull(url: str, part: Path, job: Job) -> None:
    """Try until the file is complete, resuming; _GivenUp when nothing more comes."""
    fruitless, reason = 0, ""
    for _ in range(ATTEMPTS):
        before = _size(part)
        try:
            _attempt(url, part, job)
            return
        except _BrokenOff as error:
            reason = str(error)
        fruitless = 0 if _size(part) > before else fruitless + 1
        if fruitless >= FRUITLESS:
            break
        time.sleep(min(job.pause * 2 ** max(fruitless - 1, 0), 8.0))
    raise _GivenUp(reason)


def _attempt(url: str, part: Path, job: Job) -> None:
    """One request. Returns when the server says that the file is complete."""
    have = _size(part)
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
                _discard(part, job)
                raise _BrokenOff("it no longer has the rest of the file") from error
            lasting = error.code < 500 and error.code not in (408, 425, 429)
            raise (_GivenUp if lasting else _BrokenOff)(f"HTTP {error.code}") from error
    except (OSError, HTTPException) as error:
        cause = getattr(error, "reason", error)
        raise (_GivenUp if isinstance(cause, ssl.SSLError) else _BrokenOff)(str(cause)) from error
    with response:
        _receive(response, part, have, job)


def _receive(response: Any, part: Path, have: int, job: Job) -> None:
    start = 0
    if response.status == 206:
        start = have
        if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            _discard(part, job)
            raise _BrokenOff("it sent another range than the one asked for")
    length = response.headers.get("Content-Length", "")
    total = start + int(length) if length.isdecimal() else None
    if total is not None and total > job.limit:
        raise _GivenUp(f"it announces {total:,} bytes, more than the file has")
    done = start
    with on_disk(part), part.open("r+b" if part.exists() else "wb") as file:
        file.truncate(start)  # a server that ignores Range sends everything again
        file.seek(start)
        while chunk := _read(response):
            file.write(chunk)
            done += len(chunk)
            if done > job.limit:
                break
            job.report(done, total)
        file.flush()
        os.fsync(file.fileno())
    if done > job.limit:
        _discard(part, job)
        raise _GivenUp(f"it sent more than {job.limit:,} bytes, more than the file has")
    # http.client does not complain about an early end when it is read in chunks.
    if total is not None and done < total:
        raise _BrokenOff(f"it broke off after {done:,} of {total:,} bytes")


def _read(response: Any) -> bytes:
    try:
        return bytes(response.read(CHUNK))
    except (OSError, HTTPException) as error:
        raise _BrokenOff(f"the connection broke ({error})") from error


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _discard(part: Path, job: Job) -> None:
    with on_disk(part):
        part.unlink(missing_ok=True)
    job.report(0, None)


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """A full or forbidden disk is the user's to mend: say so, and do not blame a mirror."""
    try:
        yield
    except OSError as error:
        raise DownloadError(f"cannot write {path}: {error.strerror or error}; what is there is kept.") from error
