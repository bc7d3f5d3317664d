"""The page: one HTML file with everything in it. It loads nothing, and runs no script but its own three."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import fulcrum
from fulcrum.analysis.report import sections, several
from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.report.charts import make_charts
from fulcrum.analysis.report.html import Child, Html, make_json_block, render, tag
from fulcrum.analysis.report.model import RunView
from fulcrum.analysis.report.numbers import describe_chart
from fulcrum.analysis.report.privacy_section import make_privacy
from fulcrum.analysis.report.seeds import describe_run, group_by_seed
from fulcrum.privacy.accounting import format_epsilon

SCRIPTS = ("d3.min.js", "plot.umd.min.js", "page.js")
Contents = tuple[tuple[str, str], ...]
SINGLE_CONTENTS: Contents = (
    ("headline", "Headline"),
    ("progress-over-rounds", "Progress"),
    ("clipping", "Clipping"),
    ("parties", "Parties"),
    ("privacy", "Privacy"),
    ("settings", "Settings"),
    ("rerun", "Rerun"),
)
SEVERAL_CONTENTS: Contents = (
    ("runs", "Runs"),
    ("tradeoff", "Trade-off"),
    ("progress-over-rounds", "Progress"),
    ("clipping", "Clipping"),
    ("differences", "Differences"),
    ("each", "Each run"),
)


@dataclasses.dataclass(frozen=True)
class LivePage:
    """How a page follows its runs: the digest of what it shows, the seconds between two looks, and where back leads.

    next: whether this is the next state of a page that is open: what does not change is left out.
    """

    state: str
    seconds: float = 2.0
    back: str = ""
    next: bool = False


def make_page(runs: Sequence[RunView], title: str = "", live: LivePage | None = None) -> str:
    """The page about one run or several, as text of an HTML file."""
    charts = make_charts(runs)
    if len(runs) == 1:
        heading = title or _make_title(runs[0])
        body, meta, contents = _make_single(runs[0], charts), sections.make_run_meta(runs[0]), SINGLE_CONTENTS
    else:
        heading = title or f"{len(runs)} runs"
        words = ", ".join(dict.fromkeys(describe_run(run) for run in runs))
        meta = tag("div", tag("span", words if len(words) < 200 else f"{len(runs)} runs"), class_="meta")
        body, contents = _make_several(runs, charts), SEVERAL_CONTENTS
    return assemble_page(heading, meta, body, charts, contents, live)


def assemble_page(
    heading: str,
    meta: Child,
    body: Child,
    charts: Sequence[Chart] = (),
    contents: Sequence[tuple[str, str]] = (),
    live: LivePage | None = None,
) -> str:
    """A whole HTML file around the content of <main>."""
    content = render(body)
    shown = [(id, name) for id, name in contents if f'id="{id}"' in content]
    links = [tag("li", tag("a", name, href=f"#{id}")) for id, name in shown]
    back = tag("p", tag("a", "← all runs", href=live.back), class_="small noprint") if live and live.back else None
    status = tag("span", "live", id="live", class_="live", role="status") if live else None
    header = tag(
        "header",
        tag("div", back, tag("div", "Fulcrum report", class_="brand"), tag("h1", heading), meta),
        tag("div", status, " ", tag("button", "theme: auto", type="button", class_="theme"), style="flex:none"),
        class_="top",
    )
    navigation = tag("nav", tag("ul", links), class_="contents", aria_label="Contents") if links else None
    main = tag("main", body, make_json_block("data", charts_to_json(charts)), id="main")
    footer = tag(
        "footer",
        f"Made by Fulcrum {fulcrum.__version__} from the run's folder alone. This page loads nothing from a network. ",
        "Charts: Observable Plot and D3 (ISC licence).",
    )
    scripts = [_read_asset(name) for name in SCRIPTS]
    policy = make_policy(scripts, live is not None)
    head = [
        Html('<meta charset="utf-8">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="fulcrum-live", content=live.state, data_seconds=f"{live.seconds:g}") if live else None,
        tag("title", f"{heading} · Fulcrum"),
        None if live and live.next else Html(f"<style>{_read_asset('page.css')}</style>"),
    ]
    skip = tag("a", "Skip to the content", href="#main", class_="skip")
    # The scripts' own texts go in as they are: their hashes are in the policy.
    ends = Html("" if live and live.next else "".join(f"<script>{text}</script>" for text in scripts))
    whole = tag("head", head) + tag("body", skip, header, navigation, main, footer, ends)
    return f'<!doctype html>\n<html lang="en">{whole}</html>\n'


def make_policy(scripts: Sequence[str], live: bool) -> str:
    """The page's content security policy: its own scripts by their hashes, nothing from elsewhere."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    parts = [
        "default-src 'none'",
        "script-src " + " ".join(f"'sha256-{each}'" for each in hashes),
        "style-src 'unsafe-inline'",  # the chart library writes a style into each SVG
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(parts + (["connect-src 'self'"] if live else []))


@functools.cache
def _read_asset(name: str) -> str:
    text = resources.files("fulcrum.analysis.report").joinpath("assets", name).read_text(encoding="utf-8")
    # A browser reads CR LF as LF before it hashes a script.
    return text.replace("\r\n", "\n")


@functools.cache
def _list_default_settings() -> Mapping[str, Any]:
    from fulcrum.settings.schema import Settings

    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(Settings()).items():
        inner = value if isinstance(value, dict) else None
        flat |= {f"{name}.{each}": own for each, own in inner.items()} if inner is not None else {name: value}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


# --- one run, several runs ----------------------------------------------------------------------------


def _make_title(run: RunView) -> str:
    what = " on ".join(part for part in (run.method, run.dataset) if part)
    return f"{what}: {run.name}" if what else run.name


def _make_single(run: RunView, charts: Sequence[Chart]) -> list[Child]:
    return [
        sections.make_headline(run),
        sections.make_state_notes(run),
        sections.make_section(
            "progress-over-rounds", "Progress", sections.make_figures(charts, ("metrics", "spending", "participants"))
        ),
        sections.make_section(
            "clipping",
            "Clipping, step and signal",
            sections.make_figures(charts, ("C", "step", "objective", "signal", "theory")),
            sections.make_rehearsal(run),
        ),
        sections.make_section(
            "parties",
            "Parties",
            sections.make_federation(run),
            sections.make_figures(charts, ("party-score", "party-epsilon", "sizes", "labels", "confusion")),
            sections.make_parties(run),
            sections.make_events(run),
        ),
        sections.make_section(
            "privacy", "Privacy, in plain words", make_privacy(run), sections.make_figures(charts, ("attack",))
        ),
        sections.make_section("settings", "Settings", sections.make_settings(run, _list_default_settings())),
        sections.make_section("rerun", "How to run it again", sections.make_rerun(run)),
    ]


def _make_several(runs: Sequence[RunView], charts: Sequence[Chart]) -> list[Child]:
    seeds = several.make_seed_table(runs)
    layers = tag("div", class_="tools", data_layers=True) if group_by_seed(runs) else None
    differences = several.make_differences(runs)
    each = [
        tag(
            "details",
            tag("summary", run.name),
            sections.make_headline(run),
            sections.make_state_notes(run),
            make_privacy(run),
            id=f"run-{place}",
        )
        for place, run in enumerate(runs)
    ]
    unique = [_with_unique_ids(part, place) for place, part in enumerate(each)]
    return [
        several.make_problem_list(runs),
        sections.make_section(
            "runs",
            "Runs",
            tag("div", several.make_run_table(runs), class_="card"),
            [tag("h3", "Means over seeds", style="margin-top:1.2rem"), tag("div", seeds, class_="card")]
            if seeds
            else None,
        ),
        sections.make_section("tradeoff", "The trade-off", sections.make_figures(charts, ("tradeoff",))),
        sections.make_section(
            "progress-over-rounds",
            "Progress",
            layers,
            sections.make_figures(charts, ("metrics", "spending", "participants")),
        ),
        sections.make_section(
            "clipping", "Clipping, step and signal", sections.make_figures(charts, ("C", "step", "objective", "signal"))
        ),
        sections.make_section(
            "differences", "What differs", tag("div", differences, class_="card") if differences else None
        ),
        sections.make_section("each", "Each run", unique),
    ]


def _with_unique_ids(part: Html, place: int) -> Html:
    """The markup of one run among several: its ids get the run's number."""
    for id in (
        "headline",
        "progress",
        "privacy-who",
        "privacy-released",
        "privacy-adds",
        "privacy-scored",
        "privacy-random",
        "privacy-uncovered",
    ):
        part = Html(part.replace(f'id="{id}"', f'id="{id}-{place}"'))
    return part


def _has_axis(chart: Chart, key: str) -> bool:
    return any(key in series.x for series in chart.series)


# --- charts for the script ----------------------------------------------------------------------------


def round_up(value: float) -> float:
    """The value with five digits, at least as large."""
    return float(format_epsilon(value, 5)) if math.isfinite(value) else value


def charts_to_json(charts: Sequence[Chart]) -> dict[str, Any]:
    """The charts for the page's script; arrays that several charts share are there once."""
    places: dict[tuple[float, ...], int] = {}

    def put(values: tuple[float, ...]) -> int:
        return places.setdefault(values, len(places))

    def put_on(axis: Axis, values: tuple[float, ...]) -> int:
        """The page keeps five digits of a number: an epsilon's are rounded up."""
        return put(tuple(map(round_up, values)) if axis.up else values)

    def make_series(chart: Chart, series: Series) -> dict[str, Any]:
        made: dict[str, Any] = {
            "name": series.name,
            "colour": series.colour,
            "dash": series.dash,
            "layer": series.layer,
            "y": put_on(chart.y, series.y),
            "x": {key: put_on(chart.x.get(key, chart.y), values) for key, values in series.x.items()},
        }
        if series.low:
            made |= {"low": put_on(chart.y, series.low), "high": put_on(chart.y, series.high)}
        return made | ({"names": series.names} if series.names else {})

    found = [
        {
            "key": chart.key,
            "title": chart.title,
            "caption": chart.caption,
            "said": describe_chart(chart),
            "kind": chart.kind,
            "group": chart.group,
            "x": {key: dataclasses.asdict(axis) for key, axis in chart.x.items() if _has_axis(chart, key)},
            "y": dataclasses.asdict(chart.y),
            "levels": chart.levels,
            "rows": chart.rows,
            "columns": chart.columns,
            "cells": chart.cells,
            "series": [make_series(chart, each) for each in chart.series],
        }
        for chart in charts
    ]
    return {"charts": found, "arrays": list(places)}
