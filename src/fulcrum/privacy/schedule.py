"""Noise schedules: the multiplier per round, fixed before the first round and equal for all parties.

A schedule gives a factor s_t for each round; the multiplier of round t is sigma_t = sigma s_t, with
s_0 = 1, and sigma is calibrated to the budget. The accountant composes the actual multipliers.
A schedule may not depend on data, not even on released values: sigma follows a public plan, only C adapts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fulcrum.errors import ConfigError
from fulcrum.settings.registry import Registry
from fulcrum.settings.schema import Privacy

NoiseFactors = tuple[float, ...]


def _constant_factors(privacy: Privacy, rounds: int) -> NoiseFactors:
    return (1.0,) * rounds


def _growth_factors(privacy: Privacy, rounds: int) -> NoiseFactors:
    """Du et al. 2021: mu_t = mu_0 rho_mu^(-t/T) and sigma_t = 1 / mu_t, so that later rounds have less noise."""
    return tuple(privacy.rho_mu ** (t / rounds) for t in range(rounds))


def _phase_factors(privacy: Privacy, rounds: int) -> NoiseFactors:
    """Equally long phases with precisions 1/sigma^2 in the given proportions.

    At small rates a step's cost is proportional to its precision, so these are the phases' shares of the
    budget. The total cost is composed exactly at any rate.
    """
    at = [t * len(privacy.phases) // rounds for t in range(rounds)]
    return tuple(math.sqrt(privacy.phases[0] / privacy.phases[i]) for i in at)


NoiseScheduleFn = Callable[[Privacy, int], NoiseFactors]
"""Settings and number of rounds T -> the factors s_0 = 1, s_1, ..., s_(T-1), all above 0."""

SCHEDULES = Registry[NoiseScheduleFn](
    "privacy.noise_schedule", entry_points="fulcrum.noise_schedules", noun="noise schedule"
)
"""Noise schedules by name. Add your own by `SCHEDULES.add`, by entry point, or as package.module:function."""
for _name, _schedule in (("constant", _constant_factors), ("growth", _growth_factors), ("phases", _phase_factors)):
    SCHEDULES.add(_name, _schedule)


def compute_noise_factors(privacy: Privacy, rounds: int) -> NoiseFactors:
    """Factor s_t for each of the rounds 0..T-1, by privacy.noise_schedule."""
    found = tuple(map(float, SCHEDULES.find(privacy.noise_schedule)(privacy, rounds)))
    if len(found) != rounds or not all(0 < factor < math.inf for factor in found) or found[0] != 1:
        raise ConfigError(
            f"privacy.noise_schedule = {privacy.noise_schedule!r} does not give {rounds} finite factors above 0 of "
            "which the first is 1; it must give one factor per round."
        )
    return found
