"""Rules with constant C: no clipping, and the classic fixed norm."""

from __future__ import annotations

import torch

from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, RuleState, Stats, View


def equal_shares(total: float, groups: int) -> torch.Tensor:
    """C for each group [G], so that a unit's whole contribution has norm at most `total`."""
    return torch.full((groups,), total / groups**0.5)


def plain_view(state: RuleState, t: int, rounds: int) -> View:
    """Asks for norms only."""
    return View()


def no_extra(stats: Stats) -> torch.Tensor:
    """An empty table of extra statistics, [B, 0]."""
    return stats.norms.new_zeros((stats.norms.shape[0], 0))


def shrink(norms: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """min(1, C / norm) for each unit and group; 1 where the norm is zero."""
    return torch.clamp(C / norms.clamp_min(torch.finfo(norms.dtype).tiny), max=1.0)


def clip_to_C(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """Scale each unit's gradient to norm at most C; release no extra statistics."""
    return shrink(stats.norms, state["C"]), no_extra(stats), state


def bound_C(state: RuleState) -> Bounds:
    """One unit changes the sum by at most C in each group."""
    return Bounds(state["C"])


def _init_fixed(settings: Clip, shape: ModelFacts) -> RuleState:
    return {"C": equal_shares(settings.C0, shape.count)}


def _init_none(settings: Clip, shape: ModelFacts) -> RuleState:
    return {"C": torch.full((shape.count,), torch.inf)}


def _leave_unclipped(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    return torch.ones_like(stats.norms), no_extra(stats), state


FIXED = ClipRule(
    name="fixed",
    init=_init_fixed,
    view=plain_view,
    clip=clip_to_C,
    bounds=bound_C,
    moves=(),
    summary="clip to a fixed C",
    reference="Abadi et al. 2016",
)

NONE = ClipRule(
    name="none",
    init=_init_none,
    view=plain_view,
    clip=_leave_unclipped,
    bounds=bound_C,
    private=False,
    summary="no clipping, no noise",
    cost="no guarantee",
    reference="McMahan et al. 2017",
)
