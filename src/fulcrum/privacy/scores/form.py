"""What all forms share: a unit's weight as an integer, the total that is public, the ranges of metrics."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from fulcrum.data.tasks import Task

ONE = 2**30
"""A unit's weight 1 as an integer: shares are rounded towards 0, so that a unit's shares have norm at most 1,
exactly."""

Metrics = dict[str, float]


class ScoreForm(Protocol):
    """How records of one kind of task are scored."""

    @property
    def columns(self) -> int:
        """How many numbers a release has."""

    @property
    def words(self) -> str:
        """What is released, for statements."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One row of integers per record [n, columns], int64, of L2 norm at most `ONE`: a function of that record."""

    def estimate(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """Metrics by name, from the noised sums [columns] of so many units alone; NaN where they do not say."""

    def estimate_baseline(self, task: Task, noised: Tensor, units: int) -> Metrics:
        """The same metrics of the best constant prediction, from the same noised sums."""

    def count_confusion(self, noised: Tensor, units: int) -> list[list[float]]:
        """Noised counts of (label, prediction); with several labels one row (TN, FP, FN, TP) each; else empty."""

    def estimate_error(self, sigma: float, units: int) -> tuple[str, float]:
        """The name of a main metric, and about how far the noise moves it."""


def fit_to_units(noised: Tensor, units: int) -> Tensor:
    """Counts [..., cells] moved by equal amounts so that they add up to the number of units, which is public.

    This is the nearest table with that total, so it only removes noise.
    """
    return noised + (units - noised.sum(dim=-1, keepdim=True)) / noised.shape[-1]


def project_to_units(noised: Tensor, units: int) -> Tensor:
    """The nearest counts [..., cells] that are possible: none below 0, and together the number of units.

    Ratios need it: noise divided by noise is anything. Sums do not: their noise cancels where counts below 0 are kept.
    """
    ordered = noised.sort(dim=-1, descending=True).values
    ranks = torch.arange(1, noised.shape[-1] + 1, dtype=noised.dtype, device=noised.device)
    shifts = (ordered.cumsum(dim=-1) - units) / ranks
    last = (ordered > shifts).sum(dim=-1, keepdim=True).clamp_min(1) - 1
    return (noised - shifts.gather(-1, last)).clamp_min(0.0)


def find_integer_weight(parts: int) -> int:
    """The largest integer w with parts * w^2 <= ONE^2: so many columns of size w each have norm at most ONE."""
    return math.isqrt(ONE * ONE // parts)


UNIT_RANGE_METRICS = frozenset(
    {
        *("accuracy", "balanced_accuracy", "auc", "average_precision", "f1", "sensitivity", "specificity"),
        *("brier", "calibration_error"),
    }
)
"""Metrics that lie between 0 and 1."""
NON_NEGATIVE_METRICS = frozenset({"rmse", "mae", "perplexity"})
"""Metrics that are never below 0, beside losses."""


def clamp_metric(name: str, value: float) -> float:
    """The nearest possible value; NaN stays, and infinity is NaN: noise divided by noise."""
    if not math.isfinite(value):
        return math.nan
    if name in UNIT_RANGE_METRICS:
        return min(max(value, 0.0), 1.0)
    return max(value, 0.0) if name.endswith("loss") or name in NON_NEGATIVE_METRICS else value
