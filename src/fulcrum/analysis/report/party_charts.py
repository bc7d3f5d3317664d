"""Charts of the parties of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fulcrum.analysis.report.chart_types import Axis, Chart, Series
from fulcrum.analysis.report.model import RunView

MAX_BARS = 40
"""More parties than this are drawn as one sorted line instead of a bar each."""


def make_party_charts(run: RunView) -> list[Chart]:
    """What each party spent, and how well the model serves it."""
    found = []
    spent = [(party.name, party.epsilon) for party in run.parties if math.isfinite(party.epsilon)]
    if len({round(value, 9) for _, value in spent}) > 1:
        words = "What each party has spent, in the order of the parties."
        found.append(
            _make_sorted_chart("party-epsilon", "Epsilon per party", words, Axis("epsilon", up=True), spent, run.target)
        )
    name = run.score.name
    scores = [(party.name, party.metrics[name]) for party in run.parties if name in party.metrics]
    if scores:
        words = f"The {name.replace('_', ' ')} of the one model on each party's own test records."
        axis = Axis(name, percent=run.score.is_fraction)
        level = run.metrics.get(name, math.nan)
        found.append(_make_sorted_chart("party-score", "Score per party", words, axis, scores, level, "all records"))
    return found


def _make_sorted_chart(
    key: str,
    title: str,
    words: str,
    axis: Axis,
    values: Sequence[tuple[str, float]],
    level: float = math.nan,
    level_name: str = "budget",
) -> Chart:
    """A bar per party; of many parties, one line of the sorted values."""
    levels = ((level_name, level),) if math.isfinite(level) else ()
    if len(values) <= MAX_BARS:
        bars = Series("", tuple(value for _, value in values), names=tuple(name for name, _ in values))
        return Chart(key, title, words, axis, kind="bars", series=(bars,), levels=levels)
    ordered = sorted(value for _, value in values)
    line = Series("parties", tuple(ordered), {"rank": tuple(float(i + 1) for i in range(len(ordered)))})
    words = f"{words.removesuffix('.')}: {len(ordered)} parties, sorted."
    return Chart(key, title, words, axis, x={"rank": Axis("parties, sorted")}, series=(line,), levels=levels)


def make_split_charts(run: RunView) -> list[Chart]:
    """How the records are spread over the parties, as far as that is public."""
    found = []
    sizes = [(party.name, party.units) for party in run.parties if math.isfinite(party.units)]
    if sizes and run.unit != "client":
        what = {"person": "persons"}.get(run.unit, "examples")
        words = f"How many {what} each party holds. These sizes are public constants."
        found.append(_make_sorted_chart("sizes", "Size of the parties", words, Axis(what), sizes))
    if run.labels and len(run.labels) == len(run.parties) and len(run.labels) <= MAX_BARS:
        cells = tuple(tuple(value / max(sum(row), 1) for value in row) for row in run.labels)
        found.append(
            Chart(
                "labels",
                "Labels at the parties",
                "The share of each class in a party's records. Shown because this data is public.",
                Axis("share", percent=True),
                kind="heat",
                rows=tuple(party.name for party in run.parties),
                columns=tuple(map(str, range(len(cells[0])))),
                cells=cells,
            )
        )
    return found


def make_confusion_chart(run: RunView) -> list[Chart]:
    """What the model takes for what; nothing where there are too many classes."""
    if not 1 < len(run.confusion) <= MAX_BARS or len(run.confusion) != len(run.confusion[0]):
        return []
    cells = tuple(tuple(value / max(sum(row), 1e-9) for value in row) for row in run.confusion)
    names = tuple(map(str, range(len(cells))))
    words = "Of the records of a class (row), the share that the model took for each class (column)."
    return [
        Chart(
            "confusion",
            "What was taken for what",
            words,
            Axis("share", percent=True),
            kind="heat",
            rows=names,
            columns=names,
            cells=cells,
        )
    ]
