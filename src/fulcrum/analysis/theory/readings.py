"""Equation A2 of the paper, dL/dC = kappa - (dL_model/dC) / C, in each reading: sign, fixed point, stability.

The objective is L(C) = L_model(C) + kappa C, so its derivative is kappa + L_model'(C). A2 differs in sign and by the
factor 1/C. A step C <- C - eta_C h(C) with drift h rests where h = 0, and returns there if h rises through 0.

    right            kappa + L'(C)                               rests at the minimum of L
    printed          kappa - L'(C) / C                           rests where L' = kappa C > 0: beyond the minimum of
    L_model
    loss             kappa - mean l_i / C                        rests at mean loss / kappa, whatever C does to the
    model
    hypergradient    kappa - eta mean |g_i| 1[|g_i| > C]         rests where the clipped mass pays kappa, or at C_min
    derivative       kappa + eta mean |g_i| 1[|g_i| > C] / C     never 0: C falls to C_min
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

C_FLOOR = 1e-3
"""The paper's lower limit of C."""
Drift = Callable[[float], float]
"""h(C): descent moves C by -eta_C h(C)."""


@dataclass(frozen=True)
class Batch:
    """Losses [n] and gradient norms [n] of examples at one point, and the learning rate of the model."""

    losses: Tensor
    norms: Tensor
    lr: float


@dataclass(frozen=True)
class RestingPoint:
    """Where descent with a reading's drift rests. C: the point, or C_FLOOR. stable: whether descent returns to it.

    reached: False where the drift has no zero, so that C falls to the floor or grows without end.
    """

    C: float
    stable: bool
    reached: bool


def make_drift(reading: str, batch: Batch, kappa: float) -> Drift:
    """h(C) of one of the readings `loss`, `hypergradient`, `derivative`."""
    mean_loss = float(batch.losses.mean())

    def clipped_mass(C: float) -> float:
        return float((batch.norms * (batch.norms > C)).mean())

    readings: dict[str, Drift] = {
        "loss": lambda C: kappa - mean_loss / C,
        "hypergradient": lambda C: kappa - batch.lr * clipped_mass(C),
        "derivative": lambda C: kappa + batch.lr * clipped_mass(C) / C,
    }
    return readings[reading]


READINGS = ("loss", "hypergradient", "derivative")
"""The readings that `clip.reading` has."""


def make_printed_drift(slope: Drift, kappa: float) -> Drift:
    """A2 to the letter with the true slope L_model'(C)."""
    return lambda C: kappa - slope(C) / C


def make_right_drift(slope: Drift, kappa: float) -> Drift:
    """The derivative of L_model(C) + kappa C."""
    return lambda C: kappa + slope(C)


def find_resting_point(drift: Drift, low: float = C_FLOOR, high: float = 1e4, points: int = 4_000) -> RestingPoint:
    """The zero of a drift on [low, high] that is found first from below; stable where the drift rises through it."""
    grid = torch.logspace(
        torch.log10(torch.tensor(low)).item(), torch.log10(torch.tensor(high)).item(), points
    ).tolist()
    values = [drift(C) for C in grid]
    for place in range(1, points):
        before, after = values[place - 1], values[place]
        if (before < 0) != (after < 0):
            return RestingPoint(_bisect(drift, grid[place - 1], grid[place]), stable=before < 0, reached=True)
    falls = values[0] > 0
    return RestingPoint(low if falls else high, stable=True, reached=False)


def _bisect(drift: Drift, low: float, high: float) -> float:
    sign = drift(low) < 0
    for _ in range(80):
        middle = math.sqrt(low * high)
        if (drift(middle) < 0) == sign:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def descend(drift: Drift, start: float, step: float, rounds: int) -> float:
    """C after `rounds` steps C <- max(C - step h(C), C_FLOOR) from `start`."""
    C = start
    for _ in range(rounds):
        C = max(C - step * drift(C), C_FLOOR)
    return C
