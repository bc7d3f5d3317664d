"""Does anything that was good fall, now that moo rehearses? Old and new rows, paired by seed, with a verdict.

    fulcrum study kept --datasets digits        # the runs (a GPU machine for mnist and fashion-mnist: docs/studies.md)
    python benchmarks/kept.py                   # the table and the verdict; --out writes it as JSON

A cell has fallen if it is more than `LIMIT` points lower beyond the 95% interval of the paired difference. The paper's
table starts from painted weights, where nothing is rehearsed: its rows are checked by their settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulcrum.runs.rehearsal.apply import UNLEARNED_INITS
from fulcrum.study.experiment import list_paper_jobs, read_experiment
from fulcrum.study.provenance import get_source_commit, list_makers
from fulcrum.study.records import get_record_score, get_score_value
from fulcrum.study.stats import compute_paired_interval
from fulcrum.study.store import RunRecord, load_results

LIMIT = 0.3
"""Points that a cell may lose."""
NEW, OLD = "moo", "moo-unrehearsed"


def compare_rows(done: Mapping[str, RunRecord]) -> list[dict[str, Any]]:
    """One entry per cell that has seeds in both rows: {dataset, epsilon, seeds, old, new, change, interval, fallen}."""
    scores: dict[tuple[str, float | None], dict[str, dict[int, float]]] = {}
    runs: dict[tuple[str, float | None], list[RunRecord]] = {}
    for job in list_paper_jobs(read_experiment(None, "kept")):
        record = done.get(job.id)
        if record is None:
            continue
        place = (job.dataset, job.epsilon)
        value = get_record_score(record).to_table_scale(get_score_value(record))
        scores.setdefault(place, {}).setdefault(job.row, {})[job.seed] = value
        runs.setdefault(place, []).append(record)
    rows = []
    for (dataset, epsilon), own in scores.items():
        seeds = sorted(own.get(NEW, {}).keys() & own.get(OLD, {}).keys())
        if len(seeds) < 2:
            continue
        change = compute_paired_interval(own[NEW], own[OLD])
        old, new = (sum(own[row][seed] for seed in seeds) / len(seeds) for row in (OLD, NEW))
        rows.append(
            {
                "dataset": dataset,
                "epsilon": epsilon,
                "seeds": len(seeds),
                "old": round(old, 3),
                "new": round(new, 3),
                "change": round(change.mean, 3),
                "interval": round(change.half, 3),
                "fallen": change.mean + change.half < -LIMIT,
                "runs_by": list_makers(runs[dataset, epsilon]),
            }
        )
    return rows


def list_rehearsed_paper_cells() -> list[str]:
    """Cells of the paper's table whose moo row would be rehearsed: none, while they start from painted weights."""
    jobs = [job for job in list_paper_jobs(read_experiment(None, "paper")) if job.settings.method == "moo"]
    return sorted({job.cell for job in jobs if job.settings.model.init in UNLEARNED_INITS})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results/kept"))
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    rows, paper = compare_rows(load_results(words.results)), list_rehearsed_paper_cells()
    print("| data | epsilon | seeds | formula | rehearsed | change | fallen |\n|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['dataset']} | {row['epsilon']:g} | {row['seeds']} | {row['old']:.2f} | {row['new']:.2f} | "
            f"{row['change']:+.2f} ± {row['interval']:.2f} | {'FALLEN' if row['fallen'] else 'no'} |"
        )
    fallen = [row for row in rows if row["fallen"]]
    print(f"\n{len(fallen)} of {len(rows)} cells fell by more than {LIMIT} points beyond their interval.")
    print(f"The paper's table: {len(paper)} of its moo cells would be rehearsed; the others stand as they are.")
    if words.out is not None:
        content = {"limit": LIMIT, "cells": rows, "paper_cells_rehearsed": paper, "commit": get_source_commit()}
        words.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if fallen or paper else 0


if __name__ == "__main__":
    raise SystemExit(main())
