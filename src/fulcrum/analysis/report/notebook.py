"""Runs in a notebook: the charts of the report as matplotlib figures, and the report itself.

import fulcrum.analysis.report.notebook as look

look.figure(result, "metric-accuracy")           # a chart of one run
look.figure([one, other], "tradeoff")            # of several
look.charts(result)                              # which there are
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulcrum.analysis.report.chart_types import Chart
from fulcrum.analysis.report.charts import make_charts
from fulcrum.analysis.report.figures import draw_chart
from fulcrum.analysis.report.model import RunView, make_columns, read_run
from fulcrum.analysis.report.reading import get_mapping, numbers_of
from fulcrum.errors import ConfigError, RunError
from fulcrum.runs.result import Result
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.study.records import StudyScore

Run = Result | RunView | Path | str
"""A run in any form: a result, or the folder of one."""


def view(run: Run, name: str = "") -> RunView:
    """A run for viewing. name: in legends; default its folder's, or its method with its epsilon."""
    if isinstance(run, RunView):
        return run
    if not isinstance(run, Result):
        found = read_run(Path(run))
        if found.state == "missing":
            raise RunError(found.problems[0])
        return found
    if run.folder is not None and not name:
        return read_run(run.folder)
    summary, settings = run.summary, run.settings
    score = StudyScore(summary["score"], summary["higher_is_better"])
    target = settings.privacy.epsilon
    return RunView(
        name=name or f"{settings.method}{'' if target is None else f' ε {target:g}'}",
        folder="" if run.folder is None else str(run.folder),
        state="finished",
        id=summary["run"],
        method=settings.method,
        rule=summary["rule"],
        dataset=settings.data.source,
        status=summary["status"],
        score=score,
        metrics=numbers_of(summary["metrics"]),
        baseline=numbers_of(get_mapping(summary, "baseline")),
        evaluated_on=summary["evaluated_on"],
        epsilon=run.epsilon,
        delta=run.delta,
        target=float("nan") if target is None else target,
        unit=summary["unit"],
        guarantee=summary["guarantee"],
        rounds_done=summary["rounds"],
        rounds_planned=settings.train.rounds,
        columns=make_columns(run.lines, score, [], summary["unit"], public=False),
    )


def charts(runs: Run | Sequence[Run]) -> dict[str, Chart]:
    """The charts that there are of a run or several, by key."""
    given = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    return {chart.key: chart for chart in make_charts([view(run) for run in given])}


def figure(runs: Run | Sequence[Run], key: str, axis: str = "", layer: str = "") -> Any:
    """A chart as a matplotlib figure, which a notebook shows. axis: "round" or "epsilon"; layer: "runs" or "seeds"."""
    found = charts(runs)
    if key not in found:
        raise ConfigError(f"there is no chart {key!r} of these runs; {suggest_nearest_names(key, found)}")
    return draw_chart(found[key], axis, layer)
