"""C follows a quantile of the norms (Andrew et al. 2021), one C for the federation.

With its gradient every client releases the number of its units below C, centred so that one unit
changes it by at most 1/2:

    b~ = (sum of (1[|g_i| <= C] - 1/2) + N(0, sigma_b^2)) / m + 1/2,      m the expected batch size,
    C <- C exp(-eta_C (b~ - gamma)).

The sign: if the fraction of units below C exceeds gamma, C shrinks. The count's share of the precision is
sigma^2 / (2 sigma_b)^2 with sigma_b = max(m/20, 5 sigma), so gradient and count together cost as much as a
gradient at sigma alone: the gradient's multiplier is (sigma^-2 - (2 sigma_b)^-2)^(-1/2), which is
always real and at most 0.51% above sigma.

Differences from the paper: the unit is an example (in the paper a client); the server averages the clients' b~ with
their weights. With clip.groups = layer every layer follows the quantile of its own norms, and the
counts' noise is sqrt(layers) times sigma_b, so that the cost stays the same.
"""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import equal_shares, plain_view, shrink
from fulcrum.clipping.rule import ClipRule, ModelFacts, has_statistics
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, Released, RuleState, Stats


def _init_quantile(settings: Clip, shape: ModelFacts) -> RuleState:
    return {
        "C": equal_shares(settings.C0, shape.count),
        "gamma": torch.tensor(settings.gamma),
        "eta_C": torch.tensor(settings.eta_C),
        "C_min": torch.tensor(settings.C_min),
        "C_max": torch.tensor(settings.C_max),
    }


def _clip_and_count(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    below = (stats.norms <= state["C"]).to(stats.norms)
    return shrink(stats.norms, state["C"]), below - 0.5, state


def _bound_count(state: RuleState) -> Bounds:
    return Bounds(state["C"], extra=0.5 * state["C"].shape[-1] ** 0.5)


def _count_share(sigma: float, batch: float) -> float:
    sigma_b = max(batch / 20, 5 * sigma)
    return sigma**2 / (2 * sigma_b) ** 2


def _adapt_to_quantile(state: RuleState, released: Released) -> RuleState:
    excess = released.extra + 0.5 - state["gamma"]
    moved = state["C"] * torch.exp((-state["eta_C"] * excess).clamp(-20.0, 20.0))  # beyond, C exceeds its limits anyway
    total = torch.linalg.vector_norm(moved)
    held = moved * (torch.clamp(total, state["C_min"], state["C_max"]) / total)
    return {**state, "C": torch.where(has_statistics(state, released), held, state["C"])}


QUANTILE = ClipRule(
    name="quantile",
    init=_init_quantile,
    view=plain_view,
    clip=_clip_and_count,
    bounds=_bound_count,
    adapt=_adapt_to_quantile,
    share=_count_share,
    summary="C follows the gamma-quantile of the norms, from a noised count",
    cost="paid: up to 0.5% more noise",
    reference="Andrew et al. 2021",
)
