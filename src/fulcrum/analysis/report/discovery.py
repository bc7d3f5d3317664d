"""Which folders hold runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fulcrum.analysis.report.model import is_run_folder

MAX_DEPTH = 4
MAX_RUNS_LISTED = 500
"""Of more runs those that changed last are listed."""
SKIPPED = frozenset({"checkpoints", "transformers", "node_modules", "__pycache__"})


def find_runs(folder: Path, most: int = MAX_RUNS_LISTED) -> list[Path]:
    """The runs in a folder and its folders, by name: the folder itself where it is a run. Links are not followed."""
    if is_run_folder(folder):
        return [folder]
    found = list(_walk(folder, MAX_DEPTH))
    if len(found) > most:
        found = sorted(found, key=_last_change, reverse=True)[:most]
    return sorted(found)


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside:
        each = folder / name
        if name in SKIPPED or name.startswith("."):
            continue
        if is_run_folder(each):
            yield each
        elif depth > 1:
            yield from _walk(each, depth - 1)


def _last_change(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def expand_folders(folders: Sequence[Path]) -> list[Path]:
    """Each given run; of a folder that is no run but holds some, those. Every run once, in the given order."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = find_runs(folder) if folder.is_dir() else []
        for each in inside or [folder]:
            found.setdefault(each.resolve(), each)
    return list(found.values())
