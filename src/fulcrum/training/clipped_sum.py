"""The clipped sum of a batch. Each unit's contribution is within the bounds that the rule states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fulcrum.clipping.rule import ClipRule
from fulcrum.gradients.param_grads import DOUBLE_SCRATCH, scratch_ranges, sum_rows_in_float64
from fulcrum.gradients.rounding import NormTable, SquaredNorms, relative_square_error, squared_norms, to_norm_table
from fulcrum.privacy.bounds import apply_rule, choose_sum_margin
from fulcrum.types import NO_MARGIN, Bounds, RuleState, Stats, View


@dataclass(frozen=True)
class Contribution:
    """The clipped sum [m] and extra statistics [J] of a batch, before noise, and their bounds.

    The sum is float64 where the bounds are proven, else of the gradients' type; the statistics are always float64.
    stats, factors [B, G] and losses [B] are the inputs of these sums; never released.
    """

    sum: torch.Tensor
    extra: torch.Tensor
    bounds: Bounds
    state: RuleState
    stats: Stats
    factors: torch.Tensor
    losses: torch.Tensor


def compute_contribution(
    rule: ClipRule,
    view: View,
    state: RuleState,
    gradients: torch.Tensor,
    losses: torch.Tensor,
    groups: torch.Tensor,
    sigma: float = 0.0,
    batch: float = 1.0,
    mask: torch.Tensor | None = None,
    lr: float = 1.0,
    weights: torch.Tensor | None = None,
    proven: bool = False,
    probes: torch.Tensor | None = None,
) -> Contribution:
    """Clip each unit's gradient by the rule and sum. The result has no noise yet and must not be released.

    gradients [B, d], losses [B]; groups [d] is the group of each coordinate. Rows that are not finite,
    and rows where mask [B] is False (padding), count as zero. weights [B] in [0, 1] scale each unit's
    clipped gradient in the sum (client level); the extra statistics stay unweighted. proven: the sum in float64, with
    factors that leave its rounding a margin. probes [B, P]: losses at other weights, where the view asks for them.
    """
    mask = torch.ones(len(gradients), dtype=torch.bool, device=gradients.device) if mask is None else mask
    counted = torch.isfinite(squared_norms(gradients).bounds.sqrt().to(gradients.dtype)) & mask
    if not bool(counted.all()):
        gradients = torch.where(counted[:, None], gradients, torch.zeros_like(gradients))
    losses = torch.where(counted & torch.isfinite(losses), losses, torch.zeros_like(losses))
    where = groups if view.transform is None else view.transform.groups
    coefficients = gradients if view.transform is None else view.transform.forward(gradients)  # [B, m]
    if view.axes is not None:  # what is not counted adds nothing, and neither does what overflows in these coordinates
        moved = view.axes.forward(gradients)
        kept = counted & torch.isfinite(squared_norms(moved).bounds.sqrt().to(moved.dtype))
        coefficients = torch.where(kept[:, None], moved, torch.zeros_like(moved))
    table = measure_group_norms(coefficients, where, len(state["C"]))
    stats = Stats(
        norms=table.norms,
        norm_bounds=table.bounds,
        margin=choose_sum_margin(len(gradients)) if proven else NO_MARGIN,
        mask=mask,
        dots=None if view.direction is None else gradients @ view.direction,
        losses=losses if view.losses else None,
        probes=fill_probes(view, len(gradients), probes, losses),
        sigma=sigma,
        batch=batch,
        lr=lr,
    )

    def add_up(factors: torch.Tensor) -> torch.Tensor:
        return sum_clipped_rows(factors, coefficients, where, proven)

    factors, extra, bounds, state = clip_batch(rule, stats, state, add_up)
    scaled = factors if weights is None else factors * keep_weights(weights, proven)[:, None]
    return Contribution(add_up(scaled), extra, bounds, state, stats, factors, losses)


def fill_probes(view: View, units: int, probes: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Losses at the probes [B, P] as `Stats` has them: zeros in steps that compute none; None where none are wanted."""
    if view.probes is None:
        return None
    return like.new_zeros((units, len(view.probes))) if probes is None else probes


def keep_weights(weights: torch.Tensor, proven: bool = False) -> torch.Tensor:
    """Weights [B] of units, held within [0, 1]; what is not a number is 0. In float64 where bounds are proven."""
    held = torch.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0).clamp(0.0, 1.0)
    return held.double() if proven else held


def clip_batch(
    rule: ClipRule, stats: Stats, state: RuleState, add_up: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Bounds, RuleState]:
    """Apply the rule to a batch: factors [B, G], the summed extra statistics, bounds, next state.

    The statistics are [J], or [J + m] where the rule has a second sum; add_up(factors [B, G]) -> [m] computes
    the sum of the batch's gradients with these factors.
    """
    decision = apply_rule(rule, stats, state)
    second_sum = [] if rule.second is None else [add_up(decision.second_factors).double()]
    summed_extra = torch.cat([decision.extra.sum(dim=0, dtype=torch.float64), *second_sum])
    return decision.factors, summed_extra, decision.bounds, decision.state


def sum_clipped_rows(
    factors: torch.Tensor, coefficients: torch.Tensor, where: torch.Tensor, proven: bool = False
) -> torch.Tensor:
    """Sum over the rows of coefficients [B, m], each coordinate scaled by its group's factor [B, G]: [m].

    proven: in float64.
    """
    # [G, m]: row g counts only in the coordinates of group g
    by_group = sum_rows_in_float64(factors.T, coefficients) if proven else factors.T @ coefficients
    return by_group.gather(0, where[None, :]).squeeze(0)


def measure_group_norms(coefficients: torch.Tensor, where: torch.Tensor, groups: int) -> NormTable:
    """Euclidean norm of each row within each group, with bounds on the error: [B, m], [m] -> [B, G] each."""
    count, size = coefficients.shape
    if groups == 1:
        found = squared_norms(coefficients)
        return to_norm_table(SquaredNorms(*(each[:, None] for each in found)), coefficients.dtype)
    squares = torch.zeros((count, groups), dtype=torch.float64, device=coefficients.device)
    for start, stop in scratch_ranges(count, 16 * size, coefficients.device, DOUBLE_SCRATCH):
        squares[start:stop].index_add_(1, where, coefficients[start:stop].double().square())
    bounds = squares * (1 + relative_square_error(64 * size, torch.float64))
    return to_norm_table(SquaredNorms(squares, bounds, bounds), coefficients.dtype)
