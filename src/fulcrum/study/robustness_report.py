"""Writes what the robustness study shows: summary.json, summary.md and a heat map for every rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulcrum.study import figures, tables
from fulcrum.study.provenance import markdown, one_line, provenance
from fulcrum.study.records import Score
from fulcrum.study.report import file_stem, used, write, write_json
from fulcrum.study.robustness import Finding, Grid, Map, findings, maps, robustness_jobs
from fulcrum.study.store import Record


def write_robustness(folder: Path, grid: Grid, done: Mapping[str, Record]) -> list[Finding]:
    """summary.json, summary.md, maps.json and figures/ from whatever has been run."""
    jobs = robustness_jobs(grid)
    found = maps(grid, done)
    shown = findings(grid, found)
    seeds = sorted({seed for dataset in grid.datasets for seed in grid.seeds_of(dataset)})
    facts = provenance(dataclasses.asdict(grid), seeds, used(jobs, done))
    write_json(folder / "summary.json", [finding.to_json() for finding in shown])
    write_json(folder / "maps.json", {"provenance": facts, "maps": [dataclasses.asdict(one) for one in found]})
    write(folder / "summary.md", page(grid, found, shown, facts))
    for one in found:
        best = [f.best_fixed for f in shown if (f.dataset, f.epsilon) == (one.dataset, one.epsilon)]
        score, measured = one.score, [value for value in one.flat if math.isfinite(value)]
        low, high = (10.0, 100.0) if score.is_fraction else (score.worst([*measured, *best]), score.best(measured))
        name = f"{one.rule}, {tables.NAMES.get(one.dataset, one.dataset)}, ε = {one.epsilon:g}"
        write(
            folder / "figures" / f"{file_stem(one.dataset)}-{one.epsilon:g}-{one.rule}.svg",
            figures.heat(
                one.values,
                [f"{C0:g}" for C0 in grid.C0],
                [f"{lr:g}" for lr in grid.lr],
                f"{name}: {score.name} {score.unit}".rstrip(),
                low=low,
                high=best[0] if best else high,
                corner="C0 \\ lr",
                note=one_line(facts),
                digits=1 if score.is_fraction else None,
            ),
        )
    return shown


def page(grid: Grid, found: Sequence[Map], shown: Sequence[Finding], facts: dict[str, Any]) -> str:
    """The Markdown page: one table a data set and epsilon, and whether the promise holds."""
    title = " or ".join(dict.fromkeys(one.score.title for one in found)) or Score().title
    below = "points below" if all(one.score.is_fraction for one in found) else "how much worse a rule is than"
    parts = [
        "# Does a rule need C0 and the learning rate tuned?\n",
        f"Every rule from C0 in {list(grid.C0)} at learning rates {list(grid.lr)}. Test {title}, mean over seeds "
        f"({_seeds(grid)}). `best fixed` is the best cell of `{grid.fixed}`; gaps are {below} it, of the worst "
        f"C0 at the default learning rate {grid.default_lr:g}, and of the worst cell of the grid.\n",
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
            title = f"{tables.NAMES.get(dataset, dataset)}, ε = {epsilon:g}; best fixed {best}"
            parts += [f"## {title}\n", tables.markdown(rows), verdict(grid, here)]
    holes = sum(1 for one in found if not one.complete)
    if holes:
        parts.append(f"{holes} maps have holes and are left out of the tables.\n")
    if grid.unknown:
        parts.append(f"Not built into this version: {', '.join(grid.unknown)}.\n")
    return "\n".join([*parts, "---\n", markdown(facts)])


def _seeds(grid: Grid) -> str:
    """Which data sets have which seeds."""
    return "; ".join(f"{name}: {', '.join(map(str, grid.seeds_of(name)))}" for name in grid.datasets)


def verdict(grid: Grid, here: Sequence[Finding]) -> str:
    """How the default rule stands against the bar: 1 point at its learning rate, 5 over the grid, 10 above rivals."""
    own = next((f for f in here if f.rule == grid.default), None)
    if own is None:
        return ""
    rivals = [f for f in here if f.rule != grid.default]
    nearest = max(rivals, key=lambda f: f.score.lead(f.worst, 0.0), default=None)
    if not own.score.is_fraction:  # the bar is in points of a percentage
        if nearest is None:
            return ""
        lead = own.score.lead(own.worst, nearest.worst)
        side = "better" if lead >= 0 else "worse"
        amount = own.score.cell(abs(lead))
        return f"`{grid.default}`: its worst case is {amount} {side} than that of the best rival, `{nearest.rule}`.\n"
    words = [
        f"`{grid.default}`: {'within' if own.worst_gap_default_lr <= 1 else 'NOT within'} 1 point at the default rate",
        f"{'within' if own.worst_gap_grid <= 5 else 'NOT within'} 5 points over the grid",
    ]
    if nearest:
        lead = own.score.lead(own.worst, nearest.worst)
        words.append(f"its worst case is {lead:.1f} points above that of the best rival, `{nearest.rule}`")
    return ", ".join(words) + ".\n"
