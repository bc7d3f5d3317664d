"""DP-SGD with paid tuning at the same total epsilon, as a row of the suite.

Per seed, a random number of trials (Poisson), each with a cell of the grid drawn at random and with more noise, such
that releasing the best trial costs the scenario's epsilon (`fulcrum.privacy.paid_tuning`). Two favours: the best is
found on the public test data, at no cost, and the price is that of somebody who sees the chosen model only; a
federation's server sees every trial.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

from fulcrum.privacy.accounting import compute_step_rdp
from fulcrum.privacy.paid_tuning import TrialCount, calibrate_trial_sigma
from fulcrum.study.suite.scenarios import Scenario, Suite

PAID_TUNING = "dp-sgd-paid-tuning"
"""The row's name among a suite's rivals."""
TRIALS = TrialCount(10.0)
"""Ten trials are expected. For the suite's scenarios they raise the noise by a factor between 1.1 and 2.1; twenty by up
to 3. The geometric distribution of the same mean costs as much and often makes two trials only."""


@lru_cache(maxsize=1024)
def calibrate_trial(rate: float, releases: int, epsilon: float, delta: float) -> float:
    """The noise multiplier of a trial of so many releases at which the best trial costs epsilon; five digits, rounded
    up."""
    sigma = calibrate_trial_sigma(lambda sigma: releases * compute_step_rdp(rate, sigma), TRIALS, epsilon, delta)
    digits = 10.0 ** (4 - math.floor(math.log10(sigma)))
    return math.ceil(sigma * digits) / digits


def draw_trials(suite: Suite, scenario: Scenario, seed: int) -> list[tuple[float, float]]:
    """The cells (C0, learning rate) of one seed's trials; the same for everybody, and there may be none."""
    name = hashlib.sha256(f"{PAID_TUNING}/{scenario.name}/{seed}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(name[:8], "little"))
    cells = [(C0, lr) for C0 in suite.C0 for lr in suite.lr]
    return [cells[i] for i in generator.integers(len(cells), size=TRIALS.draw(generator.random()))]
