"""Renyi divergence of one Poisson-sampled Gaussian release, at many orders at once.

With rate q, multiplier sigma and order a the divergence is log A(a) / (a - 1), where (Mironov, Talwar and
Zhang 2019)

    A(a) = E over z ~ N(0, 1) of (1 - q + q exp(z / sigma - 1 / (2 sigma^2)))^a.

At integer orders this is a finite sum of binomial terms. At other orders the integrand is analytic in the strip
|Im z| < pi sigma and falls off like a Gaussian, so the trapezoidal rule is exact to rounding once its step is
small against sigma and 1. `dp_accounting` computes the same numbers order by order, in forty
milliseconds per sigma; a noise schedule has hundreds of sigmas, and its calibration needs thousands.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FloatVector = npt.NDArray[np.float64]

TRAPEZOID_STEP = 0.35
"""Step of the trapezoidal rule, in units of min(1, sigma): an error of exp(-2 pi^2 / STEP) = exp(-56) or less."""
INTEGRAL_REACH = 9.5
"""Range of the integral beyond the outermost peak, in standard deviations: exp(-45) is left out."""
MAX_TABLE_ORDER = 63
"""Integer orders up to this one share a table of binomial coefficients."""
MIN_INTEGRAL_SIGMA = 0.05
"""Below this sigma fractional orders are bounded by their integer neighbours: nothing is hidden there anyway."""


def compute_sampled_gaussian_rdp(rate: float, sigma: float, orders: FloatVector) -> FloatVector:
    """log A(order) / (order - 1) at each of `orders` (all above 1), for 0 < rate < 1 and sigma > 0."""
    whole = orders == np.round(orders)
    log_moments = np.empty_like(orders)
    for low, high in (
        (1, MAX_TABLE_ORDER),
        (MAX_TABLE_ORDER, math.inf),
    ):  # two tables, so that low orders do not get rows as long as high ones
        chosen = whole & (orders > low) & (orders <= high)
        log_moments[chosen] = _log_moments_by_sum(rate, sigma, tuple(orders[chosen].astype(int).tolist()))
    if sigma >= MIN_INTEGRAL_SIGMA:
        log_moments[~whole] = _log_moments_by_integral(rate, sigma, orders[~whole])
    else:
        # log A is convex in the order and 0 at order 1, so a chord between integer orders lies above it.
        knots = tuple(range(2, math.ceil(orders[~whole].max(initial=2)) + 1))
        log_moments[~whole] = np.interp(orders[~whole], (1, *knots), (0.0, *_log_moments_by_sum(rate, sigma, knots)))
    return log_moments / (orders - 1)


def _log_weighted_mean(log_weights: FloatVector, log_values: FloatVector) -> FloatVector:
    """log of the sum over the last axis of weight * exp(value), for weights [orders, n] that add up to 1.

    Where the sum is near 1 it is computed as 1 + sum of weight * (exp(value) - 1), so that small moments
    keep their digits.
    """
    log_weights, log_values = np.broadcast_arrays(log_weights, log_values)
    terms = log_weights + log_values
    top = terms.max(axis=-1, keepdims=True)
    near = top[:, 0] < 1
    found = np.empty(len(terms))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # weight * (exp(value) - 1) as a difference, because exp(value) may overflow where its weight is tiny
        small = np.exp(log_weights[near])
        growth = np.where(log_values[near] < 1, small * np.expm1(log_values[near]), np.exp(terms[near]) - small)
        found[near] = np.log1p(growth.sum(axis=-1))
        found[~near] = (top + np.log(np.exp(terms - top).sum(axis=-1, keepdims=True)))[~near, 0]
    return found


@lru_cache(maxsize=4)
def _log_binomial_table(orders: tuple[int, ...]) -> FloatVector:
    """log of the binomial coefficients (a over k) in row a, column k; minus infinity beyond the row's end."""
    table = np.full((len(orders), max(orders, default=0) + 1), -np.inf)
    for row, order in enumerate(orders):
        table[row, : order + 1] = [math.log(math.comb(order, k)) for k in range(order + 1)]
    return table


def _log_moments_by_sum(rate: float, sigma: float, orders: tuple[int, ...]) -> FloatVector:
    """log A at integer orders: the sum over k of (a over k) (1-q)^(a-k) q^k exp((k^2 - k) / (2 sigma^2))."""
    if not orders:
        return np.zeros(0)
    table = _log_binomial_table(orders)
    k = np.arange(table.shape[1])
    rest = np.maximum(np.array(orders)[:, None] - k, 0)
    log_weights = table + rest * math.log1p(-rate) + k * math.log(rate)
    return _log_weighted_mean(log_weights, (k * k - k) / (2 * sigma**2))


def _log_moments_by_integral(rate: float, sigma: float, orders: FloatVector) -> FloatVector:
    """log A at any orders, by the trapezoidal rule."""
    if not len(orders):
        return np.zeros(0)
    step = TRAPEZOID_STEP * min(1.0, sigma)
    z = np.arange(-INTEGRAL_REACH, float(orders.max()) / sigma + INTEGRAL_REACH + step, step)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + z / sigma - 1 / (2 * sigma**2))
    log_weights = math.log(step) - 0.5 * math.log(2 * math.pi) - 0.5 * z**2
    return _log_weighted_mean(log_weights, orders[:, None] * ratio)
