"""Checks of the paper's statements: the objective, convexity and PL, Lemma 2, Lemma 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from fulcrum.analysis.theory import clip_descent as descents
from fulcrum.analysis.theory import federation_bound as bounds
from fulcrum.analysis.theory import readings
from fulcrum.analysis.theory.findings import CONDITIONAL, FAILS, HOLDS, Finding, format_numbers
from fulcrum.analysis.theory.objective import (
    PrivateRound,
    compare_with_differences,
    count_direction_changes,
    draw_common_numbers,
    find_minimiser,
    has_kink_near,
    measure_objective,
    measure_slopes,
)
from fulcrum.analysis.theory.on_run import Moment, estimate_constants, look, replay
from fulcrum.runs.one_call import resolve_keywords
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.training.federation import Federation

# --- the objective ----------------------------------------------------------------------------------


def _quadratic_slope(best: float) -> Callable[[float], float]:
    return lambda C: C - best


def check_printed_derivative() -> Finding:
    """A2 against the derivative, on L_model(C) = (C - 2)^2 / 2 with kappa = 0.5."""
    slope, kappa = _quadratic_slope(2.0), 0.5
    right, printed = readings.make_right_drift(slope, kappa), readings.make_printed_drift(slope, kappa)
    minimum = readings.find_resting_point(right)
    rest = readings.find_resting_point(printed)
    wrong_signs = [C for C in (0.5, 1.0, 3.0, 4.0, 8.0) if right(C) * printed(C) < 0]
    ends = [readings.descend(printed, rest.C * factor, 0.1, 2_000) for factor in (0.99, 1.01)]
    fails = bool(wrong_signs) and abs(rest.C - minimum.C) > 0.1 and not rest.stable
    return Finding(
        FAILS if fails else HOLDS,
        (
            ("minimum of L(C)", format_numbers(minimum.C)),
            ("where A2 is 0", f"{format_numbers(rest.C)}, {'stable' if rest.stable else 'unstable'}"),
            ("C at which A2 has the wrong sign, of 0.5, 1, 3, 4, 8", format_numbers(*wrong_signs)),
            ("descent by A2 from 1% below and above that point ends at", format_numbers(*ends)),
        ),
    )


def check_readings() -> Finding:
    """Where the three readings of `moo-paper` rest, on losses and norms drawn once, and whether C knows the model."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(4_000, generator=generator, dtype=torch.float64) * 4
    batch = readings.Batch(torch.full((4_000,), 2.0, dtype=torch.float64), norms, lr=0.1)
    kappa = 0.05
    rests = {name: readings.find_resting_point(readings.make_drift(name, batch, kappa)) for name in readings.READINGS}
    harder = readings.Batch(batch.losses, 10 * norms, batch.lr)
    moved = {name: readings.find_resting_point(readings.make_drift(name, harder, kappa)) for name in readings.READINGS}
    conditional = (
        abs(rests["loss"].C - 2.0 / kappa) < 1e-3 * 2.0 / kappa
        and moved["loss"].C == rests["loss"].C
        and rests["hypergradient"].stable
        and not rests["derivative"].reached
    )
    rows = [
        (
            f"{name}: rests at, with gradients ten times as large",
            format_numbers(rests[name].C, moved[name].C),
        )
        for name in readings.READINGS
    ]
    return Finding(CONDITIONAL if conditional else FAILS, (("mean loss / kappa", format_numbers(2.0 / kappa)), *rows))


def make_digits_federation(model: str = "mlp", rounds: int = 50) -> Federation:
    """The federation on which statements are measured: digits, five parties, epsilon 4, `moo`, no rehearsal."""
    settings, _, _ = resolve_keywords(
        "digits", model, None, {"epsilon": 4.0, "parties": 5, "rounds": rounds, "method": "moo"}
    )
    return prepare_unrehearsed(settings.replace(clip={"rehearse": False}))


def _take_moments(federation: Federation, rounds: Iterable[int]) -> list[Moment]:
    return [look(federation, snapshot) for snapshot in replay(federation, list(rounds))]


OBJECTIVE_GRID = tuple(10 ** (k / 2) for k in range(-6, 5))


def check_measured_objective() -> Finding:
    """L(C) at rounds 0 and 25 of a run on digits: one minimum inside, and the exact slope against differences."""
    kappa, rows, fine = 0.01, [], True
    for moment in _take_moments(make_digits_federation(), (0, 25)):
        points = measure_objective(moment.step, moment.loss, OBJECTIVE_GRID, kappa, draws=24)
        best = find_minimiser(points)
        inside = OBJECTIVE_GRID[0] < best.C < OBJECTIVE_GRID[-1] and count_direction_changes(points) == 1
        fine = fine and inside
        ends = format_numbers(points[0].total, points[-1].total)
        rows.append(
            (
                f"round {moment.round}: least L(C), at C",
                f"{format_numbers(best.total)} ± {format_numbers(best.interval)}, {format_numbers(best.C)}",
            )
        )
        rows.append(
            (
                f"round {moment.round}: L at C = {OBJECTIVE_GRID[0]:g} and {OBJECTIVE_GRID[-1]:g}",
                ends,
            )
        )
        rows.append(
            (
                f"round {moment.round}: parts at the minimum (clipping, noise, kappa C)",
                format_numbers(best.clipping, best.noise, best.price),
            )
        )
        rows.append((f"round {moment.round}: where moo has C", format_numbers(moment.C)))
    worst = _measure_slope_error()
    rows.append(("largest relative error of the exact slope against differences, float64", format_numbers(worst)))
    return Finding(CONDITIONAL if fine and worst < 1e-4 else FAILS, tuple(rows))


def make_logistic_round(
    seed: int = 0, examples: int = 200, dim: int = 6
) -> tuple[PrivateRound, bounds.LogisticRegression]:
    """A private round of logistic regression in float64, where slopes can be checked to many digits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((examples, dim), generator=generator, dtype=torch.float64)
    y = torch.sign(x[:, 0] + 0.5 * torch.randn(examples, generator=generator, dtype=torch.float64))
    problem = bounds.LogisticRegression(x, y, 0.0)
    theta = torch.full((dim,), 0.3, dtype=torch.float64)
    rows = problem.example_gradients(theta)
    rate = 0.5
    weights = torch.full((examples,), 1 / (rate * examples), dtype=torch.float64)
    return PrivateRound(theta, rows, weights, torch.full((examples,), rate, dtype=torch.float64), 0.05, 2.0), problem


def _measure_slope_error() -> float:
    step, problem = make_logistic_round()

    def loss(theta: torch.Tensor) -> torch.Tensor:
        return torch.stack([problem.loss(row) for row in theta])

    errors = []
    for C in (0.05, 0.2, 0.5, 0.9, 1.4, 3.0):
        if has_kink_near(step, C):
            continue
        exact, difference = compare_with_differences(step, loss, C)
        errors.append(abs(exact - difference) / max(abs(exact), 1e-3))
    return max(errors)


# --- convexity and PL -------------------------------------------------------------------------------


def check_convexity() -> Finding:
    """PL plus a linear term is not PL; and a clipped step whose L_model(C) has two minima, or a level stretch."""
    wave = descents.find_local_minima(descents.make_tilted_wave(3.0), 0.01, 12.0)
    groups = descents.find_local_minima(descents.make_clipped_groups(descents.TWO_MINIMA_GROUPS, 3.0, 1.0), 1e-3, 20.0)
    level = descents.make_clipped_groups(((1.0, 1.0),), 1.0, 2.0)
    values = level(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)).tolist()
    fails = len(wave) > 1 and len(groups) > 1 and values[1] == values[2] > values[0]

    def describe(minima: list[descents.Minimum]) -> str:
        return "; ".join(f"C = {format_numbers(m.C)}: {format_numbers(m.value)}" for m in minima)

    return Finding(
        FAILS if fails else HOLDS,
        (
            ("PL constant of x^2 + 3 sin(x)^2 (at least 1/32)", format_numbers(descents.measure_wave_mu())),
            ("minima of that function around C = 6, plus 3 C", describe(wave)),
            ("minima of L_model(C) of a clipped step, three groups of examples", describe(groups)),
            (
                "one example, a step that is too long: L_model at C = 0.5, 1, 2 (slope 0 from 1 on)",
                format_numbers(*values),
            ),
        ),
    )


def check_pl_along_run() -> Finding:
    """PL constant and smoothness of the training loss of an MLP along a run: PL holds, convexity does not."""
    found = [estimate_constants(moment, 0.0) for moment in _take_moments(make_digits_federation("mlp"), (0, 2, 10, 49))]
    mu = min(each.pl for each in found)
    M = max(each.smoothness for each in found)
    lowest = min(each.lowest for each in found)
    rows = [
        (
            f"round {each.round}: L, |grad L|, |grad L|^2 / 2L, largest and least eigenvalue",
            format_numbers(each.loss, each.gradient, each.pl, each.smoothness, each.lowest),
        )
        for each in found
    ]
    rows.append(("mu (least ratio, L* = 0), M (largest eigenvalue)", format_numbers(mu, M)))
    return Finding(CONDITIONAL if mu > 0 and lowest < 0 else HOLDS if mu > 0 else FAILS, tuple(rows))


# --- Lemma 2 ----------------------------------------------------------------------------------------


def check_lemma_2() -> Finding:
    """Lemma 2 on quadratics, where everything is exact, and on a PL function that is not convex, by simulation."""
    smallest = descents.ClipDescent(1.0, 1.0, 0.5, 0.0, 0.5)
    first, excess = descents.find_printed_violation(smallest, 5)
    left, said = (
        float(each[1]) for each in (descents.compute_quadratic_gaps(smallest, 1), smallest.bound_as_printed(1))
    )
    noisy = descents.ClipDescent(4.0, 4.0, 0.25, 1.0, 0.0)
    exact_floor = float(descents.compute_quadratic_gaps(noisy, 200)[-1])
    printed_floor = float(noisy.bound_as_printed(200)[-1])
    sharp = max(
        float((case.bound(100) - descents.compute_quadratic_gaps(case, 100)).abs().max())
        for case in (smallest, noisy, descents.ClipDescent(2.0, 2.0, 0.9, 0.3, 1.0))
    )
    wave = descents.ClipDescent(
        descents.WAVE_MU, descents.WAVE_SMOOTHNESS, 0.05, 0.5, float(descents.evaluate_wave(torch.tensor(3.0)))
    )
    gaps = descents.simulate_gaps(descents.evaluate_wave, 3.0, wave, 300, 400).mean(dim=1)
    held = bool((gaps <= wave.bound(300) * 1.02 + 1e-9).all())
    fails = first >= 0 and exact_floor > printed_floor and sharp < 1e-9 and held
    return Finding(
        FAILS if fails else HOLDS,
        (
            (
                "smallest example: L = (C - C*)^2 / 2, eta_C = 0.5, no noise, one step: L - L*, printed bound",
                format_numbers(left, said),
            ),
            (
                "floor with noise, mu = L = 4, eta_C = 0.25, sigma_g = 1: exact, printed",
                format_numbers(exact_floor, printed_floor),
            ),
            ("excess over the printed bound in the first example", f"{format_numbers(excess)} at step {first}"),
            ("largest distance of the corrected bound from the exact value on quadratics", format_numbers(sharp)),
            ("corrected bound on x^2 + 3 sin(x)^2, 400 simulated descents, 300 steps", "holds" if held else "violated"),
        ),
    )


def check_lemma_2_on_run() -> Finding:
    """Descent on the measured L(C) of a run at round 0 with one draw per step, beside the corrected bound."""
    (moment,) = _take_moments(make_digits_federation("linear"), (0,))
    kappa, step, rounds = 0.02, 1.0, 40
    grid = [0.25 * k for k in range(1, 25)]
    points = measure_objective(moment.step, moment.loss, grid, kappa, draws=16)
    best = find_minimiser(points)
    slopes = [point.slope + kappa for point in points]
    ratios = [
        s**2 / (2 * (p.total - best.total))
        for s, p in zip(slopes, points, strict=True)
        if p.total > best.total + 2 * p.interval
    ]
    bends = [abs(slopes[i + 1] - slopes[i]) / (grid[i + 1] - grid[i]) for i in range(len(grid) - 1)]
    mu, smooth = min(ratios), max(bends)
    common = draw_common_numbers(moment.step, 16)
    noise = max(float(measure_slopes(moment.step, moment.loss, C, common).std()) for C in (grid[0], 4.0, grid[-1]))
    ends = []
    for seed in range(3):
        C = 4.0
        for t in range(rounds):
            one = draw_common_numbers(moment.step, 1, seed * 1_000 + t)
            C = max(C - step * (kappa + float(measure_slopes(moment.step, moment.loss, C, one)[0])), readings.C_FLOOR)
        ends.append(C)
    gaps = [measure_objective(moment.step, moment.loss, [C], kappa, draws=16)[0].total - best.total for C in ends]
    start = next(p.total for p in points if p.C == 4.0) - best.total
    measured = sum(gaps) / len(gaps)
    usable = 0 < step < 2 / smooth
    bound = (
        float(descents.ClipDescent(min(mu, smooth), smooth, step, noise, start).bound(rounds)[-1])
        if usable
        else math.inf
    )
    return Finding(
        CONDITIONAL if measured <= bound + 0.02 else FAILS,
        (
            ("estimated mu, L, sigma_g of L(C)", format_numbers(mu, smooth, noise)),
            (
                f"L(C) - L* at C_0 = 4; after {rounds} steps, mean of 3",
                f"{format_numbers(start)}; {format_numbers(measured)}",
            ),
            ("corrected bound", format_numbers(bound)),
            ("C at the end; the best C", f"{format_numbers(*ends)}; {format_numbers(best.C)}"),
        ),
    )


# --- Lemma 1 ----------------------------------------------------------------------------------------


def check_lemma_1() -> Finding:
    """Lemma 1 with noise and with clipping: printed form violated, corrected form never."""
    smallest = bounds.find_smallest_violation()
    start = torch.full((4,), 3.0, dtype=torch.float64)
    noisy = [
        each
        for seed in range(4)
        for steps in (1, 8)
        for each in bounds.follow_bounds(
            bounds.make_quadratics(5, 4, seed % 2 == 0, seed), start, 0.02, steps, 200 // steps, 0.3, seed
        )
    ]
    _, problem = make_logistic_round()
    clipped = bounds.follow_clipped_bounds(bounds.LogisticRegression(problem.x, problem.y, 0.1), 0.3, 1.0, 40, 0.0)
    over_printed = sum(each.measured > each.printed + 1e-12 for each in (*noisy, *clipped))
    over_corrected = sum(each.measured > each.corrected + 1e-12 for each in (*noisy, *clipped))
    violated_by_clipping = sum(each.measured > each.printed + 1e-12 for each in clipped)
    fails = smallest.measured > smallest.printed and over_corrected == 0 and violated_by_clipping > 0
    return Finding(
        FAILS if fails else HOLDS,
        (
            (
                "one client at the optimum of theta^2 / 2, eta = 0.5, noise 1: measured, printed, corrected",
                format_numbers(smallest.measured, smallest.printed, smallest.corrected),
            ),
            (
                f"of {len(noisy) + len(clipped)} noisy or clipped steps: above printed, above corrected bound",
                f"{over_printed}, {over_corrected}",
            ),
            (
                "steps of clipped logistic regression without noise above the printed bound, of 40",
                str(violated_by_clipping),
            ),
        ),
    )


def check_lemma_1_without_noise() -> Finding:
    """The printed form without noise and clipping on random quadratics, where no counter-example was found."""
    start = torch.full((4,), 3.0, dtype=torch.float64)
    steps = [
        each
        for seed in range(6)
        for local in (1, 8, 32)
        for each in bounds.follow_bounds(
            bounds.make_quadratics(4, 4, False, seed), start, 0.05, local, 64 // local, 0.0
        )
    ]
    above = sum(each.measured > each.printed + 1e-12 for each in steps)
    corrected = sum(each.measured > each.corrected + 1e-12 for each in steps)
    loose = sorted(each.printed / max(each.measured, 1e-12) for each in steps)[len(steps) // 2]
    tight = sorted(each.corrected / max(each.measured, 1e-12) for each in steps)[len(steps) // 2]
    return Finding(
        CONDITIONAL if above == 0 and corrected == 0 else FAILS,
        (
            ("steps; above the printed bound; above the corrected one", f"{len(steps)}; {above}; {corrected}"),
            ("median of bound / measured: printed, corrected", format_numbers(loose, tight)),
        ),
    )
