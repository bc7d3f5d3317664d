"""Charts as figure files, by matplotlib, in the style of the page. Needs the extra `figures`."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.report.files import make_file_stem
from fulcrum.errors import RunError
from fulcrum.study.figures import INK, LINE, PALETTE, SOFT

DASHES = ((0, ()), (0, (7, 3)), (0, (2, 3)), (0, (9, 3, 2, 3)))
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "fulcrum",
    "figure.dpi": 100,
    "savefig.dpi": 200,
}
"""The one style of all figures, as matplotlib's settings."""


def import_matplotlib() -> Any:
    """matplotlib, drawing to files only; RunError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise RunError(
            "figures need matplotlib: pip install 'fulcrum-fl[figures]' (the page needs nothing)."
        ) from error
    return matplotlib


def write_figures(folder: Path, charts: Sequence[Chart], formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """A figure per chart and format in a folder; returns the files. The same charts give the same bytes."""
    matplotlib = import_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        figure = draw_chart(chart)
        for format in formats:
            file = folder / f"{make_file_stem(chart.key)}.{format}"
            metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format, {})
            with matplotlib.rc_context(STYLE):
                figure.savefig(file, format=format, metadata=metadata)
            written.append(file)
    return written


def draw_chart(chart: Chart, axis: str = "", layer: str = "") -> Any:
    """A matplotlib figure of a chart. axis: the key of the horizontal axis; layer: "runs" or "seeds", by default means
    over seeds where there are some."""
    matplotlib = import_matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = _make_figure_class()(figsize=_choose_size(chart), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(chart.title)
        drawers = {"bars": _draw_bars, "heat": _draw_heat}
        if chart.kind in drawers:
            drawers[chart.kind](axes, chart)
        else:
            _draw_lines(axes, chart, axis or next(iter(chart.x)), layer)
    return figure


@functools.cache
def _make_figure_class() -> Any:
    """matplotlib's Figure, which a notebook shows by itself, whether or not its backend was set up."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):  # type: ignore[misc,unused-ignore]  # matplotlib may be missing where types are checked
        """A figure that shows itself."""

        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            with import_matplotlib().rc_context(STYLE):
                self.savefig(content, format="png", dpi=120)
            return content.getvalue()

    return ShownFigure


def _choose_size(chart: Chart) -> tuple[float, float]:
    if chart.kind == "bars":
        return 5.6, max(2.0, 1.0 + 0.24 * len(chart.series[0].y))
    if chart.kind == "heat":
        return max(3.6, 1.8 + 0.38 * len(chart.columns)), max(2.4, 1.0 + 0.3 * len(chart.rows))
    return 5.6, 3.4


def _draw_lines(axes: Any, chart: Chart, key: str, layer: str) -> None:
    layers = [each.layer for each in chart.series]
    wanted = layer or ("seeds" if "seeds" in layers else "runs")
    shown = [each for each in chart.series if each.layer == wanted and key in each.x]
    horizontal, dots = chart.x[key], chart.kind == "dots"
    for series in shown:
        _draw_series(axes, series, key, dots)
    for name, value in chart.levels:
        axes.axhline(value, color=SOFT, linestyle=(0, (2, 3)), linewidth=1)
        axes.annotate(
            name, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=SOFT, fontsize=8
        )
    axes.set_xlabel(horizontal.label)
    axes.set_ylabel(chart.y.label)
    if horizontal.log:
        axes.set_xscale("log")
    if chart.y.log:
        axes.set_yscale("log")
    elif chart.y.zero:
        axes.set_ylim(bottom=0)
    _format_values(axes.yaxis, chart.y)
    if horizontal.percent:
        _format_values(axes.xaxis, horizontal)
    named = [each for each in shown if each.name and each.colour >= 0]
    if len(named) > 1:
        axes.legend(loc="best", ncols=2 if len(named) > 6 else 1)


def _draw_series(axes: Any, series: Series, key: str, dots: bool) -> None:
    colour = SOFT if series.colour < 0 else PALETTE[series.colour % len(PALETTE)]
    x, y = series.x[key], series.y
    label = _shorten(series.name, 40) if series.name and series.colour >= 0 else "_nolegend_"
    if series.low:
        axes.fill_between(x, series.low, series.high, color=colour, alpha=0.08 if series.dash else 0.16, linewidth=0)
        if series.dash:
            return
    if (dots and series.colour >= 0) or len(y) == 1:
        axes.plot(x, y, "o", color=colour, label=label, markeredgecolor="white")
        return
    style = (0, (5, 4)) if series.dash else DASHES[max(series.colour, 0) // len(PALETTE) % len(DASHES)]
    drawn = axes.step if dots else axes.plot
    more = {"where": "post"} if dots else {}
    drawn(x, y, color=colour, linestyle=style, label=label, **more)


def _draw_bars(axes: Any, chart: Chart) -> None:
    (series,) = chart.series
    places = range(len(series.y))
    axes.barh(places, series.y, color=PALETTE[series.colour % len(PALETTE)], height=0.8)
    axes.set_yticks(places, [_shorten(name) for name in series.names])
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    for name, value in chart.levels:
        axes.axvline(value, color=INK, linestyle=(0, (2, 3)), linewidth=1, label=name)
        axes.legend()
    axes.set_xlabel(chart.y.label)
    _format_values(axes.xaxis, chart.y)


def _draw_heat(axes: Any, chart: Chart) -> None:
    most = max((value for row in chart.cells for value in row if math.isfinite(value)), default=1.0) or 1.0
    axes.imshow(chart.cells, cmap="Blues", vmin=0.0, vmax=most, aspect="auto")
    axes.set_xticks(range(len(chart.columns)), chart.columns)
    axes.set_yticks(range(len(chart.rows)), [_shorten(name) for name in chart.rows])
    axes.grid(visible=False)
    axes.set_xlabel("class")
    if len(chart.columns) <= 20:
        for i, row in enumerate(chart.cells):
            for j, value in enumerate(row):
                text = f"{100 * value:.0f}" if chart.y.percent else f"{value:.3g}"
                if not math.isfinite(value) or text == "0":
                    continue
                axes.text(
                    j, i, text, ha="center", va="center", fontsize=7.5, color="white" if value > 0.6 * most else INK
                )


def _format_values(axis: Any, spec: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if spec.percent:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))
    elif spec.log:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _shorten(name: str, most: int = 22) -> str:
    # A dollar sign would begin a formula.
    return (name if len(name) <= most else f"{name[: most - 1]}…").replace("$", r"\$")
