"""What a chart is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Axis:
    """An axis. percent: values are fractions, shown in %. zero: the axis begins at 0. up: epsilons, rounded up."""

    label: str
    log: bool = False
    percent: bool = False
    zero: bool = False
    up: bool = False


@dataclass(frozen=True)
class Series:
    """A line, its points or its bars. colour: place in the palette. x: by the key of the axis. low, high: a band.

    layer: "runs", or "seeds" for means over seeds; the page shows one of them. names: of the points, for bars and dots.
    """

    name: str
    y: tuple[float, ...]
    x: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    colour: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dash: bool = False
    layer: str = "runs"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart. kind: "line", "bars" (across), "dots" or "heat". group: charts of one group share a place on the page.

    x: axes to choose from; the first is shown first. levels: (name, value) of horizontal lines to compare with. rows,
    columns, cells: of a heat map, cells[row][column].
    """

    key: str
    title: str
    caption: str
    y: Axis
    kind: str = "line"
    group: str = ""
    x: Mapping[str, Axis] = field(default_factory=dict)
    series: tuple[Series, ...] = ()
    levels: tuple[tuple[str, float], ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    cells: tuple[tuple[float, ...], ...] = ()
