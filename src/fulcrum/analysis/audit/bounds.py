"""Lower bounds on epsilon from an attacker's guesses, each with its confidence. Pure functions of counts and scores.

    bound_by_thresholds    many runs, one canary each: Clopper-Pearson; assumes nothing
    bound_by_one_run       one run, many canaries: Steinke, Nasr and Jagielski 2023; assumes nothing
    bound_by_one_run_fdp   one run, many canaries, a hypothesised family of curves: Mahloujifar, Melis, Chaudhuri 2025
    bound_by_known_samples the same, where the auditor knows in which releases each canary was sampled
    bound_by_noise_fit     many runs, the family Poisson(q, sigma')^T assumed: an upper bound on sigma' by its moments

A bound of confidence 0.95 is above the true epsilon in at most 5% of audits, whatever the score is. A low bound says
nothing: a bad score, few canaries and good privacy give the same number. What is chosen (a threshold, the number of
guesses) is chosen on other scores than those that are counted, or from the claim alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, gammaincinv
from scipy.stats import binom, chi2
from scipy.stats import t as student

from fulcrum.analysis.audit.curves import (
    SCALE_RANGE,
    Curve,
    FloatVector,
    NoiseFamily,
    make_gaussian_family,
    make_poisson_family,
)
from fulcrum.errors import InputError
from fulcrum.privacy.events import Gaussian

BoolVector = npt.NDArray[np.bool_]

MAX_EPSILON = 64.0
"""Bounds above this are reported as this: no count of guesses tells such epsilons apart."""


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon at delta, which holds with probability `confidence`.

    method: the function's short name. assumes: what must be true of the mechanism beside privacy; "" if nothing.
    numbers: the counts that the bound was made of.
    """

    epsilon: float
    delta: float
    confidence: float
    method: str
    assumes: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


def check_terms(delta: float, confidence: float) -> None:
    """InputError where delta or the confidence is out of range."""
    if not 0 <= delta < 1:
        raise InputError(f"delta = {delta!r} is out of range; it must be at least 0 and less than 1.")
    if not 0.5 <= confidence < 1:
        raise InputError(f"confidence = {confidence!r} is out of range; it must be at least 0.5 and less than 1.")


# --- many runs: Clopper-Pearson -----------------------------------------------------------------


def bound_rate_below(successes: int, trials: int, confidence: float) -> float:
    """Clopper-Pearson: a lower bound on a rate after `successes` in `trials`."""
    if successes <= 0 or trials <= 0:
        return 0.0
    return float(betaincinv(successes, trials - successes + 1, 1 - confidence))


def bound_rate_above(successes: int, trials: int, confidence: float) -> float:
    """Clopper-Pearson: an upper bound on a rate after `successes` in `trials`."""
    return 1 - bound_rate_below(trials - successes, trials, confidence)


def bound_by_rates(
    true_positives: int, members: int, false_positives: int, others: int, delta: float, confidence: float = 0.95
) -> LowerBound:
    """The bound from one threshold's counts: `true_positives` of `members`, `false_positives` of `others`.

    (epsilon, delta) allows TPR <= e^epsilon FPR + delta, and the same of 1 - FPR and 1 - TPR. Both use the same two
    one-sided limits, each at half of what the confidence leaves.
    """
    check_terms(delta, confidence)
    side = 1 - (1 - confidence) / 2
    hit, false_alarm = (
        bound_rate_below(true_positives, members, side),
        bound_rate_above(false_positives, others, side),
    )
    found = max(_log_ratio(hit - delta, false_alarm), _log_ratio(1 - false_alarm - delta, 1 - hit))
    numbers = {"true_positives": true_positives, "members": members}
    numbers |= {"false_positives": false_positives, "others": others}
    return LowerBound(found, delta, confidence, "clopper-pearson", numbers=numbers)


def _log_ratio(above: float, below: float) -> float:
    """log(above / below), held within [0, MAX_EPSILON]."""
    if above <= 0 or above <= below:
        return 0.0
    return MAX_EPSILON if below <= 0 else min(math.log(above / below), MAX_EPSILON)


def bound_by_thresholds(
    scores: FloatVector, included: BoolVector, delta: float, confidence: float = 0.95
) -> LowerBound:
    """Many independent runs: scores [n], higher where the canary seems to be in; included [n]: whether it was.

    Even places choose the threshold (the one with the best bound there), odd places are counted at it. The order of the
    runs must not depend on their scores.
    """
    scores, included = check_scores(scores, included)
    threshold = _choose_threshold(scores[::2], included[::2], delta, confidence)
    counted, truth = scores[1::2] >= threshold, included[1::2]
    counts = int(counted[truth].sum()), int(truth.sum()), int(counted[~truth].sum()), int((~truth).sum())
    return bound_by_rates(*counts, delta=delta, confidence=confidence)


def _choose_threshold(scores: FloatVector, included: BoolVector, delta: float, confidence: float) -> float:
    """The threshold whose counts give the best bound, among at most 500 of the scores."""
    if not len(scores):
        return math.inf
    order = np.argsort(-scores, kind="stable")
    places = np.unique(np.linspace(0, len(scores) - 1, min(500, len(scores))).astype(int))
    hits, alarms = np.cumsum(included[order])[places], np.cumsum(~included[order])[places]
    members, others = int(included.sum()), int((~included).sum())
    side = (1 - confidence) / 2
    with np.errstate(all="ignore"):  # no member, or none without: limits 0 and 1
        low = np.nan_to_num(betaincinv(hits, members - hits + 1, side))
        high = 1 - np.nan_to_num(betaincinv(others - alarms, alarms + 1, side))
        found = np.fmax(np.log((low - delta) / high), np.log((1 - high - delta) / (1 - low)))
    return float(scores[order[places[int(np.nanargmax(np.nan_to_num(found, nan=-np.inf)))]]])


def list_releases(events: Sequence[Gaussian]) -> FloatVector:
    """Rate and noise multiplier of each release of the events: [T, 2]."""
    rows = [(event.rate, event.sigma) for event in events for _ in range(event.count)]
    if not rows or min(sigma for _, sigma in rows) <= 0:
        raise InputError("an audit needs at least one release, and every one of them with noise.")
    return np.array(rows, dtype=np.float64)


def score_likelihood(projections: FloatVector, events: Sequence[Gaussian]) -> FloatVector:
    """The best score under the claim: the log-likelihood ratio of in against out, summed over the releases: [n].

    projections [n, T]: each release along the canary's direction, in units of what the canary adds when sampled.
    """
    rate, sigma = list_releases(events).T
    gain = (projections - 0.5) / sigma**2
    with np.errstate(divide="ignore"):  # rate 1: the canary is in every sample
        ratios: FloatVector = np.logaddexp(np.log1p(-rate), np.log(rate) + gain).sum(axis=1)
    return ratios


def simulate_projections(
    events: Sequence[Gaussian], included: BoolVector, generator: np.random.Generator
) -> FloatVector:
    """Projections [n, T] of the claimed mechanism, as the best canary sees them."""
    rate, sigma = list_releases(events).T
    size = (len(included), len(rate))
    noise = generator.standard_normal(size) * sigma
    simulated: FloatVector = noise + (generator.random(size) < rate) * np.asarray(included)[:, None]
    return simulated


def check_scores(scores: FloatVector, included: BoolVector) -> tuple[FloatVector, BoolVector]:
    """Scores [n] and coins [n] as arrays; InputError where they do not fit or a score is not a number."""
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if scores.ndim != 1 or scores.shape != included.shape:
        raise InputError(f"scores {scores.shape} and included {included.shape} must be two vectors of one length.")
    if np.isnan(scores).any():
        raise InputError("a score is not a number; every canary needs one.")
    return scores, included


# --- one run: guesses -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Guesses:
    """`correct` of `made` guesses about `canaries` coins were right; an auditor may abstain from the others.

    sides: 1 where all guesses were "in", 2 where some were "out".
    """

    canaries: int
    made: int
    correct: int
    sides: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.made <= self.canaries or self.sides not in (1, 2):
            raise InputError(f"{self}: 0 <= correct <= made <= canaries and 1 or 2 sides must hold.")


@dataclass(frozen=True)
class GuessPlan:
    """How many canaries are guessed, on one side (the highest scores are in) or two (and the lowest are out)."""

    made: int
    sides: int


def guess_by_scores(scores: FloatVector, included: BoolVector, plan: GuessPlan) -> Guesses:
    """Guess the canaries with the most extreme of the scores [m], as planned.

    The plan must not come from these scores: take it from the claim (`plan_guesses`). Equal scores are ordered by
    place, so the coins [m] must not depend on the places.
    """
    scores, included = check_scores(scores, included)
    made = min(plan.made, len(scores))
    above = made if plan.sides == 1 else (made + 1) // 2
    order = np.argsort(-scores, kind="stable")
    upper, lower = order[:above], order[len(order) - (made - above) :]
    return Guesses(len(scores), made, int(included[upper].sum() + (~included[lower]).sum()), plan.sides)


def plan_guesses(
    canaries: int, events: Sequence[Gaussian], confidence: float = 0.95, trials: int = 40_000
) -> GuessPlan:
    """How many of `canaries` coins to guess, from the claim alone: the best in expectation if the events are true.

    Scores of the claimed mechanism are simulated with a seed of their own, so nothing of the run decides the plan.
    """
    generator = np.random.default_rng(20250)
    trials = max(2000, min(trials, int(8e6 / len(list_releases(events)))))  # memory
    included = np.arange(trials) % 2 == 0
    scores = score_likelihood(simulate_projections(events, included, generator), events)
    best, chosen = math.inf, GuessPlan(canaries, 2)
    for made in np.unique(np.geomspace(min(8, canaries), canaries, 20).astype(int)):
        for sides in (1, 2):
            drawn = guess_by_scores(scores, included, GuessPlan(max(1, round(made * trials / canaries)), sides))
            correct = int(made * drawn.correct / drawn.made)
            scale = _find_refuted_scale(Guesses(canaries, int(made), correct, sides), 1 - confidence)
            if scale < best:
                best, chosen = scale, GuessPlan(int(made), sides)
    return chosen


def _find_refuted_scale(guesses: Guesses, level: float) -> float:
    """The smallest 1 / mu that the guesses refute for Gaussian curves: a fast measure of how good a count would be."""
    curve = make_gaussian_family().curve
    low, high = SCALE_RANGE
    if not is_refuted(curve(high), guesses, level):
        return math.inf
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_refuted(curve(middle), guesses, level) else (middle, high)
    return high


def compute_one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """The most likely that (epsilon, delta) makes so many right guesses or more: Steinke et al. 2023, theorem 5.2.

    f(v) = P[Binomial(made, e^eps / (1 + e^eps)) >= v]; p = f(v) + 2 m delta max over i of (f(v - i) - f(v)) / i.
    """
    right = 1 / (1 + math.exp(-epsilon))
    v = guesses.correct
    reached = float(binom.sf(v - 1, guesses.made, right))
    if delta == 0 or v == 0:
        return min(1.0, reached)
    steps = np.arange(1, v + 1)
    below = np.cumsum(binom.pmf(v - steps, guesses.made, right))
    return min(1.0, reached + 2 * guesses.canaries * delta * float((below / steps).max()))


def bound_by_one_run(guesses: Guesses, delta: float, confidence: float = 0.95) -> LowerBound:
    """One run, canaries included by fair coins: the largest epsilon that so many right guesses refute."""
    check_terms(delta, confidence)
    level = 1 - confidence
    low, high = 0.0, MAX_EPSILON
    if compute_one_run_p_value(guesses, low, delta) > level:
        high = 0.0
    for _ in range(50 if high else 0):
        middle = (low + high) / 2
        refuted = compute_one_run_p_value(guesses, middle, delta) <= level
        low, high = (middle, high) if refuted else (low, middle)
    return LowerBound(low, delta, confidence, "one-run", numbers=_list_numbers(guesses))


def _list_numbers(guesses: Guesses) -> dict[str, float]:
    return {"canaries": guesses.canaries, "guesses": guesses.made, "correct": guesses.correct, "sides": guesses.sides}


# --- one run: f-DP --------------------------------------------------------------------------------


def is_refuted(curve: Curve, guesses: Guesses, level: float) -> bool:
    """Whether a curve makes so many right guesses or more less likely than `level`: Mahloujifar et al. 2025, alg. 3.

    Let p_j be the probability of j right guesses, right_i = sum over j >= i of p_j j/m and wrong_i that of
    p_j (c - j)/m. Flipping one guessed coin turns a right guess among i into a wrong one among i - 1, so a curve allows
    wrong_(i-1) >= curve(right_i) only. Suppose at least `level` of the probability lies at c' and above. Then the
    inequalities push mass down from c' to 0; where they need more than all of it, the supposition was wrong.

    Where all guesses are "in", a right one means that the coin fell to 1, half of the probability: the same argument
    gives wrong_(i-1) >= curve(2 right_i) / 2, which is the stronger one.
    """
    part = guesses.sides / 2
    m, c, v = guesses.canaries, guesses.made, guesses.correct
    right, wrong = level * v / m, level * (c - v) / m
    for i in range(v - 1, -1, -1):
        needed = part * curve(min(right / part, 1.0))
        if needed <= wrong:  # nothing is pushed down from here on
            break
        right += i / (c - i) * (needed - wrong)
        wrong = needed
        if right + wrong > c / m:
            return True
    return False


def bound_by_one_run_fdp(
    guesses: Guesses, family: NoiseFamily, delta: float, confidence: float = 0.95, tolerance: float = 2e-3
) -> LowerBound:
    """One run, canaries included by fair coins, and a hypothesised family of curves (make_gaussian_family, ...).

    The largest noise that so many right guesses do not refute, and the epsilon of the family's mechanism with it. It is
    valid for mechanisms in the family; the statement of the family says which they are.
    """
    check_terms(delta, confidence)

    def refuted(scale: float) -> bool:
        return is_refuted(family.curve(scale), guesses, 1 - confidence)

    numbers = _list_numbers(guesses)
    low = high = 1.0  # curves of little noise take longest, so the search starts at the claim
    while not refuted(high):
        low, high = high, 2 * high
        if high > SCALE_RANGE[1]:
            return LowerBound(0.0, delta, confidence, "one-run-fdp", family.statement, numbers)
    while low == high and low > SCALE_RANGE[0]:
        low, high = (low / 2, high) if not refuted(low / 2) else (low / 2, low / 2)
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    found = min(family.epsilon(high, delta), MAX_EPSILON)
    return LowerBound(found, delta, confidence, "one-run-fdp", family.statement, numbers | {"noise_at_most": high})


# --- many runs: the noise, in a family ------------------------------------------------------------


def bound_by_noise_fit(
    scores: FloatVector,
    included: BoolVector,
    events: Sequence[Gaussian],
    delta: float,
    confidence: float = 0.95,
) -> LowerBound:
    """Many independent canaries whose releases are Poisson(q, sigma')^T: how large sigma' can be, and its epsilon.

    scores [n, T]: the release of each round along the canary's direction, in units of what the canary adds when it is
    sampled (C). events: the claim, T releases in the order of the rounds, which sets q and the ratios of the
    multipliers. included [n].

    Z = sum over rounds of (q / sigma^2) * score is about N(0, v tau^2) without the canary, and its mean is larger by
    v s with it, v = sum of q^2 / sigma^2. tau / s is the noise as a multiple of the claim; tau is bounded above by the
    chi-square of the runs without, s below by Welch's t. Anything else that moves along the direction adds to tau, so
    it lowers the bound. Rate and number of rounds are taken as claimed: a canary that is sampled too often looks like
    less noise.
    """
    check_terms(delta, confidence)
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    plan = list_releases(events)
    if scores.ndim != 2 or len(scores) != len(included) or scores.shape[1] != len(plan):
        raise InputError(f"scores {scores.shape} must be [{len(included)}, {len(plan)}]: canaries times releases.")
    if not np.isfinite(scores).all():
        raise InputError("a score is not a finite number; every canary needs one for every release.")
    weights = plan[:, 0] / plan[:, 1] ** 2
    unit = float((plan[:, 0] * weights).sum())
    sums = scores @ weights / unit
    ins, outs = sums[included], sums[~included]
    statement = make_poisson_family(events).statement
    numbers: dict[str, float] = {"members": len(ins), "others": len(outs), "releases": len(plan)}
    if min(len(ins), len(outs)) < 10:
        return LowerBound(0.0, delta, confidence, "noise-fit", statement, numbers)
    level = 1 - confidence
    freedom = len(outs) - 1
    spread = float(outs.var(ddof=1))
    noise = math.sqrt(spread * unit * freedom / float(chi2.ppf(0.2 * level, freedom)))
    shares = np.array([ins.var(ddof=1) / len(ins), spread / len(outs)])
    total = float(shares.sum())
    # Releases without any noise have no spread: what moved is certain.
    parts = shares / total if total > 0 else np.array([0.0, 1.0])
    welch = 1 / float((parts**2 / [len(ins) - 1, freedom]).sum())
    moved = float(ins.mean() - outs.mean())
    shift = moved - float(student.isf(0.8 * level, welch)) * math.sqrt(total)
    numbers |= {"noise": math.sqrt(spread * unit), "shift": moved}
    if shift <= 0:
        return LowerBound(0.0, delta, confidence, "noise-fit", statement, numbers)
    scale = max(noise / shift, SCALE_RANGE[0])
    found = min(make_poisson_family(events).epsilon(scale, delta), MAX_EPSILON)
    return LowerBound(found, delta, confidence, "noise-fit", statement, numbers | {"noise_at_most": scale})


def bound_by_known_samples(
    projections: FloatVector,
    sampled: FloatVector,
    included: BoolVector,
    events: Sequence[Gaussian],
    delta: float,
    confidence: float = 0.95,
    steps: int = 1,
) -> LowerBound:
    """`bound_by_noise_fit` by an auditor who knows in which releases each canary was sampled: sampled [n, T], 0 or 1.

    The party itself knows, the server does not. The rate is then measured too, and small rates cost no precision. In
    units of the claimed noise, s is the slope of the projections of included canaries on `sampled`, tau^2 the variance
    of those that are not included (chi-square), the rate how often canaries were sampled (Clopper-Pearson; Poisson
    where rates differ). What moves along a direction in the same way in every round is taken out, if there are at least
    8 rounds and rates below 1. steps: releases that were seen only as one sum, in turn; each has its part of it.
    """
    check_terms(delta, confidence)
    included, plan = np.asarray(included, dtype=bool), list_releases(events)
    count, releases = len(included), len(plan)
    if projections.shape != (count, releases) or sampled.shape != projections.shape or releases % steps:
        raise InputError(
            f"projections {projections.shape} and sampled {sampled.shape} must be canaries times releases."
        )
    rate = plan[:, 0]
    family = make_poisson_family(events)
    level, method = 1 - confidence, "known-samples"
    rounds = releases // steps
    spreads = np.sqrt((plan[:, 1] ** 2).reshape(rounds, steps).sum(axis=1))
    scaled, taken = (each.reshape(count, rounds, steps).sum(axis=2) / spreads for each in (projections, sampled))
    freedom = int((~included).sum()) * rounds
    if rounds >= 8 and rate.max() < 1:
        scaled, taken = (each - each.mean(axis=1, keepdims=True) for each in (scaled, taken))
        freedom -= int((~included).sum())
    numbers: dict[str, float] = {"members": int(included.sum()), "others": int((~included).sum()), "releases": releases}
    weight = float((taken[included] ** 2).sum())
    if freedom < 10 or weight == 0:
        return LowerBound(0.0, delta, confidence, method, family.statement, numbers)
    variance = float((scaled[~included] ** 2).sum()) / freedom
    noise = math.sqrt(variance * freedom / float(chi2.ppf(0.2 * level, freedom)))
    moved = float((scaled[included] * taken[included]).sum()) / weight
    shift = moved - float(student.isf(0.7 * level, freedom)) * math.sqrt(variance / weight)
    total, expected = float(sampled.sum()), float(count * rate.sum())
    if len(np.unique(rate)) == 1:
        share = bound_rate_below(round(total), count * releases, 1 - 0.1 * level) / float(rate[0])
    else:
        share = float(gammaincinv(max(total, 1e-9), 0.1 * level)) / expected
    share = min(share, 1 / float(rate.max()))
    numbers |= {"noise": math.sqrt(variance), "shift": moved, "rate": total / expected}
    if shift <= 0 or share <= 0:
        return LowerBound(0.0, delta, confidence, method, family.statement, numbers)
    scale = max(noise / shift, SCALE_RANGE[0])
    measured = [Gaussian(event.rate * share, event.sigma * scale, event.count) for event in events]
    found = min(make_poisson_family(measured).epsilon(1.0, delta), MAX_EPSILON)
    return LowerBound(found, delta, confidence, method, family.statement, numbers | {"noise_at_most": scale})
