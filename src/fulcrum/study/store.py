"""Finished runs: one line of JSON each, in the *.jsonl files (shards) of a folder; large merged ones are gzipped.

Lines are appended whole and flushed, so a crash loses at most the line being written, which readers
drop. Ids are computed from the settings in the line, not read from it: results stay valid when a
new setting with a neutral default is added, and become invalid when a default changes.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError, RunError
from fulcrum.runs.folder import to_json_value
from fulcrum.study.job import StudyJob, compute_job_id, settings_from_json
from fulcrum.study.records import get_record_score, get_score_value

GZIP_THRESHOLD_BYTES = 2**16
"""Bytes of a merged file above which it is kept gzipped: settings repeat, so gzip reduces them to a twentieth."""
GZIP_SUFFIX = ".gz"
RunRecord = dict[str, Any]
"""A finished run: the job's tags and settings, metrics, curves, and where it ran (see records.py)."""


class ShardWriter:
    """A shard to append to, locked against a second process; use as a context manager."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.jsonl"
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise RunError(f"{self.path} is being written by another process; give each its own --shard.") from error
        self._drop_torn_line()

    def _drop_torn_line(self) -> None:
        """Cut off a line that a crash left half written."""
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one finished run; it is on the disk when this returns."""
        self._file.write((json.dumps(to_json_value(record), separators=(",", ":")) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Release the lock and delete the shard if it is empty."""
        empty = self._file.seek(0, os.SEEK_END) == 0
        if empty:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def list_shards(folder: Path) -> list[Path]:
    """The files with results in a folder."""
    return sorted([*folder.glob("*.jsonl"), *folder.glob(f"*.jsonl{GZIP_SUFFIX}")])


def read_shard(file: Path) -> list[RunRecord]:
    """The records of one file. A torn last line is left out; any other damage is an error."""
    text = _read_shard_text(file)
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["id"] = _recompute_id(record)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged in line {number}: {error}.") from None
        records.append(record)
    return records


def _read_shard_text(file: Path) -> str:
    if file.suffix != GZIP_SUFFIX:
        return file.read_text(encoding="utf-8")
    try:
        return gzip.decompress(file.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RunError(f"{file} is damaged: {error}.") from None


def _recompute_id(record: RunRecord) -> str:
    """The id computed by this version; unchanged if the record's settings are from another version."""
    try:
        return compute_job_id(settings_from_json(record["settings"]), record["epsilon"], record.get("revision", 0))
    except ConfigError:
        return str(record["id"])


def load_results(folders: Path | Sequence[Path], keep: str = "") -> dict[str, RunRecord]:
    """All finished runs of one or more folders, by id.

    The same run may occur twice with the same result. With different results, that is an error unless keep is
    "earliest" or "latest", by the date of the run.
    """
    found: dict[str, RunRecord] = {}
    origin: dict[str, Path] = {}
    for folder in [folders] if isinstance(folders, Path) else folders:
        for file in list_shards(folder):
            for record in read_shard(file):
                known = found.get(record["id"])
                if known is not None and not is_same_result(known, record) and not keep:
                    raise RunError(_make_conflict_error(known, origin[record["id"]], record, file))
                if known is None or _is_preferred(record, known, keep):
                    found[record["id"]], origin[record["id"]] = record, file
    return found


def _is_preferred(new: RunRecord, old: RunRecord, keep: str) -> bool:
    if keep not in ("", "earliest", "latest"):
        raise ConfigError(f"keep = {keep!r} is not known; choose earliest or latest.")
    later = str(new["date"]) > str(old["date"])
    return bool(keep) and not is_same_result(new, old) and later == (keep == "latest")


def is_same_result(one: RunRecord, other: RunRecord) -> bool:
    """Whether two records of one job agree: equal score at equal noise."""
    return get_score_value(one) == get_score_value(other) and _get_noise_terms(one) == _get_noise_terms(other)


def _get_noise_terms(record: RunRecord) -> float | None:
    sigma = record["settings"].get("privacy", {}).get("sigma")
    return None if sigma is None else float(f"{sigma:.4g}")


def _make_conflict_error(one: RunRecord, first: Path, other: RunRecord, second: Path) -> str:
    score = f"{get_record_score(one).name} {get_score_value(one):.4f}"
    what = f"job {one['id']} ({one['cell']}, seed {one['seed']}) has {score}"
    return (
        f"{what} in {first} and {get_score_value(other):.4f} in {second}; keep one with: fulcrum study merge "
        f"{first.parent} --keep earliest"
    )


def load_finished_ids(folders: Iterable[Path]) -> set[str]:
    """The ids of all finished runs of some folders; folders that are not there have none.

    Two results of one job may differ here, as two studies that share a job have run it on different machines: it is
    finished in either case. Which result a table takes is decided by its own folder (`load_results`).
    """
    shards = (file for folder in folders for file in list_shards(folder))
    return {record["id"] for file in shards for record in read_shard(file)}


def find_missing_jobs(jobs: Iterable[StudyJob], done: Container[str]) -> list[StudyJob]:
    """The jobs without a result, in order. done: ids of finished runs, or results by id."""
    return [job for job in jobs if job.id not in done]


def merge_results(sources: Sequence[Path], target: Path, keep: str = "") -> dict[str, int]:
    """Merge the results of several folders into one; returns the number of runs per study in it.

    Afterwards the target holds one file per study, sorted by cell and seed, gzipped where it is large; the other
    folders are unchanged. Nothing is removed before everything is on the disk.
    """
    for source in sources:
        if not source.is_dir():
            raise RunError(f"there is no folder {source}.")
    target.mkdir(parents=True, exist_ok=True)
    records = load_results([target, *sources], keep)
    old = list_shards(target)
    by_study: dict[str, list[RunRecord]] = {}
    for record in records.values():
        by_study.setdefault(record["study"], []).append(record)
    written = []
    for study, own in by_study.items():
        own.sort(key=lambda r: (r["cell"], r["trial"] if r["trial"] is not None else -1, r["seed"], r["id"]))
        content = "".join(json.dumps(to_json_value(record), separators=(",", ":")) + "\n" for record in own).encode()
        large = len(content) > GZIP_THRESHOLD_BYTES
        file = target / f"{study}.jsonl{GZIP_SUFFIX if large else ''}"
        part = target / f"{study}.jsonl.part"
        with part.open("wb") as opened:
            opened.write(gzip.compress(content, mtime=0) if large else content)  # the same bytes for the same runs
            opened.flush()
            os.fsync(opened.fileno())
        written.append((part, file))
    for part, file in written:
        part.replace(file)
    for file in set(old) - {file for _, file in written}:
        file.unlink()
    return {study: len(own) for study, own in sorted(by_study.items())}
