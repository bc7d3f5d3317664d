"""What a guarantee lets anybody learn, in numbers that a person can weigh.

Two worlds: one unit took part, or it contributed nothing. A pair (epsilon, delta) bounds every test between them, in
both directions: true positives <= e^epsilon false positives + delta, and the same with the two worlds exchanged. A
mechanism that is fixed in advance has such a pair for every delta, all of which hold at once; `Promise` keeps those
that were computed. Each number here is the least that any of its pairs allows, so more pairs never make it worse, and
one pair is always enough. Numbers that people read are computed in decimals and rounded up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np
import numpy.typing as npt

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import PLD_ACCOUNTANT, Spend, compute_epsilons

PRIORS = (0.01, 0.1, 0.5)
"""How sure somebody is beforehand that a unit took part."""
FALSE_ALARMS = (0.001, 0.01)
"""False-positive rates at which the true-positive rate of a test is told."""
EXCEPTION_FACTOR = 10
"""Beliefs are bounded but for a probability of this many deltas."""
LARGEST_EXPONENT = 700.0
"""exp of more than this is taken as infinite: nothing is bounded then."""
MAX_CURVES = 8
"""More parties with different releases than this, and the one pair of the headline is used: curves take time."""
DIGITS = Context(prec=50)
_WITHOUT_ROUNDING = 1 - Decimal("1e-26")
# More than the rounding errors of a corner of the ROC bound, which is computed in float64. It is added.
_CORNER_PAD = 1e-12


@dataclass(frozen=True)
class Promise:
    """Pairs (epsilon, delta) that all hold for one unit, the headline first. source: "epsilon", or "pld" where the
    other pairs come from the accountant's curve of all that was released.
    """

    pairs: tuple[tuple[float, float], ...]
    source: str = "epsilon"
    _lines: npt.NDArray[np.float64] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ConfigError("a promise needs at least one pair (epsilon, delta).")
        for epsilon, delta in self.pairs:
            if not epsilon >= 0:
                raise ConfigError(f"epsilon = {epsilon!r} is out of range; it must be a number of at least 0.")
            if not 0 <= delta <= 1:
                raise ConfigError(f"delta = {delta!r} is out of range; it must be from 0 to 1.")
        object.__setattr__(self, "_lines", _list_lines(self.pairs))

    @property
    def epsilon(self) -> float:
        """Epsilon of the headline."""
        return self.pairs[0][0]

    @property
    def delta(self) -> float:
        """Delta of the headline."""
        return self.pairs[0][1]

    @property
    def exception(self) -> float:
        """The probability of the cases in which `bound_posterior` says nothing: ten deltas."""
        return min(EXCEPTION_FACTOR * self.delta, 1.0)

    @property
    def is_finite(self) -> bool:
        """Whether anything is bounded at all."""
        return self.epsilon < math.inf and self.delta < 1


def make_promise(epsilon: float, delta: float, spends: Sequence[Spend] = ()) -> Promise:
    """The promise of (epsilon, delta), with the PLD accountant's curve of what was released where that is allowed.

    spends: what each party releases in a plan that was fixed in advance and is carried out; empty where several runs,
    which may depend on each other's outcomes, are added up: then only the headline holds.
    """
    headline = (float(epsilon), float(delta))
    unique = list({spend.key: spend for spend in spends if spend.releases}.values())
    if not 0 < len(unique) <= MAX_CURVES or not 0 < delta < 1 or not all(_has_curve(spend) for spend in unique):
        return Promise((headline,))
    try:
        more = _compute_pairs(unique, _choose_deltas(delta))
    except ImportError:  # dp_accounting is not installed: the headline is enough
        return Promise((headline,))
    return Promise((headline, *more), "pld")


def _has_curve(spend: Spend) -> bool:
    return all(map(PLD_ACCOUNTANT.supports, spend.events)) and all(sigma > 0 for _, sigma in spend.counts)


def _choose_deltas(delta: float) -> list[float]:
    """Deltas at which the curve is computed: close together where tests and beliefs are read off."""
    around = [EXCEPTION_FACTOR * delta / part for part in (1.5, 2, 3, 5, 10, 20)]
    chosen = [*around, *np.geomspace(1e-7, 0.05, 24).tolist(), *np.linspace(0.06, 0.98, 24).tolist()]
    return sorted({float(each) for each in chosen if 0 < each < 1})


def _compute_pairs(spends: Sequence[Spend], deltas: Sequence[float]) -> list[tuple[float, float]]:
    """(the largest epsilon of any spend, delta) for each delta."""
    worst = [0.0] * len(deltas)
    for spend in spends:  # one after the other: the accountant keeps the last compositions
        for i, delta in enumerate(deltas):
            worst[i] = max(worst[i], float(compute_epsilons([spend], delta, PLD_ACCOUNTANT)[0]))
    return [(epsilon, delta) for epsilon, delta in zip(worst, deltas, strict=True) if epsilon < math.inf]


# --- tests: true positives at a rate of false positives -------------------------------------------


def _list_lines(pairs: Sequence[tuple[float, float]]) -> npt.NDArray[np.float64]:
    """The lines (slope, height at 0) [L, 2] below which every (false positive, true positive) point lies."""
    found = [(0.0, 1.0)]
    for epsilon, delta in pairs:
        if epsilon <= LARGEST_EXPONENT:
            found.append((math.exp(epsilon), delta))
        found.append((math.exp(-epsilon), 1 - math.exp(-epsilon) * (1 - delta)))
    lines = np.array(sorted(set(found), reverse=True))
    lines.setflags(write=False)
    return lines


def bound_true_positives(promise: Promise, false_positives: float) -> float:
    """The largest true-positive rate of any test for membership with this false-positive rate."""
    if not 0 <= false_positives <= 1:
        raise ConfigError(f"a false-positive rate of {false_positives!r} is out of range; it must be from 0 to 1.")
    found = Decimal(1)
    for epsilon, delta in promise.pairs:
        factor, rest = _exp(epsilon), 1 - Decimal(delta)
        alarms = Decimal(false_positives)
        found = min(found, DIGITS.add(DIGITS.multiply(factor, alarms), Decimal(delta)))
        found = min(found, 1 - DIGITS.divide(max(rest - alarms, Decimal(0)), factor))
    return _to_float_up(found)


def list_roc_points(promise: Promise) -> list[tuple[float, float]]:
    """The corners of the bound on every ROC curve: (false-positive rate, true-positive rate) from 0 to 1.

    No test between the two worlds has a point above the line through these corners.
    """
    corners, kept = [], _find_lowest_lines(promise._lines)
    for (steep, high), (flat, higher) in itertools.pairwise(kept):
        at = (higher - high) / (steep - flat)
        if 0 < at < 1:
            corners.append((float(at), float(min(steep * at + high, 1.0))))
    ends = [(0.0, float(min(promise._lines[:, 1].min(), 1.0))), (1.0, 1.0)]
    return [ends[0], *corners, ends[1]]


def _find_lowest_lines(lines: npt.NDArray[np.float64]) -> list[tuple[float, float]]:
    """The lines of the lower envelope, steepest first. lines: sorted by slope, falling."""
    kept: list[tuple[float, float]] = []
    for slope, height in lines.tolist():
        if kept and slope == kept[-1][0]:
            kept[-1] = (slope, min(height, kept[-1][1]))
            continue
        while len(kept) > 1 and _crossing(kept[-2], (slope, height)) <= _crossing(kept[-2], kept[-1]):
            kept.pop()
        kept.append((slope, height))
    return kept


def _crossing(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (one[0] - other[0])


def bound_correct_guesses(promise: Promise, prior: float = 0.5) -> float:
    """How often a guess whether a unit took part is right at most, where it did with probability `prior`."""
    _check_prior(prior)
    found = max(prior * hits + (1 - prior) * (1 - alarms) for alarms, hits in list_roc_points(promise))
    blind = max(prior, 1 - prior)
    return min(found + _CORNER_PAD, 1.0) if found > blind else blind


# --- beliefs ---------------------------------------------------------------------------------------


def bound_posterior(promise: Promise, prior: float) -> float:
    """The most that somebody can believe afterwards that a unit took part who believed `prior` before.

    It holds but for a probability of at most `promise.exception`: where all outcomes S raise the odds by more than
    e^t, a pair gives P(S) <= delta / (1 - e^(epsilon - t)).
    """
    _check_prior(prior)
    exception, least = promise.exception, Decimal("Infinity")
    for epsilon, delta in promise.pairs:
        if delta < exception or delta == 0:
            kept = 1 - DIGITS.divide(Decimal(delta), Decimal(exception)) if delta else Decimal(1)
            least = min(least, DIGITS.divide(_exp(epsilon), kept))
    if not least.is_finite():
        return 1.0
    odds = DIGITS.multiply(least, Decimal(prior))
    return _to_float_up(DIGITS.divide(odds, DIGITS.add(odds, 1 - Decimal(prior))))


def _check_prior(prior: float) -> None:
    if not 0 < prior < 1:
        raise ConfigError(f"a prior of {prior!r} is out of range; it must be greater than 0 and less than 1.")


# --- rounding --------------------------------------------------------------------------------------


def _exp(value: float) -> Decimal:
    return Decimal(value).exp(DIGITS) if value <= LARGEST_EXPONENT else Decimal("Infinity")


def _to_float_up(value: Decimal) -> float:
    """The smallest float of at least this value, which is exact to 26 digits."""
    found = float(value)
    return found if Decimal(found) >= value * _WITHOUT_ROUNDING else math.nextafter(found, math.inf)


def format_share(share: float) -> str:
    """A probability as people read it, rounded up: 73%, 0.1%, 99.98%; 100% only where it is 1 or nearly."""
    percent = Decimal(repr(float(share))) * 100  # the shortest decimal that means this number
    if percent >= 100 or percent <= 0:
        return "100%" if percent > 0 else "0%"
    digits = 0 if percent >= 10 else 1 - percent.adjusted()
    while (shown := percent.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)) >= 100 and digits < 12:
        digits += 1
    found = f"{shown:f}"
    return (found.rstrip("0").rstrip(".") if "." in found else found) + "%"
