"""What was released, never what it costs."""

from __future__ import annotations

from dataclasses import dataclass

# --- privacy events: what happened, never what it costs -------------------------------------


@dataclass(frozen=True)
class Gaussian:
    """One noised sum, released `count` times over fresh Poisson samples.

    Each unit joins with probability `rate`, changes the sum by at most 1 (after scaling), and the
    noise has standard deviation `sigma` in the same scale.
    """

    rate: float
    sigma: float
    count: int = 1


@dataclass(frozen=True)
class Unprotected:
    """Something about the data left without noise, `count` times: no finite epsilon holds."""

    count: int = 1


Event = Gaussian | Unprotected
