"""Geyer's rule: C is the median of the batch's norms. It reads raw private values, so it is not sound."""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import bound_C, equal_shares, no_extra, plain_view, shrink
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import RuleState, Stats


def init_median(settings: Clip, shape: ModelFacts) -> RuleState:
    """C is C0 until the first non-empty batch; C_min and C_max bound the median."""
    return {
        "C": equal_shares(settings.C0, shape.count),
        "C_min": torch.tensor(settings.C_min),
        "C_max": torch.tensor(settings.C_max),
    }


def masked_median(norms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Median [G] of the rows of norms [B, G] where mask [B] is True: the mean of the two middle values."""
    ordered = torch.where(mask[:, None], norms, torch.inf).sort(dim=0).values
    count = mask.sum()
    middle = torch.stack([(count - 1) // 2, count // 2]).clamp_min(0)
    return ordered.index_select(0, middle).mean(dim=0)


def clip_to_median(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """g / max(1, ||g|| / C) with C the median of the norms; an empty batch leaves C unchanged."""
    # Two rows of padding, so that the index is valid when the batch is empty.
    padding = stats.norms.new_zeros((2, stats.norms.shape[1]))
    mask = torch.cat([stats.mask, torch.zeros(2, dtype=torch.bool, device=stats.mask.device)])
    median = masked_median(torch.cat([stats.norms, padding]), mask)
    C = torch.where(stats.mask.any(), median.clamp(state["C_min"], state["C_max"]), state["C"])
    return shrink(stats.norms, C), no_extra(stats), {**state, "C": C}


MEDIAN = ClipRule(
    name="median",
    init=init_median,
    view=plain_view,
    clip=clip_to_median,
    bounds=bound_C,
    sound=False,
    normalises=True,  # C0 only matters before the first non-empty batch: no C0 turns clipping off
    summary="C is the median of the norms",
    cost="nominal",
    reference="Geyer et al. 2017",
)
