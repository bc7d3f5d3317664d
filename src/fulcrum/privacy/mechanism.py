"""The one mechanism: it noises a clipped sum and the rule's extra statistics, and says what happened.

Rules say what a unit can change (`Bounds`); the scale of the noise and the event both follow from
that here, so no rule can misstate its cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulcrum.clipping.rule import ClipRule, alone
from fulcrum.privacy.events import Event, Gaussian, Unprotected
from fulcrum.rng import Key, Randomness
from fulcrum.types import Bounds


@dataclass(frozen=True)
class Scales:
    """Standard deviations of the noise on the sum and on the extra statistics, and the event.

    asked is False in a step that keeps its extra statistics to itself.
    """

    sum: float | torch.Tensor
    extra: float
    event: Event
    asked: bool = True


def scales(
    rule: ClipRule, bounds: Bounds, rate: float, sigma: float, batch: float, asked: bool = True, shares: int = 1
) -> Scales:
    """Noise for one release at multiplier `sigma`, split between the sum and the extra statistics.

    The pair costs exactly one Gaussian release at sigma: the precisions (1 - s)/sigma^2 on the sum,
    scaled by its bound, and s/sigma^2 on the extra, scaled by its own, add up to 1/sigma^2. A step that
    is not asked for its extra has the same noise on the sum, and costs only that.

    With `shares` parties to one dose of noise, this one's part has 1/shares of the variance, and the event is that
    of the sum over them all: the only thing that may be shown to anybody (privacy.aggregation).
    """
    if sigma == 0 or not rule.private:
        return Scales(0.0, 0.0, Unprotected(), asked)
    share = rule.share(sigma, batch)
    if shares > 1:
        if share > 0:
            raise ValueError("parties share the noise of gradients only, and this rule releases statistics too")
        return Scales(torch.linalg.vector_norm(bounds.C) * sigma / shares**0.5, 0.0, Gaussian(rate, sigma), asked)
    on_sum = alone(rule.share, sigma, batch)
    reach = torch.linalg.vector_norm(bounds.C)
    if not asked:
        return Scales(reach * on_sum, 0.0, Gaussian(rate, on_sum), asked)
    return Scales(reach * on_sum, sigma / share**0.5 * bounds.extra if share > 0 else 0.0, Gaussian(rate, sigma))


def hold(
    rule: ClipRule, factors: torch.Tensor, extra: torch.Tensor, norms: torch.Tensor, bounds: Bounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [B, G] and extra rows [B, J], cut down to the bounds the rule itself stated.

    A sound rule passes through unchanged; one whose `clip` and `bounds` disagree would otherwise make
    epsilon a lie. Rules marked not sound are left as they are: their epsilon is nominal anyway.
    """
    if not (rule.sound and rule.private):
        return factors, extra
    tiny = torch.finfo(norms.dtype).tiny
    allowed = bounds.C * (1 + 1e-6) / norms.clamp_min(tiny)  # room for rounding, not for a wrong rule
    rows = torch.linalg.vector_norm(extra, dim=1, keepdim=True).clamp_min(tiny)
    return torch.minimum(factors, allowed), extra * torch.clamp(bounds.extra * (1 + 1e-6) / rows, max=1.0)


def hold_both(
    rule: ClipRule, extra: torch.Tensor, second: torch.Tensor, norms: torch.Tensor, bounds: Bounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Extra rows [B, J] and factors of a second sum [B, G], cut down so that together they keep the bound."""
    if not (rule.sound and rule.private):
        return extra, second
    size = torch.sqrt(extra.square().sum(dim=1) + (second * norms).square().sum(dim=1))
    keep = torch.clamp(bounds.extra * (1 + 1e-6) / size.clamp_min(torch.finfo(norms.dtype).tiny), max=1.0)[:, None]
    return extra * keep, second * keep


def release(
    clipped: torch.Tensor, extra: torch.Tensor, scale: Scales, randomness: Randomness, key: Key
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the noise: (sum [m], extra [J]) -> what may leave the client. Draws from two streams of `key`.

    Extra statistics that were not asked for come out as zeros.
    """
    if not scale.asked:
        extra = torch.zeros_like(extra)
    if isinstance(scale.event, Unprotected):
        return clipped, extra
    noisy = clipped + randomness.normal(("noise", *key), clipped.numel()).to(clipped) * scale.sum
    if extra.numel() == 0 or not scale.asked:
        return noisy, extra
    if scale.extra <= 0:
        raise ValueError("a rule releases extra statistics but gives them no share of the noise (ClipRule.share)")
    return noisy, extra + randomness.normal(("noise-extra", *key), extra.numel()).to(extra) * scale.extra
