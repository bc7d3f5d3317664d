"""Classes and labels as histograms of (label, prediction, bin of the score)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.data.tasks import Task
from fulcrum.data.tasks.losses import make_binary_cross_entropy
from fulcrum.data.tasks.metrics import METRICS, MetricContext
from fulcrum.privacy.scores.form import (
    ONE,
    Metrics,
    clamp_metric,
    find_integer_weight,
    fit_to_units,
    project_to_units,
)

CONFIDENCE_BINS = 5
"""Bins of the predicted class's probability where there are more than two classes."""
MAX_CONFUSION_CLASSES = 10
"""Up to so many classes the cells also tell which class was predicted; beyond, only whether it was the right one,
since each cell has noise of its own."""
RANKING_METRICS = frozenset({"auc", "average_precision"})
"""Of several labels, the mean over the labels; other metrics pool the counts of all labels."""

RATIO_METRICS = RANKING_METRICS | {"balanced_accuracy", "f1", "sensitivity", "specificity", "calibration_error"}
"""Of two classes: they divide by counts, so they are those of the nearest table without counts below 0."""


@dataclass(frozen=True)
class ClassCells:
    """A histogram. Two classes: (label, bin of the positive class's probability).

    With more: (label, predicted class, bin of its probability), or beyond `MAX_CONFUSION_CLASSES` classes (label, bin,
    right or wrong). edges [bins + 1], from 0 to 1. threshold: at which a record counts as positive (two classes).
    """

    classes: int
    edges: tuple[float, ...]
    threshold: float = 0.5

    @property
    def binary(self) -> bool:
        """Whether there are two classes."""
        return self.classes == 2

    @property
    def joint(self) -> bool:
        """Whether the cells of several classes tell which one was predicted."""
        return 2 < self.classes <= MAX_CONFUSION_CLASSES

    @property
    def shape(self) -> tuple[int, ...]:
        """The table's shape: cells are numbered in this order."""
        if self.binary:
            return self.classes, self.bins
        if self.joint:
            return self.classes, self.classes, self.bins
        return self.classes, self.bins, 2

    @property
    def bins(self) -> int:
        """Number of bins of a score."""
        return len(self.edges) - 1

    @property
    def columns(self) -> int:
        """Number of cells."""
        return math.prod(self.shape)

    @property
    def words(self) -> str:
        """What is released."""
        return "histogram of (score bin, label) with Gaussian noise"

    def locate(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cell of each record [n]: a function of the model's outputs [n, O] and the target [n] of that record."""
        labels = targets.long().clamp(0, self.classes - 1)
        if self.binary:
            score = torch.sigmoid(outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0])
            return labels * self.bins + find_bins(score, self.edges)
        score, guess = outputs.float().softmax(dim=-1).max(dim=-1)
        place = find_bins(score, self.edges)
        if self.joint:
            return (labels * self.classes + guess) * self.bins + place
        return (labels * self.bins + place) * 2 + (guess == labels).long()

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ONE in the record's cell."""
        place = self.locate(outputs, targets).unsqueeze(-1)
        return torch.zeros(len(place), self.columns, dtype=torch.int64, device=place.device).scatter_(-1, place, ONE)

    def represent(self, outputs: int) -> tuple[Tensor, Tensor]:
        """A typical record of each cell: model outputs [cells, outputs] and targets [cells]."""
        middle = find_bin_middles(self.edges)
        if self.binary:
            logit = torch.logit(middle.clamp(1e-6, 1 - 1e-6)).repeat(2)
            found = logit[:, None] if outputs == 1 else torch.stack([torch.zeros_like(logit), logit], dim=1)
            return found.float(), torch.arange(2).repeat_interleave(self.bins)
        axes = torch.meshgrid(*map(torch.arange, self.shape), indexing="ij")
        if self.joint:
            targets, guess, place = (axis.flatten() for axis in axes)
        else:
            targets, place, right = (axis.flatten() for axis in axes)
            guess = torch.where(right > 0, targets, (targets + 1) % self.classes)
        chance = middle[place].clamp_min(1.01 / self.classes)
        logits = ((1 - chance) / (self.classes - 1)).log()[:, None].repeat(1, self.classes)
        return logits.scatter(1, guess[:, None], chance.log()[:, None]).float(), targets

    def estimate(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """Each cell stands for so many typical records."""
        return sum_typical_records(task, *self.represent(task.outputs), *self._get_tables(noised, units))

    def _get_tables(self, noised: Tensor, units: int) -> tuple[Tensor, Tensor]:
        """Counts [cells] for sums and for ratios. Of many classes both are the same: so many cells that are nearly
        empty would move every ratio towards that of equal counts."""
        fitted = fit_to_units(noised.double().cpu(), units)
        return fitted, project_to_units(fitted, units) if self.binary else fitted

    def estimate_baseline(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """The same with the noised class shares as every record's prediction."""
        if task.constant is None:
            return {}
        weights, possible = self._get_tables(noised, units)
        outputs, targets = self.represent(task.outputs)
        shares = weights.view(self.classes, -1).sum(dim=-1).clamp_min(0.0)
        constant = task.constant(torch.arange(self.classes), shares)
        return sum_typical_records(task, constant.expand_as(outputs), targets, weights, possible)

    def count_confusion(self, noised: Tensor, units: int) -> list[list[float]]:
        """Counts of (label, prediction); empty for many classes, whose cells do not tell the prediction."""
        table = self._get_tables(noised, units)[1].view(self.shape)
        if self.binary:
            positive = find_bin_middles(self.edges) >= self.threshold
            return [[float(row[~positive].sum()), float(row[positive].sum())] for row in table]
        return [list(map(float, row)) for row in table.sum(dim=-1)] if self.joint else []

    def estimate_error(self, sigma: float, units: int) -> tuple[str, float]:
        """Of the cells, `right` count as right: their sum has this noise once the total is known."""
        right = self.columns // (self.classes if self.joint else 2)
        return "accuracy", sigma * math.sqrt(right * (1 - right / self.columns)) / max(units, 1)

    def tabulate_thresholds(self, noised: Tensor, units: int) -> list[tuple[float, Tensor]]:
        """Two classes: (threshold, counts [2, 2] of (label, prediction)) at every edge between bins."""
        table = self._get_tables(noised, units)[1].view(2, -1)
        below = table.cumsum(dim=-1)
        return [
            (edge, torch.stack([below[:, k], table.sum(dim=-1) - below[:, k]], dim=-1))
            for k, edge in enumerate(self.edges[1:-1])
        ]


def find_bins(score: Tensor, edges: tuple[float, ...]) -> Tensor:
    """The bin of each probability; NaN is in the lowest."""
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device=score.device)
    return torch.bucketize(score.double().nan_to_num(0.0), inner, right=True)


def find_bin_middles(edges: tuple[float, ...]) -> Tensor:
    """The middle of each bin [bins]."""
    ends = torch.tensor(edges, dtype=torch.float64)
    return (ends[1:] + ends[:-1]) / 2


def sum_typical_records(task: Task, outputs: Tensor, targets: Tensor, weights: Tensor, possible: Tensor) -> Metrics:
    """Every metric of the task over records [cells, ...] that count so many times [cells].

    Metrics are sums over records, so weights below 0 are kept: they cancel the noise of others. `RATIO_METRICS` count
    with `possible` instead. What falls outside a metric's range is moved to its end.
    """
    sums = task.sums(outputs[:, None], targets[:, None])  # [cells, k] each: a run of one record per cell
    counts = {name: possible if name in RATIO_METRICS else weights for name in sums}
    whole = {name: (counts[name][:, None] * value.double()).sum(dim=0) for name, value in sums.items()}
    found = task.results(whole) if float(weights.sum()) >= 1 else dict.fromkeys(sums, math.nan)
    return {name: clamp_metric(name, value) for name, value in found.items()}


@dataclass(frozen=True)
class LabelCells:
    """A histogram (label's value, bin of its probability) for each of several binary labels."""

    labels: int
    cells: ClassCells
    positive_weights: tuple[float, ...] = ()

    @property
    def columns(self) -> int:
        """Number of cells of all labels."""
        return self.labels * self.cells.columns

    @property
    def words(self) -> str:
        """What is released."""
        return f"histograms of (score bin, value) of {self.labels} labels with Gaussian noise"

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The same share of ONE in one cell of every label."""
        own = [
            self.cells.locate(outputs[:, k : k + 1], targets[:, k]) + k * self.cells.columns for k in range(self.labels)
        ]
        empty = torch.zeros(len(targets), self.columns, dtype=torch.int64, device=targets.device)
        return empty.scatter_(-1, torch.stack(own, dim=-1), find_integer_weight(self.labels))

    def _get_tables(self, noised: Tensor, units: int) -> Tensor:
        """Counts of units [labels, cells]."""
        share = find_integer_weight(self.labels) / ONE
        return fit_to_units(noised.double().cpu().view(self.labels, -1) / share, units)

    def _make_binary_task(self, task: Task, k: int) -> Task:
        """The k-th label as a task of its own, with the metrics that the whole task has."""
        weight = self.positive_weights[k] if self.positive_weights else 1.0
        loss, slopes = make_binary_cross_entropy((1.0, weight))

        def chances(outputs: Tensor) -> Tensor:
            yes = torch.sigmoid(outputs[..., 0].float())
            return torch.stack([1 - yes, yes], dim=-1)

        def predict(outputs: Tensor) -> Tensor:
            return (torch.sigmoid(outputs[..., 0].float()) >= self.cells.threshold).long()

        context = MetricContext(1, 0, loss, predict, chances, self.cells.threshold)
        metrics = {name: METRICS.find(name)(context) for name in task.metrics}
        return dataclasses.replace(
            task, name="binary", outputs=1, loss=loss, slopes=slopes, metrics=metrics, target_dims=0, classes=2
        )

    def _pool(self, task: Task, tables: Tensor, outputs_of: Callable[[int, Tensor], Tensor]) -> Metrics:
        """Metrics over all labels. outputs_of: label and the typical outputs of its cells -> outputs."""
        pooled: dict[str, Tensor] = {}
        possible = project_to_units(tables, round(float(tables[0].sum())))
        ranked: dict[str, list[float]] = {name: [] for name in task.metrics if name in RANKING_METRICS}
        for k in range(self.labels):
            single = self._make_binary_task(task, k)
            outputs, targets = self.cells.represent(1)
            sums = single.sums(outputs_of(k, outputs)[:, None], targets[:, None])
            for name, value in sums.items():
                counts = possible if name in RATIO_METRICS else tables
                whole = (counts[k][:, None] * value.double()).sum(dim=0)
                if name in ranked:
                    ranked[name].append(clamp_metric(name, float(single.metrics[name].result(whole))))
                else:
                    pooled[name] = pooled[name] + whole if name in pooled else whole
        single = self._make_binary_task(task, 0)
        found = {name: float(single.metrics[name].result(pooled[name])) for name in task.metrics if name in pooled}
        for name, values in ranked.items():
            known = [value for value in values if math.isfinite(value)]
            found[name] = sum(known) / len(known) if known else math.nan
        return {name: clamp_metric(name, found[name]) for name in task.metrics}

    def estimate(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """Each cell stands for so many typical labels; ranking metrics are means over the labels."""
        return self._pool(task, self._get_tables(noised, units), lambda k, outputs: outputs)

    def estimate_baseline(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """The same with each label's noised share as its prediction."""
        tables = self._get_tables(noised, units)
        share = (tables.view(self.labels, 2, -1).sum(dim=-1)[:, 1] / max(units, 1)).clamp(1e-4, 1 - 1e-4)
        return self._pool(task, tables, lambda k, outputs: torch.logit(share[k]).float().expand_as(outputs))

    def count_confusion(self, noised: Tensor, units: int) -> list[list[float]]:
        """One row (TN, FP, FN, TP) per label."""
        share = find_integer_weight(self.labels) / ONE
        tables = noised.double().cpu().view(self.labels, -1) / share
        rows = [self.cells.count_confusion(table, units) for table in tables]
        return [[*no, *yes] for no, yes in rows]

    def estimate_error(self, sigma: float, units: int) -> tuple[str, float]:
        """The mean over labels of sums of half the cells, each with noise larger by the root of the labels."""
        return self.cells.estimate_error(sigma, units)


THRESHOLD_METRICS: Mapping[str, Callable[[Tensor], float]] = {
    "accuracy": lambda table: float((table[0, 0] + table[1, 1]) / table.sum()),
    "balanced_accuracy": lambda table: float(
        (table[0, 0] / table[0].sum().clamp_min(1) + table[1, 1] / table[1].sum().clamp_min(1)) / 2
    ),
    "f1": lambda table: float(2 * table[1, 1] / (2 * table[1, 1] + table[0, 1] + table[1, 0]).clamp_min(1)),
}
"""The choices of task.choose_threshold: counts [2, 2] of (label, prediction) -> what the threshold should maximise."""


def choose_threshold(tables: list[tuple[float, Tensor]], metric: str) -> tuple[float, float]:
    """The threshold at which a metric is largest, and that value; of equals, the one nearest to 0.5."""
    scored = [(threshold, clamp_metric(metric, THRESHOLD_METRICS[metric](table))) for threshold, table in tables]
    known = [pair for pair in scored if math.isfinite(pair[1])]
    return max(known, key=lambda pair: (pair[1], -abs(pair[0] - 0.5))) if known else (math.nan, math.nan)
