"""Tests whose false-alarm rate is known: exact tails, or bounds that are proven, never an approximation.

Each returns a p-value: on code that is right, P(p <= a) <= a for every a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special, stats

Floats = npt.NDArray[np.float64]


def double_tail(lower: float, upper: float) -> float:
    """The p-value of a two-sided test from its two tails, each of which includes the observed value."""
    return min(1.0, 2.0 * min(lower, upper))


def judge_variance(square_sum: float, degrees: float) -> float:
    """Whether a sum of `degrees` squared standard normals is as large as it should be; two-sided."""
    return double_tail(
        judge_variance_too_small(square_sum, degrees), float(special.gammaincc(degrees / 2, square_sum / 2))
    )


def judge_variance_too_small(square_sum: float, degrees: float) -> float:
    """Lower tail alone. Also valid where each normal has a mean of its own: that makes the sum larger."""
    return float(special.gammainc(degrees / 2, max(square_sum, 0.0) / 2))


def judge_normal(value: float) -> float:
    """Whether a number is one of a standard normal; two-sided."""
    return float(2 * special.ndtr(-abs(value)))


def judge_count(count: int, draws: int, chance: float) -> float:
    """Whether `count` successes in `draws` independent draws fit a chance; two-sided."""
    return double_tail(float(stats.binom.cdf(count, draws, chance)), float(stats.binom.sf(count - 1, draws, chance)))


def judge_count_too_large(count: int, draws: int, chance: float) -> float:
    """Upper tail alone. Also valid where each draw has a chance of at most this, given those before it."""
    return float(stats.binom.sf(count - 1, draws, chance)) if count > 0 else 1.0


def judge_distribution(uniforms: Floats) -> float:
    """Whether independent numbers are uniform in [0, 1]: the inequality of Dvoretzky, Kiefer, Wolfowitz and Massart."""
    values = np.sort(np.asarray(uniforms, dtype=np.float64))
    count = len(values)
    if not count:
        return 1.0
    steps = np.arange(1, count + 1) / count
    distance = float(max(np.max(steps - values), np.max(values - (steps - 1 / count))))
    return min(1.0, 2.0 * math.exp(-2.0 * count * distance**2))


def judge_dispersion(counts: Sequence[int] | npt.NDArray[Any], draws: int, chance: float) -> float:
    """Whether independent binomial counts scatter as they should; two-sided.

    The statistic is the sum of (count - m)^2, m the rounded mean. Its distribution is computed by convolution.
    """
    values = np.asarray(counts, dtype=np.int64)
    middle = round(draws * chance)
    observed = int(((values - middle) ** 2).sum())
    whole = _distribute_squares(draws, chance, len(values))
    lower = float(whole[: observed + 1].sum())
    upper = float(whole[observed:].sum())
    # The transform of the convolution rounds by less than this.
    pad = 1e-13 * len(values)
    return double_tail(min(1.0, lower + pad), min(1.0, upper + pad))


@lru_cache(maxsize=64)
def _distribute_squares(draws: int, chance: float, times: int) -> Floats:
    """The distribution of the sum of `times` squared distances of binomial numbers from their rounded mean."""
    numbers, middle = np.arange(draws + 1), round(draws * chance)
    one = np.zeros(max(draws - middle, middle) ** 2 + 1)
    np.add.at(one, (numbers - middle) ** 2, stats.binom.pmf(numbers, draws, chance))
    size = (len(one) - 1) * times + 1
    return np.clip(np.fft.irfft(np.fft.rfft(one, size) ** times, size), 0.0, None)


def judge_singular_values(matrix: Floats) -> float:
    """Whether a matrix [n, m] of standard normals is as round as it should be (Davidson and Szarek).

    Its largest and smallest singular values are beyond sqrt(max) +- (sqrt(min) + u) with probability exp(-u^2/2) each.
    """
    rows, columns = matrix.shape
    if not rows or not columns:
        return 1.0
    found = np.linalg.svd(matrix, compute_uv=False)
    wide, narrow = math.sqrt(max(rows, columns)), math.sqrt(min(rows, columns))
    beyond = max(float(found[0]) - wide - narrow, wide - narrow - float(found[-1]), 0.0)
    return min(1.0, 2.0 * math.exp(-(beyond**2) / 2))


def judge_pairs(rows: Floats, others: Floats | None = None) -> tuple[float, int, int]:
    """Whether vectors of standard normals are independent: the smallest p-value over all pairs, and that pair.

    For a given row z, <y, z> / |z| is standard normal; the p-value counts all pairs (Bonferroni). Rows [n, m]; others:
    the rows to pair them with; None: each other.
    """
    second = rows if others is None else others
    lengths = np.linalg.norm(second, axis=1)
    scores = np.abs(rows @ second.T) / np.maximum(lengths, 1e-300)[None, :]
    if others is None:
        scores = np.where(np.tri(len(rows), k=-1, dtype=bool), scores, 0.0)
        pairs = len(rows) * (len(rows) - 1) // 2
    else:
        pairs = scores.size
    if not pairs:
        return 1.0, 0, 0
    i, j = np.unravel_index(int(np.argmax(scores)), scores.shape)
    return min(1.0, pairs * judge_normal(float(scores[i, j]))), int(i), int(j)


def judge_directions(rows: Floats) -> tuple[float, int, int, float]:
    """Whether vectors [n, m] point into independent directions, whatever their lengths: p-value, the pair, its cosine.

    The squared cosine of two independent directions has a Beta(1/2, (m - 1)/2) distribution; all pairs count.
    """
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.maximum(lengths, 1e-300)
    cosines = np.where(np.tri(len(rows), k=-1, dtype=bool), np.abs(units @ units.T), 0.0)
    if len(rows) < 2 or rows.shape[1] < 2:
        return 1.0, 0, 0, 0.0
    i, j = np.unravel_index(int(np.argmax(cosines)), cosines.shape)
    cosine = min(1.0, float(cosines[i, j]))
    p = float(special.betainc((rows.shape[1] - 1) / 2, 0.5, max(0.0, 1 - cosine**2)))
    return min(1.0, p * len(rows) * (len(rows) - 1) / 2), int(i), int(j), cosine


def judge_largest(values: Floats) -> float:
    """Whether the largest of independent standard normals is as far out as it should be; two-sided.

    Noise that is cut off, or whose tails are too long, keeps its variance and most of its form.
    """
    if not len(values):
        return 1.0
    # P(all |z| <= a) = (1 - 2 Phi(-a))^n
    beyond = float(2 * special.ndtr(-float(np.abs(values).max())))
    lower = math.exp(len(values) * math.log1p(-min(beyond, 1 - 1e-16)))
    return double_tail(lower, min(1.0, len(values) * beyond))


def judge_neighbours(rows: Floats, lag: int) -> float:
    """Whether numbers that are `lag` places apart in rows [n, m] of standard normals are independent.

    Disjoint pairs: for given second numbers v, <u, v> / |v| is standard normal.
    """
    columns = rows.shape[1]
    firsts = [i for i in range(columns) if i % (2 * lag) < lag and i + lag < columns]
    if not firsts or not len(rows):
        return 1.0
    u, v = rows[:, firsts].ravel(), rows[:, [i + lag for i in firsts]].ravel()
    return judge_normal(float(u @ v) / max(float(np.linalg.norm(v)), 1e-300))


MATCH = 2e-6
"""Numbers that are this close count as the same: two roundings of float32, or the grid of a release."""
MATCH_CHANCE = 0.8 * (2 * MATCH + 2.0**-20)
"""Bounds the chance that |z| is this close to a given number: its density is at most 0.8, the grid at most 2^-20."""


def judge_matches(one: Floats, other: Floats) -> tuple[float, int]:
    """Whether independent standard normals [m] and [k] have absolute values in common, beyond chance; and how many.

    For given others, each of `one` comes close to one of them with a chance of at most k times MATCH_CHANCE.
    """
    if not len(one) or not len(other):
        return 1.0, 0
    others = np.sort(np.abs(other))
    values = np.abs(one)
    place = np.searchsorted(others, values)
    gap = np.minimum(
        np.abs(others[np.minimum(place, len(others) - 1)] - values), np.abs(others[np.maximum(place - 1, 0)] - values)
    )
    found = int((gap <= MATCH * np.maximum(1.0, values)).sum())
    # The tolerance of values above 1 is wider, and their density falls faster than it grows.
    chance = min(1.0, len(others) * MATCH_CHANCE)
    return judge_count_too_large(found, len(values), chance), found
