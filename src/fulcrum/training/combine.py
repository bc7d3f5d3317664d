"""How the parties' updates become one (`train.combine`), and the noise that the result is known to have.

mean              the mean with the weights of `train.weights`; linear, so it alone goes with shared noise
trimmed-mean      per coordinate, the mean of what is left without a share `train.trim` of the values at each end
median            per coordinate, the median
geometric-median  the point whose weighted sum of distances to all updates is smallest

All act on released values, so none of them costs privacy. One party can move the mean anywhere; a trimmed mean bears a
share `trim` of bad parties, and the medians bear fewer than one half. In trimmed-mean and median each party counts
once, whatever its declared size: a size cannot be checked.

Known noise. Each update has independent Gaussian noise of a public scale s_k in every coordinate. What the combined
update has is derived for updates that differ by noise alone; where parties' own updates differ by more than the noise
in a coordinate, a trimmed mean and a median have somewhat more.

* mean: sqrt(sum (w_k s_k)^2), exact.
* geometric-median: it is a mean with weights v_k in proportion to w_k / (distance from the result). In many dimensions
  the distances hardly depend on the noise's direction, so sqrt(sum (v_k s_k)^2) with the weights that were found.
* median of an odd number: its distribution function is P(at least (m+1)/2 of m independent events happen), with
  probabilities Phi(x / s_k), integrated numerically. Of an even number: the mean of the two middle values, whose
  squared distance is integrated in two dimensions.
* trimmed-mean: with M the mean weighted by 1/s_k^2, T - M does not depend on M (Basu's theorem: M is sufficient for a
  shift, T - M is free of it). So Var T = Var M + Var(T - M); the first term is exact, the second, a few percent of it,
  is averaged over draws from a fixed stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fulcrum.rng import numpy_generator
from fulcrum.settings.registry import Registry

COLUMNS_AT_ONCE = 1 << 20
"""Coordinates that are sorted together, to bound the memory."""
WEISZFELD_STEPS = 50
WEISZFELD_TOLERANCE = 1e-6
"""The search for the geometric median ends when no weight moves by more than this."""
MAX_PARTIES_INTEGRATED = 100
"""Of more parties than this, evenly chosen ones stand for all in the integrals; noise falls with the root of m."""
DRAWS = 1_000_000
"""Normal numbers drawn for the known noise of a trimmed mean, over all parties."""


@dataclass(frozen=True)
class CombinedUpdates:
    """values [n], and the weights [m] with which the parties count in it, of sum 1."""

    values: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Combiner:
    """combine(updates [m, n], weights [m], trim) -> CombinedUpdates; noise(scales [m], weights [m], trim) -> scale.

    scales: the standard deviation of the noise in one coordinate of each update; noise: that of the combined one.
    """

    combine: Callable[[Tensor, Tensor, float], CombinedUpdates]
    noise: Callable[[Sequence[float], Sequence[float], float], float]
    expect_weights: Callable[[Sequence[float], Sequence[float]], Sequence[float]] = lambda scales, weights: weights
    """(scales, weights) -> the weights with which parties will count, before there are updates."""


# --- the combined update ------------------------------------------------------------------------


def _mean(updates: Tensor, weights: Tensor, trim: float) -> CombinedUpdates:
    if len(updates) == 1:  # without a copy of a large model's update
        return CombinedUpdates(weights.to(updates) * updates[0], weights)
    return CombinedUpdates(weights.to(updates) @ updates, weights)


def count_trimmed(parties: int, trim: float) -> int:
    """Values that a trimmed mean leaves out at each end: at least one of three or more parties, and never all."""
    return min(math.ceil(trim * parties), (parties - 1) // 2)


def _by_columns(updates: Tensor, middle: Callable[[Tensor], Tensor]) -> CombinedUpdates:
    parts = [middle(part) for part in updates.split(COLUMNS_AT_ONCE, dim=1)]
    even = torch.full((len(updates),), 1.0 / len(updates))
    return CombinedUpdates(torch.cat(parts) if len(parts) != 1 else parts[0], even)


def _trimmed_mean(updates: Tensor, weights: Tensor, trim: float) -> CombinedUpdates:
    cut = count_trimmed(len(updates), trim)
    return _by_columns(updates, lambda part: part.sort(dim=0).values[cut : len(part) - cut].mean(dim=0))


def _median(updates: Tensor, weights: Tensor, trim: float) -> CombinedUpdates:
    cut = (len(updates) - 1) // 2
    return _by_columns(updates, lambda part: part.sort(dim=0).values[cut : len(part) - cut].mean(dim=0))


def _geometric_median(updates: Tensor, weights: Tensor, trim: float) -> CombinedUpdates:
    """Weiszfeld's iteration, on the inner products of the updates alone: nothing of size d is made but the result."""
    flat = updates.double() if updates.shape[1] < COLUMNS_AT_ONCE else updates
    products = torch.stack([flat @ row for row in flat]).double().cpu()  # [m, m]
    found = _find_geometric_weights(products, weights.double().cpu())
    return CombinedUpdates(found.to(updates) @ updates, found.float())


def _find_geometric_weights(products: Tensor, given: Tensor) -> Tensor:
    """The weights [m] of the geometric median as a mean. products [m, m]: the updates' inner products."""
    squares, current = products.diagonal(), given.clone()
    for _ in range(WEISZFELD_STEPS):
        along = products @ current
        away = (squares - 2 * along + current @ along).clamp_min(0.0).sqrt()
        pull = given / away.clamp_min(1e-12 * float(squares.max().sqrt()) + 1e-30)
        new = pull / pull.sum()
        moved, current = float((new - current).abs().max()), new
        if moved < WEISZFELD_TOLERANCE:
            break
    return current


# --- the noise of the combined update -----------------------------------------------------------


def _linear_noise(scales: Sequence[float], weights: Sequence[float], trim: float) -> float:
    return math.hypot(*(w * s for w, s in zip(weights, scales, strict=True)))


def _expect_geometric_weights(scales: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The weights for updates that are noise alone, in many dimensions: nearly orthogonal, of norms as the scales."""
    if max(scales) == 0:
        return list(weights)
    squares = torch.tensor(scales, dtype=torch.float64).square().diag()
    found: list[float] = _find_geometric_weights(squares, torch.tensor(weights, dtype=torch.float64)).tolist()
    return found


def _median_noise(scales: Sequence[float], weights: Sequence[float], trim: float) -> float:
    return _for_few(scales, _integrate_median)


def _trimmed_noise(scales: Sequence[float], weights: Sequence[float], trim: float) -> float:
    return _for_few(scales, lambda few: _estimate_trimmed(few, trim))


def _for_few(scales: Sequence[float], compute: Callable[[tuple[float, ...]], float]) -> float:
    """The noise for at most `MAX_PARTIES_INTEGRATED` parties, in units of the largest scale so that results are found
    again; 0 without noise."""
    largest = max(scales)
    if largest == 0 or len(scales) == 1:
        return float(largest)
    ordered = sorted(scales)
    count = min(len(ordered), MAX_PARTIES_INTEGRATED - (MAX_PARTIES_INTEGRATED - len(ordered)) % 2)  # both even or odd
    few = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
    shrunk = math.sqrt(len(few) / len(ordered))
    return largest * shrunk * compute(tuple(float(f"{scale / largest:.12g}") for scale in few))


@lru_cache(maxsize=256)
def _integrate_median(scales: tuple[float, ...]) -> float:
    """Standard deviation of the median of independent normals of these scales, by numerical integration."""
    s = np.maximum(np.array(scales), 1e-9)
    m, typical = len(s), float(1 / np.mean(1 / s))
    least = (m + 1) // 2 if m % 2 else m // 2 + 1  # so many must be below for the (upper) middle to be below

    def tail(x: np.ndarray, count: int) -> np.ndarray:
        """P(the count-th smallest > x)."""
        return 1 - _at_least(_normal_cdf(x[:, None] / s), count)

    end = 4 * 1.26 * typical / math.sqrt(m)
    while float(tail(np.array([end]), least)[0]) > 1e-13 and end < 40 * float(s.max()):
        end *= 1.25
    x, weight = _nodes(0.0, end, 400)
    if m % 2:
        return math.sqrt(4 * float(np.sum(weight * x * tail(x, least))))
    # By symmetry the two middle values have the same second moment, and one is below -x as often as the other above x.
    second = 2 * float(np.sum(weight * x * (tail(x, least - 1) + tail(x, least))))
    # E (upper - lower)^2 = 2 int int P(half of them <= x, none in (x, x + gap], the others above).
    gaps, gap_weight = _nodes(0.0, end, 96)
    x, weight = _nodes(-end, end, 96)
    low = _normal_cdf(x[:, None, None] / s)
    high = 1 - _normal_cdf((x[:, None, None] + gaps[None, :, None]) / s)
    between = _count_distribution(np.broadcast_to(low, high.shape), high)[..., m // 2]
    gap_square = 2 * float(weight @ between @ gap_weight)
    return math.sqrt((4 * second - gap_square) / 4)


def _nodes(low: float, high: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes and weights on [low, high]."""
    x, weight = np.polynomial.legendre.leggauss(count)
    return low + (x + 1) * (high - low) / 2, weight * (high - low) / 2


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = torch.special.ndtr(torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return found


def _count_distribution(happens: np.ndarray, misses: np.ndarray) -> np.ndarray:
    """Coefficients [..., m + 1] of prod (misses_k + happens_k z), over the last axis [..., m]."""
    m = happens.shape[-1]
    found = np.zeros((*happens.shape[:-1], m + 1))
    found[..., 0] = 1.0
    for k in range(m):
        found[..., 1 : k + 2] = (
            found[..., 1 : k + 2] * misses[..., k, None] + found[..., : k + 1] * happens[..., k, None]
        )
        found[..., 0] = found[..., 0] * misses[..., k]
    return found


def _at_least(p: np.ndarray, count: int) -> np.ndarray:
    """P(at least `count` of the independent events happen); p [..., m]."""
    found: np.ndarray = _count_distribution(p, 1 - p)[..., count:].sum(axis=-1)
    return found


@lru_cache(maxsize=256)
def _estimate_trimmed(scales: tuple[float, ...], trim: float) -> float:
    """Standard deviation of the trimmed mean of independent normals of these scales."""
    s = np.maximum(np.array(scales), 1e-9)
    m = len(s)
    cut = count_trimmed(m, trim)
    precision = 1 / s**2
    best = 1 / precision.sum()  # Var M
    values = numpy_generator(0, "trimmed-mean", m).standard_normal((max(DRAWS // m, 1000), m)) * s
    rest = np.sort(values, axis=1)[:, cut : m - cut].mean(axis=1) - values @ (precision * best)
    return math.sqrt(best + float(np.mean(rest**2)))


COMBINERS: Registry[Combiner] = Registry("train.combine", noun="way to combine updates", kind=Combiner)
"""Ways to combine updates, by name. Your own: package.module:name."""
COMBINERS.add("mean", Combiner(_mean, _linear_noise))
COMBINERS.add("trimmed-mean", Combiner(_trimmed_mean, _trimmed_noise))
COMBINERS.add("median", Combiner(_median, _median_noise))
COMBINERS.add("geometric-median", Combiner(_geometric_median, _linear_noise, _expect_geometric_weights))
