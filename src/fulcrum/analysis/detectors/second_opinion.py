"""Epsilon of sampled Gaussian releases by code of its own: nothing here is shared with `fulcrum.privacy.accounting`.

Renyi divergences come from a plain quadrature for fractional orders and from the binomial sum for whole ones. A lower
bound comes from the distribution of privacy losses, which no accountant may go below.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]
Paid = Counter[tuple[float, float]]
"""How many releases per (rate, sigma)."""
FRACTIONAL = np.arange(1.1, 11.0, 0.1)
WHOLE = np.array([*range(11, 65), 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024], dtype=np.float64)
ORDERS = np.concatenate([FRACTIONAL, WHOLE])


@lru_cache(maxsize=1024)
def compute_divergences(rate: float, sigma: float) -> Floats:
    """The Renyi divergence of one release at each of ORDERS."""
    if rate >= 1:
        return ORDERS / (2 * sigma**2)
    x = np.arange(-12 * sigma, FRACTIONAL[-1] + 1 + 12 * sigma, sigma / 40)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
    log_density = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi)) + math.log(sigma / 40)
    fractional = [special.logsumexp(order * log_ratio + log_density) / (order - 1) for order in FRACTIONAL]
    whole = []
    for order in WHOLE:
        k = np.arange(order + 1)
        log_choose = special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
        terms = log_choose + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k**2 - k) / (2 * sigma**2)
        whole.append(special.logsumexp(terms) / (order - 1))
    return np.array([*fractional, *whole])


def price(paid: Paid, delta: float) -> float:
    """Epsilon at delta of all these releases together; 0 without any, infinite without noise."""
    used = {pair: count for pair, count in paid.items() if count}
    if not used:
        return 0.0
    if min(sigma for _, sigma in used) <= 0:
        return math.inf
    total = sum(count * compute_divergences(*pair) for pair, count in used.items())
    bounds = total + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    return max(0.0, float(np.min(bounds)))


LOSS_BINS, LOSS_REACH = 2**16, 64.0
"""Privacy losses are kept on this many places between - and + this reach."""


@lru_cache(maxsize=256)
def _transform_losses(rate: float, sigma: float) -> npt.NDArray[np.complex128]:
    """The Fourier transform of one release's distribution of losses, each rounded down to a place of the grid."""
    width = 2 * LOSS_REACH / LOSS_BINS
    edges = np.arange(-LOSS_BINS // 2, LOSS_BINS // 2 + 1) * width
    inside = np.exp(np.minimum(edges, 500.0)) - (1 - rate)
    x = np.full(len(edges), -np.inf)
    x[inside > 0] = sigma**2 * np.log(inside[inside > 0] / rate) + 0.5
    reached = (1 - rate) * special.ndtr(x / sigma) + rate * special.ndtr((x - 1) / sigma)
    mass = np.diff(reached)  # place i: losses from edge i to edge i + 1
    return np.fft.rfft(np.fft.ifftshift(mass))


def price_at_least(paid: Paid, delta: float) -> float:
    """A lower bound on the epsilon at delta of all these releases together, whatever the accountant.

    The distribution of privacy losses, composed exactly: losses are rounded down and the largest are left out, so
    delta is at least what this finds. One of the two directions is enough for a lower bound.
    """
    used = {pair: count for pair, count in paid.items() if count}
    if not used:
        return 0.0
    if min(sigma for _, sigma in used) <= 0:
        return math.inf
    product = np.prod([_transform_losses(*pair) ** count for pair, count in used.items()], axis=0)
    mass = np.clip(np.fft.fftshift(np.fft.irfft(product, LOSS_BINS)), 0.0, None)
    losses = np.arange(-LOSS_BINS // 2, LOSS_BINS // 2) * (2 * LOSS_REACH / LOSS_BINS)
    mass = np.where(mass > 1e-13, mass, 0.0)  # the transform rounds by less

    def find_delta(epsilon: float) -> float:
        above = losses > epsilon
        return float((mass[above] * -np.expm1(epsilon - losses[above])).sum())

    low, high = 0.0, LOSS_REACH / 2
    if find_delta(low) <= delta:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if find_delta(middle) > delta else (low, middle)
    return low
