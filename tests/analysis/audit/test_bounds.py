"""Lower bounds on epsilon: below the truth as often as they say, close to it, and above a wrong claim."""

import math

import numpy as np
import pytest
from scipy.optimize import linprog

from fulcrum.analysis.audit.bounds import (
    Guesses,
    GuessPlan,
    bound_by_known_samples,
    bound_by_noise_fit,
    bound_by_one_run,
    bound_by_one_run_fdp,
    bound_by_rates,
    bound_by_thresholds,
    compute_one_run_p_value,
    guess_by_scores,
    is_refuted,
    plan_guesses,
    score_likelihood,
    simulate_projections,
)
from fulcrum.analysis.audit.curves import (
    compute_gaussian_delta,
    compute_gaussian_epsilon,
    make_curve,
    make_gaussian_family,
    make_poisson_family,
    round_events,
    scale_events,
)
from fulcrum.errors import InputError
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Gaussian

DELTA = 1e-5
CLAIM = (Gaussian(0.5, 2.0, 8),)


def draw(events, count, seed):
    """Coins [n] and projections [n, T] of a mechanism."""
    generator = np.random.default_rng(seed)
    included = generator.random(count) < 0.5
    return included, simulate_projections(events, included, generator)


JAX_ONE_RUN = (
    ((1000, 100, 90), 1.6261437, 2.4564051),
    ((20000, 400, 360), 1.8868349, 2.3549539),
    ((20000, 1000, 700), 0.7263685, 0.9172383),
    ((5000, 5000, 3000), 0.3573718, 0.6183252),
)
"""(canaries, guesses, correct), and what jax_privacy 2.0.0 computes: its one-run and one-run f-DP at 0.95, 1e-5."""


# --- the formulas ---------------------------------------------------------------------------------


def test_gaussian_epsilon_is_that_of_the_accountant():
    for mu in (0.3, 1.0, 3.0):
        found = compute_gaussian_epsilon(mu, DELTA)
        assert found == pytest.approx(compute_epsilon([Gaussian(1.0, 1 / mu)], DELTA, "pld"), rel=1e-3)
        assert compute_gaussian_delta(mu, found) == pytest.approx(DELTA, rel=1e-6)


def test_numbers_of_other_software():
    for guesses, one_run, fdp in JAX_ONE_RUN:
        found = Guesses(*guesses)
        assert bound_by_one_run(found, DELTA).epsilon == pytest.approx(one_run, abs=1e-4)
        assert bound_by_one_run_fdp(found, make_gaussian_family(), DELTA, tolerance=1e-6).epsilon == pytest.approx(
            fdp, abs=1e-3
        )


def test_clopper_pearson_takes_the_better_of_both_sides():
    # 95 and 5 of 100: limits 0.8872 and 0.1128 at 97.5% each, so log((0.8872 - delta) / 0.1128).
    found = bound_by_rates(95, 100, 5, 100, DELTA).epsilon
    assert found == pytest.approx(2.0623, abs=1e-3)
    assert bound_by_rates(100, 100, 50, 100, 0.0).epsilon == pytest.approx(math.log(0.3983 / 0.0362), abs=0.01)
    assert bound_by_rates(50, 100, 50, 100, 0.0).epsilon == 0.0
    assert bound_by_rates(0, 0, 0, 0, 0.0).epsilon == 0.0


def test_one_run_without_delta_is_the_binomial():
    assert compute_one_run_p_value(Guesses(100, 10, 10), 0.0, 0.0) == pytest.approx(2.0**-10)
    assert compute_one_run_p_value(Guesses(100, 10, 10), 1.0, 0.0) == pytest.approx((1 / (1 + math.exp(-1))) ** 10)
    assert compute_one_run_p_value(Guesses(100, 10, 10), 1.0, 1e-3) > (1 / (1 + math.exp(-1))) ** 10


@pytest.mark.parametrize("sides", [1, 2])
def test_recursion_is_the_linear_programme(sides):
    """The most probability that the inequalities leave to c' and more, by linear programming, is where it refutes."""
    epsilons = np.linspace(0, 5, 60)
    curve_points = np.array([compute_gaussian_delta(0.4, e) for e in epsilons])
    curve = make_curve(epsilons, curve_points)
    m, c, v, part = 30, 12, 11, sides / 2
    lines = [(math.exp(-e), -d * math.exp(-e)) for e, d in zip(epsilons, curve_points, strict=True)]
    lines += [(math.exp(e), 1 - d - math.exp(e)) for e, d in zip(epsilons, curve_points, strict=True)]
    j = np.arange(c + 1)
    rows, limits = [np.ones(c + 1)], [1.0]
    for i in range(1, v + 1):
        right, wrong = np.where(j >= i, j / m, 0), np.where(j >= i - 1, (c - j) / m, 0)
        for slope, start in lines:  # part * (slope * right / part + start) <= wrong
            rows.append(slope * right - wrong)
            limits.append(-part * start)
    most = -linprog(-(j >= v).astype(float), A_ub=np.array(rows), b_ub=limits).fun
    guesses = Guesses(m, c, v, sides)
    assert 0.001 < most < 0.999
    assert is_refuted(curve, guesses, most * 1.001)
    assert not is_refuted(curve, guesses, most * 0.999)


def test_curve_of_composed_releases_is_that_of_one_gaussian_without_sampling():
    composed = make_poisson_family([Gaussian(1.0, 4.0, 16)]).curve(1.0)
    exact = make_gaussian_family().curve(1.0)
    for t in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert composed(t) == pytest.approx(exact(t), rel=0.01)
        assert composed(t) <= exact(t) + 1e-9  # an upper bound on what leaks


# --- bounds against simulated mechanisms ----------------------------------------------------------


def bound_every_way(events, claim, seed, plan):
    """Bounds from 4,000 canaries of a mechanism, by every method, under a claim."""
    included, projections = draw(events, 4000, seed)
    scores = score_likelihood(projections, claim)
    guesses = guess_by_scores(scores, included, plan)
    return {
        "thresholds": bound_by_thresholds(scores, included, DELTA, 0.9).epsilon,
        "one-run": bound_by_one_run(guesses, DELTA, 0.9).epsilon,
        "fdp": bound_by_one_run_fdp(guesses, make_gaussian_family(), DELTA, 0.9).epsilon,
        "fit": bound_by_noise_fit(projections, included, claim, DELTA, 0.9).epsilon,
    }


def test_bounds_hold_as_often_as_they_say_and_are_close():
    claim = [Gaussian(1.0, 1.0)]  # mu = 1, epsilon = 4.4
    truth = compute_gaussian_epsilon(1.0, DELTA)
    plan = plan_guesses(4000, claim, 0.9)
    found = [bound_every_way(claim, claim, seed, plan) for seed in range(20)]
    for name, share in (("thresholds", 0.2), ("one-run", 0.25), ("fdp", 0.5), ("fit", 0.9)):
        values = np.array([each[name] for each in found])
        # 20 audits at 0.9: more than 7 above the truth happen with probability 4e-4.
        assert (values > truth).sum() <= 7, name
        assert np.median(values) > share * truth, (name, np.median(values) / truth)


def test_noise_at_half_strength_is_caught():
    """The wrong case: a bound above what is claimed, by the methods that are sharp enough for it."""
    claimed = compute_epsilon(CLAIM, DELTA, "pld")
    wrong = scale_events(CLAIM, 0.5)
    plan = plan_guesses(4000, CLAIM)
    caught, clean = bound_every_way(wrong, CLAIM, 0, plan), bound_every_way(CLAIM, CLAIM, 0, plan)
    assert caught["fdp"] > claimed
    assert caught["fit"] > claimed
    assert max(clean.values()) <= claimed


def test_sampling_at_twice_the_rate_is_caught():
    claimed = [Gaussian(0.25, 2.0, 20)]
    included, projections = draw([Gaussian(0.5, 2.0, 20)], 4000, 1)
    assert bound_by_noise_fit(projections, included, claimed, DELTA).epsilon > compute_epsilon(claimed, DELTA, "pld")


def test_family_of_the_claim_is_sharper_than_no_assumption():
    included, projections = draw(CLAIM, 5_000, 2)
    guesses = guess_by_scores(score_likelihood(projections, CLAIM), included, plan_guesses(5_000, CLAIM))
    bound = bound_by_one_run_fdp(guesses, make_poisson_family(CLAIM), DELTA)
    assert bound_by_one_run(guesses, DELTA).epsilon < bound.epsilon < compute_epsilon(CLAIM, DELTA, "pld")
    assert "Poisson(q = 0.5, sigma')^8" in bound.assumes


def test_a_score_without_information_bounds_nothing():
    included, _ = draw(CLAIM, 4000, 3)
    noise = np.random.default_rng(4).standard_normal((4000, 8))
    assert bound_by_thresholds(noise[:, 0], included, DELTA).epsilon < 0.2
    guesses = guess_by_scores(noise[:, 0], included, GuessPlan(400, 2))
    assert bound_by_one_run(guesses, DELTA).epsilon < 0.2
    assert bound_by_noise_fit(noise, included, CLAIM, DELTA).epsilon == 0.0


def test_choosing_the_threshold_on_the_counted_half_would_be_wrong():
    """Scores without information, all thresholds tried on the very scores that are counted: above 0 far too often."""
    above = held = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        scores, included = generator.standard_normal(400), generator.random(400) < 0.5
        cheated = max(
            bound_by_rates(
                int((scores[included] >= t).sum()),
                int(included.sum()),
                int((scores[~included] >= t).sum()),
                int((~included).sum()),
                0.0,
                0.6,
            ).epsilon
            for t in scores[::4]
        )
        above += cheated > 0
        held += bound_by_thresholds(scores, included, 0.0, 0.6).epsilon > 0
    assert held <= 25 < above, (held, above)  # 40% of 40 are 16


# --- refusals -------------------------------------------------------------------------------------


def test_wrong_input_is_refused_in_a_sentence():
    with pytest.raises(InputError, match="two vectors of one length"):
        bound_by_thresholds(np.zeros(3), np.zeros(4, bool), DELTA)
    with pytest.raises(InputError, match="not a number"):
        bound_by_thresholds(np.array([1.0, np.nan]), np.array([True, False]), DELTA)
    with pytest.raises(InputError, match="delta = 2"):
        bound_by_rates(1, 2, 1, 2, 2.0)
    with pytest.raises(InputError, match="confidence"):
        bound_by_one_run(Guesses(10, 5, 3), DELTA, 0.2)
    with pytest.raises(InputError, match="correct"):
        Guesses(10, 5, 6)
    with pytest.raises(InputError, match="canaries times releases"):
        bound_by_noise_fit(np.zeros((20, 3)), np.zeros(20, bool), CLAIM, DELTA)


# --- an auditor who knows the samples --------------------------------------------------------------


def draw_with_samples(rate, sigma, count, seed, drift=0.0):
    """Coins, samples and projections of Poisson(rate, sigma)^16; drift: what else moves along each direction."""
    generator = np.random.default_rng(seed)
    included = generator.random(count) < 0.5
    sampled = (generator.random((count, 16)) < rate).astype(float)
    noise = sigma * generator.standard_normal((count, 16)) + drift * generator.standard_normal((count, 1))
    return noise + sampled * included[:, None], sampled, included


def test_known_samples_hold_as_often_as_they_say_and_are_close_at_small_rates():
    claim = [Gaussian(0.05, 1.0, 16)]
    truth = compute_epsilon(claim, DELTA, "pld")
    found = []
    for seed in range(15):
        projections, sampled, included = draw_with_samples(0.05, 1.0, 1000, seed, drift=2.0)
        found.append(bound_by_known_samples(projections, sampled, included, claim, DELTA, 0.9).epsilon)
    assert sum(each > truth for each in found) <= 6  # more happen with probability 3e-4
    assert np.median(found) > 0.7 * truth


@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 1.0), (0.05, 0.5)])
def test_known_samples_notice_another_rate_and_less_noise(rate, sigma):
    claim = [Gaussian(0.05, 1.0, 16)]
    projections, sampled, included = draw_with_samples(rate, sigma, 1000, 0)
    bound = bound_by_known_samples(projections, sampled, included, claim, DELTA, 0.99)
    assert bound.epsilon > compute_epsilon(claim, DELTA, "pld")
    assert bound.numbers["rate"] == pytest.approx(rate / 0.05, rel=0.2)


def test_a_noise_schedule_is_composed_in_few_kinds_that_leak_no_less():
    events = [Gaussian(0.2, 1.0 + 0.01 * t) for t in range(40)]
    rounded = round_events(events)
    assert all(new.sigma <= old.sigma < 1.03 * new.sigma for new, old in zip(rounded, events, strict=True))
    assert len({event.sigma for event in rounded}) <= 20
    assert round_events(events[:16]) == events[:16]
