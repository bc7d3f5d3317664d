"""Means over few seeds: Student's t intervals, and paired differences between methods that share their seeds."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MeanInterval:
    """A mean and the half-width of its 95% interval (NaN with fewer than two values); n values."""

    mean: float
    half: float
    n: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half


def compute_mean_interval(values: Sequence[float], level: float = 0.95) -> MeanInterval:
    """Mean and t interval of independent values: half-width t_{n-1} s / sqrt(n), s with denominator n - 1."""
    n = len(values)
    if n == 0:
        return MeanInterval(math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return MeanInterval(mean, math.nan, 1)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return MeanInterval(mean, student_t_quantile(0.5 + level / 2, n - 1) * spread / math.sqrt(n), n)


def compute_paired_interval(one: Mapping[int, float], other: Mapping[int, float]) -> MeanInterval:
    """Interval of one - other over common seeds: variation due to the seed cancels."""
    return compute_mean_interval([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


@functools.cache
def student_t_quantile(p: float, freedom: int) -> float:
    """The p-quantile (1/2 < p < 1) of Student's t with `freedom` >= 1 degrees of freedom."""
    if not 0.5 < p < 1 or freedom < 1:
        raise ValueError(f"t_quantile needs 1/2 < p < 1 and freedom >= 1, not {p} and {freedom}")
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def student_t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0: Abramowitz and Stegun 26.7.3 and 26.7.4, a finite sum for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, total, term = math.cos(angle), 0.0, 1.0
    if freedom % 2:
        term = cosine
        for k in range(1, freedom - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        inside = (angle + math.sin(angle) * total) * 2 / math.pi
    else:
        for k in range(0, freedom - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        inside = math.sin(angle) * total
    return 0.5 + inside / 2
