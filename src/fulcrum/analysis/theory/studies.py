"""Measured grids of fixed (C, learning rate) cells in results/, with the public facts of their runs.

facts.json in results/theory holds the facts by study and scenario; `python benchmarks/theory_facts.py` makes it, which
takes the data. The grids are the raw rows of `fulcrum study robustness` and of the no-tuning suite's development half.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulcrum.analysis.theory.prediction import Cell, RunFacts

FACTS_FILE = "theory/facts.json"
GRID_ROWS = ("dp-sgd", "fixed")
"""Rows of a study that train with a fixed (C, learning rate)."""


def find_results(start: Path | None = None) -> Path | None:
    """The results folder of the repository that the current folder, or this file, is in; None where there is none."""
    for folder in (start or Path.cwd(), Path(__file__).resolve().parents[4]):
        if (folder / "results" / FACTS_FILE).is_file():
            return folder / "results"
    return None


def read_facts(results: Path) -> dict[str, RunFacts]:
    """Facts by "study/scenario"."""
    told: dict[str, dict[str, Any]] = json.loads((results / FACTS_FILE).read_text())["facts"]
    return {name: RunFacts(**entry) for name, entry in told.items()}


def read_grids(start: Path | None = None) -> list[tuple[str, RunFacts, dict[Cell, float]]]:
    """(name, facts, score in percent by cell) of each grid at hand; [] where results/ is not."""
    results = find_results(start)
    if results is None:
        return []
    facts = read_facts(results)
    scores: dict[str, dict[Cell, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, cell, score in _iterate_scores(results):
        scores[name][cell].append(score)
    return [
        (name, facts[name], {cell: sum(values) / len(values) for cell, values in cells.items()})
        for name, cells in scores.items()
        if name in facts
    ]


def _iterate_scores(results: Path) -> Iterator[tuple[str, Cell, float]]:
    development = results / "no-tuning" / "development-grid.jsonl.gz"
    if development.is_file():
        for row in _read_rows(development):
            if row["data"] == "real" and row["row"] in GRID_ROWS:
                yield f"no-tuning/{row['scenario']}", (row["C"], row["lr"]), _clean(row["score"])
    robustness = results / "robustness" / "robustness.jsonl.gz"
    if robustness.is_file():
        for row in _read_rows(robustness):
            if row["row"] in GRID_ROWS:
                cell = (row["settings"]["clip"]["C0"], row["settings"]["train"]["lr"])
                yield f"robustness/{row['dataset']}-{row['epsilon']}", cell, 100 * _clean(row["accuracy"])


def _read_rows(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt") as lines:
        for line in lines:
            yield json.loads(line)


def _clean(score: float | None) -> float:
    """A run that ended in numbers that are none has learned nothing."""
    return 0.0 if score is None or math.isnan(score) else float(score)
