"""Writes the results of the robustness study: summary.json, summary.md and a heat map for every rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulcrum.privacy.accounting import format_epsilon
from fulcrum.study import figures, tables
from fulcrum.study.provenance import collect_provenance, provenance_to_line, provenance_to_markdown
from fulcrum.study.records import StudyScore
from fulcrum.study.report import file_stem, select_job_results, write_json_file, write_text_file
from fulcrum.study.robustness import (
    RobustnessFinding,
    RobustnessGrid,
    ScoreMap,
    list_robustness_jobs,
    make_score_maps,
    summarise_maps,
)
from fulcrum.study.store import RunRecord


def write_robustness_report(
    folder: Path, grid: RobustnessGrid, done: Mapping[str, RunRecord]
) -> list[RobustnessFinding]:
    """summary.json, summary.md, maps.json and figures/ from all finished runs."""
    jobs = list_robustness_jobs(grid)
    found = make_score_maps(grid, done)
    shown = summarise_maps(grid, found)
    seeds = sorted({seed for dataset in grid.datasets for seed in grid.list_dataset_seeds(dataset)})
    facts = collect_provenance(dataclasses.asdict(grid), seeds, select_job_results(jobs, done))
    write_json_file(folder / "summary.json", [finding.to_json() for finding in shown])
    write_json_file(folder / "maps.json", {"provenance": facts, "maps": [dataclasses.asdict(one) for one in found]})
    write_text_file(folder / "summary.md", make_robustness_page(grid, found, shown, facts))
    for one in found:
        best = [f.best_fixed for f in shown if (f.dataset, f.epsilon) == (one.dataset, one.epsilon)]
        score, measured = one.score, [value for value in one.flat if math.isfinite(value)]
        low, high = (10.0, 100.0) if score.is_fraction else (score.worst([*measured, *best]), score.best(measured))
        name = (
            f"{one.rule}, {tables.DATASET_TITLES.get(one.dataset, one.dataset)}, ε = {format_epsilon(one.epsilon, 6)}"
        )
        write_text_file(
            folder / "figures" / f"{file_stem(one.dataset)}-{one.epsilon:g}-{one.rule}.svg",
            figures.draw_heat_map(
                one.values,
                [f"{C0:g}" for C0 in grid.C0],
                [f"{lr:g}" for lr in grid.lr],
                f"{name}: {score.name} {score.unit}".rstrip(),
                low=low,
                high=best[0] if best else high,
                corner="C0 \\ lr",
                note=provenance_to_line(facts),
                digits=1 if score.is_fraction else None,
            ),
        )
    return shown


def make_robustness_page(
    grid: RobustnessGrid, found: Sequence[ScoreMap], shown: Sequence[RobustnessFinding], facts: dict[str, Any]
) -> str:
    """The Markdown page: one table per data set and epsilon, and whether the criterion holds."""
    title = " or ".join(dict.fromkeys(one.score.title for one in found)) or StudyScore().title
    below = "points below" if all(one.score.is_fraction for one in found) else "how much worse a rule is than"
    parts = [
        "# Does a rule need C0 and the learning rate tuned?\n",
        f"Every rule from C0 in {list(grid.C0)} at learning rates {list(grid.lr)}. Test {title}, mean over seeds "
        f"({_describe_seeds(grid)}). `best fixed` is the best cell of `{grid.fixed}`; gaps are {below} it, of the "
        f"worst C0 at the default learning rate {grid.default_lr:g}, and of the worst cell of the grid.\n",
    ]
    for dataset in grid.datasets:
        for epsilon in grid.epsilons:
            here = [f for f in shown if (f.dataset, f.epsilon) == (dataset, epsilon)]
            if not here:
                continue
            rows = [["rule", "worst", "mean", "best", "gap, default lr", "gap, whole grid"]]
            rows += [
                [
                    f.rule,
                    *map(f.score.cell, (f.worst, f.mean, f.best, f.worst_gap_default_lr, f.worst_gap_grid)),
                ]
                for f in here
            ]
            best = here[0].score.cell(here[0].best_fixed)
            title = (
                f"{tables.DATASET_TITLES.get(dataset, dataset)}, ε = {format_epsilon(epsilon, 6)}; best fixed {best}"
            )
            parts += [f"## {title}\n", tables.make_markdown_table(rows), describe_verdict(grid, here)]
    holes = sum(1 for one in found if not one.is_complete)
    if holes:
        parts.append(f"{holes} maps have holes and are left out of the tables.\n")
    if grid.unknown:
        parts.append(f"Not built into this version: {', '.join(grid.unknown)}.\n")
    return "\n".join([*parts, "---\n", provenance_to_markdown(facts)])


def _describe_seeds(grid: RobustnessGrid) -> str:
    """Which data sets have which seeds."""
    return "; ".join(f"{name}: {', '.join(map(str, grid.list_dataset_seeds(name)))}" for name in grid.datasets)


def describe_verdict(grid: RobustnessGrid, here: Sequence[RobustnessFinding]) -> str:
    """How the default rule stands against the bar: 1 point at its learning rate, 5 over the grid, 10 above rivals."""
    own = next((f for f in here if f.rule == grid.default), None)
    if own is None:
        return ""
    rivals = [f for f in here if f.rule != grid.default]
    nearest = max(rivals, key=lambda f: f.score.compute_lead(f.worst, 0.0), default=None)
    if not own.score.is_fraction:  # the bar is in points of a percentage
        if nearest is None:
            return ""
        lead = own.score.compute_lead(own.worst, nearest.worst)
        side = "better" if lead >= 0 else "worse"
        amount = own.score.cell(abs(lead))
        return f"`{grid.default}`: its worst case is {amount} {side} than that of the best rival, `{nearest.rule}`.\n"
    words = [
        f"`{grid.default}`: {'within' if own.worst_gap_default_lr <= 1 else 'NOT within'} 1 point at the default rate",
        f"{'within' if own.worst_gap_grid <= 5 else 'NOT within'} 5 points over the grid",
    ]
    if nearest:
        lead = own.score.compute_lead(own.worst, nearest.worst)
        words.append(f"its worst case is {lead:.1f} points above that of the best rival, `{nearest.rule}`")
    return ", ".join(words) + ".\n"
