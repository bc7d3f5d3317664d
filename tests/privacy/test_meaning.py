"""What a guarantee lets an attacker learn: against closed forms, and against attackers that are simulated."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from fulcrum.errors import ConfigError
from fulcrum.privacy import meaning
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.privacy.meaning import (
    PRIORS,
    Promise,
    bound_correct_guesses,
    bound_posterior,
    bound_true_positives,
    format_share,
    list_roc_points,
    make_promise,
)
from fulcrum.privacy.statement.meaning import (
    UNIT_WORDS,
    WATCHERS,
    WORTH_SENTENCES,
    describe_meaning,
    find_watcher,
    make_meaning,
    wrap_meaning,
)

NORMAL = NormalDist()


def gaussian_promise(sigma: float, count: int = 1, rate: float = 1.0, delta: float = 1e-5) -> Promise:
    spend = Spend.empty().add_events([Gaussian(rate, sigma, count)])
    return make_promise(spend.epsilon(delta), delta, [spend])


def roc_at(promise: Promise, alarms: float) -> float:
    return float(np.interp(alarms, *np.array(list_roc_points(promise)).T))


# --- randomised response: every bound is reached ------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, math.log(3), 5.0])
def test_randomised_response_reaches_every_bound(epsilon: float):
    promise = Promise(((epsilon, 0.0),))
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))  # the answer is true with this probability
    for prior in PRIORS:
        exact = prior * truth / (prior * truth + (1 - prior) * (1 - truth))
        assert bound_posterior(promise, prior) == pytest.approx(exact, rel=1e-12)
        assert bound_posterior(promise, prior) >= exact * (1 - 1e-15)
    assert bound_correct_guesses(promise) == pytest.approx(truth, rel=1e-9)
    assert bound_true_positives(promise, 1 - truth) == pytest.approx(truth, rel=1e-12)
    assert bound_true_positives(promise, 0.5) == pytest.approx(1 - 0.5 * math.exp(-epsilon), rel=1e-12)


def test_a_leak_of_delta_counts_in_every_test():
    promise = Promise(((1.0, 0.01),))
    assert bound_true_positives(promise, 0.0) == 0.01
    assert bound_true_positives(promise, 0.1) == pytest.approx(0.1 * math.e + 0.01)
    assert bound_true_positives(promise, 0.99) == 1.0
    # With the probability delta everything leaks; else it is randomised response.
    truth = math.e / (1 + math.e)
    assert bound_correct_guesses(promise) == pytest.approx(0.01 + 0.99 * truth, rel=1e-9)


def test_a_belief_leaves_out_what_delta_may_reveal():
    # A mechanism that is (epsilon, delta)-private and raises the odds beyond e^epsilon with more than delta: with
    # probability p it shows a bit that is true with odds e^t. Its delta at epsilon is p (1 - e^(epsilon - t)).
    epsilon, delta = 1.0, 1e-3
    promise = Promise(((epsilon, delta),))
    odds = bound_posterior(promise, 0.5) / (1 - bound_posterior(promise, 0.5))
    t = math.log(odds) + 1e-9
    most = delta / (1 - math.exp(epsilon - t))
    assert most == pytest.approx(promise.exception, rel=1e-6)
    assert odds > math.exp(epsilon)  # the wrong bound, with delta left aside, is below what happens


# --- the Gaussian mechanism: the accountant's curve is close to the truth -----------------------------------


@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_the_curve_of_the_gaussian_mechanism(sigma: float):
    promise = gaussian_promise(sigma)
    assert promise.source == "pld"
    for alarms in (0.001, 0.01, 0.1, 0.5, 0.9):
        exact = NORMAL.cdf(NORMAL.inv_cdf(alarms) + 1 / sigma)
        found = bound_true_positives(promise, alarms)
        assert exact <= found <= 1.02 * exact + 1e-4
        assert roc_at(promise, alarms) == pytest.approx(found, abs=1e-9)
        assert found <= bound_true_positives(Promise(promise.pairs[:1]), alarms)
    exact = NORMAL.cdf(1 / (2 * sigma))
    assert exact <= bound_correct_guesses(promise) <= 1.01 * exact


def test_a_sound_belief_of_the_gaussian_mechanism_and_a_wrong_one():
    sigma, prior = 1.0, 0.1
    promise = gaussian_promise(sigma)
    loss = NormalDist(1 / (2 * sigma**2), 1 / sigma)  # the log-likelihood ratio of who took part

    def exceed(odds: float) -> float:
        return 1 - loss.cdf(math.log(odds * (1 - prior) / prior))

    bound = bound_posterior(promise, prior)
    assert exceed(bound / (1 - bound)) <= promise.exception
    # The pair's epsilon at ten deltas, as if it bounded beliefs but for these: the truth is beyond it.
    spend = Spend.empty().add_events([Gaussian(1.0, sigma)])
    naive = math.exp(spend.epsilon(promise.exception, "pld")) * prior / (1 - prior)
    assert exceed(naive) > promise.exception


def test_sampled_releases_are_bounded_in_both_directions():
    rate, sigma, generator = 0.3, 1.0, np.random.default_rng(3)
    promise = gaussian_promise(sigma, count=1, rate=rate)
    out = generator.normal(size=200_000)
    took = generator.normal(size=200_000) / 1 + (generator.random(200_000) < rate)
    for without, member in ((out, took), (-took, -out)):  # a test for members, and one for those who are none
        for alarms in (0.01, 0.1, 0.5):
            hits = float((member > np.quantile(without, 1 - alarms)).mean())
            assert hits <= bound_true_positives(promise, alarms) + 0.005
    half = gaussian_promise(2 * sigma, count=1, rate=rate)  # a promise for twice the noise is refuted
    hits = float((took > np.quantile(out, 0.99)).mean())
    assert hits > bound_true_positives(half, 0.01) + 0.005


def test_more_pairs_never_promise_less():
    few, many = Promise(((2.0, 1e-5),)), Promise(((2.0, 1e-5), (1.0, 1e-2), (0.5, 0.1)))
    for alarms in (0.0, 1e-3, 0.01, 0.3, 1.0):
        assert bound_true_positives(many, alarms) <= bound_true_positives(few, alarms)
    assert bound_correct_guesses(many) < bound_correct_guesses(few)
    assert all(bound_posterior(many, prior) <= bound_posterior(few, prior) for prior in PRIORS)
    heights = [y for _, y in list_roc_points(many)]
    assert heights == sorted(heights)
    assert list_roc_points(many)[-1] == (1.0, 1.0)


# --- where there is no curve, or nothing at all -------------------------------------------------------------


def test_without_a_plan_fixed_in_advance_there_is_one_pair(monkeypatch: pytest.MonkeyPatch):
    spend = Spend.empty().add_events([Gaussian(0.1, 1.0, 10)])
    assert make_promise(3.0, 1e-5).pairs == ((3.0, 1e-5),)
    assert make_promise(3.0, 1e-5, [Spend.empty()]).source == "epsilon"
    assert make_promise(math.inf, 1e-5, [spend.add_events([Unprotected(1)])]).pairs == ((math.inf, 1e-5),)
    many = [Spend.empty().add_events([Gaussian(0.1, 1.0, 1 + i)]) for i in range(9)]
    assert make_promise(3.0, 1e-5, many).source == "epsilon"
    monkeypatch.setattr(meaning, "compute_epsilons", lambda *_: (_ for _ in ()).throw(ImportError))
    assert make_promise(3.0, 1e-5, [spend]).source == "epsilon"


def test_the_costliest_party_counts_in_every_pair():
    cheap, dear = (Spend.empty().add_events([Gaussian(0.1, sigma, 10)]) for sigma in (4.0, 1.0))
    both = make_promise(1.0, 1e-5, [cheap, dear])
    assert both.pairs == make_promise(1.0, 1e-5, [dear]).pairs


def test_an_infinite_or_huge_epsilon_bounds_nothing():
    for epsilon in (math.inf, 1e308, 701.0):
        promise = Promise(((epsilon, 1e-5),))
        assert bound_posterior(promise, 0.01) == 1.0
        assert bound_true_positives(promise, 0.001) == 1.0
        assert bound_correct_guesses(promise) == 1.0
    assert bound_posterior(Promise(((1.0, 0.9),)), 0.5) < 1.0
    assert bound_posterior(Promise(((0.0, 1.0),)), 0.5) == 1.0


def test_nothing_spent_teaches_nothing():
    promise = Promise(((0.0, 0.0),))
    assert [bound_posterior(promise, prior) for prior in PRIORS] == list(PRIORS)
    assert bound_correct_guesses(promise) == 0.5
    assert bound_true_positives(promise, 0.01) == 0.01


@pytest.mark.parametrize(
    "pairs", [(), ((-1.0, 1e-5),), ((math.nan, 1e-5),), ((1.0, -1e-9),), ((1.0, 1.5),), ((1.0, math.nan),)]
)
def test_a_pair_out_of_range_is_refused(pairs: tuple[tuple[float, float], ...]):
    with pytest.raises(ConfigError):
        Promise(pairs)


def test_a_prior_or_rate_out_of_range_is_refused():
    promise = Promise(((1.0, 1e-5),))
    for call in (
        lambda: bound_posterior(promise, 0.0),
        lambda: bound_posterior(promise, 1.0),
        lambda: bound_correct_guesses(promise, math.nan),
        lambda: bound_true_positives(promise, -0.1),
        lambda: bound_true_positives(promise, math.nan),
    ):
        with pytest.raises(ConfigError, match="out of range"):
            call()


def test_shares_are_rounded_up():
    shares = (0.01, 0.001, 0.7301, 0.07, 0.070001, 0.9999, 1 - 1e-9, 1.0, 0.0, 0.5, 0.29, 1e-12)
    found = ["1%", "0.1%", "74%", "7%", "7.1%", "99.99%", "99.9999999%", "100%", "0%", "50%", "29%", "0.0000000001%"]
    assert [format_share(each) for each in shares] == found
    generator = np.random.default_rng(0)
    for share in generator.random(2000) ** 3:
        assert float(format_share(float(share)).rstrip("%")) >= 100 * share


# --- sentences -----------------------------------------------------------------------------------------------


def test_the_sentences_fit_and_say_unit_and_attacker():
    for unit, word in UNIT_WORDS.items():
        for aggregation in ("plain", "ideal-secagg", "pairwise"):
            watcher = find_watcher(unit, aggregation, 7)
            for epsilon in (0.003, 1.0, 3.617, 12.0):
                text = describe_meaning(Promise(((epsilon, 1.3e-6),)), watcher, unit)
                lines = wrap_meaning(text)
                assert 2 <= len(lines) <= 4 or epsilon == 12.0, lines
                assert max(map(len, lines)) <= 80
                assert word in text[0]
                assert watcher in text[0]
    assert len({find_watcher("example", name, 1) for name in WATCHERS if name != "client"}) == 3


@pytest.mark.parametrize("worth", WORTH_SENTENCES)
def test_what_is_no_guarantee_says_that_it_does_not_hold(worth: str):
    told = make_meaning(Promise(((1.0, 1e-5),)), find_watcher("example"), "example", worth)
    assert told["holds"] is (worth == "yes")
    assert any("NOT" in each for each in told["text"]) is (worth != "yes")
    assert ("beliefs" in told) is (worth != "none")


def test_an_infinite_epsilon_has_no_numbers():
    told = make_meaning(Promise(((math.inf, 1e-5),)), find_watcher("example"), "example", "yes")
    assert told == {"holds": False, "text": [WORTH_SENTENCES["none"]]}
