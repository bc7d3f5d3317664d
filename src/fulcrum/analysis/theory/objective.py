"""The paper's objective L(C) = L_model(C) + kappa C, measured at one point of training.

L_model(C) is the expected loss after one private round with clipping norm C:

    theta'(C) = theta - lr (sum_i m_i a_i clip(g_i, C) + nu C z),     z ~ N(0, I),  m_i ~ Bernoulli(q_i)

The expectation is a mean over draws of (m, z) that all C share (common random numbers), so that differences between
two C have small intervals. The derivative goes through clipping and noise:

    d theta'/dC = -lr (sum_i m_i a_i 1[|g_i| > C] g_i / |g_i| + nu z),     dL/dC = mean of <grad L(theta'), d theta'/dC>

It exists unless C equals a norm, where clip(g, C) has a kink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.study.stats import compute_mean_interval

LossOfWeights = Callable[[Tensor], Tensor]
"""theta [r, d] -> mean losses [r], differentiable."""


@dataclass(frozen=True)
class PrivateRound:
    """What one private round does to the weights.

    theta [d]. gradients [n, d]: of the units that may be sampled. weights [n]: a_i, what a sampled unit's clipped
    gradient counts in the aggregate (its party's weight / its expected batch). rates [n]: q_i. noise: nu, the standard
    deviation of the aggregate's noise per coordinate in units of C. lr: what the server applies of the aggregate.
    """

    theta: Tensor
    gradients: Tensor
    weights: Tensor
    rates: Tensor
    noise: float
    lr: float

    def norms(self) -> Tensor:
        """Norms of the gradients [n]."""
        found: Tensor = torch.linalg.vector_norm(self.gradients, dim=1)
        return found


@dataclass(frozen=True)
class Draws:
    """Common random numbers: who is sampled, bool [r, n], and the noise z [r, d]."""

    sampled: Tensor
    noise: Tensor


@dataclass(frozen=True)
class ObjectivePoint:
    """The objective at one C. total = start + step + clipping + noise + price.

    start: loss before the round. step: change by the expected gradient step, neither clipped nor noised. clipping: what
    clipping adds to that. noise: what sampling and noise add. price: kappa C. interval: 95% half-width of total.
    slope: exact derivative of L_model in C, slope_interval: its 95% half-width.
    """

    C: float
    total: float
    interval: float
    start: float
    step: float
    clipping: float
    noise: float
    price: float
    slope: float
    slope_interval: float


def draw_common_numbers(step: PrivateRound, draws: int, seed: int = 0) -> Draws:
    """`draws` samples of units and noises, the same for every C."""
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.rand((draws, len(step.rates)), generator=generator, dtype=torch.float64) < step.rates.double()
    noise = torch.randn((draws, len(step.theta)), generator=generator, dtype=torch.float64)
    return Draws(sampled, noise.to(step.theta.dtype))


def move_weights(step: PrivateRound, C: float, draws: Draws) -> Tensor:
    """theta' [r, d] of each draw."""
    factors = (C / step.norms().clamp_min(1e-300)).clamp(max=1.0) * step.weights
    sums = (draws.sampled * factors) @ step.gradients
    return step.theta - step.lr * (sums + step.noise * C * draws.noise)


def differentiate_weights(step: PrivateRound, C: float, draws: Draws) -> Tensor:
    """d theta'/dC [r, d] of each draw."""
    norms = step.norms()
    factors = torch.where(norms > C, step.weights / norms.clamp_min(1e-300), torch.zeros_like(norms))
    sums = (draws.sampled * factors) @ step.gradients
    return -step.lr * (sums + step.noise * draws.noise)


def move_weights_in_expectation(step: PrivateRound, C: float) -> Tensor:
    """The weights [1, d] after the mean of the clipped gradients, without noise. C = inf: not clipped."""
    factors = (C / step.norms().clamp_min(1e-300)).clamp(max=1.0) * step.weights * step.rates
    return (step.theta - step.lr * (factors @ step.gradients))[None]


def measure_slopes(step: PrivateRound, loss: LossOfWeights, C: float, draws: Draws) -> Tensor:
    """d L(theta') / dC [r] of each draw, exactly."""
    moved = move_weights(step, C, draws).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(moved).sum(), moved)
    return (gradient * differentiate_weights(step, C, draws)).sum(dim=1).detach()


def measure_objective(
    step: PrivateRound, loss: LossOfWeights, grid: Sequence[float], kappa: float, draws: int = 64, seed: int = 0
) -> list[ObjectivePoint]:
    """L(C) and its parts at each C of the grid, with 95% intervals over `draws` common draws."""
    common = draw_common_numbers(step, draws, seed)
    with torch.no_grad():
        start = float(loss(step.theta[None]))
        free = float(loss(move_weights_in_expectation(step, math.inf)))
    found = []
    for C in grid:
        with torch.no_grad():
            clipped = float(loss(move_weights_in_expectation(step, C)))
            losses = loss(move_weights(step, C, common))
        slopes = measure_slopes(step, loss, C, common)
        mean = float(losses.mean())
        found.append(
            ObjectivePoint(
                C=C,
                total=mean + kappa * C,
                interval=_half_width(losses),
                start=start,
                step=free - start,
                clipping=clipped - free,
                noise=mean - clipped,
                price=kappa * C,
                slope=float(slopes.mean()),
                slope_interval=_half_width(slopes),
            )
        )
    return found


def _half_width(values: Tensor) -> float:
    return compute_mean_interval(values.tolist()).half


def find_minimiser(points: Sequence[ObjectivePoint]) -> ObjectivePoint:
    """The point of the grid with the least total."""
    return min(points, key=lambda point: point.total)


def compare_with_differences(
    step: PrivateRound, loss: LossOfWeights, C: float, draws: int = 16, seed: int = 0, width: float = 1e-6
) -> tuple[float, float]:
    """(exact slope, central difference over C (1 +- width)) on common draws; away from kinks they agree."""
    common = draw_common_numbers(step, draws, seed)
    exact = float(measure_slopes(step, loss, C, common).mean())
    with torch.no_grad():
        high = float(loss(move_weights(step, C * (1 + width), common)).mean())
        low = float(loss(move_weights(step, C * (1 - width), common)).mean())
    return exact, (high - low) / (2 * width * C)


def has_kink_near(step: PrivateRound, C: float, width: float = 1e-6) -> bool:
    """Whether the norm of a gradient lies within C (1 +- width)."""
    norms = step.norms()
    return bool(((norms >= C * (1 - width)) & (norms <= C * (1 + width))).any())


def count_direction_changes(points: Sequence[ObjectivePoint]) -> int:
    """How often the total turns along the grid, beyond the intervals: 1 for one minimum inside."""
    turns, falling = 0, True
    anchor = points[0]
    for point in points[1:]:
        change = point.total - anchor.total
        if abs(change) <= anchor.interval + point.interval:
            continue
        if (change < 0) != falling:
            turns += 1
            falling = change < 0
        anchor = point
    return turns
