"""The price of a random number of trials, against what the best of them gives away of a mechanism that is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import ORDERS, compute_step_rdp, convert_rdp_to_epsilon
from fulcrum.privacy.paid_tuning import TrialCount, calibrate_trial_sigma, compute_tuned_epsilon, compute_tuned_rdp
from fulcrum.study.suite.jobs import list_paid_jobs, list_scenario_jobs
from fulcrum.study.suite.paid import PAID_TUNING, TRIALS, calibrate_trial, draw_trials
from fulcrum.study.suite.scenarios import read_suite

COUNTS = [TrialCount(10.0), TrialCount(10.0, 0.0), TrialCount(10.0, 1.0), TrialCount(4.0, 0.5)]


@pytest.mark.parametrize("trials", COUNTS, ids=TrialCount.describe)
def test_the_number_of_trials_has_its_mean_and_is_drawn_from_its_distribution(trials: TrialCount) -> None:
    chances = trials.probabilities()
    assert chances.sum() == pytest.approx(1.0)
    assert (np.arange(len(chances)) * chances).sum() == pytest.approx(trials.mean, rel=1e-6)
    assert (chances[0] == 0) == (trials.eta is not None)
    generator = np.random.default_rng(0)
    drawn = [trials.draw(u) for u in generator.random(300)]
    assert np.mean(drawn) == pytest.approx(trials.mean, rel=0.35)
    assert TrialCount(10.0, 1.0).probabilities()[1:4].tolist() == pytest.approx([0.1, 0.09, 0.081], rel=1e-6)


def renyi(p: list[float], q: list[float], order: float) -> float:
    logs = [order * math.log(a) + (1 - order) * math.log(b) for a, b in zip(p, q, strict=True)]
    return float(np.logaddexp.reduce(logs)) / (order - 1)


def best_of(good: float, trials: TrialCount) -> list[float]:
    """Chances that nothing, the worse or the better output is shown, where a trial is good with this chance."""
    chances = trials.probabilities()
    k = np.arange(len(chances))
    bad = float((chances * (1 - good) ** k).sum())
    return [float(chances[0]), bad - float(chances[0]), 1 - bad] if chances[0] else [bad, 1 - bad]


@pytest.mark.parametrize("trials", COUNTS, ids=TrialCount.describe)
@pytest.mark.parametrize("pair", [(0.1, 0.15), (0.05, 0.06), (0.02, 0.04)])
@pytest.mark.every(3)
def test_the_price_covers_what_the_best_trial_gives_away_and_that_of_one_trial_does_not(
    trials: TrialCount, pair: tuple[float, float]
) -> None:
    """Trials of two outputs, of which the rarer counts as better; both directions."""
    exceeded = False
    for one, other in (pair, pair[::-1]):
        trial = np.array([max(renyi([1 - a, a], [1 - b, b], o) for a, b in (pair, pair[::-1])) for o in ORDERS])
        price = compute_tuned_rdp(trial, trials)
        true = np.array([renyi(best_of(one, trials), best_of(other, trials), o) for o in ORDERS])
        assert (true <= price * (1 + 1e-9)).all()
        exceeded |= bool((true > trial).any())
    assert exceeded  # the price of a single trial would have been too low


def test_a_trial_gets_more_noise_for_more_trials_and_the_whole_costs_the_target() -> None:
    def trial(sigma: float) -> np.ndarray:
        return 100 * compute_step_rdp(0.05, sigma)

    sigmas = [calibrate_trial_sigma(trial, TrialCount(mean), 3.0, 1e-5) for mean in (3.0, 10.0, 30.0)]
    assert sigmas == sorted(sigmas)
    for sigma, mean in zip(sigmas, (3.0, 10.0, 30.0), strict=True):
        assert compute_tuned_epsilon(trial(sigma), TrialCount(mean), 1e-5) == pytest.approx(3.0, rel=1e-3)
        assert float(convert_rdp_to_epsilon(trial(sigma), 1e-5)) < 2.5  # what is left for one trial
    with pytest.raises(ConfigError, match="no noise makes Poisson"):
        calibrate_trial_sigma(trial, TrialCount(1e6), 0.01, 1e-9)


def test_the_suite_lists_the_trials_of_each_seed_with_their_noise() -> None:
    suite = read_suite()
    scenario = next(s for s in suite.scenarios if s.name == "digits-linear-20x1-k5-q0.2-e3.61")
    assert PAID_TUNING in suite.rivals
    jobs = list_paid_jobs(suite, scenario, 3)
    assert [job.id for job in jobs] == [job.id for job in list_paid_jobs(suite, scenario, 3)]
    assert {(job.settings.clip.C0, job.settings.train.lr) for job in jobs} == set(draw_trials(suite, scenario, 3))
    assert all(job.is_calibrated and job.settings.privacy.sigma == calibrate_trial(0.2, 20, 3.61, 1e-5) for job in jobs)
    every = list_scenario_jobs(suite, scenario)
    assert sum(job.row == PAID_TUNING for job in every) > 5 * suite.seeds_rivals
    assert not {job.id for job in every if job.row == PAID_TUNING} & {job.id for job in every if job.row == "dp-sgd"}
    counts = [len(draw_trials(suite, s, seed)) for s in suite.scenarios for seed in range(5)]
    assert np.mean(counts) == pytest.approx(TRIALS.mean, rel=0.1)
