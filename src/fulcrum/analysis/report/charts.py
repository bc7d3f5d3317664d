"""Charts as plain values: the page's script, the figure files and the CSV files are made from the same ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulcrum.analysis.report.attack_charts import make_attack_charts
from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.report.model import RunView
from fulcrum.analysis.report.party_charts import make_confusion_chart, make_party_charts, make_split_charts
from fulcrum.analysis.report.seeds import SeedGroup, average_columns, group_by_seed
from fulcrum.analysis.report.theory_charts import make_objective_charts, read_moments
from fulcrum.study.front import find_front
from fulcrum.study.records import StudyScore

ROUND, EPSILON = "round", "epsilon"


OVER_ROUNDS = {ROUND: Axis("round"), EPSILON: Axis("epsilon spent", up=True)}


def make_charts(runs: Sequence[RunView]) -> list[Chart]:
    """All charts of a page about these runs; those without a point to show are left out."""
    readable = [run for run in runs if run.columns.get(ROUND)]
    groups = group_by_seed(readable) if len(readable) > 1 else []
    source = _Source(readable, groups)
    single = readable[0] if len(runs) == 1 and readable else None
    found = [*_make_tradeoff(readable), *_make_metric_charts(source, single)]
    found += _make_clipping_charts(source, single)
    found += _make_spending_charts(source, single)
    if single:
        found += make_objective_charts(read_moments(single.theory))
        found += make_attack_charts(single)
        found += [*make_party_charts(single), *make_split_charts(single), *make_confusion_chart(single)]
    return [chart for chart in found if chart.series or chart.cells]


@dataclass(frozen=True)
class _Source:
    """The runs of a page, and those that differ in their seed alone."""

    runs: Sequence[RunView]
    groups: Sequence[SeedGroup]

    def list_series(self, column: str, name: str = "", colour: int = 0, dash: bool = False) -> tuple[Series, ...]:
        """A column of each run, and its mean over seeds; `name` and `colour` where there is one run only."""
        several = len(self.runs) > 1
        found = []
        for place, run in enumerate(self.runs):
            made = make_series(run.columns, column, run.name if several else name, place if several else colour, dash)
            found += [made] if made else []
        for group in self.groups:
            columns, low, high = average_columns(group.runs, column)
            made = make_series(columns, column, group.name, group.colour, dash, low, high, "seeds")
            found += [made] if made else []
        return tuple(found)


def make_series(
    columns: Mapping[str, Sequence[float]],
    column: str,
    name: str,
    colour: int = 0,
    dash: bool = False,
    low: Sequence[float] = (),
    high: Sequence[float] = (),
    layer: str = "runs",
) -> Series | None:
    """The points of a column that are numbers, over rounds and over epsilon; None where there is none."""
    values, rounds = columns.get(column, ()), columns.get(ROUND, ())
    spent = columns.get(EPSILON, ())
    picked = [i for i, value in enumerate(values) if math.isfinite(value)]
    if not picked:
        return None

    def take(given: Sequence[float]) -> tuple[float, ...]:
        return tuple(given[i] for i in picked) if given else ()

    axes = {ROUND: take(rounds), EPSILON: take(spent)}
    known = {key: each for key, each in axes.items() if any(map(math.isfinite, each))}
    return Series(name, take(values), known, colour, take(low), take(high), dash, layer)


# --- over rounds --------------------------------------------------------------------------------------


def _make_metric_charts(source: _Source, single: RunView | None) -> list[Chart]:
    columns = dict.fromkeys(name for run in source.runs for name in run.columns if name.startswith("metric:"))
    names = [name.removeprefix("metric:") for name in columns]
    first = source.runs[0].score.name if source.runs else ""
    names.sort(key=lambda name: (name != first, name == "loss"))
    found = []
    for name in names:
        series = source.list_series(f"metric:{name}", name)
        levels = []
        if single:
            if name == single.score.name:
                series = (*_make_party_band(single), *series)
            series += _drop_none(make_series(single.columns, f"mean:{name}", "mean over parties", 2, dash=True))
            levels = [
                (word, values[name])
                for word, values in (("constant prediction", single.baseline), ("without privacy", single.reference))
                if name in values and math.isfinite(values[name])
            ]
        found.append(
            Chart(
                key=f"metric-{name}",
                title=name.replace("_", " ").capitalize(),
                caption=_describe_metric(name, single),
                y=Axis(name, percent=StudyScore(name).is_fraction),
                group="metrics",
                x=OVER_ROUNDS,
                series=series,
                levels=tuple(levels),
            )
        )
    return found


def _describe_metric(name: str, single: RunView | None) -> str:
    where = f" on {single.evaluated_on}" if single and single.evaluated_on else ""
    words = f"{name.replace('_', ' ').capitalize()}{where} after each evaluated round."
    if single and any(column.startswith("quantile:") for column in single.columns) and name == single.score.name:
        words += " The bands are the parties: the middle half, and the best to the worst."
    return words


def _make_party_band(run: RunView) -> tuple[Series, ...]:
    columns = run.columns
    if "quantile:0.5" not in columns:
        return ()
    wide = make_series(
        columns, "quantile:0.5", "all parties", 5, low=columns["quantile:0"], high=columns["quantile:1"], dash=True
    )
    middle = make_series(
        columns, "quantile:0.5", "middle half", 5, low=columns["quantile:0.25"], high=columns["quantile:0.75"]
    )
    return _drop_none(wide, middle)


def _make_clipping_charts(source: _Source, single: RunView | None) -> list[Chart]:
    only = {ROUND: OVER_ROUNDS[ROUND]}
    found = [
        Chart(
            key="C",
            title="Clipping norm C",
            caption="The norm to which one unit's contribution is cut, in each round.",
            y=Axis("C", log=_is_wide(source.runs, "C")),
            x=only,
            series=source.list_series("C", "C"),
        ),
        Chart(
            key="step",
            title="Step length",
            caption="How far one round may move the model: chosen by the rule (solid), and moved (dashed).",
            y=Axis("length", log=_is_wide(source.runs, "course:move", "course:step")),
            x=only,
            series=(
                *source.list_series("course:step", "step length s", 1),
                *source.list_series("course:move", "the model moved", 0, dash=True),
            ),
        ),
    ]
    parts = source.list_series("course:alignment", "alignment: a larger C helps", 0)
    if parts:
        found.append(
            Chart(
                key="objective",
                title="The two parts of the objective",
                caption="Where the alignment of released updates (solid) is above the penalty kappa C (dashed), "
                "the rule goes further; below, it goes less far.",
                y=Axis("slope"),
                x=only,
                series=(*parts, *source.list_series("course:penalty", "penalty kappa C", 1, dash=True)),
            )
        )
    found.append(_make_signal_chart(source.runs, only))
    return found


def _make_signal_chart(runs: Sequence[RunView], axes: Mapping[str, Axis]) -> Chart:
    """Signal and noise of the released update; of several runs their ratio."""
    several, made = len(runs) > 1, []
    for place, run in enumerate(runs):
        update, noise = (run.columns.get(f"course:{name}", ()) for name in ("update", "noise"))
        if not update or not noise:
            continue
        norms = run.columns.get("C") or (math.nan,) * len(update)
        update, noise = (tuple(_divide(a, C) for a, C in zip(each, norms, strict=True)) for each in (update, noise))
        signal = tuple(_subtract_noise(a, b) for a, b in zip(update, noise, strict=True))
        ratio = tuple(map(_divide, signal, noise))
        columns = {**run.columns, "signal": signal, "noise": noise, "ratio": ratio}
        if several:
            made += [make_series(columns, "ratio", run.name, place)]
        elif max((value for value in noise if math.isfinite(value)), default=0.0) > 0:
            made += [make_series(columns, "signal", "signal", 0), make_series(columns, "noise", "noise", 1, dash=True)]
    words = (
        "An estimate of how much of the released update is signal: its length with the expected length of the noise "
    )
    words += (
        "taken off (in squares; 0 where the noise is longer). Both follow from released values and public settings."
    )
    title = "Signal to noise" if several else "Signal and noise"
    label = "signal / noise" if several else "length in units of C"
    return Chart("signal", title, words, Axis(label, zero=True), x=axes, series=_drop_none(*made))


def _divide(one: float, other: float) -> float:
    return one / other if other > 0 and math.isfinite(one) else math.nan


def _subtract_noise(update: float, noise: float) -> float:
    return math.sqrt(max(update**2 - noise**2, 0.0)) if math.isfinite(update) and math.isfinite(noise) else math.nan


def _make_spending_charts(source: _Source, single: RunView | None) -> list[Chart]:
    only = {ROUND: OVER_ROUNDS[ROUND]}
    series = source.list_series("epsilon", "largest of any party")
    levels: tuple[tuple[str, float], ...] = ()
    if single:
        spent = [name for name in single.columns if name.startswith("spent:")]
        lines = [make_series(single.columns, name, name.removeprefix("spent:"), 1 + i) for i, name in enumerate(spent)]
        series = (*series, *_drop_none(*lines))
        levels = (("budget", single.target),) if math.isfinite(single.target) else ()
    found = [
        Chart(
            "epsilon",
            "Epsilon spent",
            "What the ledger says each round has cost so far; it never falls.",
            Axis("epsilon", zero=True, up=True),
            x=only,
            series=series,
            levels=levels,
            group="spending",
        )
    ]
    if any(len(set(run.columns.get("participants", ()))) > 1 for run in source.runs):
        shown = source.list_series("participants", "parties")
        words = "How many parties took part in each round."
        found.append(
            Chart("participants", "Parties per round", words, Axis("parties", zero=True), x=only, series=shown)
        )
    seconds = source.list_series("seconds", "seconds")
    words = "How long each round took, with its evaluation."
    found.append(
        Chart(
            "seconds", "Seconds per round", words, Axis("seconds", zero=True), x=only, series=seconds, group="spending"
        )
    )
    return found


def _is_wide(runs: Sequence[RunView], *columns: str) -> bool:
    """Whether positive values span more than a factor of eight, so that a log axis shows them better."""
    values = [value for run in runs for name in columns for value in run.columns.get(name, ()) if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > 8 * min(values)


def _drop_none(*series: Series | None) -> tuple[Series, ...]:
    return tuple(each for each in series if each is not None)


# --- the trade-off ------------------------------------------------------------------------------------


def _make_tradeoff(runs: Sequence[RunView]) -> list[Chart]:
    """Epsilon against the score, one point per run; those that nothing beats are joined."""
    known = [run for run in runs if run.is_private and math.isfinite(run.epsilon) and math.isfinite(run.score_value)]
    if len(known) < 2 or len({run.score for run in known}) > 1:
        return []
    score = known[0].score
    sound = [run for run in known if run.guarantee != "nominal"]
    points = [(run.epsilon, run.score_value) for run in sound]
    front = [points[i] for i in find_front(points, (True, not score.higher_is_better))]
    dots = tuple(
        Series(run.name, (run.score_value,), {EPSILON: (run.epsilon,)}, list(runs).index(run), names=(run.name,))
        for run in known
    )
    line = Series("front", tuple(y for _, y in front), {EPSILON: tuple(x for x, _ in front)}, -1, dash=True)
    better = "higher" if score.higher_is_better else "lower"
    words = (
        f"Each point is a run: left is more private, {better} is more useful. The line joins the runs that no other "
        "run beats in both. Runs whose epsilon is nominal cannot be on it."
    )
    if len({run.unit for run in known}) > 1:
        words += " These runs protect different units: their epsilons are not comparable."
    return [
        Chart(
            "tradeoff",
            "Privacy and utility",
            words,
            Axis(score.name, percent=score.is_fraction),
            kind="dots",
            x={EPSILON: Axis("epsilon", up=True)},
            series=(line, *dots),
        )
    ]
