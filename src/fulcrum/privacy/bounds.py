"""The bounds as a proof step: a rule's factors and statistics, reduced so that no unit exceeds the rule's bounds.

`apply_rule` is the only way from norms to factors, for every engine. What a rule returns is never trusted: factors are
clamped into [0, allowed], and what is not a number counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.clipping.rule import ClipRule
from fulcrum.types import Bounds, RuleState, Stats


@dataclass(frozen=True)
class RuleDecision:
    """A rule's output for a batch of B units, after its bounds were enforced.

    factors [B, G] scale each unit's gradient in each group. second_factors [B, G]: factors of a second sum; [B, 0]
    without one. extra [B, J]: one row of extra statistics per unit. bounds: of one unit's contribution.
    """

    factors: Tensor
    second_factors: Tensor
    extra: Tensor
    bounds: Bounds
    state: RuleState


def apply_rule(rule: ClipRule, stats: Stats, state: RuleState) -> RuleDecision:
    """Clip a batch by the rule, drop padding, and enforce the rule's bounds. Works under `torch.vmap`."""
    factors, extra, state = rule.clip(stats, state)  # [B, G], [B, J]
    bounds = rule.bounds(state)
    extra = extra * stats.mask[:, None]
    second_factors = factors[:, :0]
    if rule.second is not None:
        second_factors = rule.second(stats, state)
        extra, second_factors = enforce_joint_bound(rule, extra, second_factors, stats.norms, bounds)
    factors, extra = enforce_bounds(rule, factors, extra, stats.norms, bounds)
    return RuleDecision(factors, second_factors, extra, bounds, state)


def enforce_bounds(
    rule: ClipRule, factors: Tensor, extra: Tensor, norms: Tensor, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """Factors [B, G] and extra rows [B, J], reduced to the bounds that the rule states.

    A sound rule's output stays unchanged. If a rule's `clip` and `bounds` disagree, epsilon would be wrong
    without this. Rules marked not sound are left unchanged: their epsilon is nominal anyway.
    """
    if not (rule.sound and rule.private):
        return factors, extra
    tiny = torch.finfo(norms.dtype).tiny
    allowed = bounds.C * (1 + 1e-6) / norms.clamp_min(tiny)  # room for rounding, not for a wrong rule
    rows = torch.linalg.vector_norm(extra, dim=1, keepdim=True).clamp_min(tiny)
    return torch.minimum(factors, allowed), extra * torch.clamp(bounds.extra * (1 + 1e-6) / rows, max=1.0)


def enforce_joint_bound(
    rule: ClipRule, extra: Tensor, second_factors: Tensor, norms: Tensor, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """Extra rows [B, J] and factors of a second sum [B, G], reduced so that together they are within `bounds.extra`."""
    if not (rule.sound and rule.private):
        return extra, second_factors
    size = torch.sqrt(extra.square().sum(dim=1) + (second_factors * norms).square().sum(dim=1))
    keep = torch.clamp(bounds.extra * (1 + 1e-6) / size.clamp_min(torch.finfo(norms.dtype).tiny), max=1.0)[:, None]
    return extra * keep, second_factors * keep
