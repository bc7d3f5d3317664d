"""OSO-style: C learned during training by privatised gradient descent, after Galli et al. 2024.

Only the abstract of that work was available, so this is the vector form that it suggests. Raising C slightly
moves the clipped sum along r_t, the sum of the unit gradients of the clipped units. Where the next
gradient s_{t+1} still has that direction, a larger C would have helped:

    C <- C exp(eta_C sign<s_t, r_{t-1}>).

s_t is the released gradient (minus the released update; only the sign matters). r_t is a second noised
vector, of sensitivity 1 whatever C is, released with it: 1/sigma^2 = 1/sigma_s^2 + 1/sigma_r^2 with
sigma_s = 1.01 sigma. With clip.groups = layer a clipped layer counts with its share of C.
"""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import clip_to_C, equal_shares, plain_view
from fulcrum.clipping.rule import ClipRule, ModelFacts, has_statistics
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, Released, RuleState, Stats

STATISTICS_SHARE = 1 - 1.01**-2
"""sigma_s = 1.01 sigma leaves this part of the precision, sigma_r = 7.1 sigma, to the second vector."""


def fixed_statistics_share(sigma: float, batch: float) -> float:
    """2% of the precision goes to the statistics: 1% more noise on the gradient."""
    return STATISTICS_SHARE


def _init_oso(settings: Clip, shape: ModelFacts) -> RuleState:
    return {
        "C": equal_shares(settings.C0, shape.count),
        "r": torch.zeros(shape.dim),
        "eta_C": torch.tensor(settings.eta_C),
        "C_min": torch.tensor(settings.C_min),
        "C_max": torch.tensor(settings.C_max),
    }


def compute_unit_factors(stats: Stats, state: RuleState) -> torch.Tensor:
    """Factors [B, G] of the sum over clipped units of g / |g|: how the clipped sum moves per unit of C."""
    C = state["C"]
    each = C / torch.linalg.vector_norm(C) / stats.norms.clamp_min(torch.finfo(stats.norms.dtype).tiny)
    return torch.where(stats.norms > C, each, torch.zeros_like(each))


def _bound_unit_sum(state: RuleState) -> Bounds:
    return Bounds(state["C"], extra=1.0)


def _adapt_by_sign(state: RuleState, released: Released) -> RuleState:
    total = torch.linalg.vector_norm(state["C"])
    step = state["eta_C"] * torch.sign(-torch.dot(released.aggregate, state["r"]))
    moved = torch.clamp(total * torch.exp(step), state["C_min"], state["C_max"])
    latest = torch.where(has_statistics(state, released), released.extra, state["r"])
    return {**state, "C": state["C"] * (moved / total), "r": latest}


OSO = ClipRule(
    name="oso",
    init=_init_oso,
    view=plain_view,
    clip=clip_to_C,
    bounds=_bound_unit_sum,
    adapt=_adapt_by_sign,
    share=fixed_statistics_share,
    second=compute_unit_factors,
    summary="C learned from a second noised vector (OSO-style)",
    cost="paid: 1% more noise",
    reference="after Galli et al. 2024",
)
