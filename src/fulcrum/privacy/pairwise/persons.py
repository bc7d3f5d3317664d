"""What a person with records at two parties can lose where both parties' records are in one sum.

Under each party's own noise the two epsilons add up. In a masked sum they do not: both contributions move the same sum,
so in a round in which both are sampled it moves twice as far. Two bounds hold:

- the mixture: in a round the sum moves by 0, by one contribution or by both, with the probabilities of the two coins.
  PLD composes that exactly (vector shifts are dominated by their norms: Choquette-Choo et al. 2023, lemma 4.5).
- the composed bound: (e1, d1) for the records at one party and (e2, d2) for those at the other give
  (e1 + e2, d1 + exp(e1) d2) for both: take away one after the other.
"""

from __future__ import annotations

import importlib
import math
from functools import lru_cache

import numpy as np

from fulcrum.privacy.events import Gaussian

LARGEST_WIDTH = 500.0
"""Privacy losses are computed in steps up to this: exp of a step must be a number. Beyond, epsilon is in the 1e5."""


@lru_cache(maxsize=256)  # a party writes its statement several times in a run, from the same plan
def compute_pair_epsilon(first: Gaussian, second: Gaussian, delta: float) -> float:
    """Epsilon at delta of a person whose records are in both parties' sums of `count` rounds, by the mixture (PLD).

    first, second: what each party is charged; both have the same count. Infinite where it is too large to compute.
    """
    if first.count != second.count:
        raise ValueError("both parties take part in the same rounds, so their events have the same count")
    pld = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    shifts = [0.0, 1 / first.sigma, 1 / second.sigma, 1 / first.sigma + 1 / second.sigma]
    p, q = first.rate, second.rate
    chances = [(1 - p) * (1 - q), p * (1 - q), (1 - p) * q, p * q]
    kept = [(shift, chance) for shift, chance in zip(shifts, chances, strict=True) if chance > 0]
    # Any width gives an upper bound. A step's loss has some 1,500 points, and the sum at most half a million.
    largest = 10 * shifts[-1] + shifts[-1] ** 2 / 2
    width = max(largest / 1500, first.count * min(largest, shifts[-1] ** 2) / 5e5)
    if width > LARGEST_WIDTH:
        return math.inf
    with np.errstate(all="ignore"):
        one = pld.from_mixture_gaussian_mechanism(
            1.0, [shift for shift, _ in kept], [chance for _, chance in kept], value_discretization_interval=width
        )
        return float(one.self_compose(first.count).get_epsilon_for_delta(delta))


def compose_two_parties(epsilon: float, other: float, delta: float, other_delta: float) -> tuple[float, float]:
    """(e1 + e2, d1 + exp(e1) d2); the smaller epsilon is the one in the exponent. delta is at most 1."""
    (small, first), (large, second) = sorted([(epsilon, delta), (other, other_delta)])
    grown = math.log(second) + small if second > 0 else -math.inf
    return small + large, min(1.0, first + (math.exp(grown) if grown < 0 else 1.0))
