"""Line plots and heat maps of studies as SVG text: small files without a plotting library, readable in any browser.

Why not matplotlib: docs/decisions/0013-charts.md has the measurements. Colours and dashes are those of the report.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0528f", "#a87b00", "#4b5563", "#2a9fd0", "#7a4b2a")
"""Colours that people with any colour vision tell apart: of these figures, of the report's page and of its figures."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""Dashes of further series, once the colours are used up."""
INK, SOFT, LINE = "#16202c", "#566273", "#dfe4ea"
FONT_ATTRIBUTES = f'font-family="sans-serif" font-size="11" fill="{INK}"'
LETTER_WIDTH = 6.4
"""Width per letter of a legend."""
PlotSeries = Mapping[str, Sequence[tuple[float, float]]]
PlotBands = Mapping[str, Sequence[tuple[float, float, float]]]
"""Name -> (x, low, high): the spread around a series."""


def style_series(place: int) -> tuple[str, str]:
    """The colour of the series at a place, and its dash as an attribute ("" for none)."""
    dash = DASHES[place // len(PALETTE) % len(DASHES)]
    return PALETTE[place % len(PALETTE)], f' stroke-dasharray="{dash}"' if dash else ""


def draw_line_plot(
    series: PlotSeries,
    title: str,
    x: str,
    y: str,
    log: bool = False,
    note: str = "",
    order: Sequence[str] = (),
    log_x: bool = False,
    bands: PlotBands = MappingProxyType({}),
) -> str:
    """A line plot with a legend. series: name -> points; points that are not drawable are left out.

    bands: the spread around some of the series, drawn behind them. log, log_x: logarithmic y, x. note: a comment kept
    in the file, such as where it came from. order: all names, so that a name has the same colour in every figure.
    """
    height, left, top, bottom = 360, 60, 34, 44
    drawn = {
        name: [
            (_scale_value(a, log_x), _scale_value(b, log))
            for a, b in points
            if _is_drawable(a, log_x) and _is_drawable(b, log)
        ]
        for name, points in series.items()
    }
    drawn = {name: points for name, points in drawn.items() if points}
    right = max(150.0, 36 + LETTER_WIDTH * max(map(len, drawn), default=0))
    width = left + 430 + right
    xs = [a for points in drawn.values() for a, _ in points] or [0.0, 1.0]
    spread = {
        name: [
            (_scale_value(a, log_x), _scale_value(low, log), _scale_value(high, log))
            for a, low, high in points
            if _is_drawable(a, log_x) and _is_drawable(low, log) and _is_drawable(high, log)
        ]
        for name, points in bands.items()
        if name in drawn
    }
    spread = {name: points for name, points in spread.items() if points}
    ends = [value for points in spread.values() for _, low, high in points for value in (low, high)]
    ys = [*(b for points in drawn.values() for _, b in points), *ends] or [0.0, 1.0]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1e-9)
    y0, y1 = _widen_range(min(ys), max(ys))

    def at(a: float, b: float) -> tuple[float, float]:
        across = left + (a - x0) / (x1 - x0) * (width - left - right)
        return across, height - bottom - (b - y0) / (y1 - y0) * (height - top - bottom)

    parts = [_make_text_element(left, 18, title, "start", 'font-weight="bold"')]
    for tick in _choose_ticks(y0, y1, log):
        _, level = at(x0, tick)
        parts.append(
            f'<line x1="{left}" x2="{width - right:g}" y1="{level:.1f}" y2="{level:.1f}" stroke="{LINE}"/>'
            + _make_text_element(left - 6, level + 4, _format_number(10**tick if log else tick), "end")
        )
    for tick in _choose_ticks(x0, x1, log_x):
        across, _ = at(tick, y0)
        parts.append(
            _make_text_element(across, height - bottom + 16, _format_number(10**tick if log_x else tick), "middle")
        )
    parts += [
        _make_text_element((left + width - right) / 2, height - 8, x, "middle"),
        _make_text_element(8, top - 6, y, "start"),
    ]
    for i, (name, band) in enumerate(spread.items()):
        colour, _ = style_series(order.index(name) if name in order else i)
        edge = [at(a, low) for a, low, _ in band] + [at(a, high) for a, _, high in reversed(band)]
        path = " ".join("{:.1f},{:.1f}".format(*point) for point in edge)
        parts.append(f'<polygon fill="{colour}" fill-opacity="0.15" points="{path}"/>')
    for i, (name, points) in enumerate(drawn.items()):
        place = order.index(name) if name in order else i
        colour, dash = style_series(place)
        path = " ".join("{:.1f},{:.1f}".format(*at(a, b)) for a, b in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dash} points="{path}"/>')
        mark = top + 16 * i
        parts.append(f'<rect x="{width - right + 12:g}" y="{mark}" width="12" height="4" fill="{colour}"/>')
        parts.append(_make_text_element(width - right + 30, mark + 7, name, "start"))
    return _make_svg(width, height, parts, note)


@dataclass(frozen=True)
class LinePanel:
    """One of several plots in a figure, with both axes logarithmic. series: name -> points (x, y)."""

    title: str
    x: str
    series: PlotSeries


def draw_panels(
    panels: Sequence[LinePanel], title: str, columns: int, order: Sequence[str] = (), note: str = ""
) -> str:
    """Several log-log plots side by side, with one legend. order: all names, as in `draw_line_plot`.

    Panels of one row have the same y axis.
    """
    wide, tall, left, top = 178, 150, 44, 60
    names = [name for name in order if any(name in panel.series for panel in panels)]
    parts = [_make_text_element(8, 18, title, "start", 'font-weight="bold"')]
    across = 8.0
    for name in names:
        colour, _ = style_series(order.index(name))
        parts.append(f'<rect x="{across:g}" y="32" width="12" height="4" fill="{colour}"/>')
        parts.append(_make_text_element(across + 18, 38, name, "start"))
        across += 36 + LETTER_WIDTH * len(name)
    for start in range(0, len(panels), columns):
        row = panels[start : start + columns]
        logs = [_scale_value(y, True) for p in row for points in p.series.values() for _, y in points if y > 0]
        y0, y1 = _widen_range(min(logs, default=0.0), max(logs, default=1.0))
        for n, panel in enumerate(row):
            corner = (left + n * (wide + 16.0), top + start // columns * (tall + 46.0))
            parts += _draw_panel(panel, corner, (wide, tall), (y0, y1), order, labels=n == 0)
    rows = -(-len(panels) // columns)
    return _make_svg(left + columns * (wide + 16), top + rows * (tall + 46), parts, note)


def _draw_panel(
    panel: LinePanel,
    corner: tuple[float, float],
    size: tuple[float, float],
    y: tuple[float, float],
    order: Sequence[str],
    labels: bool,
) -> list[str]:
    (left, top), (wide, tall), (y0, y1) = corner, size, y
    points = [a for line in panel.series.values() for a, b in line if a > 0 and b > 0]
    x0, x1 = _widen_range(math.log10(min(points, default=1)), math.log10(max(points, default=10)))

    def at(a: float, b: float) -> tuple[float, float]:
        return left + (a - x0) / (x1 - x0) * wide, top + tall - (b - y0) / (y1 - y0) * tall

    parts = [_make_text_element(left, top - 5, panel.title, "start")]
    for tick in _choose_ticks(y0, y1, True):
        _, level = at(x0, tick)
        parts.append(f'<line x1="{left:g}" x2="{left + wide:g}" y1="{level:.1f}" y2="{level:.1f}" stroke="{LINE}"/>')
        if labels:
            parts.append(_make_text_element(left - 4, level + 4, _format_number(10**tick), "end"))
    for value in sorted(set(points)):
        across, _ = at(math.log10(value), y0)
        parts.append(_make_text_element(across, top + tall + 14, _format_number(value), "middle"))
    for name, line in panel.series.items():
        colour, dash = style_series(order.index(name) if name in order else 0)
        drawn = [at(math.log10(a), math.log10(b)) for a, b in line if a > 0 and b > 0]
        path = " ".join("{:.1f},{:.1f}".format(*point) for point in drawn)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dash} points="{path}"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.2" fill="{colour}"/>' for a, b in drawn]
    return parts


@dataclass(frozen=True)
class IntervalRow:
    """A line of `draw_intervals`: a value with its half-width, and further values by the name of their mark."""

    label: str
    value: float
    half: float
    marks: Mapping[str, float]


def draw_intervals(rows: Sequence[IntervalRow], title: str, x: str, name: str, bar: float, note: str = "") -> str:
    """One line per row: a dot with its interval, and a ring per mark, on a symmetric logarithmic axis.

    name: what the dots are. bar: a value that dots should stay below, drawn as a line.
    """
    left, top, tall, wide = 310.0, 58.0, 15.0, 470.0
    marks = list(dict.fromkeys(mark for row in rows for mark in row.marks))
    values = [v for row in rows for v in (row.value - row.half, row.value + row.half, *row.marks.values())]
    low, high = (_squeeze(v) for v in (min([*values, -1.0]), max([*values, bar, 1.0])))

    def at(value: float) -> float:
        return left + (_squeeze(value) - low) / (high - low) * wide

    bottom = top + tall * len(rows)
    parts = [_make_text_element(8, 18, title, "start", 'font-weight="bold"')]
    across = 8.0
    for colour, what in zip(PALETTE, [name, *marks], strict=False):
        parts.append(f'<circle cx="{across + 6:g}" cy="34" r="4" fill="{colour}"/>')
        parts.append(_make_text_element(across + 16, 38, what, "start"))
        across += 34 + LETTER_WIDTH * len(what)
    for tick in (-30, -10, -3, -1, 0, 1, 3, 10, 30, 100):
        if low <= _squeeze(tick) <= high:
            parts.append(f'<line x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="{top}" y2="{bottom}" stroke="{LINE}"/>')
            parts.append(_make_text_element(at(tick), bottom + 14, _format_number(tick), "middle"))
    parts.append(f'<line x1="{at(bar):.1f}" x2="{at(bar):.1f}" y1="{top}" y2="{bottom}" stroke="{PALETTE[1]}"/>')
    parts.append(_make_text_element(left + wide / 2, bottom + 32, x, "middle"))
    for n, row in enumerate(rows):
        level = top + tall * (n + 0.5)
        parts.append(_make_text_element(left - 8, level + 4, row.label, "end"))
        for mark, value in row.marks.items():
            colour = style_series(1 + marks.index(mark))[0]
            parts.append(f'<circle cx="{at(value):.1f}" cy="{level:.1f}" r="3" fill="none" stroke="{colour}"/>')
        ends = (at(row.value - row.half), at(row.value + row.half))
        parts.append(
            f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{level:.1f}" y2="{level:.1f}" '
            f'stroke="{PALETTE[0]}" stroke-width="1.5"/>'
        )
        parts.append(f'<circle cx="{at(row.value):.1f}" cy="{level:.1f}" r="3.5" fill="{PALETTE[0]}"/>')
    return _make_svg(left + wide + 30, bottom + 44, parts, note)


def _squeeze(value: float) -> float:
    """A symmetric logarithm: nearly linear below 1."""
    return math.copysign(math.log1p(abs(value)), value)


def draw_heat_map(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    low: float = 0.0,
    high: float = 100.0,
    corner: str = "",
    note: str = "",
    digits: int | None = 1,
) -> str:
    """A heat map with printed numbers: values[i][j] belongs to rows[i] and columns[j]; NaN is left grey.

    low and high: the values with the darkest and the brightest colour; low is the larger one where a lower value is
    better. digits: decimals of the numbers; None: three significant digits.
    """
    size, tall, left, top = 62, 30, 70, 52
    span = high - low

    def shown(value: float) -> str:
        return f"{value:.3g}" if digits is None else f"{value:.{digits}f}"

    parts = [
        _make_text_element(8, 18, title, "start", 'font-weight="bold"'),
        _make_text_element(8, top - 8, corner, "start"),
    ]
    parts += [_make_text_element(left + size * (j + 0.5), top - 8, name, "middle") for j, name in enumerate(columns)]
    for i, row in enumerate(values):
        parts.append(_make_text_element(left - 8, top + tall * i + 19, rows[i], "end"))
        for j, value in enumerate(row):
            share = math.nan if math.isnan(value) else min(max((value - low) / (span or 1e-9), 0.0), 1.0)
            ink = "#fff" if share < 0.55 else INK
            parts.append(
                f'<rect x="{left + size * j}" y="{top + tall * i}" width="{size - 2}" height="{tall - 2}" '
                f'fill="{_choose_shade(share)}"/>'
            )
            if not math.isnan(value):
                parts.append(
                    _make_text_element(left + size * (j + 0.5), top + tall * i + 19, shown(value), "middle", ink=ink)
                )
    return _make_svg(left + size * len(columns) + 10, top + tall * len(rows) + 10, parts, note)


# --- parts ----------------------------------------------------------------------------------------


def _make_svg(width: float, height: float, parts: Sequence[str], note: str) -> str:
    comment = f"<!-- {escape(note).replace('--', '- -')} -->\n" if note else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}">'
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{comment}{head}{back}\n' + "\n".join(parts) + "\n</svg>\n"


def _make_text_element(x: float, y: float, words: str, anchor: str, more: str = "", ink: str = "") -> str:
    font = FONT_ATTRIBUTES if not ink else FONT_ATTRIBUTES.replace(INK, ink)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {font} {more}>{escape(words)}</text>'


def _is_drawable(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _scale_value(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _widen_range(low: float, high: float) -> tuple[float, float]:
    """A little room above and below, also for a flat line."""
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def _choose_ticks(low: float, high: float, log: bool) -> list[float]:
    """About five round values between low and high; on a log axis (low and high are exponents) powers of ten, or 1, 2
    and 5 times those where there are few."""
    if log:
        whole = [float(k) for k in range(math.ceil(low), math.floor(high) + 1)]
        if len(whole) > 3:
            return whole
        fine = [k + math.log10(m) for k in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
        return [tick for tick in fine if low - 1e-9 <= tick <= high + 1e-9] or [(low + high) / 2]
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _format_number(value: float) -> str:
    return f"{value:.4g}"


def _choose_shade(share: float) -> str:
    """Dark blue over green to yellow; grey for NaN."""
    if math.isnan(share):
        return "#bbb"
    stops = ((0.0, (48, 18, 94)), (0.5, (33, 144, 140)), (1.0, (253, 231, 76)))
    for (a, one), (b, other) in itertools.pairwise(stops):
        if share <= b:
            mix = (share - a) / (b - a)
            return "#" + "".join(f"{round(p + mix * (q - p)):02x}" for p, q in zip(one, other, strict=True))
    return "#fde74c"
