"""Epsilon against integrals and simulations that share no formula with the accountant."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize
from scipy.stats import norm

from fulcrum.errors import ConfigError
from fulcrum.privacy import accounting
from fulcrum.privacy.accounting import (
    ORDERS,
    Spend,
    calibrate_sigma,
    combine_sigmas,
    compute_epsilon,
    compute_max_steps,
    compute_step_rdp,
    reported_accountants,
)
from fulcrum.privacy.events import Event, Gaussian, Unprotected

DELTA = 1e-5
Accountant = Callable[[Sequence[Event], float], float]


# --- independent truth --------------------------------------------------------------------------


def renyi(rate: float, sigma: float, order: float, removed: bool) -> float:
    """Renyi divergence of the sampled Gaussian, by quadrature: with the unit against without, or the reverse."""

    power = order if removed else 1 - order
    x = np.linspace(-order - 15 * sigma, order + 15 * sigma, 20_001)  # smooth and tiny at both ends: exact to rounding
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
    terms = power * ratio + norm.logpdf(x, 0, sigma)
    # The moment minus 1, so that a tiny divergence keeps its digits; the density itself sums to 1.
    if terms.max() < 1:
        excess = integrate.trapezoid(np.expm1(power * ratio) * norm.pdf(x, 0, sigma), x)
        return math.log1p(excess) / (order - 1)
    return (terms.max() + math.log(integrate.trapezoid(np.exp(terms - terms.max()), x))) / (order - 1)


def gaussian_delta(sigma: float, eps: float) -> float:
    """The exact delta of one Gaussian release with sensitivity 1 (Balle and Wang 2018)."""
    return float(norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma))


def sampled_delta(rate: float, sigma: float, eps: float) -> float:
    """The exact delta of one Poisson-sampled Gaussian release, from its two tails."""
    shift = math.log1p(math.expm1(eps) / rate) * sigma**2 + 0.5  # beyond it the likelihood ratio passes e^eps
    removed = (
        (1 - rate) * norm.sf(shift / sigma)
        + rate * norm.sf((shift - 1) / sigma)
        - math.exp(eps) * norm.sf(shift / sigma)
    )
    added = 0.0
    if math.exp(-eps) > 1 - rate:
        shift = math.log1p(math.expm1(-eps) / rate) * sigma**2 + 0.5
        mixture = (1 - rate) * norm.cdf(shift / sigma) + rate * norm.cdf((shift - 1) / sigma)
        added = float(norm.cdf(shift / sigma) - math.exp(eps) * mixture)
    return max(float(removed), added)


def exact_epsilon(delta_of: Callable[[float], float], delta: float) -> float:
    return float(optimize.brentq(lambda eps: delta_of(eps) - delta, 0.0, 100.0, xtol=1e-12))


def below(curve: np.ndarray, rate: float, sigma: float, orders: Sequence[float]) -> list[float]:
    """The orders at which an RDP curve claims less than the integral says: not an upper bound there."""
    at = [int(np.abs(ORDERS - order).argmin()) for order in orders]
    truth = [max(renyi(rate, sigma, float(ORDERS[i]), way) for way in (True, False)) for i in at]
    return [float(ORDERS[i]) for i, true in zip(at, truth, strict=True) if curve[i] < true * (1 - 1e-7)]


# --- RDP of one step ----------------------------------------------------------------------------

CHECKED = (1.1, 1.5, 2.0, 3.7, 8.0, 10.9, 16.0, 45.0)


@pytest.mark.parametrize(
    ("rate", "sigma"), [(0.001, 1.0), (0.05, 2.07), (0.05, 0.6), (0.3, 5.0), (0.9, 1.5), (0.01, 20.0)]
)
def test_rdp_of_a_step_is_an_upper_bound_at_whole_and_broken_orders(rate: float, sigma: float):
    curve = compute_step_rdp(rate, sigma)
    assert below(curve, rate, sigma, CHECKED) == []
    for order in (2.0, 8.0, 16.0):  # and a tight one where the sum is finite
        truth = renyi(rate, sigma, order, removed=True)
        assert curve[order == ORDERS][0] == pytest.approx(truth, rel=1e-6, abs=2e-12)
    # the same check rejects a curve for a little more noise, or a little less sampling, than there was
    assert below(compute_step_rdp(rate, 1.05 * sigma), rate, sigma, CHECKED)
    assert below(compute_step_rdp(0.9 * rate, sigma), rate, sigma, CHECKED)


def test_without_sampling_it_is_the_plain_gaussian():
    np.testing.assert_allclose(compute_step_rdp(1.0, 3.0), ORDERS / 18, rtol=1e-9)


def test_conversion_to_epsilon_is_that_of_dp_accounting():
    from dp_accounting import rdp

    random = np.random.default_rng(0)
    for scale in (1e-12, 1e-6, 1e-2, 1.0, 50.0):
        curve = np.sort(random.random(len(ORDERS))) * scale
        assert accounting.convert_rdp_to_epsilon(curve, 1e-5) == pytest.approx(
            rdp.compute_epsilon(ORDERS, curve, 1e-5)[0]
        )


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.05, 0.5, 0.99])
def test_rdp_is_that_of_dp_accounting_at_whole_orders_and_never_above_it(rate: float, caplog: pytest.LogCaptureFixture):
    """At broken orders its series stops early, on the safe side (or not at all: infinite); the integral does not."""
    import dp_accounting
    from dp_accounting import rdp

    whole = np.round(ORDERS) == ORDERS
    caplog.set_level(logging.ERROR, logger="absl")  # it reports every order that did not converge
    for sigma in (0.03, 0.1, 0.5, 1.0, 2.07, 20.0):
        theirs = rdp.RdpAccountant(orders=list(ORDERS))
        with np.errstate(all="ignore"):
            theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)))
        curve, other = compute_step_rdp(rate, sigma), np.asarray(theirs._rdp)
        np.testing.assert_allclose(curve[whole], other[whole], rtol=1e-9, atol=2e-12)
        assert np.isfinite(curve).all()
        if sigma >= 0.05:  # below, a chord between whole orders: an upper bound that may lie above
            assert (curve <= other * (1 + 1e-9) + 2e-12 / (ORDERS - 1)).all()
        assert not np.allclose(compute_step_rdp(rate, 1.001 * sigma)[whole], other[whole], rtol=1e-9, atol=2e-12)


def test_below_the_finest_sigma_broken_orders_are_bounded_by_their_neighbours():
    curve = compute_step_rdp(0.05, 0.04) * (ORDERS - 1)
    assert (np.diff(curve) > 0).all()
    assert curve[ORDERS == 1.5][0] >= 0.5 * renyi(0.05, 0.04, 1.5, removed=True)


@pytest.mark.slow
def test_many_sigmas_by_pld_are_an_upper_bound_and_hardly_above(monkeypatch: pytest.MonkeyPatch):
    events = [Gaussian(0.05, 1.5 * 0.8 ** (t / 20)) for t in range(20)]
    rounded = compute_epsilon(events, DELTA, "pld")
    monkeypatch.setattr(accounting, "MAX_EXACT_PLD_KINDS", 20)
    accounting._compute_pld_epsilon.cache_clear()
    exact = compute_epsilon(events, DELTA, "pld")
    accounting._compute_pld_epsilon.cache_clear()
    assert exact < rounded < 1.006 * exact
    assert (
        compute_epsilon([Gaussian(e.rate, e.sigma * 1.005) for e in events], DELTA, "pld") < exact
    )  # rounding up is caught


# --- epsilon against exact values ---------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (4.0, 1), (20.0, 200), (0.5, 2)])
def test_plain_gaussian_against_the_exact_formula(sigma: float, steps: int):
    exact = exact_epsilon(lambda eps: gaussian_delta(sigma / math.sqrt(steps), eps), DELTA)
    pld, rdp = (compute_epsilon([Gaussian(1.0, sigma, steps)], DELTA, how) for how in ("pld", "rdp"))
    assert exact <= pld <= 1.002 * exact
    assert pld < rdp < 1.2 * exact
    assert compute_epsilon([Gaussian(1.0, 1.05 * sigma, steps)], DELTA, "pld") < exact  # 5% less noise is caught


@pytest.mark.parametrize(("rate", "sigma"), [(0.05, 0.7), (0.01, 0.5), (0.5, 2.0)])
def test_one_sampled_step_against_the_exact_tails(rate: float, sigma: float):
    exact = exact_epsilon(lambda eps: sampled_delta(rate, sigma, eps), DELTA)
    pld, rdp = (compute_epsilon([Gaussian(rate, sigma)], DELTA, how) for how in ("pld", "rdp"))
    assert exact <= pld <= 1.005 * exact
    assert rdp >= pld
    assert compute_epsilon([Gaussian(rate, 1.05 * sigma)], DELTA, "pld") < exact


def simulated_delta(rate: float, sigma: float, steps: int, eps: float, draws: int = 100_000) -> tuple[float, float]:
    """delta(eps) of the composition and its standard error, by drawing the privacy loss of releases with the unit."""
    random = np.random.default_rng(1)
    loss = np.zeros(draws)
    for _ in range(steps):
        x = random.normal(0, sigma, draws) + (random.random(draws) < rate)
        loss += np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
    gain = np.maximum(0.0, -np.expm1(eps - loss))
    return float(gain.mean()), float(gain.std() / math.sqrt(draws))


def admissible(accountant: Accountant, rate: float, sigma: float, steps: int, delta: float = 0.01) -> bool:
    """Whether the epsilon an accountant claims for a run survives a simulation of that run."""
    claimed = accountant([Gaussian(rate, sigma)] * steps, delta)
    found, error = simulated_delta(rate, sigma, steps, claimed)
    return found - 5 * error <= delta


def test_composition_against_a_simulation_that_rejects_wrong_accountants():
    run = (0.1, 1.0, 40)
    wrong: dict[str, Accountant] = {
        "a new accountant each round": lambda events, delta: max(compute_epsilon([e], delta) for e in events),
        "half of the rounds forgotten": lambda events, delta: compute_epsilon(events[::2], delta, "pld"),
        "noise said to be a third larger": lambda events, delta: compute_epsilon(
            [Gaussian(e.rate, e.sigma * 4 / 3) for e in events if isinstance(e, Gaussian)], delta, "pld"
        ),
        "amplified once more by client sampling": lambda events, delta: compute_epsilon(
            [Gaussian(e.rate / 2, e.sigma) for e in events if isinstance(e, Gaussian)], delta, "pld"
        ),
    }
    assert admissible(lambda events, delta: compute_epsilon(events, delta, "rdp"), *run)
    assert admissible(lambda events, delta: compute_epsilon(events, delta, "pld"), *run)
    assert [name for name, accountant in wrong.items() if admissible(accountant, *run)] == []
    # and PLD is not merely safe: simulated delta at its epsilon is delta
    found, error = simulated_delta(*run, compute_epsilon([Gaussian(*run)], 0.01, "pld"))
    assert found == pytest.approx(0.01, abs=5 * error + 2e-4)


def test_shuffled_batches_accounted_as_poisson_are_rejected():
    """Where each unit is in exactly one of 1/q batches of fixed size, the batch sums tell more than Poisson's do.

    All others contribute -1, so their batches sum to -size and the unit's own batch to 2 more than that
    if it contributes 1, to 1 more if it contributes nothing (Chua et al. 2024).
    """
    sigma, batches = 0.5, 100

    def delta_at_least(eps: float) -> float:
        """delta of telling the two apart by "some sum passes c": a lower bound for shuffling."""
        c = np.linspace(0, 8, 2001)
        others = (batches - 1) * norm.logcdf(c / sigma)
        with_unit, without = (-np.expm1(others + norm.logcdf((c - shift) / sigma)) for shift in (2, 1))
        return float(np.max(with_unit - math.exp(eps) * without))

    assert delta_at_least(compute_epsilon([Gaussian(1 / batches, sigma, batches)], DELTA, "rdp")) > 10 * DELTA
    assert delta_at_least(compute_epsilon([Gaussian(1 / batches, sigma, batches)], DELTA, "pld")) > 50 * DELTA
    assert (
        delta_at_least(compute_epsilon([Gaussian(1.0, sigma)], DELTA, "pld")) <= DELTA
    )  # an epoch without amplification


# --- composition --------------------------------------------------------------------------------


def test_rounds_compose_and_nothing_is_forgotten():
    import dp_accounting
    from dp_accounting import rdp

    spend = Spend.empty()
    costs = []
    for _ in range(50):
        spend = spend.add_events([Gaussian(0.05, 1.2, 2), Gaussian(0.01, 3.0)])
        costs.append(spend.epsilon(DELTA))
    assert all(a < b for a, b in itertools.pairwise(costs))
    assert costs[-1] > 2 * costs[0]
    assert spend.counts == {(0.05, 1.2): 100, (0.01, 3.0): 50}
    assert spend == Spend.empty().add_events([Gaussian(0.01, 3.0, 50), Gaussian(0.05, 1.2, 100)])
    assert spend == Spend.empty().add_events([Gaussian(0.01, 3.0), Gaussian(0.05, 1.2, 2)], times=50)
    assert spend == Spend.empty().add_events(spend.events)
    assert spend.releases == 150

    theirs = rdp.RdpAccountant(orders=list(ORDERS))
    for rate, sigma, count in ((0.05, 1.2, 100), (0.01, 3.0, 50)):
        theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), count)
    assert costs[-1] == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-5)
    assert spend.epsilon(DELTA, "pld") < costs[-1]


def test_spends_do_not_change_when_added_to():
    first = Spend.empty().add_events([Gaussian(0.1, 1.0)])
    before = first.rdp.copy()
    first.add_events([Gaussian(0.1, 1.0), Unprotected()])
    assert first.counts == {(0.1, 1.0): 1}
    assert first.num_unprotected == 0
    np.testing.assert_array_equal(first.rdp, before)


@pytest.mark.parametrize("how", ["rdp", "pld"])
def test_extremes(how: str):
    assert compute_epsilon([], DELTA, how) == 0
    assert compute_epsilon([Gaussian(0.1, 1.0, 0)], DELTA, how) == 0
    assert compute_epsilon([Gaussian(0.1, 1.0), Unprotected()], DELTA, how) == math.inf
    assert compute_epsilon([Gaussian(0.1, 0.0)], DELTA, how) == math.inf
    assert 1e4 < compute_epsilon([Gaussian(1.0, 0.005)], DELTA, how) < math.inf
    tiny = compute_epsilon([Gaussian(1e-4, 50.0, 10**4)], DELTA, how)
    assert 0 <= tiny < 0.01


def test_pld_is_tighter_also_where_each_step_loses_almost_nothing():
    # On a grid of 1e-3 this run would be charged 0.44 by PLD, twice what it costs.
    events = [Gaussian(0.001, 5.0, 100_000)]
    assert 0.2090 < compute_epsilon(events, DELTA, "pld") < 0.2105 < compute_epsilon(events, DELTA, "rdp")


def test_pld_gives_way_to_rdp_where_its_arithmetic_ends():
    events = [Gaussian(0.001, 1.0, 10**6)]
    assert compute_epsilon(events, 1e-8, "pld") == compute_epsilon(events, 1e-8, "rdp")


# --- monotone -----------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(1e-3, 1.0),
    sigma=st.floats(0.5, 8.0),
    count=st.integers(1, 1000),
    more=st.floats(1.05, 3.0),
    how=st.sampled_from(["rdp", "pld"]),
)
def test_more_data_less_noise_or_more_steps_never_cost_less(
    rate: float, sigma: float, count: int, more: float, how: str
):
    base = compute_epsilon([Gaussian(rate, sigma, count)], DELTA, how)
    # These are bounds, and how loose they are varies a little: with the order for RDP, the grid for PLD.
    least = base * 0.99 - 1e-6
    assert compute_epsilon([Gaussian(min(1.0, rate * more), sigma, count)], DELTA, how) >= least
    assert compute_epsilon([Gaussian(rate, sigma / more, count)], DELTA, how) >= least
    assert compute_epsilon([Gaussian(rate, sigma, math.ceil(count * more))], DELTA, how) >= least
    assert compute_epsilon([Gaussian(rate, sigma, count)], DELTA / 10, how) >= base


# --- searches -----------------------------------------------------------------------------------


def test_calibration_meets_the_known_value():
    assert calibrate_sigma(lambda s: [Gaussian(0.05, s, 200)], 1.64, DELTA) == pytest.approx(2.0738, rel=2e-4)


def falling(sigma: float) -> list[Event]:
    """A heterogeneous schedule: noise that falls over the rounds, and a different first round."""
    return [Gaussian(1.0, 3 * sigma), *(Gaussian(0.05, sigma * 0.8 ** (t / 20), 3) for t in range(3))]


@pytest.mark.parametrize("how", ["rdp", "pld"])
@pytest.mark.parametrize(
    ("planned", "target"),
    [
        (lambda s: [Gaussian(0.05, s, 200)], 0.5),
        (lambda s: [Gaussian(0.05, s, 200)], 12.0),
        (lambda s: [Gaussian(1.0, s)], 0.05),
        (falling, 2.0),
    ],
)
def test_calibration_is_safe_and_nearly_the_smallest(planned: Callable[[float], list[Event]], target: float, how: str):
    sigma = calibrate_sigma(planned, target, DELTA, how)
    assert compute_epsilon(planned(sigma), DELTA, how) <= target
    assert compute_epsilon(planned(sigma / 1.0003), DELTA, how) > target


def test_calibration_counts_what_was_spent_before():
    past = Gaussian(0.05, 2.0, 100)
    fresh = calibrate_sigma(lambda s: [Gaussian(0.05, s, 100)], 2.0, DELTA)
    later = calibrate_sigma(lambda s: [past, Gaussian(0.05, s, 100)], 2.0, DELTA)
    assert later > fresh
    with pytest.raises(ConfigError, match=r"epsilon = 0.5 .* cannot be reached.*larger epsilon"):
        calibrate_sigma(lambda s: [past, Gaussian(0.05, s, 100)], 0.5, DELTA)
    with pytest.raises(ConfigError, match="cannot be reached"):
        calibrate_sigma(lambda s: [Unprotected()], 0.5, DELTA)


def test_an_enormous_budget_still_gets_some_noise():
    assert calibrate_sigma(lambda s: [Gaussian(1.0, s)], 1e8, DELTA) == accounting.SIGMA_MIN


@pytest.mark.parametrize("how", ["rdp", "pld"])
def test_steps_for_is_the_inverse(how: str):
    count = compute_max_steps(0.05, 2.0738, 1.64, DELTA, how)
    assert count == 200 if how == "rdp" else count > 200
    assert compute_epsilon([Gaussian(0.05, 2.0738, count)], DELTA, how) <= 1.64
    assert compute_epsilon([Gaussian(0.05, 2.0738, count + 1)], DELTA, how) > 1.64
    assert compute_max_steps(1.0, 0.5, 1.0, DELTA, how) == 0


def test_steps_for_stops_at_its_limit():
    assert compute_max_steps(1e-6, 1e5, 1.0, DELTA) == accounting.MAX_STEPS


def test_two_releases_on_one_sample_combine():
    both = combine_sigmas(2.0, 3.0)
    assert both == pytest.approx((1 / 4 + 1 / 9) ** -0.5)
    apart = compute_epsilon([Gaussian(1.0, 2.0), Gaussian(1.0, 3.0)], DELTA)
    assert compute_epsilon([Gaussian(1.0, both)], DELTA) == pytest.approx(apart)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute_epsilon([], 0.0), "delta = 0.0"),
        (lambda: compute_epsilon([], 1.0), "delta = 1.0"),
        (lambda: compute_epsilon([], math.nan), "delta = nan"),
        (lambda: compute_epsilon([], DELTA, "zcdp"), "accountant = 'zcdp' is not known; choose one of rdp, pld"),
        (lambda: compute_epsilon([Gaussian(0.0, 1.0)], DELTA), "rate = 0.0"),
        (lambda: compute_epsilon([Gaussian(1.1, 1.0)], DELTA), "rate = 1.1"),
        (lambda: compute_epsilon([Gaussian(0.1, -1.0)], DELTA), "sigma = -1.0"),
        (lambda: compute_epsilon([Gaussian(0.1, math.nan)], DELTA), "sigma = nan"),
        (lambda: compute_epsilon([Gaussian(0.1, 1.0, -1)], DELTA), "count = -1"),
        (lambda: compute_epsilon([Gaussian(0.1, 1.0, 1.5)], DELTA), "count = 1.5"),  # type: ignore[arg-type]
        (lambda: calibrate_sigma(lambda s: [Gaussian(0.1, s)], 0.0, DELTA), "epsilon = 0.0"),
        (lambda: calibrate_sigma(lambda s: [Gaussian(0.1, s)], math.inf, DELTA), "epsilon = inf"),
        (lambda: compute_max_steps(0.1, 1.0, -1.0, DELTA), "epsilon = -1.0"),
    ],
)
def test_wrong_input_is_named(call: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        call()


# --- accountants of others ----------------------------------------------------------------------

OWN = accounting.Accountant(
    "own", lambda spends, delta: np.array([0.5 * spend.releases for spend in spends]), lambda event: event.count < 100
)


def test_an_own_accountant_is_found_by_its_place_and_bounds_what_it_supports():
    place = f"{__name__}:OWN"
    assert compute_epsilon([Gaussian(0.1, 1.0, 4)], DELTA, place) == 2.0
    assert math.isinf(compute_epsilon([Gaussian(0.1, 1.0, 100)], DELTA, place))  # it does not support this event
    assert math.isinf(compute_epsilon([Unprotected()], DELTA, "rdp"))
    assert math.isinf(compute_epsilon([Unprotected()], DELTA, "pld"))
    with pytest.raises(ConfigError, match=r"is a int, not a fulcrum\.privacy\.accounting\.Accountant"):
        compute_epsilon([], DELTA, f"{__name__}:NOT_ONE")


NOT_ONE = 7


def test_an_enforced_own_accountant_comes_first_and_the_built_in_ones_beside_it():
    assert [a.name for a in reported_accountants("rdp")] == ["rdp", "pld"]
    assert [a.name for a in reported_accountants("pld")] == ["rdp", "pld"]
    assert [a.name for a in reported_accountants(f"{__name__}:OWN")] == ["own", "rdp", "pld"]
