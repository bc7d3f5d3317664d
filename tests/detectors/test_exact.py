"""The tests that detectors use: their false-alarm rates hold, and they reject what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.findings import Reading, collect, contradict
from fulcrum.analysis.detectors.second_opinion import Paid, price, price_at_least
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Gaussian

DRAWS = 600


def draw_p_values(kind: str, wrong: bool, draws: int = DRAWS) -> np.ndarray:
    """p-values of one test on numbers that are right, or wrong in its own way."""
    g = np.random.default_rng(1)
    size = 1.4 if wrong else 1.0
    rate = 0.35 if wrong else 0.25
    make = {
        "variance": lambda: exact.judge_variance(float(np.square(size * g.standard_normal(60)).sum()), 60),
        "small variance": lambda: exact.judge_variance_too_small(
            float(np.square(g.standard_normal(60) / size).sum()), 60
        ),
        "count": lambda: exact.judge_count(int(g.binomial(200, rate)), 200, 0.25),
        "dispersion": lambda: exact.judge_dispersion(
            np.full(30, 6) if wrong else g.binomial(24, 0.25, size=30), 24, 0.25
        ),
        "distribution": lambda: exact.judge_distribution(g.random(200) ** size),
        "pairs": lambda: exact.judge_pairs(_rows(g, wrong))[0],
        "directions": lambda: exact.judge_directions(_rows(g, wrong))[0],
        "largest": lambda: exact.judge_largest(g.standard_normal(400) if not wrong else g.uniform(-2, 2, 400)),
        "neighbours": lambda: exact.judge_neighbours(_cancelling(g, wrong), 1),
        "matches": lambda: exact.judge_matches(*_overlapping(g, wrong))[0],
        "singular values": lambda: exact.judge_singular_values(
            g.standard_normal((8, 50)) + (2 * g.standard_normal((8, 1)) if wrong else 0)
        ),
    }[kind]
    return np.array([make() for _ in range(draws)])


def _rows(generator: np.random.Generator, wrong: bool) -> np.ndarray:
    rows = generator.standard_normal((6, 40))
    if wrong:
        rows[3] = rows[1]
    return rows


def _cancelling(generator: np.random.Generator, wrong: bool) -> np.ndarray:
    drawn = generator.standard_normal((4, 41))
    return (drawn[:, 1:] - drawn[:, :-1]) / np.sqrt(2) if wrong else drawn


def _overlapping(generator: np.random.Generator, wrong: bool) -> tuple[np.ndarray, np.ndarray]:
    drawn = generator.standard_normal(300)
    return drawn[:150], np.concatenate([-drawn[140:150], drawn[150:]]) if wrong else drawn[150:]


KINDS = (
    "variance",
    "small variance",
    "count",
    "dispersion",
    "distribution",
    "pairs",
    "directions",
    "singular values",
    "largest",
    "neighbours",
    "matches",
)


@pytest.mark.parametrize("kind", KINDS)
def test_p_values_are_not_too_small(kind: str) -> None:
    found = draw_p_values(kind, wrong=False)
    for level in (0.1, 0.02):
        assert (found <= level).mean() <= level + 5 * np.sqrt(level / DRAWS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_has_small_p_values(kind: str) -> None:
    wrong, right = (np.median(draw_p_values(kind, each, 60)) for each in (True, False))
    assert wrong < 0.05 < right


def test_the_level_is_shared_by_all_readings() -> None:
    readings = [Reading("d", "w", p, "") for p in (2e-6, 0.5, 0.3, 0.9)]
    assert len(collect(readings, level=1e-5).alarms) == 1
    assert not collect([*readings, *readings, *readings], level=1e-5).alarms
    assert collect([contradict("d", "w", True, "no"), contradict("e", "w", False, "yes")]).detectors == ("d",)


@pytest.mark.parametrize(("rate", "sigma", "count"), [(0.25, 1.3, 4), (0.01, 0.6, 1000), (1.0, 5.0, 3), (0.2, 50.0, 9)])
def test_the_second_opinion_agrees_with_our_accountant(rate: float, sigma: float, count: int) -> None:
    ours = compute_epsilon([Gaussian(rate, sigma, count)], 1e-5)
    assert price(Paid({(rate, sigma): count}), 1e-5) == pytest.approx(ours, rel=1e-6)
    assert price(Paid({(rate, 0.9 * sigma): count}), 1e-5) > 1.01 * ours  # a wrong sigma is noticed


@pytest.mark.parametrize(("rate", "sigma", "count"), [(0.25, 1.3, 4), (0.01, 0.6, 200), (1.0, 5.0, 3), (0.05, 0.8, 4)])
def test_no_accountant_goes_below_the_lower_bound(rate: float, sigma: float, count: int) -> None:
    tight = compute_epsilon([Gaussian(rate, sigma, count)], 1e-5, "pld")
    least = price_at_least(Paid({(rate, sigma): count}), 1e-5)
    assert 0.95 * tight - 0.01 <= least <= tight  # an accountant that is a tenth too low is noticed
    assert price_at_least(Paid({(rate, 0.8 * sigma): count}), 1e-5) > tight
    assert price_at_least(Paid(), 1e-5) == 0.0
    assert price_at_least(Paid({(rate, 0.0): 1}), 1e-5) == np.inf
