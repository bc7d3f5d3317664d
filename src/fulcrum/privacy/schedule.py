"""Noise schedules: how the multiplier moves over the rounds, fixed before the first and the same for everybody.

A schedule gives a factor s_t for each round; the multiplier of round t is sigma_t = sigma s_t, with
s_0 = 1, and sigma is what a budget is calibrated to. The accountant composes the rounds as they are.
A schedule may not depend on data, not even on released values: sigma follows a public plan, only C adapts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fulcrum.settings.schema import Privacy

Factors = tuple[float, ...]


def _constant(privacy: Privacy, rounds: int) -> Factors:
    return (1.0,) * rounds


def _growth(privacy: Privacy, rounds: int) -> Factors:
    """Du et al. 2021: mu_t = mu_0 rho_mu^(-t/T) and sigma_t = 1 / mu_t, so that later rounds are clearer."""
    return tuple(privacy.rho_mu ** (t / rounds) for t in range(rounds))


def _phases(privacy: Privacy, rounds: int) -> Factors:
    """Equally long phases whose precisions 1/sigma^2 are to each other as the numbers given.

    At small rates a step costs in proportion to its precision, so these are the phases' shares of the
    budget; what they cost together is composed exactly, whatever the rate.
    """
    at = [t * len(privacy.phases) // rounds for t in range(rounds)]
    return tuple(math.sqrt(privacy.phases[0] / privacy.phases[i]) for i in at)


SCHEDULES: dict[str, Callable[[Privacy, int], Factors]] = {
    "constant": _constant,
    "growth": _growth,
    "phases": _phases,
}


def factors(privacy: Privacy, rounds: int) -> Factors:
    """s_t for each of the rounds 0..T-1, as privacy.noise_schedule asks."""
    return SCHEDULES[privacy.noise_schedule](privacy, rounds)
