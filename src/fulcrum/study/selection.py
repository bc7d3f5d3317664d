"""The privacy cost of choosing settings, if the trials ran on the private data.

The tables' epsilon is that of one run, as in the paper. Tuning on private data releases
more. If the number of trials K is drawn at random and only the best one's output is published, the
cost grows slowly: Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy" (ICLR
2022), theorem 2, after Liu and Talwar, "Private selection from private candidates" (STOC 2019). For K
from the truncated negative binomial distribution with parameters eta > -1 and 0 < gamma < 1, and a
trial that satisfies (a, e)-RDP and (b, f)-RDP, publishing the best of K satisfies (a, e')-RDP with

    e' = e + (1 + eta) (1 - 1/b) f + (1 + eta) log(1/gamma) / b + log(E K) / (a - 1).

eta = 1 is the geometric distribution, eta = 0 the logarithmic one. For pure DP (a, b -> infinity) it
is the factor 2 + eta: 3 for the geometric distribution, as Liu and Talwar have it. The score that picks
the best must itself come out of the trial's mechanism, or be computed on public data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import ORDERS, FloatVector, Spend, convert_rdp_to_epsilon
from fulcrum.study.calibrate import plan_without_data
from fulcrum.study.job import StudyJob

STOPPING_FAMILIES: dict[str, float] = {"geometric": 1.0, "logarithmic": 0.0}
"""Distributions of the number of trials, by their eta."""


def compute_mean_trials(eta: float, gamma: float) -> float:
    """E K of the truncated negative binomial distribution."""
    if eta == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return float(eta * (1 - gamma) / (gamma * (1 - gamma**eta)))


def solve_gamma(trials: float, eta: float) -> float:
    """The gamma at which `trials` are made on average (at least 1): fewer trials, larger gamma."""
    if trials < 1:
        raise ConfigError(f"trials = {trials:g}; at least 1 is needed.")
    low, high = math.log(1e-15), 0.0  # range of log gamma
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if compute_mean_trials(eta, math.exp(min(middle, -1e-12))) > trials else (low, middle)
        )
    return math.exp(min(low, -1e-12))  # the end with at least as many trials: on the safe side


def compute_selection_rdp(rdp: FloatVector, trials: float, eta: float) -> FloatVector:
    """RDP at ORDERS [A] of publishing the best of about `trials` trials, each of RDP `rdp` [A] at ORDERS."""
    gamma = solve_gamma(trials, eta)
    second = (1 + eta) * ((1 - 1 / ORDERS) * rdp + math.log(1 / gamma) / ORDERS)  # any order b is valid: use the best
    total: FloatVector = rdp + np.min(second) + math.log(compute_mean_trials(eta, gamma)) / (ORDERS - 1)
    return total


def compute_selection_epsilon(rdp: FloatVector, trials: float, delta: float) -> dict[str, float]:
    """Epsilon of publishing the best of about `trials` trials, for each family of random stopping."""
    return {
        name: float(convert_rdp_to_epsilon(compute_selection_rdp(rdp, trials, eta), delta))
        for name, eta in STOPPING_FAMILIES.items()
    }


def compute_trial_rdp(jobs: Iterable[StudyJob]) -> FloatVector:
    """RDP at ORDERS of one trial drawn from these calibrated jobs: at every order the RDP of the costliest job."""
    worst = np.zeros(len(ORDERS))
    seen: set[tuple[object, ...]] = set()
    for job in jobs:
        plan = plan_without_data(job.settings)
        rounds = [plan.events(0, t) for t in range(job.settings.train.rounds)]
        if tuple(rounds) in seen:
            continue
        seen.add(tuple(rounds))
        spend = Spend.empty().add_events(event for events in rounds for event in events)
        worst = np.maximum(worst, spend.rdp)
    return worst


def compute_tuning_cost(jobs: Iterable[StudyJob], delta: float) -> dict[str, float]:
    """What tuning one cell would cost: all trials composed, and private selection by each family."""
    jobs = list(jobs)
    rdp = compute_trial_rdp(jobs)
    composed = float(convert_rdp_to_epsilon(len(jobs) * rdp, delta))
    return {
        "one trial": float(convert_rdp_to_epsilon(rdp, delta)),
        **compute_selection_epsilon(rdp, len(jobs), delta),
        "all": composed,
    }
