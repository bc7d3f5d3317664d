"""Unpacks a data set's tar.gz without trusting its contents."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from pathlib import Path

from fulcrum.data.sources.public import registry
from fulcrum.data.sources.public.download import translate_disk_errors
from fulcrum.data.sources.public.registry import DataArchive, DataFile
from fulcrum.errors import DownloadError

MAX_MEMBER_BYTES = 64 << 20  # a batch has 31 MB


def unpack_archive(
    path: Path, archive: DataArchive, files: tuple[DataFile, ...], wanted: set[str], place: Path
) -> None:
    """Write the wanted members of a tar.gz into `place`, each checked and renamed in one step.

    The archive may hold its own folder, the data set's files and the known extras as plain files, each
    once. If it holds anything else (links, devices, other paths), it is refused before any file is written.
    """
    members = {f"{archive.prefix}/{file.name}": file for file in files}
    allowed = {*members, *(f"{archive.prefix}/{extra}" for extra in archive.extras)}
    contents: dict[str, bytes] = {}
    seen: set[str] = set()
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                if member.isdir() and member.name.rstrip("/") == archive.prefix:
                    continue
                if member.name not in allowed or member.name in seen or not member.isreg():
                    raise DownloadError(f"{path} holds {member.name!r}, which does not belong there; it is not used.")
                if member.size > MAX_MEMBER_BYTES:
                    raise DownloadError(f"{path} holds {member.name!r} with {member.size:,} bytes, far too many.")
                seen.add(member.name)
                file = members.get(member.name)
                if file is None or file.name not in wanted:
                    continue
                handle = tar.extractfile(member)
                contents[file.name] = handle.read() if handle else b""
                if registry.compute_content_digest(contents[file.name], file.digest) != file.digest:
                    raise DownloadError(f"{path} holds {member.name!r} with a wrong checksum; it is not used.")
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DownloadError(f"{path} cannot be unpacked: {error}.") from error
    if lacking := sorted(wanted - contents.keys()):
        raise DownloadError(f"{path} lacks {', '.join(lacking)}.")
    for name, content in contents.items():
        part = place / f"{name}.part"
        with translate_disk_errors(part):
            part.write_bytes(content)
            os.replace(part, place / name)


def compute_file_digest(path: Path, like: str) -> str:
    """The digest of a whole file, in the "algorithm:hex" form of `like`."""
    algorithm = like.split(":", 1)[0]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{found.hexdigest()}"
