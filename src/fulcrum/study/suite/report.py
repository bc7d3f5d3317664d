"""Writes the suite's outputs: summary.json, summary.md, cells.json, the figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulcrum.study.figures import IntervalRow, draw_intervals
from fulcrum.study.job import StudyJob
from fulcrum.study.provenance import (
    collect_provenance,
    get_command_line,
    get_source_commit,
    list_makers,
    provenance_to_markdown,
)
from fulcrum.study.report import select_job_results, write_json_file, write_text_file
from fulcrum.study.store import RunRecord
from fulcrum.study.suite.jobs import list_suite_jobs
from fulcrum.study.suite.scenarios import Suite
from fulcrum.study.suite.summary import ScenarioFinding, find_all, judge


def write_suite_report(folder: Path, suite: Suite, done: Mapping[str, RunRecord]) -> list[ScenarioFinding]:
    """summary.json, summary.md and cells.json from all finished runs."""
    findings = find_all(suite, done)
    jobs = list_suite_jobs(suite)
    most = max((len(suite.list_seeds(scenario)) for scenario in suite.scenarios), default=0)
    facts = collect_provenance({"suite": suite.name}, range(most), select_job_results(jobs, done))
    origin = {"commit": get_source_commit(), "command": get_command_line()}
    makers = {name: list_makers(runs) for name, runs in _group_runs(jobs, done).items()}
    write_json_file(folder / "summary.json", [{**finding.to_json(), **origin} for finding in findings])
    cells = [{**_list_cells(finding), "runs_by": makers[finding.scenario.name]} for finding in findings]
    write_json_file(folder / "cells.json", {"provenance": facts, "scenarios": cells})
    write_text_file(folder / "summary.md", make_suite_page(suite, findings, facts))
    if findings:
        write_text_file(folder / "figures" / "regrets.svg", draw_regrets(suite, findings))
    return findings


def _group_runs(jobs: Sequence[StudyJob], done: Mapping[str, RunRecord]) -> dict[str, list[RunRecord]]:
    """The finished runs of each scenario."""
    found: dict[str, list[RunRecord]] = {}
    for job in jobs:
        if job.id in done:
            found.setdefault(job.dataset, []).append(done[job.id])
    return found


SHOWN_RIVALS = ("moo-unrehearsed", "dp-sgd-rehearsed", "dp-sgd-paid-tuning")
"""Rivals of the figure; all of them are in the table."""


def draw_regrets(suite: Suite, findings: Sequence[ScenarioFinding]) -> str:
    """The suite in one figure: each scenario's regret with its interval, the worst start, and some rivals."""
    rows = []
    for aside in (True, False):
        for f in sorted((f for f in findings if f.set_aside == aside), key=lambda f: -f.regret):
            marks = {"worst start": f.start_regret}
            marks |= {rival.method: rival.regret for rival in f.rivals if rival.method in SHOWN_RIVALS}
            half = f.interval if math.isfinite(f.interval) else 0.0
            rows.append(IntervalRow(f"{f.scenario.name}{' *' if aside else ''}", f.regret, half, marks))
    words = "points below the best of 25 fixed cells (C, learning rate); negative: ahead of it. *: set aside"
    return draw_intervals(rows, suite.title, words, suite.default, bar=1.5)


def _list_cells(finding: ScenarioFinding) -> dict[str, Any]:
    return {
        "scenario": finding.scenario.name,
        "kinds": finding.scenario.kinds,
        "chosen": finding.cells,
        "grid": finding.grid,
        "rivals": [dataclasses.asdict(rival) for rival in finding.rivals],
    }


def make_suite_page(suite: Suite, findings: Sequence[ScenarioFinding], facts: Mapping[str, Any]) -> str:
    """The page for people."""
    lines = [
        f"# {suite.title}",
        "",
        f"Score in %, means over the seeds. Best fixed: the best of {len(suite.C0) * len(suite.lr)} cells of "
        f"{suite.fixed}, chosen on one half of the seeds and scored on the other. Regret: best fixed less default, "
        "with the half-width of its 95% interval. Any start: best fixed less the worst of all starts.",
        "",
    ]
    for aside, title in ((False, "Development half"), (True, "Set-aside half")):
        own = [finding for finding in findings if finding.set_aside == aside]
        wanted = sum((scenario.name in suite.set_aside) == aside for scenario in suite.scenarios)
        if wanted:
            lines += [f"## {title}", "", *_make_half(own, wanted, suite.default), ""]
    return "\n".join([*lines, provenance_to_markdown(facts)])


def _make_half(findings: Sequence[ScenarioFinding], wanted: int, default: str) -> list[str]:
    if not findings:
        return [f"None of {wanted} scenarios has been run."]
    verdict = judge(findings)
    rows = [
        f"{verdict.count} of {wanted} scenarios. Beyond the interval: within 1.5 points {verdict.within_1_5}, within 3 "
        f"points {verdict.within_3}, any start within 5 points {verdict.starts_within_5}. Mean regret "
        f"{verdict.mean_regret:.2f}, largest {verdict.largest_regret:.1f}.",
        "",
        "| scenario | seeds | best fixed | default | regret | any start |",
        "|---|---|---|---|---|---|",
    ]
    for f in sorted(findings, key=lambda finding: -finding.regret):
        half = f"{f.interval:.1f}" if math.isfinite(f.interval) else "?"
        rows.append(
            f"| {f.scenario.name} | {f.seeds} | {f.best_fixed:.1f} | {f.default:.1f} | {f.regret:+.1f} ± {half} | "
            f"{f.start_regret:+.1f} |"
        )
    names = list(dict.fromkeys(rival.method for f in findings for rival in f.rivals))
    rows += ["", describe_single_cell(findings)]
    if not names:
        return rows
    rows += [
        "",
        "From the default start; rivals on their first seeds, against the best fixed cell on the same seeds.",
        "",
        "| method | scenarios | mean regret | largest | within 1.5 points |",
        "|---|---|---|---|---|",
        _make_method_row(default, [f.regret for f in findings]),
    ]
    for name in names:
        regrets = [rival.regret for f in findings for rival in f.rivals if rival.method == name]
        rows.append(_make_method_row(name, regrets))
    return [*rows, "", describe_single_cell(findings)]


def _make_method_row(name: str, regrets: Sequence[float]) -> str:
    near = sum(regret <= 1.5 for regret in regrets)
    return f"| {name} | {len(regrets)} | {sum(regrets) / len(regrets):.2f} | {max(regrets):.1f} | {near} |"


def describe_single_cell(findings: Sequence[ScenarioFinding]) -> str:
    """The fixed cell that is best for all scenarios together, found in hindsight."""
    cells = list(findings[0].grid)
    regrets = {cell: [f.best_fixed - f.grid[cell] for f in findings] for cell in cells}
    best = min(cells, key=lambda cell: sum(regrets[cell]))
    own = regrets[best]
    return (
        f"One fixed cell for all, the best in hindsight ({best}): mean regret {sum(own) / len(own):.2f}, largest "
        f"{max(own):.1f}."
    )
