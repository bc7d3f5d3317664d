"""Writes the report: the page, and the numbers and figures beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fulcrum.analysis.report.chart_types import Chart
from fulcrum.analysis.report.model import RunView
from fulcrum.analysis.report.numbers import chart_to_csv, parties_to_csv, rounds_to_csv, runs_to_csv
from fulcrum.errors import RunError
from fulcrum.runs.folder import write_file_atomically

PAGE_START = b"<!doctype html>"


def write_page(file: Path, page: str) -> None:
    """Write the page; refuses to replace a file that is no page."""
    if file.is_dir():
        raise RunError(f"--out = {file} is a folder; give the page a file's name, such as {file / 'report.html'}.")
    if file.is_file() and file.stat().st_size:
        with file.open("rb") as opened:
            if not opened.read(len(PAGE_START)).lower().startswith(PAGE_START):
                raise RunError(f"--out = {file} exists and is no HTML page; choose another file.")
    _make_folder(file.parent)
    write_file_atomically(file, page.encode("utf-8"))


def write_numbers(folder: Path, runs: Sequence[RunView], charts: Sequence[Chart]) -> list[Path]:
    """CSV files: runs.csv, one per chart, and the rounds and parties of each run. Returns them."""
    texts = {"runs.csv": runs_to_csv(runs)}
    texts |= {f"chart-{make_file_stem(chart.key)}.csv": chart_to_csv(chart) for chart in charts}
    for place, run in enumerate(runs, start=1):
        stem = f"{place}-{make_file_stem(run.name)}" if len(runs) > 1 else make_file_stem(run.name)
        texts[f"rounds-{stem}.csv"] = rounds_to_csv(run)
        if run.parties:
            texts[f"parties-{stem}.csv"] = parties_to_csv(run)
    _make_folder(folder)
    for name, text in texts.items():
        write_file_atomically(folder / name, text.encode("utf-8"))
    return [folder / name for name in texts]


def make_file_stem(name: str) -> str:
    """A name of anything as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "run"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make folder {folder}: {error.strerror}.") from error
