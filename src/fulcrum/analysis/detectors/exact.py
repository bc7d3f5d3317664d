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
