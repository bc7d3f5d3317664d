"""Scores of private held-out records as a release: one noised histogram of (score bin, label) per evaluation.

Each held-out unit adds 1 to the histogram: to one cell, or in equal parts to the cells of a person's records. Taking
the unit away (zero-out) changes the histogram by at most 1 in L2 norm, so a release with noise of standard deviation
sigma in every cell is `Gaussian(rate 1, sigma)`. The event is charged to the held-out units' own account: they do not
train, and the units that train are not scored. Accuracy, AUC, calibration and all other metrics are computed from the
noised cells alone, class totals included: a true total beside them would be a second, unprotected release.

The number of evaluations is public and fixed in advance, and sigma is calibrated to `privacy.evaluation_epsilon` over
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.data.tasks import Task
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import calibrate_sigma
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.exact_noise import release_on_grid
from fulcrum.rng import CipherRandomness, Randomness, name_stream

BINARY_EDGES = (-6.0, -4.0, -2.5, -1.5, -0.75, 0.0, 0.75, 1.5, 2.5, 4.0, 6.0)
"""Edges between the bins of the positive class's score, as logits: finer where models are sure, since AUC ranks there.
The threshold is a further edge."""
CONFIDENCE_BINS = 5
"""Bins of the predicted class's probability where there are more than two classes."""
WEIGHT_ONE = 2**30
"""A unit's weight 1 as an integer: shares are rounded down, so that a unit's shares add up to at most 1 exactly."""
HELD_OUT_NAME = "held-out"
"""The account of held-out units; of a named party, PARTY/held-out."""


def is_held_out_account(name: str) -> bool:
    """Whether an account of a ledger is that of held-out units."""
    return name.rpartition("/")[2] == HELD_OUT_NAME


@dataclass(frozen=True)
class HeldOutAccount:
    """The held-out units of one party. name: of their account in a ledger. party: its number, 0 where none is named.

    rows [m] int64: their records among the held-out ones. unit_of [m] int64: the unit of each. units: how many.
    """

    name: str
    party: int
    rows: Tensor
    unit_of: Tensor
    units: int


@dataclass(frozen=True)
class EvaluationPlan:
    """What evaluations will release, fixed in advance: `releases` histograms, each with noise sigma.

    epsilon: what they cost a held-out unit at most, at delta. cells: how scores are sorted.
    """

    epsilon: float
    delta: float
    accountant: str
    sigma: float
    releases: int
    cells: ScoreCells
    accounts: tuple[HeldOutAccount, ...]

    @property
    def event(self) -> Gaussian:
        """What one evaluation releases of a unit."""
        return Gaussian(1.0, self.sigma, 1)

    @property
    def planned(self) -> Gaussian:
        """What the whole run releases of a unit, at most."""
        return Gaussian(1.0, self.sigma, self.releases)

    @property
    def note(self) -> str:
        """How exact the scores are, in one sentence; it says nothing about the records."""
        units = sum(account.units for account in self.accounts)
        error = self.sigma * math.sqrt(self.cells.count * len(self.accounts) / 2) / max(units, 1)
        return (
            f"Scores are noised: {self.releases} evaluations of {units} held-out units cost them epsilon "
            f"{self.epsilon:g} in all, and the noise moves an accuracy by about {error:.2g}; fewer evaluations "
            "(run.evaluate_every) have less noise."
        )


@dataclass(frozen=True)
class ScoreCells:
    """The cells of the histogram. With two classes: (label, bin of the positive class's probability).

    With more: (label, bin of the predicted class's probability, right or wrong). edges [bins + 1], from 0 to 1.
    """

    classes: int
    edges: tuple[float, ...]

    @property
    def binary(self) -> bool:
        """Whether there are two classes."""
        return self.classes == 2

    @property
    def bins(self) -> int:
        """Number of bins of a score."""
        return len(self.edges) - 1

    @property
    def count(self) -> int:
        """Number of cells."""
        return self.classes * self.bins * (1 if self.binary else 2)

    def locate(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cell of each record [n]: a function of the model's outputs [n, O] and the target [n] of that record."""
        labels = targets.long().clamp(0, self.classes - 1)
        if self.binary:
            score = torch.sigmoid(outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0])
            return labels * self.bins + self._find_bin(score)
        score, guess = outputs.float().softmax(dim=-1).max(dim=-1)
        return (labels * self.bins + self._find_bin(score)) * 2 + (guess == labels).long()

    def _find_bin(self, score: Tensor) -> Tensor:
        inner = torch.tensor(self.edges[1:-1], dtype=torch.float64, device=score.device)
        return torch.bucketize(score.double().nan_to_num(0.0), inner, right=True)

    def represent(self, outputs: int) -> tuple[Tensor, Tensor]:
        """A typical record of each cell: model outputs [cells, outputs] and targets [cells]."""
        edges = torch.tensor(self.edges, dtype=torch.float64)
        middle = (edges[1:] + edges[:-1]) / 2  # [bins]
        if self.binary:
            logit = torch.logit(middle.clamp(1e-6, 1 - 1e-6)).repeat(2)
            targets = torch.arange(2).repeat_interleave(self.bins)
            found = logit[:, None] if outputs == 1 else torch.stack([torch.zeros_like(logit), logit], dim=1)
            return found.float(), targets
        targets = torch.arange(self.classes).repeat_interleave(2 * self.bins)
        right = torch.arange(2).repeat(self.classes * self.bins)
        chance = middle.repeat_interleave(2).repeat(self.classes).clamp_min(1.01 / self.classes)
        guess = torch.where(right > 0, targets, (targets + 1) % self.classes)
        logits = ((1 - chance) / (self.classes - 1)).log()[:, None].repeat(1, self.classes)
        return logits.scatter(1, guess[:, None], chance.log()[:, None]).float(), targets


def make_score_cells(task: Task, threshold: float) -> ScoreCells:
    """The cells for a task with classes; ConfigError for any other."""
    if not task.classes or task.sequence or task.target_dims:
        raise ConfigError(
            f"data.validation scores private records by a histogram of classes, and task {task.name!r} has none; hand "
            "over x_test and y_test that everybody may see, or leave data.validation at 0."
        )
    if task.classes > 2:
        return ScoreCells(task.classes, tuple(k / CONFIDENCE_BINS for k in range(CONFIDENCE_BINS + 1)))
    inner = {1 / (1 + math.exp(-edge)) for edge in BINARY_EDGES} | ({threshold} if task.name == "binary" else set())
    return ScoreCells(2, (0.0, *sorted(inner - {0.0, 1.0}), 1.0))


def calibrate_evaluation(epsilon: float, delta: float, accountant: str, releases: int) -> float:
    """The smallest sigma at which so many histograms cost at most epsilon at delta."""
    return calibrate_sigma(lambda sigma: [Gaussian(1.0, sigma, releases)], epsilon, delta, accountant)


def count_units_in_cells(cells: ScoreCells, places: Tensor, unit_of: Tensor, units: int) -> Tensor:
    """The exact histogram [cells] float64, in which each unit has weight at most 1, in equal parts over its records.

    Integers throughout: the shares of one unit add up to at most 1, without rounding errors.
    """
    records = torch.bincount(unit_of, minlength=units)
    share = torch.div(WEIGHT_ONE, records.clamp_min(1), rounding_mode="floor")
    table = torch.zeros(cells.count, dtype=torch.int64)
    table.index_add_(0, places.cpu(), share[unit_of])
    return table.double() / WEIGHT_ONE


def release_histogram(
    histogram: Tensor, sigma: float, randomness: Randomness, round: int, party: int, attempt: int
) -> Tensor:
    """What leaves: the histogram [cells] with noise of standard deviation sigma in each cell, on a public grid."""
    if not isinstance(randomness, CipherRandomness):
        raise TypeError(f"a histogram of private records needs a cipher's noise, not {type(randomness).__name__}")
    key = name_stream("evaluation", round, party, attempt=attempt)
    return release_on_grid(histogram, sigma, randomness, key).values


def estimate_metrics(task: Task, cells: ScoreCells, noised: Tensor) -> dict[str, float]:
    """Every metric of the task from noised cells [cells] alone: each cell stands for so many typical records.

    Metrics are sums over records, so cells below 0 are kept: they cancel the noise of others. What falls outside a
    metric's range is moved to its end.
    """
    outputs, targets = cells.represent(task.outputs)
    sums = task.sums(outputs[:, None], targets[:, None])  # [cells, k] each: a run of one record per cell
    weights = noised.double().cpu()
    whole = {name: (weights[:, None] * value.double()).sum(dim=0) for name, value in sums.items()}
    total = float(weights.sum())
    found = task.results(whole) if total >= 1 else dict.fromkeys(sums, math.nan)
    return {name: clamp_metric(name, value) for name, value in found.items()}


UNIT_RANGE_METRICS = frozenset(
    {
        *("accuracy", "balanced_accuracy", "auc", "average_precision", "f1", "sensitivity", "specificity"),
        *("brier", "calibration_error"),
    }
)
"""Metrics that lie between 0 and 1."""


def clamp_metric(name: str, value: float) -> float:
    """The nearest possible value; NaN stays, and infinity is NaN: noise divided by noise."""
    if not math.isfinite(value):
        return math.nan
    return (
        min(max(value, 0.0), 1.0) if name in UNIT_RANGE_METRICS else max(value, 0.0) if name.endswith("loss") else value
    )


def describe_evaluation(plan: EvaluationPlan) -> Mapping[str, float | int | str]:
    """The public terms of the evaluations, for statements."""
    return {
        "mechanism": "histogram of (score bin, label) with Gaussian noise",
        "sigma": plan.sigma,
        "releases": plan.releases,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "cells": plan.cells.count,
    }
