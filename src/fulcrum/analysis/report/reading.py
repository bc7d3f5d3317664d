"""Reads the files of a run's folder for viewing: what is missing, torn or too large becomes a sentence, no error."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 64 * 2**20
"""Larger JSON and TOML files are not read; those of 100,000 parties are below."""
MAX_LINE_BYTES = 4 * 2**20
"""Longer lines of metrics.jsonl are skipped; a round of 100 parties has about 20 kB."""
MAX_ROUNDS_KEPT = 1000
"""Of more rounds, evenly spaced ones are kept: no screen shows more points."""


@dataclass
class Problems:
    """What was wrong with the files of a folder, in sentences."""

    sentences: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Note a problem once."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)


def read_text(file: Path, problems: Problems) -> str | None:
    """The file's text; None where there is no such file, or with a problem where it cannot be read."""
    try:
        if not file.is_file():
            return None
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            problems.add(f"{file.name} has {size / 2**20:.0f} MiB, which is too large to show; it was not read.")
            return None
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        problems.add(f"{file.name} is damaged: it is not text in UTF-8.")
    except OSError as error:
        problems.add(f"{file.name} cannot be read: {error.strerror}.")
    return None


def read_json_object(file: Path, problems: Problems) -> dict[str, Any]:
    """The file's JSON object; empty where there is none."""
    text = read_text(file, problems)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        problems.add(f"{file.name} is damaged: it is not valid JSON{' (it is empty)' if not text.strip() else ''}.")
        return {}
    if not isinstance(value, dict):
        problems.add(f"{file.name} is damaged: it holds a {type(value).__name__}, not an object.")
        return {}
    return value


def read_toml_table(file: Path, problems: Problems) -> tuple[dict[str, Any], str]:
    """The file's TOML table and its text; both empty where there is none."""
    text = read_text(file, problems)
    if text is None:
        return {}, ""
    try:
        return tomllib.loads(text), text
    except (ValueError, RecursionError):
        problems.add(f"{file.name} is damaged: it is not valid TOML.")
        return {}, text


@dataclass(frozen=True)
class KeptRounds:
    """Rounds of metrics.jsonl. lines: evenly spaced, at most `MAX_ROUNDS_KEPT`, the last one among them. total: rounds
    in the file. last_scored: the last line with metrics, {} where there is none."""

    lines: tuple[dict[str, Any], ...] = ()
    total: int = 0
    last_scored: Mapping[str, Any] = field(default_factory=dict)


def read_rounds(file: Path, problems: Problems, most: int = MAX_ROUNDS_KEPT) -> KeptRounds:
    """The rounds of a run in bounded memory, however long the file is. A torn last line is a round in progress."""
    kept: list[dict[str, Any]] = []
    stride, total, damaged, last, scored = 1, 0, 0, None, None
    waiting: dict[str, Any] | None = None
    torn = False
    try:
        for line in _iterate_lines(file):
            value = _parse_line(line)
            if value is None:
                torn = not line.endswith(b"\n")
                damaged += not torn
                continue
            total, last = total + 1, value
            if get_mapping(value, "metrics"):
                scored = value
            waiting = _prefer_scored(waiting, value)
            if total % stride == 0:
                kept.append(waiting)
                waiting = None
            if len(kept) >= 2 * most:
                kept = [_prefer_scored(a, b) for a, b in zip(kept[::2], kept[1::2], strict=True)]
                stride *= 2
    except OSError as error:
        problems.add(f"{file.name} cannot be read: {error.strerror}.")
    while len(kept) > most:
        rest = kept[len(kept) // 2 * 2 :]
        kept = [_prefer_scored(a, b) for a, b in zip(kept[::2], kept[1::2], strict=False)] + rest
    if last is not None and (not kept or kept[-1] is not last):
        kept.append(last)
    if damaged:
        problems.add(f"{file.name} is damaged: {damaged} of its lines cannot be read and are left out.")
    return KeptRounds(tuple(kept), total, scored or {})


def read_last_lines(file: Path, problems: Problems, most: int) -> tuple[dict[str, Any], ...]:
    """The last objects of a file with one JSON object per line; lines that are none are left out."""
    try:
        return tuple(deque((value for line in _iterate_lines(file) if (value := _parse_line(line))), maxlen=most))
    except OSError as error:
        problems.add(f"{file.name} cannot be read: {error.strerror}.")
        return ()


def _prefer_scored(earlier: dict[str, Any] | None, later: dict[str, Any]) -> dict[str, Any]:
    """Of two neighbouring rounds the later one, unless only the earlier one was evaluated."""
    if earlier is not None and get_mapping(earlier, "metrics") and not get_mapping(later, "metrics"):
        return earlier
    return later


def _iterate_lines(file: Path) -> Iterator[bytes]:
    """Lines with their ends; of a line that is too long, an empty one in its place."""
    if not file.is_file():
        return
    with file.open("rb") as opened:
        while line := opened.readline(MAX_LINE_BYTES):
            if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
                yield line
                continue
            while line and not line.endswith(b"\n"):
                line = opened.readline(MAX_LINE_BYTES)
            yield b"?\n"


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# --- values of any type where a number, a text or a table is expected ----------------------------------


def to_number(value: Any) -> float:
    """The value as a number; NaN where it is none. Our JSON has infinity as the text "inf"."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def to_text(value: Any, default: str = "") -> str:
    """The value where it is a text."""
    return value if isinstance(value, str) else default


def get_mapping(value: Any, name: str) -> dict[str, Any]:
    """value[name] where both are tables; else empty."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def get_list(value: Any, name: str) -> list[Any]:
    """value[name] where that is a list; else empty."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return list(found) if isinstance(found, list) else []


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers."""
    found = {str(name): to_number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def is_locked(file: Path) -> bool | None:
    """Whether a process holds this lock file; None where the system does not tell.

    It is looked up in /proc/locks: taking the lock to see would keep a run out that starts at that moment.
    """
    try:
        facts = file.stat()
        table = Path("/proc/locks").read_text()
    except OSError:
        return None
    place = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    return any(place in line.split() for line in table.splitlines())
