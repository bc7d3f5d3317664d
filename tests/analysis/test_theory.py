"""The theory's statements: exact problems, where tests are sharp, and their wrong cases."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fulcrum.analysis.theory import bowl as bowls
from fulcrum.analysis.theory import clip_descent as descents
from fulcrum.analysis.theory import federation_bound as bounds
from fulcrum.analysis.theory import readings
from fulcrum.analysis.theory.findings import FAILS
from fulcrum.analysis.theory.objective import (
    PrivateRound,
    compare_with_differences,
    differentiate_weights,
    draw_common_numbers,
    find_minimiser,
    has_kink_near,
    measure_objective,
    move_weights,
)
from fulcrum.analysis.theory.page import read_statuses
from fulcrum.analysis.theory.paper_checks import make_logistic_round
from fulcrum.analysis.theory.prediction import RunFacts, advise, correlate_ranks, predict_end, score_against
from fulcrum.analysis.theory.statements import STATEMENTS
from fulcrum.clipping.moo_paper import _compute_C_gradient

ROOT = Path(__file__).parents[2]
QUICK = [s for s in STATEMENTS if s.name in ("derivative", "readings", "convexity", "lemma-2", "public-facts")]


# --- statuses ---------------------------------------------------------------------------------------


def test_the_page_says_what_the_statements_say() -> None:
    assert read_statuses(ROOT / "docs" / "theory.md") == {s.name: s.status for s in STATEMENTS}


@pytest.mark.parametrize("statement", QUICK, ids=lambda s: s.name)
def test_quick_statements_have_the_status_of_the_page(statement) -> None:
    assert statement.check().status == statement.status


@pytest.mark.slow
@pytest.mark.parametrize("statement", [s for s in STATEMENTS if s not in QUICK], ids=lambda s: s.name)
def test_statements_have_the_status_of_the_page(statement) -> None:
    assert statement.check().status == statement.status


# --- the objective ----------------------------------------------------------------------------------


@pytest.mark.parametrize("C", [0.05, 0.3, 0.9, 2.0])
def test_the_exact_slope_is_the_difference_quotient(C: float) -> None:
    step, problem = make_logistic_round()

    def loss(theta: torch.Tensor) -> torch.Tensor:
        return torch.stack([problem.loss(row) for row in theta])

    assert not has_kink_near(step, C)
    exact, difference = compare_with_differences(step, loss, C)
    assert exact == pytest.approx(difference, rel=1e-5, abs=1e-9)
    # without the noise's part, the slope is another one
    common = draw_common_numbers(step, 16)
    wrong = differentiate_weights(step, C, common) + step.lr * step.noise * common.noise
    assert not torch.allclose(wrong, differentiate_weights(step, C, common))


def test_the_parts_of_the_objective_add_up_and_grow_as_they_must() -> None:
    step, problem = make_logistic_round()

    def loss(theta: torch.Tensor) -> torch.Tensor:
        return torch.stack([problem.loss(row) for row in theta])

    points = measure_objective(step, loss, (0.01, 0.3, 1.0, 30.0), kappa=0.1, draws=32)
    for point in points:
        parts = point.start + point.step + point.clipping + point.noise + point.price
        assert parts == pytest.approx(point.total, abs=1e-12)
    assert points[-1].clipping == pytest.approx(0.0, abs=1e-12)  # nothing is clipped at C = 30
    assert points[-1].noise > points[0].noise
    assert find_minimiser(points).C not in (0.01, 30.0)


def test_a_step_without_noise_and_clipping_is_plain_descent() -> None:
    step, _ = make_logistic_round()
    everyone = PrivateRound(
        step.theta, step.gradients, step.weights * step.rates, torch.ones_like(step.rates), 0.0, 1.0
    )
    moved = move_weights(everyone, 1e9, draw_common_numbers(everyone, 2))
    assert torch.allclose(moved, (step.theta - step.gradients.mean(dim=0)).expand(2, -1))


# --- readings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "reading"), list(enumerate(readings.READINGS)))
def test_a_reading_is_that_of_the_rule(place: int, reading: str) -> None:
    losses, norms = torch.tensor([0.5, 2.0]), torch.tensor([0.3, 4.0])
    state = {"kappa": torch.tensor(0.2), "reading": torch.eye(3)[place]}
    of_rule = _compute_C_gradient(losses, norms, torch.tensor(1.5), 0.1, state).mean()
    drift = readings.make_drift(reading, readings.Batch(losses, norms, 0.1), 0.2)
    assert drift(1.5) == pytest.approx(float(of_rule), rel=1e-6)


def test_descent_ends_at_a_stable_resting_point_and_leaves_an_unstable_one() -> None:
    right = readings.make_right_drift(lambda C: C - 2.0, 0.5)
    rest = readings.find_resting_point(right)
    assert rest.stable
    assert pytest.approx(1.5, rel=1e-6) == rest.C
    assert readings.descend(right, 5.0, 0.1, 500) == pytest.approx(1.5, abs=1e-6)
    printed = readings.make_printed_drift(lambda C: C - 2.0, 0.5)
    at = readings.find_resting_point(printed)
    assert not at.stable
    assert abs(readings.descend(printed, at.C * 1.01, 0.1, 2_000) - at.C) > 1


# --- Lemma 2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_the_corrected_bound_is_exact_on_quadratics_and_the_printed_one_is_violated(step: float, noise: float) -> None:
    descent = descents.ClipDescent(2.0, 2.0, step, noise, 1.5)
    gaps = descents.compute_quadratic_gaps(descent, 60)
    assert torch.allclose(descent.bound(60), gaps, atol=1e-12)
    if noise == 0:
        assert descents.find_printed_violation(descent, 60)[0] == 1


def test_exact_gaps_are_those_of_simulated_descents() -> None:
    descent = descents.ClipDescent(1.0, 1.0, 0.4, 0.5, 2.0)
    gaps = descents.simulate_gaps(lambda C: C.square() / 2, 2.0, descent, 20, 20_000)
    mean, error = gaps.mean(dim=1), gaps.std(dim=1) / math.sqrt(20_000)
    exact = descents.compute_quadratic_gaps(descent, 20)
    assert bool(((mean - exact).abs() <= 6 * error + 1e-12).all())
    wrong = descents.compute_quadratic_gaps(descents.ClipDescent(1.0, 1.0, 0.4, 0.6, 2.0), 20)
    assert bool(((mean - wrong).abs() > 6 * error)[5:].any())


def test_a_step_beyond_two_over_smoothness_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        descents.ClipDescent(1.0, 1.0, 2.0, 0.0, 1.0).bound(3)


# --- convexity --------------------------------------------------------------------------------------


def test_pl_plus_linear_has_two_minima_only_where_the_slope_is_not_monotone() -> None:
    assert len(descents.find_local_minima(descents.make_tilted_wave(3.0), 0.01, 12.0)) == 2
    assert len(descents.find_local_minima(descents.make_tilted_wave(0.5), 0.01, 12.0)) == 1
    assert descents.measure_wave_mu() >= descents.WAVE_MU


def test_a_clipped_step_may_have_two_best_values_of_C() -> None:
    two = descents.make_clipped_groups(descents.TWO_MINIMA_GROUPS, 3.0, 1.0)
    assert [round(m.C, 2) for m in descents.find_local_minima(two, 1e-3, 20.0)] == [1.0, 10.0]
    one = descents.make_clipped_groups(((0.7, 1.0), (0.3, 2.0)), 3.0, 1.0)
    assert len(descents.find_local_minima(one, 1e-3, 20.0)) == 1


# --- Lemma 1 ----------------------------------------------------------------------------------------


def test_the_smallest_violation_is_what_algebra_says() -> None:
    found = bounds.find_smallest_violation(lr=0.5, noise=1.0)
    assert (found.measured, found.corrected) == pytest.approx((0.125, 0.125))
    assert found.printed == pytest.approx(-0.125)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_the_corrected_bound_holds_on_quadratics(alike: bool, steps: int, noise: float) -> None:
    problem = bounds.make_quadratics(4, 3, alike, seed=3)
    start = torch.full((3,), 2.0, dtype=torch.float64)
    found = bounds.follow_bounds(problem, start, 0.1, steps, 60 // steps, noise)
    assert all(each.measured <= each.corrected + 1e-12 for each in found)
    # half of the noise's term is too little
    if noise and alike:
        spread = float(problem.weights.square().sum()) * noise**2 * 3
        assert any(each.measured > each.corrected - 0.9 * problem.smoothness() * 0.005 * spread for each in found)


def test_dissimilarity_holds_everywhere() -> None:
    problem = bounds.make_quadratics(4, 3, False, seed=1)
    unlike = bounds.find_dissimilarity(problem)
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0, 1e3):
        theta = scale * torch.randn(3, generator=generator, dtype=torch.float64)
        apart = problem.local_gradients(theta.expand(4, 3)) - problem.gradient(theta)
        left = float(apart.square().sum())
        right = unlike.B1 * float(problem.gradient(theta).square().sum()) + unlike.B2**2 / 4
        assert left <= right * (1 + 1e-9)


def test_clipped_descent_breaks_the_printed_bound_and_keeps_the_corrected_one() -> None:
    _, problem = make_logistic_round()
    found = bounds.follow_clipped_bounds(bounds.LogisticRegression(problem.x, problem.y, 0.1), 0.3, 1.0, 15, 0.0)
    assert any(each.measured > each.printed + 1e-9 for each in found)
    assert all(each.measured <= each.corrected + 1e-12 for each in found)


# --- our own rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rounds"), [(0.05, 100), (0.2, 60), (0.05, 15)])
def test_the_recursion_is_the_mean_of_the_rule(noise: float, rounds: int) -> None:
    bowl = bowls.Bowl(1.0, 2_000, 10.0, noise, rounds, 5.0)
    predicted = bowls.follow_rule(bowl)
    ends = [bowls.simulate_rule(bowl, seed).end for seed in range(3)]
    assert predicted.end == pytest.approx(sum(ends) / 3, abs=0.04 * bowl.distance)
    wrong = bowls.follow_rule(bowls.Bowl(1.0, 2_000, 10.0, 4 * noise, rounds, 5.0))
    assert wrong.end != pytest.approx(sum(ends) / 3, abs=0.04 * bowl.distance)


def test_the_best_step_below_the_norms_does_not_know_the_curvature() -> None:
    steps = bowls.compare_curvatures(bowls.Bowl(1.0, 500, 10.0, 0.1, 50, 5.0), (0.1, 10.0))
    assert steps[0] == steps[1]
    above = [bowls.follow_fixed(bowls.Bowl(h, 500, 10.0, 0.0, 50, 5.0), 50.0, 1e3).end for h in (0.1, 10.0)]
    assert above[0] != pytest.approx(above[1])


def test_a_prediction_orders_cells_and_random_scores_are_not_predicted() -> None:
    facts = RunFacts(1_000, 5.0, 0.01, 100)
    cells = [(C, lr) for C in (0.01, 0.1, 1.0, 10.0, 100.0) for lr in (0.0625, 0.25, 1.0, 4.0, 16.0)]
    told = {cell: -predict_end(facts, *cell) for cell in cells}
    assert score_against("own", facts, told).correlation == pytest.approx(1.0)
    assert score_against("own", facts, told).regret == 0.0
    generator = torch.Generator().manual_seed(0)
    luck = dict(zip(cells, torch.rand(25, generator=generator).tolist(), strict=True))
    assert abs(score_against("luck", facts, luck).correlation) < 0.6
    assert advise(facts).wrong[1] > advise(facts).end


def test_ranks_with_ties() -> None:
    assert correlate_ranks([1, 2, 2, 3], [10, 20, 20, 30]) == pytest.approx(1.0)
    assert correlate_ranks([1, 1, 1], [1, 2, 3]) == 0.0
    assert correlate_ranks([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_some_statements_fail_as_printed() -> None:
    assert {s.name for s in STATEMENTS if s.status == FAILS} == {"derivative", "convexity", "lemma-2", "lemma-1"}
