"""The bounds as a proof step: a rule's factors and statistics, reduced so that no unit exceeds the rule's bounds.

`apply_rule` is the only way from norms to factors, for every engine. What a rule returns is never trusted: factors are
clamped into [0, allowed], and what is not a finite number counts as 0. allowed comes from an upper bound of the true
norm (`Stats.norm_bounds`), so no rounding of a norm can push a contribution over its bound, and leaves the rounding of
the sum its share (`SumMargin`). docs/privacy/bounded-contributions.md has the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fulcrum.clipping.rule import ClipRule
from fulcrum.gradients.rounding import bound_roundings
from fulcrum.types import Bounds, RuleState, Stats, SumMargin

DEFAULT_NORM_ERROR = 2.0**-20
"""Relative error of norms that come without a bound: numbers of float32 that were added up in float64."""

SMALLEST_ETA, USUAL_ETA, LARGEST_ETA = 2.0**-20, 2.0**-10, 0.5
USUAL_SPREAD = 64.0
"""K that is aimed at: products that add up to a gradient may be 64 times as long as the gradient, free of charge."""

SPREAD_IN_OTHER_BASIS = 4096.0
"""K that is aimed at where whole gradients are added up at the factors of one level of another basis."""


FAST_SUM_MARGIN = {
    "float32": SumMargin(0.0, 256.0),
    "tf32": SumMargin(2.0**-9, 128.0),
    "bf16": SumMargin(2.0**-6, 128.0),
}
"""By precision, what `privacy.arithmetic = fast` sets aside for the rounding of its sums: measured, not proven."""


@dataclass(frozen=True)
class RuleDecision:
    """A rule's output for a batch of B units, after its bounds were enforced.

    factors [B, G] scale each unit's gradient in each group. second_factors [B, G]: factors of a second sum; [B, 0]
    without one. extra [B, J]: one row of extra statistics per unit; float64 where the rounding of sums has a margin.
    bounds: of one unit's contribution.
    """

    factors: Tensor
    second_factors: Tensor
    extra: Tensor
    bounds: Bounds
    state: RuleState


def choose_sum_margin(units: int, positions: int = 1, pieces: int = 1, usual_spread: float = USUAL_SPREAD) -> SumMargin:
    """The margin of a float64 sum over `units` gradients, each of which adds `positions` products to a coordinate.

    A coordinate of the sum adds up at most N = units * positions + pieces + 64 numbers, so it is off by at most
    gamma(N) times the sum of their absolute values, and the whole sum by at most

        E = gamma(N) * sum over units of factor * A <= gamma(N) * units * K * C.

    Two neighbours are off by E each, and a second sum likewise: eta = 4 gamma(N) units K. K is `usual_spread` or more
    as long as eta stays below USUAL_ETA. `units` must follow from public numbers and the coins of sampling only.
    """
    unit = 4 * bound_roundings(units * positions + pieces + 64) * max(units, 1)
    eta = min(max(usual_spread * unit, SMALLEST_ETA), USUAL_ETA)
    eta = min(max(eta, 2 * unit), LARGEST_ETA)
    return SumMargin(eta, eta / unit)


def apply_rule(rule: ClipRule, stats: Stats, state: RuleState) -> RuleDecision:
    """Clip a batch by the rule, drop padding, and enforce the rule's bounds. Works under `torch.vmap`."""
    factors, extra, state = rule.clip(stats, state)  # [B, G], [B, J]
    bounds = sanitise_bounds(rule, rule.bounds(state))
    factors, extra = keep_nonnegative(factors), drop_nonfinite_rows(extra, stats.mask)
    limits = NormLimits.of(stats)
    second_factors = factors[:, :0]
    if rule.second is not None:
        second_factors = keep_nonnegative(rule.second(stats, state))
        extra, second_factors = enforce_joint_bound(rule, extra, second_factors, stats.norms, bounds, limits)
    factors, extra = enforce_bounds(rule, factors, extra, stats.norms, bounds, limits)
    return RuleDecision(factors, second_factors, extra, bounds, state)


# --- what is not a number -----------------------------------------------------------------------


def keep_nonnegative(factors: Tensor) -> Tensor:
    """Factors with 0 in place of every negative number, NaN and infinity."""
    return torch.nan_to_num(factors, nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0)


def drop_nonfinite_rows(extra: Tensor, mask: Tensor) -> Tensor:
    """Rows of statistics [B, J] with 0 in place of padding, and of each row with a number that is not finite."""
    if not extra.shape[1]:
        return extra
    kept = torch.isfinite(extra).all(dim=1, keepdim=True) & mask[:, None]
    return torch.where(kept, extra, torch.zeros((), dtype=extra.dtype, device=extra.device))


def sanitise_bounds(rule: ClipRule, bounds: Bounds) -> Bounds:
    """The bounds that a private rule states, with 0 in place of what is negative or not finite: nothing may pass."""
    if not rule.private:
        return bounds
    extra = bounds.extra
    if isinstance(extra, Tensor):
        extra = keep_nonnegative(extra)
    elif not 0 <= extra < math.inf:
        extra = 0.0
    return replace(bounds, C=keep_nonnegative(bounds.C), extra=extra)


# --- bounds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormLimits:
    """Upper bounds of the true norms and A, float64 [B, G] each, and the margin of the sums."""

    norms: Tensor
    lengths: Tensor
    margin: SumMargin

    @staticmethod
    def of(stats: Stats) -> NormLimits:
        """The limits that the statistics of a batch come with."""
        norms = stats.norms.double() * (1 + DEFAULT_NORM_ERROR) if stats.norm_bounds is None else stats.norm_bounds
        return NormLimits(norms, norms if stats.lengths is None else stats.lengths, stats.margin)


def limit_factors(factors: Tensor, C: Tensor, limits: NormLimits, share: float = 1.0) -> Tensor:
    """Factors [B, G], reduced to those with factor * norm <= C (1 - eta) and factor * A <= K C share.

    Computed in float64, then rounded down to the factors' own type. Factors below the limit stay as they are.
    """
    tiny = torch.finfo(torch.float64).tiny
    C = C.double()
    allowed = C * (1 - limits.margin.eta) / limits.norms.clamp_min(tiny)
    if limits.margin.spread < torch.inf:
        allowed = torch.minimum(allowed, C * (limits.margin.spread * share) / limits.lengths.clamp_min(tiny))
    allowed = torch.nan_to_num(allowed * (1 - find_slack(factors)), nan=0.0)  # a norm that is no number: nothing passes
    held = torch.minimum(factors.double(), allowed).to(factors.dtype)
    # Numbers below the smallest normal one round by more than the slack.
    return torch.where(held < torch.finfo(factors.dtype).tiny, torch.zeros_like(held), held)


def enforce_bounds(
    rule: ClipRule, factors: Tensor, extra: Tensor, norms: Tensor, bounds: Bounds, limits: NormLimits | None = None
) -> tuple[Tensor, Tensor]:
    """Factors [B, G] and extra rows [B, J], reduced to the bounds that the rule states.

    If a rule's `clip` and `bounds` disagree, epsilon would be wrong without this. A sound rule's output shrinks by the
    error of the norms and the margin of the sums only. Rules marked not sound are not reduced: their epsilon is
    nominal anyway.
    """
    if not (rule.sound and rule.private):
        return factors, extra
    limits = limits or NormLimits.of(Stats(norms, norms[:, 0] >= 0))
    held = limit_factors(keep_nonnegative(factors), bounds.C, limits)
    if not extra.shape[1]:
        return held, extra.double() if limits.margin.eta else extra
    size = torch.linalg.vector_norm(extra.double(), dim=1, keepdim=True)
    return held, scale_rows_to(extra, size, bounds.extra, limits.margin)


def enforce_joint_bound(
    rule: ClipRule,
    extra: Tensor,
    second_factors: Tensor,
    norms: Tensor,
    bounds: Bounds,
    limits: NormLimits | None = None,
) -> tuple[Tensor, Tensor]:
    """Extra rows [B, J] and factors of a second sum [B, G], reduced so that together they are within `bounds.extra`."""
    if not (rule.sound and rule.private):
        return extra, second_factors
    limits = limits or NormLimits.of(Stats(norms, norms[:, 0] >= 0))
    groups = norms.shape[1]
    bound = bounds.extra.double() if isinstance(bounds.extra, Tensor) else limits.norms.new_full((), bounds.extra)
    # Any group may take all of the bound; of the rounding of the sum each has its share.
    second_factors = limit_factors(second_factors, bound.expand(groups), limits, groups**-0.5)
    reach = torch.nan_to_num(second_factors.double() * limits.norms, nan=0.0)
    size = torch.sqrt(extra.double().square().sum(dim=1) + reach.square().sum(dim=1))[:, None]
    keep = measure_shrinkage(size, bounds.extra, limits.margin, find_slack(second_factors))
    return scale_rows_to(extra, size, bounds.extra, limits.margin), (second_factors * keep).to(second_factors.dtype)


def find_slack(values: Tensor) -> float:
    """Relative reduction of what is limited, for the rounding of the limit itself: in float64, and to this type."""
    return 2 * torch.finfo(values.dtype).eps + 2.0**-48


def measure_shrinkage(size: Tensor, bound: float | Tensor, margin: SumMargin, slack: float) -> Tensor:
    """The factor at most 1 that brings something of this size [B, 1], float64, within the bound."""
    allowed = bound * (1 - margin.eta) * (1 + 2.0**-48)  # a size that equals the bound exactly is within it
    keep = allowed / size.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(keep >= 1, torch.ones_like(keep), keep * (1 - slack))


def scale_rows_to(extra: Tensor, size: Tensor, bound: float | Tensor, margin: SumMargin) -> Tensor:
    """Rows [B, J] of this size [B, 1], scaled down to the bound; in float64 where the sum's rounding has a margin."""
    scaled = extra.double() * measure_shrinkage(size, bound, margin, find_slack(extra))
    return scaled if margin.eta else scaled.to(extra.dtype)
