"""Finished runs -> cells of a table: values by seed, their interval, the distance to moo, the paper's figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fulcrum.clipping import find_rule
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.settings.derived import get_planned_unit
from fulcrum.study.experiment import Experiment
from fulcrum.study.job import StudyJob
from fulcrum.study.records import StudyScore, choice_to_cell_keys, get_common_score, get_score_value
from fulcrum.study.search import ChosenSettings, find_choice
from fulcrum.study.stats import MeanInterval, compute_mean_interval, compute_paired_interval
from fulcrum.study.store import RunRecord

OUR_METHOD = "moo"
"""The row with which the others are compared."""

PAPER_RESULTS: dict[str, dict[str, tuple[float, ...]]] = {
    "non-private FL": {"mnist": (96.25,), "fashion-mnist": (89.45,), "cifar10": (72.61,)},
    "DP-SGD": {
        "mnist": (86.39, 81.58, 76.43),
        "fashion-mnist": (77.19, 69.35, 58.14),
        "cifar10": (60.53, 53.68, 48.88),
    },
    "DP-FedAvg": {
        "mnist": (88.42, 82.50, 76.58),
        "fashion-mnist": (75.18, 68.91, 53.58),
        "cifar10": (59.17, 51.85, 43.06),
    },
    "Dynamic DP": {
        "mnist": (87.71, 86.59, 82.81),
        "fashion-mnist": (79.62, 78.44, 69.82),
        "cifar10": (62.61, 59.02, 53.23),
    },
    "DP-SGD-WAV": {
        "mnist": (90.24, 89.72, 85.61),
        "fashion-mnist": (83.53, 82.16, 72.37),
        "cifar10": (64.58, 61.18, 57.85),
    },
    "Tempered sigmoid": {
        "mnist": (90.92, 90.02, 84.39),
        "fashion-mnist": (82.73, 81.49, 70.58),
        "cifar10": (64.15, 60.59, 56.02),
    },
    "MOO": {
        "mnist": (91.10, 90.21, 88.16),
        "fashion-mnist": (84.20, 83.27, 74.78),
        "cifar10": (64.37, 62.92, 59.89),
    },
}
"""The paper's table, test score in %, by its rows, our data sets, and epsilon 6.38, 3.61, 1.64."""
PAPER_EPSILONS = (6.38, 3.61, 1.64)


@dataclass(frozen=True)
class TableCell:
    """One cell. values: score by seed, fractions in %. paper: the paper's figure, None if it has none.

    ahead: moo minus this row over shared seeds, None if not comparable (moo itself, another
    unit, another number of parties, another view of the server). aggregation: what the server is assumed
    to see. choice: how its settings were chosen, None: the unchanged preset. method: its name in table.json; empty: the
    row's.
    """

    dataset: str
    epsilon: float | None
    row: str
    label: str
    unit: str
    parties: int
    sound: bool
    values: Mapping[int, float]
    wanted: int
    paper: float | None = None
    choice: ChosenSettings | None = None
    ahead: MeanInterval | None = None
    notes: tuple[str, ...] = ()
    aggregation: str = "plain"
    against: str = OUR_METHOD
    method: str = ""
    curves: Sequence[RunRecord] = field(default=(), repr=False, compare=False)
    score: StudyScore = field(default_factory=StudyScore)

    @property
    def stats(self) -> MeanInterval:
        """Mean and 95% interval over the seeds."""
        return compute_mean_interval([self.values[seed] for seed in sorted(self.values)])

    def to_json(self) -> dict[str, Any]:
        """The entry of table.json: ci95 is the half-width of the interval, None with a single seed."""
        stats = self.stats
        return {
            "dataset": self.dataset,
            "epsilon": self.epsilon,
            "method": self.method or self.row,
            "unit": self.unit or "none",
            "parties": self.parties,
            "sound": self.sound,
            "mean": self.score.rounded(stats.mean),
            "ci95": self.score.rounded(stats.half) if stats.half == stats.half else None,
            "seeds": sorted(self.values),
        }

    def to_detailed_json(self) -> dict[str, Any]:
        """The entry of cells.json: all that the tables show."""
        ahead = self.ahead
        return {
            **self.to_json(),
            "label": self.label,
            "aggregation": self.aggregation,
            "accuracies": {str(seed): self.score.rounded(self.values[seed]) for seed in sorted(self.values)},
            "paper": self.paper,
            "moo_ahead": None if ahead is None else {"mean": ahead.mean, "ci95": ahead.half, "seeds": ahead.n},
            "tuned_at": self.choice.epsilon if self.choice else None,
            "tuning": None if self.choice is None else choice_to_cell_keys(vars(self.choice)),
            "missing_runs": self.wanted - len(self.values),
        }


def find_paper_figure(row: str, dataset: str, epsilon: float | None) -> float | None:
    """The paper's figure for one of its rows."""
    figures = PAPER_RESULTS.get(row, {}).get(dataset)
    if figures is None:
        return None
    if epsilon is None:
        return figures[0] if len(figures) == 1 else None
    return figures[PAPER_EPSILONS.index(epsilon)] if epsilon in PAPER_EPSILONS and len(figures) > 1 else None


def make_table_cells(
    experiment: Experiment, jobs: Iterable[StudyJob], done: Mapping[str, RunRecord], protocol: bool = False
) -> list[TableCell]:
    """Cells of the jobs, in their order, with whatever results there are."""
    rows = {row.name: row for row in experiment.rows}
    by_cell: dict[str, list[StudyJob]] = {}
    for job in jobs:
        by_cell.setdefault(job.cell, []).append(job)
    cells = []
    for members in by_cell.values():
        first = members[0]
        rule = find_rule(first.settings.clip.rule)
        runs = [done[job.id] for job in members if job.id in done]
        score = get_common_score(runs)
        row = rows[first.row]
        cells.append(
            TableCell(
                dataset=first.dataset,
                epsilon=first.epsilon,
                row=first.row,
                label=row.label,
                unit=get_planned_unit(first.settings.privacy) if rule.private else "",
                parties=first.settings.data.parties,
                sound=rule.sound,
                values={
                    job.seed: score.to_table_scale(get_score_value(done[job.id])) for job in members if job.id in done
                },
                wanted=len(members),
                paper=find_paper_figure(row.paper, first.dataset, first.epsilon),
                choice=find_choice(experiment.choices, first.dataset, first.epsilon, first.row, protocol),
                aggregation=first.settings.privacy.aggregation,
                against=row.against,
                notes=tuple(dict.fromkeys(note for run in runs for note in run["notes"])),
                curves=tuple(runs),
                score=score,
            )
        )
    return _name_cells(_compare_with_ours(cells), {name: row.method for name, row in rows.items()})


def _name_cells(cells: Sequence[TableCell], methods: Mapping[str, str]) -> list[TableCell]:
    """The cells with their methods' names, where those and the number of parties tell rows apart; else the rows'.

    Rows under another adversary keep their names, so that they are not confused with the usual method.
    """

    def place(cell: TableCell) -> tuple[str, float | None, str, int]:
        return cell.dataset, cell.epsilon, methods[cell.row], cell.parties

    count = Counter(place(cell) for cell in cells)
    clear = [count[place(cell)] == 1 and cell.aggregation == "plain" for cell in cells]
    return [
        replace(cell, method=methods[cell.row]) if alone else cell for cell, alone in zip(cells, clear, strict=True)
    ]


def _compare_with_ours(cells: Sequence[TableCell]) -> list[TableCell]:
    """The cells with their paired distance to moo, where it is a fair comparison."""
    places = {(c.row, c.dataset, c.epsilon, c.unit, c.parties, c.aggregation): c for c in cells}
    result = []
    for cell in cells:
        here = (cell.against, cell.dataset, cell.epsilon, cell.unit, cell.parties, cell.aggregation)
        own = places.get(here)
        ahead = None if own is None or own is cell else _compute_lead(own, cell)
        result.append(replace(cell, ahead=ahead) if ahead is not None and ahead.n else cell)
    return result


def _compute_lead(one: TableCell, other: TableCell) -> MeanInterval:
    """By how much one cell is better than another over shared seeds."""
    better = (one, other) if one.score.higher_is_better else (other, one)
    return compute_paired_interval(better[0].values, better[1].values)


def count_wins(cells: Sequence[TableCell]) -> tuple[int, int, list[str]]:
    """(cells in which moo is not behind any sound example-level baseline, cells compared, where it is behind).

    Not behind: the upper end of the paired interval of moo minus the baseline is at least 0.
    """
    fair = [c for c in cells if c.ahead is not None and c.sound and c.ahead.n > 1]
    places = sorted({(c.dataset, c.epsilon) for c in fair}, key=str)
    behind = [
        f"{c.dataset} at {format_epsilon(c.epsilon, 6)}: {c.label}"
        for c in fair
        if c.ahead and c.ahead.high < 0 and c.epsilon is not None
    ]
    lost = {(c.dataset, c.epsilon) for c in fair if c.ahead and c.ahead.high < 0}
    return len(places) - len(lost), len(places), behind
