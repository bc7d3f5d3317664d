"""A page about finished runs of a study or a comparison: the ranking, and curves with bands over seeds."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.report.formats import ABSENT
from fulcrum.analysis.report.html import Child, Html, make_table, tag
from fulcrum.analysis.report.numbers import guard, write_csv
from fulcrum.analysis.report.page import LivePage, assemble_page
from fulcrum.analysis.report.reading import Problems, get_list, read_json_object, to_text
from fulcrum.analysis.report.sections import make_badge, make_figures, make_section
from fulcrum.errors import RunError
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.study.compare import REQUEST_FILE, ComparedCell, iterate_ranking_rows, make_compared_cells
from fulcrum.study.store import list_shards, read_shard

MAX_RUNS_READ = 20_000
CONTENTS = (("ranking", "Ranking"), ("tradeoff", "Trade-off"), ("curves", "Curves"), ("about", "About"))


def is_study_folder(folder: Path) -> bool:
    """Whether a folder holds finished runs of a study or a comparison."""
    if (folder / REQUEST_FILE).is_file():
        return True
    if (folder / "run.json").exists() or (folder / "metrics.jsonl").exists():
        return False
    for shard in list_shards(folder)[:3]:
        with contextlib.suppress(OSError, UnicodeDecodeError, ValueError, AttributeError):
            if shard.suffix == ".gz":
                return True
            with shard.open("rb") as opened:
                first = json.loads(opened.readline(2**22))
            return "row" in first and "settings" in first
    return False


def read_study(folder: Path, problems: Problems) -> tuple[list[ComparedCell], Mapping[str, Any]]:
    """The cells of the finished runs in a folder, and what was asked for ({} for a study)."""
    request = read_json_object(folder / REQUEST_FILE, problems)
    records: dict[str, dict[str, Any]] = {}
    for shard in list_shards(folder):
        if shard.name in ("metrics.jsonl", "parties.jsonl"):
            continue
        try:
            for each in read_shard(shard):
                if len(records) < MAX_RUNS_READ:
                    records[str(each["id"])] = each
        except (RunError, OSError, KeyError, UnicodeDecodeError) as error:
            problems.add(f"{shard.name} cannot be read: {error}")
    wanted: dict[tuple[str, float | None], int] = {}
    asked = [each for each in get_list(request, "jobs") if isinstance(each, dict)]
    for each in asked:
        key = to_text(each.get("row")), each.get("epsilon")
        wanted[key] = wanted.get(key, 0) + 1
    ids = {each.get("id") for each in asked}
    shown = [each for id, each in records.items() if not ids or id in ids]
    rows = list(dict.fromkeys(str(each["row"]) for each in shown))
    against = to_text(request.get("against")) or ("moo" if "moo" in rows else rows[0] if rows else "")
    return make_compared_cells(shown, against, wanted), {**request, "against": against}


def make_study_page(folder: Path, title: str = "", live: LivePage | None = None) -> str:
    """The page about the finished runs in a folder."""
    problems = Problems()
    cells, request = read_study(folder, problems)
    charts = make_study_charts(cells)
    done = sum(len(cell.values) for cell in cells)
    wanted = max(len(get_list(request, "jobs")), done)
    words = f"{done} runs" if done == wanted else f"{done} of {wanted} runs"
    meta = tag(
        "div", tag("span", words), tag("span", ", ".join(dict.fromkeys(cell.dataset for cell in cells))), class_="meta"
    )
    notes = _make_problem_note(problems.sentences)
    groups = list(dict.fromkeys(chart.group or chart.key for chart in charts if chart.key.startswith("curve")))
    body: list[Child] = [
        notes,
        _make_progress(done, wanted),
        make_section("ranking", "Ranking", make_ranking_tables(cells, to_text(request.get("against")))),
        make_section(
            "tradeoff",
            "The trade-off",
            make_figures(charts, [c.key for c in charts if c.kind == "line" and c.key.startswith("tradeoff")]),
        ),
        make_section(
            "curves",
            "Over the rounds",
            make_figures(charts, [*groups, *(c.key for c in charts if c.key.startswith("norm"))]),
        ),
        make_section("about", "How it was made", _make_about(cells, request)),
    ]
    return assemble_page(title or f"Comparison in {folder.resolve().name}", meta, body, charts, CONTENTS, live)


def _make_problem_note(sentences: Sequence[str]) -> Html:
    if not sentences:
        return Html("")
    head = tag("p", tag("strong", "Not all of this folder can be shown."))
    return tag("div", head, tag("ul", [tag("li", each) for each in sentences]), class_="note bad", role="status")


def _make_progress(done: int, wanted: int) -> Html:
    if done >= wanted:
        return Html("")
    share = done / max(wanted, 1)
    bar = tag(
        "div",
        tag("i", style=f"width:{100 * share:.1f}%"),
        class_="progress",
        role="progressbar",
        aria_valuenow=str(done),
        aria_valuemin="0",
        aria_valuemax=str(wanted),
        aria_label="runs done",
    )
    return tag("div", tag("p", f"{done} of {wanted} runs are done."), bar, class_="card", style="margin-top:1.2rem")


def make_ranking_tables(cells: Sequence[ComparedCell], against: str) -> list[Html]:
    """A table per data set and epsilon, the best method first."""
    found: list[Html] = []
    groups: dict[tuple[str, float | None], list[tuple[ComparedCell, int]]] = {}
    for cell, place in iterate_ranking_rows(cells):
        groups.setdefault((cell.dataset, cell.epsilon), []).append((cell, place))
    several = len({dataset for dataset, _ in groups}) > 1
    for (dataset, epsilon), members in groups.items():
        score = members[0][0].score
        rows = [_make_ranking_row(cell, place, against) for cell, place in members]
        named = f"{dataset}, " if several else ""
        title = f"{named}without privacy" if epsilon is None else f"{named}epsilon = {format_epsilon(epsilon, 6)}"
        columns = (
            "place",
            "method",
            f"mean {score.title}",
            "95% interval",
            f"better than {against or 'the first'} by",
            "seeds",
        )
        found.append(tag("div", tag("h3", title), make_table(columns, rows, f"ranking, {title}"), class_="card"))
    return found


def _make_ranking_row(cell: ComparedCell, place: int, against: str) -> Sequence[Child | tuple[Child, float | str]]:
    score, stats, lead = cell.score, cell.stats, cell.lead
    half = ABSENT if math.isnan(stats.half) else f"± {score.cell(score.to_table_scale(stats.half))}"
    if lead is None:
        said: Child = ABSENT
    else:
        value = score.cell(score.to_table_scale(lead.mean), "+")
        width = "" if math.isnan(lead.half) else f" ± {score.cell(score.to_table_scale(lead.half))}"
        clear = make_badge("good" if lead.mean > 0 else "bad", "clear") if cell.is_clear else None
        said = [f"{value}{width} ", clear]
    name: Child = cell.row if cell.sound else [cell.row, " ", make_badge("bad", "not sound")]
    count = f"{len(cell.values)}" + (f" of {cell.wanted}" if cell.wanted > len(cell.values) else "")
    return (
        (str(place), str(place)),
        [tag("strong", name)] if cell.row == against else name,
        (score.format_number(stats.mean), stats.mean),
        (half, stats.half),
        (said, lead.mean if lead else math.nan),
        (count, len(cell.values)),
    )


def _make_about(cells: Sequence[ComparedCell], request: Mapping[str, Any]) -> Html:
    against = to_text(request.get("against"))
    words = [
        "Intervals are Student's t over seeds. Differences are paired: all methods share split, initial weights, "
        'samples and noise streams of a seed where their settings allow it. "Clear" means that the interval leaves '
        "out zero; with many methods, some are clear by chance.",
        f"Every method is compared with {against}." if against else "",
    ]
    if any(not cell.sound for cell in cells):
        words.append(
            "A method that is not sound looks at private values to set C: its epsilon is nominal, and its place "
            "is no fair one."
        )
    command = to_text(request.get("command"))
    return tag(
        "div",
        [tag("p", each) for each in words if each],
        tag("pre", tag("code", command)) if command else None,
        class_="card",
    )


# --- charts -------------------------------------------------------------------------------------------


def make_study_charts(cells: Sequence[ComparedCell]) -> list[Chart]:
    """Score over epsilon, and score and C over rounds, with bands over the seeds."""
    rows = list(dict.fromkeys(cell.row for cell in sorted(cells, key=lambda cell: cell.row)))
    datasets = list(dict.fromkeys(cell.dataset for cell in cells))
    found: list[Chart] = []
    for dataset in datasets:
        own = [cell for cell in cells if cell.dataset == dataset]
        suffix = f", {dataset}" if len(datasets) > 1 else ""
        found += _make_tradeoff(own, rows, dataset, suffix)
        for epsilon in dict.fromkeys(cell.epsilon for cell in own):
            here = [cell for cell in own if cell.epsilon == epsilon]
            place = "without privacy" if epsilon is None else f"ε = {format_epsilon(epsilon, 6)}"
            score = here[0].score
            found.append(
                Chart(
                    f"curve-{dataset}-{epsilon}",
                    f"{place}{suffix}",
                    f"{score.name.capitalize()} over the rounds, {place}{suffix}: means over seeds, and the lowest and "
                    "highest seed.",
                    Axis(score.name, percent=score.is_fraction),
                    group=f"curve-{dataset}",
                    x={"round": Axis("round")},
                    series=tuple(_make_curve(cell, rows, "curve") for cell in here),
                )
            )
        norms = [cell for cell in own if cell.epsilon == next((c.epsilon for c in own if c.epsilon is not None), None)]
        if norms:
            where = (
                f"ε = {format_epsilon(norms[0].epsilon, 6)}{suffix}"
                if norms[0].epsilon is not None
                else f"without privacy{suffix}"
            )
            series = tuple(_make_curve(cell, rows, "C") for cell in norms)
            found.append(
                Chart(
                    f"norm-{dataset}",
                    f"Clipping norm C, {where}",
                    "The clipping norm of each round, means over seeds.",
                    Axis("C", log=True),
                    x={"round": Axis("round")},
                    series=series,
                )
            )
    return [chart for chart in found if any(series.y for series in chart.series)]


def _make_curve(cell: ComparedCell, rows: Sequence[str], what: str) -> Series:
    by_round: dict[float, list[float]] = {}
    for each in cell.records:
        for point in each.get(what, ()):
            value = float(point[1]) if point[1] is not None else math.nan
            if math.isfinite(value):
                by_round.setdefault(float(point[0]), []).append(value)
    whole = {t: values for t, values in sorted(by_round.items()) if len(values) == len(cell.records)}
    x, values = tuple(whole), list(whole.values())
    low, high = tuple(map(min, values)), tuple(map(max, values))
    mean = tuple(math.fsum(each) / len(each) for each in values)
    band = len(cell.records) > 1
    return Series(cell.row, mean, {"round": x}, rows.index(cell.row), low if band else (), high if band else ())


def _make_tradeoff(cells: Sequence[ComparedCell], rows: Sequence[str], dataset: str, suffix: str) -> list[Chart]:
    private = [cell for cell in cells if cell.epsilon is not None]
    if len({cell.epsilon for cell in private}) < 2:
        return []
    score, series = private[0].score, []
    for row in dict.fromkeys(cell.row for cell in private):
        own = sorted((cell for cell in private if cell.row == row), key=lambda cell: cell.epsilon or 0.0)
        means = tuple(cell.stats.mean for cell in own)
        ends = [(min(cell.values.values()), max(cell.values.values())) for cell in own]
        band = any(low < high for low, high in ends)
        low, high = (tuple(each) for each in zip(*ends, strict=True)) if band else ((), ())
        x = {"epsilon": tuple(float(cell.epsilon or 0.0) for cell in own)}
        series.append(Series(row, means, x, rows.index(row), low, high))
    plain = (
        [("without privacy", max(cell.stats.mean for cell in cells if cell.epsilon is None))]
        if any(cell.epsilon is None for cell in cells)
        else []
    )
    words = f"{score.name.capitalize()} against epsilon{suffix}: means over seeds, and the lowest and highest seed."
    return [
        Chart(
            f"tradeoff-{dataset}",
            f"Privacy and utility{suffix}",
            words,
            Axis(score.name, percent=score.is_fraction),
            x={"epsilon": Axis("epsilon", log=True, up=True)},
            series=tuple(series),
            levels=tuple(plain),
        )
    ]


# --- files --------------------------------------------------------------------------------------------


def ranking_to_csv(cells: Sequence[ComparedCell]) -> str:
    """The ranking, a line per method and epsilon."""
    lines: list[list[str | float]] = [
        ["data", "epsilon", "place", "method", "score", "mean", "ci95", "lead", "lead_ci95", "seeds", "sound"]
    ]
    for cell, place in iterate_ranking_rows(cells):
        lead = (cell.lead.mean, cell.lead.half) if cell.lead else (math.nan, math.nan)
        epsilon: str | float = "none" if cell.epsilon is None else cell.epsilon
        words: list[str | float] = [guard(cell.dataset), epsilon, place, guard(cell.row), cell.score.name]
        lines.append([*words, cell.stats.mean, cell.stats.half, *lead, len(cell.values), str(cell.sound).lower()])
    return write_csv(lines)


def ranking_to_json(cells: Sequence[ComparedCell]) -> list[dict[str, Any]]:
    """The ranking for a program."""
    return [
        {
            "dataset": cell.dataset,
            "epsilon": cell.epsilon,
            "place": place,
            "method": cell.row,
            "score": cell.score.name,
            "higher_is_better": cell.score.higher_is_better,
            "mean": cell.stats.mean,
            "ci95": cell.stats.half,
            "lead": None
            if cell.lead is None
            else {"mean": cell.lead.mean, "ci95": cell.lead.half, "clear": cell.is_clear},
            "values": {str(seed): value for seed, value in sorted(cell.values.items())},
            "sound": cell.sound,
            "unit": cell.unit,
        }
        for cell, place in iterate_ranking_rows(cells)
    ]


def format_ranking_rows(cells: Sequence[ComparedCell]) -> list[tuple[str, ...]]:
    """The ranking for a terminal: epsilon, place, method, mean, interval, lead, seeds."""
    found: list[tuple[str, ...]] = []
    for cell, place in iterate_ranking_rows(cells):
        score, stats, lead = cell.score, cell.stats, cell.lead
        half = "" if math.isnan(stats.half) else f" ± {score.cell(score.to_table_scale(stats.half))}"
        ahead = ""
        if lead is not None:
            width = "" if math.isnan(lead.half) else f" ± {score.cell(score.to_table_scale(lead.half))}"
            ahead = f"{score.cell(score.to_table_scale(lead.mean), '+')}{width}{' *' if cell.is_clear else ''}"
        epsilon = "none" if cell.epsilon is None else format_epsilon(cell.epsilon, 6)
        count = f"{len(cell.values)}" + (f" of {cell.wanted}" if cell.wanted > len(cell.values) else "")
        name = cell.row if cell.sound else f"{cell.row} †"
        found.append((epsilon, str(place), name, f"{score.format_number(stats.mean)}{half}", ahead, count))
    return found
