"""The study of aggregations: what shared noise and masks give back of the accuracy, and what colluders cost.

A study of rows whose file names a row to `compare` with: every other row is compared with it seed by seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.pairwise.shares import count_colluders
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Settings
from fulcrum.study.experiment import Experiment, list_paper_jobs
from fulcrum.study.job import StudyJob
from fulcrum.study.provenance import collect_provenance, get_command_line, get_source_commit, list_makers
from fulcrum.study.records import get_common_score, get_score_value
from fulcrum.study.stats import MeanInterval, compute_mean_interval, compute_paired_interval
from fulcrum.study.store import RunRecord

TITLES = {"plain": "own noise", "ideal-secagg": "ideal, simulated", "pairwise": "pairwise"}


def count_covered_colluders(settings: Settings) -> int:
    """How many parties may collude with the server before the row's epsilon no longer holds.

    Each party's own noise holds against all others together; an ideal secure aggregation against none.
    """
    privacy, parties = settings.privacy, settings.data.parties
    counts = {"plain": parties - 1, "ideal-secagg": 0}
    if privacy.aggregation in counts:
        return counts[privacy.aggregation]
    return count_colluders(privacy.colluders, parties)


def make_rows(experiment: Experiment, compare: str, done: Mapping[str, RunRecord]) -> list[dict[str, Any]]:
    """The entries of table.json, in the order of the study's jobs: those of which there is at least one run.

    mean, ci95, behind_ideal and behind_ideal_ci95 in percent; the last two over the seeds that both rows have. commit
    and command are those of the table; runs_by has those of the row's runs, which other machines may have made.
    """
    cells: dict[tuple[str, float | None, str], list[StudyJob]] = {}
    for job in list_paper_jobs(experiment):
        cells.setdefault((job.dataset, job.epsilon, job.row), []).append(job)
    scores = {place: _read_scores(jobs, done) for place, jobs in cells.items()}
    where = {"commit": get_source_commit(), "command": get_command_line()}
    rows = []
    for (dataset, epsilon, row), jobs in cells.items():
        own, ideal = scores[dataset, epsilon, row], scores.get((dataset, epsilon, compare), {})
        if not own:
            continue
        stats, behind = compute_mean_interval([own[seed] for seed in sorted(own)]), compute_paired_interval(ideal, own)
        rows.append(
            {
                "dataset": dataset,
                "epsilon": epsilon,
                "aggregation": jobs[0].settings.privacy.aggregation,
                "colluders": count_covered_colluders(jobs[0].settings),
                **_round("mean", "ci95", stats),
                **_round("behind_ideal", "behind_ideal_ci95", behind),
                "seeds": sorted(own),
                **where,
                "runs_by": list_makers(done[job.id] for job in jobs if job.id in done),
            }
        )
    return rows


def _read_scores(jobs: Sequence[StudyJob], done: Mapping[str, RunRecord]) -> dict[int, float]:
    """The score of each seed that has a run, in percent."""
    runs = {job.seed: done[job.id] for job in jobs if job.id in done}
    score = get_common_score(list(runs.values()))
    return {seed: score.to_table_scale(get_score_value(run)) for seed, run in runs.items()}


def _round(mean: str, half: str, found: MeanInterval) -> dict[str, float | None]:
    """Two keys with four digits; None where there are too few values."""
    return {
        mean: round(found.mean, 4) if found.n else None,
        half: round(found.half, 4) if found.n > 1 else None,
    }


def write_aggregation_report(out: Path, experiment: Experiment, compare: str, done: Mapping[str, RunRecord]) -> None:
    """Write table.json (the list), table-provenance.json and table.md into a folder."""
    rows = make_rows(experiment, compare, done)
    jobs = list_paper_jobs(experiment)
    runs = [done[job.id] for job in jobs if job.id in done]
    provenance = collect_provenance(experiment.settings, experiment.seeds, runs)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "table.json", rows)
    _write_json(out / "table-provenance.json", provenance)
    (out / "table.md").write_text(_make_page(experiment, rows, len(runs), len(jobs)), encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(record.to_json_value(value), indent=1) + "\n", encoding="utf-8")


def _make_page(experiment: Experiment, rows: Sequence[Mapping[str, Any]], runs: int, jobs: int) -> str:
    """The table for people."""
    lines = [
        f"# {experiment.title}",
        "",
        f"{runs} of {jobs} runs. Test accuracy in %, mean and half-width of the 95% t interval; behind: how far below "
        "the ideal secure aggregation, over the same seeds. Colluders: how many parties may join forces with the "
        "server before epsilon no longer holds.",
        "",
        "| data | epsilon | aggregation | colluders covered | accuracy | behind ideal | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        title = TITLES.get(row["aggregation"], row["aggregation"])
        lines.append(
            f"| {row['dataset']} | {format_epsilon(row['epsilon'], 6)} | {title} | {row['colluders']} | "
            f"{_show(row['mean'], row['ci95'])} | {_show(row['behind_ideal'], row['behind_ideal_ci95'])} | "
            f"{len(row['seeds'])} |"
        )
    return "\n".join([*lines, ""])


def _show(mean: float | None, half: float | None) -> str:
    return "" if mean is None else f"{mean:.2f}" + ("" if half is None else f" ± {half:.2f}")
