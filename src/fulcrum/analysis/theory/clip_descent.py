"""The paper's Lemma 2: gradient descent on L(C) converges linearly to the best C.

In print, for L(C) with the PL constant mu and smoothness L, gradient noise of variance sigma_g^2 and 0 < eta_C <= 2/L:

    E[L(C_t) - L*] <= (1 - 2 mu eta_C)^t (L(C_0) - L*) + eta_C sigma_g^2 / (2 mu)

The proof drops the term L eta_C^2 / 2 |grad|^2 of the descent inequality. With it, for 0 < eta_C < 2/L:

    E[L(C_t) - L*] <= rho^t (L(C_0) - L*) + (1 - rho^t) L eta_C sigma_g^2 / (4 mu (1 - L eta_C / 2))
    rho = 1 - 2 mu eta_C (1 - L eta_C / 2)

On a quadratic mu = L, and the corrected bound is an equality: the test is sharp. There the printed one is false for
every eta_C, since (1 - mu eta_C)^2 > 1 - 2 mu eta_C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClipDescent:
    """Descent C <- C - step (L'(C) + noise z), z ~ N(0, 1), on a function of C.

    mu, smoothness: its PL constant and the Lipschitz constant of its derivative. step: eta_C. noise: sigma_g.
    gap: L(C_0) - L*.
    """

    mu: float
    smoothness: float
    step: float
    noise: float
    gap: float

    def bound_as_printed(self, rounds: int) -> Tensor:
        """Lemma 2's right side after 0, ..., rounds steps, as printed: float64 [rounds + 1]."""
        powers = torch.tensor([(1 - 2 * self.mu * self.step) ** t for t in range(rounds + 1)], dtype=torch.float64)
        return powers * self.gap + self.step * self.noise**2 / (2 * self.mu)

    def bound(self, rounds: int) -> Tensor:
        """The corrected right side after 0, ..., rounds steps: float64 [rounds + 1]; 0 < step < 2/L, or ValueError."""
        if not 0 < self.step < 2 / self.smoothness:
            raise ValueError(f"step = {self.step:g} must be between 0 and 2 / smoothness = {2 / self.smoothness:g}.")
        damping = 1 - self.smoothness * self.step / 2
        rate = 1 - 2 * self.mu * self.step * damping
        floor = self.smoothness * self.step * self.noise**2 / (4 * self.mu * damping)
        powers = torch.tensor([rate**t for t in range(rounds + 1)], dtype=torch.float64)
        return powers * self.gap + (1 - powers) * floor


def compute_quadratic_gaps(descent: ClipDescent, rounds: int) -> Tensor:
    """E[L(C_t) - L*] on L(C) = mu (C - C*)^2 / 2, exactly, after 0, ..., rounds steps: float64 [rounds + 1]."""
    gaps = [descent.gap]
    for _ in range(rounds):
        kept = (1 - descent.mu * descent.step) ** 2 * gaps[-1]
        gaps.append(kept + descent.mu * descent.step**2 * descent.noise**2 / 2)
    return torch.tensor(gaps, dtype=torch.float64)


def simulate_gaps(
    function: Callable[[Tensor], Tensor], start: float, descent: ClipDescent, rounds: int, runs: int, seed: int = 0
) -> Tensor:
    """Gaps of simulated descents on function(C [runs]) -> [runs], whose minimum is 0: float64 [rounds + 1, runs]."""
    generator = torch.Generator().manual_seed(seed)
    C = torch.full((runs,), start, dtype=torch.float64)
    gaps = [function(C)]
    for _ in range(rounds):
        at = C.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(at).sum(), at)
        C = C - descent.step * (slope + descent.noise * torch.randn(runs, generator=generator, dtype=torch.float64))
        gaps.append(function(C))
    return torch.stack(gaps)


# --- a PL function that is not convex ---------------------------------------------------------------

WAVE_MU, WAVE_SMOOTHNESS = 1 / 32, 8.0
"""PL constant and smoothness of `evaluate_wave` (Karimi, Nutini and Schmidt 2016)."""


def evaluate_wave(x: Tensor) -> Tensor:
    """x^2 + 3 sin(x)^2: not convex, one minimum at 0, PL with constant 1/32."""
    return x.square() + 3 * torch.sin(x).square()


@dataclass(frozen=True)
class Minimum:
    """A local minimum of a function of C, and its value."""

    C: float
    value: float


def find_local_minima(
    function: Callable[[Tensor], Tensor], low: float, high: float, points: int = 20_001
) -> list[Minimum]:
    """Local minima of function(C [n]) -> [n] inside [low, high], on a grid; the first point of a level stretch."""
    grid = torch.linspace(low, high, points, dtype=torch.float64)
    values = function(grid)
    found = []
    falls, low_point = True, 0  # from the left end the function is entered downwards
    for place in range(1, points):
        change = float(values[place] - values[place - 1])
        if change > 0 and falls:
            found.append(Minimum(float(grid[low_point]), float(values[low_point])))
        if change != 0:
            falls, low_point = change < 0, place
    if falls:
        found.append(Minimum(float(grid[low_point]), float(values[low_point])))
    return found


def make_tilted_wave(kappa: float, shift: float = 6.0) -> Callable[[Tensor], Tensor]:
    """L_model(C) + kappa C where L_model is the wave around C = shift: PL plus linear. For kappa between 1.55 and 4.73
    it has two local minima, so that it is not PL and descent may end at the worse one."""

    def evaluate(C: Tensor) -> Tensor:
        return evaluate_wave(C - shift) + kappa * C

    return evaluate


def make_clipped_groups(
    groups: tuple[tuple[float, float], ...], start: float, step: float
) -> Callable[[Tensor], Tensor]:
    """L_model(C) of one clipped step without noise on L(theta) = theta^2 / 2, whose examples come in groups.

    groups: (share, gradient) of each group of examples at theta = start. L_model(C) = (start - step g(C))^2 / 2, with
    g(C) the mean of the clipped gradients.
    """
    shares = torch.tensor([share for share, _ in groups], dtype=torch.float64)
    gradients = torch.tensor([gradient for _, gradient in groups], dtype=torch.float64)

    def evaluate(C: Tensor) -> Tensor:
        clipped = torch.sign(gradients) * torch.minimum(gradients.abs(), C[:, None])
        return (start - step * (clipped @ shares)).square() / 2

    return evaluate


TWO_MINIMA_GROUPS = ((0.5, 1.0), (0.3, -2.0), (0.2, 10.0))
"""Most examples have a small gradient, some a larger one the other way, a few a very large one: the mean of the clipped
gradients rises with C, falls, and rises again. A real clipped step whose L_model(C) has two minima."""


def measure_wave_mu(points: int = 200_001, reach: float = 40.0) -> float:
    """The least of |f'|^2 / (2 f) over a grid: the PL constant of `evaluate_wave`, from above."""
    x = torch.linspace(-reach, reach, points, dtype=torch.float64)
    slope = 2 * x + 3 * torch.sin(2 * x)
    value = evaluate_wave(x)
    kept = value > 1e-9
    return float((slope[kept].square() / (2 * value[kept])).min())


def find_printed_violation(descent: ClipDescent, rounds: int) -> tuple[int, float]:
    """The first step whose exact gap on a quadratic is above the printed bound, and by how much; (-1, 0) if none."""
    above = compute_quadratic_gaps(descent, rounds) - descent.bound_as_printed(rounds)
    for t, excess in enumerate(above.tolist()):
        if excess > 1e-12 * max(1.0, descent.gap) and math.isfinite(excess):
            return t, excess
    return -1, 0.0
