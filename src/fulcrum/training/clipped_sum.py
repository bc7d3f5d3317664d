"""The clipped sum of a batch. Each unit's contribution is within the bounds that the rule states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fulcrum.clipping.rule import ClipRule
from fulcrum.privacy.bounds import apply_rule
from fulcrum.types import Bounds, RuleState, Stats, View


@dataclass(frozen=True)
class Contribution:
    """The clipped sum [m] and extra statistics [J] of a batch, before noise, and their bounds.

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
) -> Contribution:
    """Clip each unit's gradient by the rule and sum. The result has no noise yet and must not be released.

    gradients [B, d], losses [B]; groups [d] is the group of each coordinate. Rows that are not finite,
    and rows where mask [B] is False (padding), count as zero. weights [B] in [0, 1] scale each unit's
    clipped gradient in the sum (client level); the extra statistics stay unweighted.
    """
    mask = torch.ones(len(gradients), dtype=torch.bool, device=gradients.device) if mask is None else mask
    counted = torch.isfinite(torch.linalg.vector_norm(gradients, dim=1)) & mask
    if not bool(counted.all()):
        gradients = torch.where(counted[:, None], gradients, torch.zeros_like(gradients))
    losses = torch.where(counted & torch.isfinite(losses), losses, torch.zeros_like(losses))
    where = groups if view.transform is None else view.transform.groups
    coefficients = gradients if view.transform is None else view.transform.forward(gradients)  # [B, m]
    stats = Stats(
        norms=compute_group_norms(coefficients, where, len(state["C"])),
        mask=mask,
        dots=None if view.direction is None else gradients @ view.direction,
        losses=losses if view.losses else None,
        sigma=sigma,
        batch=batch,
        lr=lr,
    )
    factors, extra, bounds, state = clip_batch(rule, stats, state, lambda f: sum_clipped_rows(f, coefficients, where))
    scaled = factors if weights is None else factors * weights[:, None]
    return Contribution(sum_clipped_rows(scaled, coefficients, where), extra, bounds, state, stats, factors, losses)


def clip_batch(
    rule: ClipRule, stats: Stats, state: RuleState, add_up: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Bounds, RuleState]:
    """Apply the rule to a batch: factors [B, G], the summed extra statistics, bounds, next state.

    The statistics are [J], or [J + m] where the rule has a second sum; add_up(factors [B, G]) -> [m] computes
    the sum of the batch's gradients with these factors.
    """
    decision = apply_rule(rule, stats, state)
    second_sum = [] if rule.second is None else [add_up(decision.second_factors)]
    summed_extra = torch.cat([decision.extra.sum(dim=0), *second_sum])
    return decision.factors, summed_extra, decision.bounds, decision.state


def sum_clipped_rows(factors: torch.Tensor, coefficients: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Sum over the rows of coefficients [B, m], each coordinate scaled by its group's factor [B, G]: [m]."""
    by_group = factors.T @ coefficients  # [G, m]: row g counts only in the coordinates of group g
    return by_group.gather(0, where[None, :]).squeeze(0)


def compute_group_norms(coefficients: torch.Tensor, where: torch.Tensor, groups: int) -> torch.Tensor:
    """Euclidean norm of each row within each group: [B, m], [m] -> [B, G]."""
    if groups == 1:
        norms: torch.Tensor = torch.linalg.vector_norm(coefficients, dim=1, keepdim=True)
        return norms
    squares = coefficients.new_zeros((coefficients.shape[0], groups))
    return squares.index_add_(1, where, coefficients.square()).sqrt()
