"""The numbers behind the charts: a sentence for those who cannot see them, and CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from fulcrum.analysis.report.chart_types import Axis, Chart
from fulcrum.analysis.report.model import RunView
from fulcrum.privacy.accounting import format_epsilon

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes a text that begins with one of these for a formula."""


def describe_chart(chart: Chart) -> str:
    """What the chart shows, in words: where its lines begin and end."""
    if chart.kind == "heat":
        return f"{len(chart.rows)} rows and {len(chart.columns)} columns."
    parts = []
    lines = [each for each in chart.series if each.layer == "runs" and each.colour >= 0]
    for series in lines[:8]:
        values = series.y
        name = f"{series.name}: " if series.name else ""
        if chart.kind == "bars":
            parts.append(f"{len(values)} values from {_say(chart.y, min(values))} to {_say(chart.y, max(values))}")
        elif len(values) == 1:
            parts.append(f"{name}{_say(chart.y, values[0])}")
        else:
            ends = f"from {_say(chart.y, values[0])} to {_say(chart.y, values[-1])}"
            parts.append(f"{name}{ends}, between {_say(chart.y, min(values))} and {_say(chart.y, max(values))}")
    if len(lines) > 8:
        parts.append(f"and {len(lines) - 8} more lines")
    return "; ".join(parts) + "."


def _say(axis: Axis, value: float) -> str:
    if axis.up and math.isfinite(value):
        return format_epsilon(value)
    return f"{100 * value:.1f}%" if axis.percent else f"{value:.4g}"


def chart_to_csv(chart: Chart) -> str:
    """The numbers of a chart, a line per point."""
    lines: list[list[str | float]] = []
    if chart.kind == "heat":
        lines.append(["", *map(guard, chart.columns)])
        lines += [[guard(name), *row] for name, row in zip(chart.rows, chart.cells, strict=True)]
        return write_csv(lines)
    keys = ["name"] if chart.kind == "bars" else list(chart.x)
    lines.append(["series", "layer", *keys, chart.y.label, "low", "high"])
    for series in chart.series:
        for i, value in enumerate(series.y):
            place: list[str | float] = (
                [guard(series.names[i])]
                if chart.kind == "bars"
                else [series.x[key][i] if key in series.x else "" for key in keys]
            )
            band: list[str | float] = [series.low[i], series.high[i]] if series.low else ["", ""]
            lines.append([guard(series.name), series.layer, *place, value, *band])
    return write_csv(lines)


def rounds_to_csv(run: RunView) -> str:
    """All columns of a run, a line per kept round."""
    names = list(run.columns)
    rows = zip(*(run.columns[name] for name in names), strict=True) if names else ()
    return write_csv([[guard(name) for name in names], *([*row] for row in rows)])


def parties_to_csv(run: RunView) -> str:
    """The parties of a run with their numbers."""
    metrics = list(dict.fromkeys(name for party in run.parties for name in party.metrics))
    columns = ["party", "units", "epsilon", "budget", "rate", "sigma", "releases"]
    lines: list[list[str | float]] = [[*columns, *map(guard, metrics)]]
    for party in run.parties:
        own: list[float] = [getattr(party, name) for name in columns[1:]]
        lines.append([guard(party.name), *own, *(party.metrics.get(name, math.nan) for name in metrics)])
    return write_csv(lines)


def runs_to_csv(runs: Sequence[RunView]) -> str:
    """A line per run."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    lines: list[list[str | float]] = [
        ["run", "method", "data", "state", "rounds", "epsilon", "delta", "unit", "guarantee", "score", *metrics]
    ]
    for run in runs:
        words: list[str | float] = [guard(text) for text in (run.name, run.method, run.dataset, run.state)]
        more: list[str | float] = [
            run.rounds_done,
            run.epsilon,
            run.delta,
            guard(run.unit),
            guard(run.guarantee),
            guard(run.score.name),
        ]
        lines.append([*words, *more, *(run.metrics.get(name, math.nan) for name in metrics)])
    return write_csv(lines)


def write_csv(lines: Sequence[Sequence[str | float]]) -> str:
    """CSV text; numbers that are not known are empty."""
    text = io.StringIO()
    writer = csv.writer(text)
    for line in lines:
        writer.writerow(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in line])
    return text.getvalue()


def guard(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(FORMULA_SIGNS) else text
