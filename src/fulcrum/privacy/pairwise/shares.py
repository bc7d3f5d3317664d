"""How much noise each party adds itself, so that the sum of any honest ones has enough.

P parties take part in a round, and at most c of them collude with the server; H = P - c are honest. The adversary sees
the honest parties' sum. Its noise has the variance that the honest parties added: sum of s_j^2 over them. Party k needs
tau_k^2 there, whoever else is honest: tau_k = b_k sigma_k, with b_k the most that one of its units moves the sum.

    sum over honest j of s_j^2 >= tau_k^2     for every honest party k, whichever c parties collude        (*)

docs/pairwise.md proves that `compute_own_variances` satisfies (*).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fulcrum.errors import ConfigError

SMALLEST_SHARE = 2.0**-30
"""No participant adds less variance than this part of the largest one's. All round on one grid, and a grid fine enough
for the least noise must not be too fine for the most (`integers.choose_shared_grid`). It adds 1e-9 to the total."""


def count_colluders(given: float, parties: int) -> int:
    """privacy.colluders as a count c: a whole number, or a fraction of all parties, rounded up.

    ConfigError if fewer than one party would be left honest.
    """
    count = int(given) if float(given).is_integer() else math.ceil(given * parties - 1e-9)
    if count >= parties:
        raise ConfigError(
            f"privacy.colluders = {given:g} leaves no honest party among {parties}; it must be at most {parties - 1}, "
            "or a fraction that leaves one."
        )
    return count


def compute_own_variances(needs: Sequence[float], colluders: int) -> list[float]:
    """The variance s_k^2 of each participant's own noise. needs: tau_k^2 of each; colluders: c, less than their number.

    All add tau_b^2 / H, with tau_b the second largest need; the party with the largest need adds the rest of its own.
    For c <= P/2 no smaller total satisfies (*). For more colluders the parties' own full noise may be less in total,
    and is then taken. More noise than that is added where a share is below SMALLEST_SHARE of the largest.
    """
    count = len(needs)
    honest = count - colluders
    if not 0 <= colluders < count:
        raise ValueError(f"{colluders} colluders among {count} participants leave no honest one")
    if count == 1:
        return list(needs)
    second = sorted(needs)[-2]
    shared = [second / honest + max(0.0, need - second) for need in needs]
    found = shared if sum(shared) <= sum(needs) else list(needs)
    least = SMALLEST_SHARE * max(found)
    return [max(least, variance) for variance in found]


def find_least_honest_variance(variances: Sequence[float], party: int, colluders: int) -> float:
    """The least noise variance of the honest parties' sum, over all sets of c colluders without this party."""
    others = sorted(value for k, value in enumerate(variances) if k != party)
    return variances[party] + sum(others[: max(0, len(others) - colluders)])


def compute_effective_sigmas(
    needs: Sequence[float], sigmas: Sequence[float], variances: Sequence[float], colluders: int
) -> list[float]:
    """sigma_eff of each participant if any `colluders` others collude: the noise of what they see, in units of b_k.

    needs: tau_k^2 = (b_k sigma_k)^2; sigmas: sigma_k.
    """
    return [
        sigma * math.sqrt(find_least_honest_variance(variances, k, colluders) / need) if need else 0.0
        for k, (need, sigma) in enumerate(zip(needs, sigmas, strict=True))
    ]
