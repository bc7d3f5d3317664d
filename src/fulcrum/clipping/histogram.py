"""DC-SGD (Wei et al. 2025), form E: C minimises the squared error predicted by a noised histogram of norms.

Once per epoch (clip.statistics_interval = 1) every client releases, with its gradient, a histogram of its norms in
20 bins, with noise sigma_H = max(6, 5 sigma). One unit is in one bin, so the sensitivity is 1. The server
averages the histograms and chooses the C that minimises

    (noise of the mean gradient)^2 + bias = (nu C)^2 d + E[(|g| - C)_+^2],

where nu C is the noise of one step's released mean along one direction: sigma C / B for one client of
expected batch B, less for the mean of several clients. Steps with a histogram cost sigma, the others
sigma_T = (sigma^-2 - sigma_H^-2)^(-1/2), the noise of every gradient; the plan composes both.

Differences from the paper: the bins cover 0 to 4 C for the current C (the last bin also holds larger norms), so that
no range must be known; negative counts are set to 0; one C for the federation, from all histograms.
"""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import equal_shares, plain_view, shrink
from fulcrum.clipping.rule import ClipRule, ModelFacts, has_statistics
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, Released, RuleState, Stats

NUM_BINS = 20
HISTOGRAM_RANGE = 4.0
"""Upper end of the bins in units of C; the last bin also holds larger norms."""
NUM_CANDIDATES = 97
"""Values of C that are compared, from C/32 to 4 C in equal ratios."""


def _init_histogram(settings: Clip, shape: ModelFacts) -> RuleState:
    return {
        "C": equal_shares(settings.C0, shape.count),
        "dim": torch.tensor(float(shape.dim)),
        "C_min": torch.tensor(settings.C_min),
        "C_max": torch.tensor(settings.C_max),
    }


def _clip_and_bin_norms(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    total = torch.linalg.vector_norm(stats.norms, dim=1) / torch.linalg.vector_norm(state["C"])  # [B], in units of C
    bins = torch.clamp(torch.floor(total * (NUM_BINS / HISTOGRAM_RANGE)), max=NUM_BINS - 1)
    row = (bins[:, None] == torch.arange(NUM_BINS, device=bins.device)).to(total)  # [B, 20]: one 1 in each
    return shrink(stats.norms, state["C"]), row, state


def _bound_histogram(state: RuleState) -> Bounds:
    return Bounds(state["C"], extra=1.0)


def _histogram_share(sigma: float, batch: float) -> float:
    return (sigma / max(6.0, 5 * sigma)) ** 2


def _minimise_predicted_error(state: RuleState, released: Released) -> RuleState:
    total = torch.linalg.vector_norm(state["C"])
    counts = released.extra.clamp_min(0.0)
    weights = counts / counts.sum().clamp_min(1e-12)
    middles = (torch.arange(NUM_BINS, device=total.device) + 0.5) * (HISTOGRAM_RANGE / NUM_BINS)  # in units of C
    candidates = torch.logspace(-5, 2, NUM_CANDIDATES, base=2.0, device=total.device)
    bias = ((middles - candidates[:, None]).clamp_min(0.0).square() * weights).sum(dim=1)
    noise = released.noise * released.steps**0.5  # noise of one step; the noise of the round's mean is smaller
    error = (noise * candidates).square() * state["dim"] + bias
    best = candidates.gather(0, error.argmin().unsqueeze(0)).squeeze(0)
    moved = torch.clamp(total * best, state["C_min"], state["C_max"])
    known = has_statistics(state, released) & (counts.sum() > 0)
    return {**state, "C": torch.where(known, state["C"] * (moved / total), state["C"])}


DC_SGD = ClipRule(
    name="dc-sgd",
    init=_init_histogram,
    view=plain_view,
    clip=_clip_and_bin_norms,
    bounds=_bound_histogram,
    adapt=_minimise_predicted_error,
    share=_histogram_share,
    summary="C of the least squared error, from a noised histogram of norms once an epoch",
    cost="paid: one step an epoch costs 4% more precision",
    reference="Wei et al. 2025",
)
