"""The price of tuning on private data: a random number of trials, of which the best alone is released.

Papernot and Steinke (ICLR 2022, "Hyperparameter tuning with Renyi differential privacy"): K trials, each a private
training run with settings drawn at random, and only the best is shown. If K is drawn from a suitable distribution, the
whole costs little more than one trial. For a trial with Renyi divergence e(a) at order a:

    K ~ truncated negative binomial(eta, gamma), theorem 2:
        e(a) + (1 + eta) ((1 - 1/b) e(b) + log(1/gamma) / b) + log E[K] / (a - 1)          for any order b
    K ~ Poisson(mu), theorem 6:
        e(a) + mu d + log(mu) / (a - 1),      d the delta of a trial at epsilon log(1 + 1/(a - 1))

The guarantee is that of somebody who sees the chosen model only. A federation's server sees every release of every
trial: against it the trials compose, and cost about the square root of their number. So this is a row of studies, which
is given the kinder of the two prices, and no method of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import ORDERS, FloatVector, convert_rdp_to_epsilon, format_epsilon

MOST_TRIALS = 10_000
"""Trials beyond which a distribution is cut off when it is drawn from; its chance is negligible."""


@dataclass(frozen=True)
class TrialCount:
    """The distribution of the number of trials K. mean: E[K].

    eta: None for Poisson(mean); otherwise a truncated negative binomial (at least one trial): 0 is the logarithmic
    distribution, 1 the geometric one.
    """

    mean: float
    eta: float | None = None

    @property
    def gamma(self) -> float:
        """The parameter gamma of the truncated negative binomial with this mean."""
        assert self.eta is not None
        low, high = 1e-12, 1 - 1e-12
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if _negative_binomial_mean(self.eta, middle) > self.mean else (low, middle)
        return low

    def describe(self) -> str:
        """In words."""
        if self.eta is None:
            return f"Poisson with mean {self.mean:g}"
        return f"truncated negative binomial, eta = {self.eta:g}, with mean {self.mean:g}"

    def probabilities(self) -> npt.NDArray[np.float64]:
        """P(K = k) for k = 0, 1, 2, ..., as far as it matters."""
        k = np.arange(1, MOST_TRIALS, dtype=np.float64)
        if self.eta is None:
            logs = k * math.log(self.mean) - self.mean - np.cumsum(np.log(k))
            found = np.concatenate([[math.exp(-self.mean)], np.exp(logs)])
        else:
            logs = k * math.log1p(-self.gamma) - np.log(k)
            if self.eta != 0:  # (1 - gamma)^k times the product of (l + eta) / (l + 1), l = 0 .. k - 1
                logs = k * math.log1p(-self.gamma) + np.cumsum(np.log((k - 1 + self.eta) / k))
            found = np.concatenate([[0.0], np.exp(logs - logs.max())])
        return np.asarray(found / found.sum(), dtype=np.float64)

    def draw(self, uniform: float) -> int:
        """K from a uniform number in [0, 1)."""
        return int(np.searchsorted(np.cumsum(self.probabilities()), uniform, side="right"))


def _negative_binomial_mean(eta: float, gamma: float) -> float:
    if eta == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return float(eta * (1 - gamma) / (gamma * (1 - gamma**eta)))


def compute_tuned_rdp(trial: FloatVector, trials: TrialCount) -> FloatVector:
    """Renyi divergence [A] of releasing the best of K trials, from that of one trial at ORDERS [A]."""
    offset = math.log(trials.mean) / (ORDERS - 1)
    if trials.eta is not None:
        best = ((1 - 1 / ORDERS) * trial + math.log(1 / trials.gamma) / ORDERS).min()
        return np.asarray(trial + (1 + trials.eta) * best + offset)
    deltas = np.array([compute_delta(trial, math.log1p(1 / (order - 1))) for order in ORDERS])
    return np.asarray(trial + trials.mean * deltas + offset)


def compute_delta(rdp: FloatVector, epsilon: float) -> float:
    """The delta that a curve [A] of Renyi divergences proves at this epsilon (Canonne, Kamath and Steinke 2020)."""
    logs = (ORDERS - 1) * (rdp - epsilon) + ORDERS * np.log1p(-1 / ORDERS) - np.log(ORDERS - 1)
    return float(min(1.0, math.exp(min(0.0, logs.min()))))


def compute_tuned_epsilon(trial: FloatVector, trials: TrialCount, delta: float) -> float:
    """Epsilon of releasing the best of K trials, from the Renyi divergence [A] of one."""
    return float(convert_rdp_to_epsilon(compute_tuned_rdp(trial, trials), delta))


def calibrate_trial_sigma(
    measure_trial: Callable[[float], FloatVector], trials: TrialCount, epsilon: float, delta: float
) -> float:
    """The smallest sigma of a trial at which releasing the best of K trials costs at most epsilon.

    measure_trial: sigma -> Renyi divergence of one trial at ORDERS [A].
    """

    def cost(sigma: float) -> float:
        return compute_tuned_epsilon(measure_trial(sigma), trials, delta)

    low, high = 0.05, 1e5
    if cost(high) > epsilon:
        raise ConfigError(
            f"no noise makes {trials.describe()} trials cost at most epsilon = {format_epsilon(epsilon)} at "
            f"delta = {delta:g}; raise "
            "epsilon or expect fewer trials."
        )
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high


__all__ = [
    "TrialCount",
    "calibrate_trial_sigma",
    "compute_delta",
    "compute_tuned_epsilon",
    "compute_tuned_rdp",
]
