"""The parts of a page about several runs: their table, and what differs between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import urlencode

from fulcrum.analysis.report.formats import (
    ABSENT,
    format_metric,
    format_number,
    format_seconds,
    format_setting,
    format_spent,
)
from fulcrum.analysis.report.html import Child, Html, make_table, tag
from fulcrum.analysis.report.meaning import find_verdict
from fulcrum.analysis.report.model import STATES, RunView
from fulcrum.analysis.report.sections import STATE_LEVELS, make_badge
from fulcrum.analysis.report.seeds import SEED_SETTINGS, group_by_seed
from fulcrum.study.front import find_front
from fulcrum.study.records import StudyScore
from fulcrum.study.stats import compute_mean_interval


def make_run_table(runs: Sequence[RunView], swatches: bool = True) -> Html:
    """A line per run, to sort by any column; runs that no other run beats are marked."""
    score = runs[0].score if runs else StudyScore()
    front = find_front_runs(runs)
    columns = ("run", "method", "state", "rounds", "score", "epsilon", "guarantee", "C at the end", "time")
    rows = []
    for place, run in enumerate(runs):
        mark = make_swatch(place) if swatches and run.columns else None
        verdict = find_verdict(run.guarantee)
        course = [value for value in run.columns.get("C", ()) if math.isfinite(value)]
        last = course[-1] if course else math.nan
        own = "" if run.score == score else f" {run.score.name}"
        star = tag("span", " ★", title="no other run beats it in both epsilon and score") if place in front else None
        rows.append(
            (
                [mark, run.name, star],
                run.method or ABSENT,
                make_badge(STATE_LEVELS[run.state], STATES[run.state]),
                (f"{run.rounds_done}" + (f" of {run.rounds_planned}" if run.rounds_planned else ""), run.rounds_done),
                (format_metric(run.score.name, run.score_value) + own, run.score_value),
                (format_spent(run.epsilon) if run.is_private else "none", run.epsilon),
                make_badge(verdict.level, verdict.short),
                (format_number(last), last),
                (format_seconds(run.seconds), run.seconds),
            )
        )
    return make_table(columns, rows, f"the runs; score: {score.title}")


def make_swatch(place: int) -> Html:
    """A square in the colour of a run's lines."""
    return tag("span", class_="swatch", style=f"background:var(--c{place % 8})", aria_hidden="true")


def find_front_runs(runs: Sequence[RunView]) -> set[int]:
    """The places of the runs on the front of epsilon and score."""
    known = [
        i
        for i, run in enumerate(runs)
        if run.is_private
        and run.guarantee != "nominal"
        and math.isfinite(run.epsilon)
        and math.isfinite(run.score_value)
        and (run.score, run.unit) == (runs[0].score, runs[0].unit)
    ]
    points = [(runs[i].epsilon, runs[i].score_value) for i in known]
    return (
        {known[j] for j in find_front(points, (True, not runs[0].score.higher_is_better))} if len(known) > 1 else set()
    )


def make_seed_table(runs: Sequence[RunView]) -> Html:
    """Means over the seeds with 95% intervals; nothing where no two runs share their settings."""
    groups = group_by_seed(runs)
    rows = []
    for group in groups:
        values = [run.score_value for run in group.runs if math.isfinite(run.score_value)]
        interval, first = compute_mean_interval(values), group.runs[0]
        half = ABSENT if math.isnan(interval.half) else f"± {format_metric(first.score.name, interval.half)}"
        rows.append(
            (
                group.name,
                len(group.runs),
                (format_metric(first.score.name, interval.mean), interval.mean),
                (half, interval.half),
                (format_spent(max(run.epsilon for run in group.runs)), max(run.epsilon for run in group.runs)),
            )
        )
    if not rows:
        return Html("")
    return make_table(("settings", "seeds", "mean score", "95% interval", "epsilon"), rows, "means over seeds")


def make_differences(runs: Sequence[RunView]) -> Html:
    """The settings in which the runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    differing = [
        name
        for name in names
        if len({format_setting(run.settings.get(name, ABSENT)) for run in runs}) > 1 and name not in SEED_SETTINGS
    ]
    if not differing or len(runs) > 12:
        return Html("")
    rows = [
        (tag("code", name), *(format_setting(run.settings.get(name, ABSENT)) for run in runs)) for name in differing
    ]
    heads = ("setting", *(run.name for run in runs))
    return make_table(heads, rows, "settings in which the runs differ")


def make_problem_list(runs: Sequence[RunView]) -> Html:
    """What could not be read, by run."""
    items = [tag("li", tag("strong", run.name), ": ", " ".join(run.problems)) for run in runs if run.problems]
    if not items:
        return Html("")
    head = tag("p", tag("strong", "Not all of these folders can be shown."))
    return tag("div", head, tag("ul", items), class_="note bad", role="status")


def make_picker(runs: Sequence[tuple[str, RunView]], token: str) -> Html:
    """The list of runs under `fulcrum watch`: search, sort, and a box per run to compare those ticked.

    runs: (the run's name in addresses, the run).
    """
    rows: list[Sequence[Child]] = []
    for key, run in runs:
        link = "?" + urlencode({"token": token, "run": key})
        box = tag("input", type="checkbox", data_run=key, aria_label=f"compare {key}")
        verdict = find_verdict(run.guarantee)
        damaged = [" ", make_badge("bad", "damaged")] if run.problems and run.state != "running" else None
        when = tag("time", "", data_ago=f"{run.changed:.0f}") if run.changed else ABSENT
        rows.append(
            (
                [box, " ", tag("a", key, href=link)],
                run.method or ABSENT,
                run.dataset or ABSENT,
                [make_badge(STATE_LEVELS[run.state], STATES[run.state]), damaged],
                (f"{run.rounds_done}" + (f" of {run.rounds_planned}" if run.rounds_planned else ""), run.rounds_done),
                (format_metric(run.score.name, run.score_value), run.score_value),
                (format_spent(run.epsilon) if run.is_private else "none", run.epsilon),
                make_badge(verdict.level, verdict.short),
                (when, run.changed),
            )
        )
    columns = ("run", "method", "data", "state", "rounds", "score", "epsilon", "guarantee", "last change")
    search = tag(
        "input",
        type="search",
        data_filter="run-table",
        placeholder="search: method, data, state …",
        aria_label="search runs",
    )
    count = tag("span", id="run-table-count", class_="small", aria_live="polite")
    compare = tag("button", "Compare ticked runs", type="button", data_compare=True, disabled=True)
    table = tag("div", make_table(columns, rows, "runs"), id="run-table")
    return tag("div", tag("div", search, count, compare, class_="filters"), table, class_="card")
