"""Rules that scale every gradient to about the same norm, or divide the clipped gradient by C.

For these rules C matters little or not at all, so they are the simplest baselines for any claim that C needs no
tuning. No C makes them plain SGD (`normalises`).
"""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import bound_C, equal_shares, no_extra, plain_view, shrink
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, RuleState, Stats


def _init_normalise(settings: Clip, shape: ModelFacts) -> RuleState:
    return {"C": equal_shares(settings.C0, shape.count), "stability": torch.tensor(settings.stability)}


def _scale_by_auto_s(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """C g / (|g| + gamma): norm close to C, whatever the gradient's norm."""
    return state["C"] / (stats.norms + state["stability"]), no_extra(stats), state


def _scale_by_psac(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """C g / (|g| + r / (|g| + r)): like auto-s for large gradients, but enlarges small ones less."""
    r = state["stability"]
    return state["C"] / (stats.norms + r / (stats.norms + r)), no_extra(stats), state


def _clip_in_units_of_C(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """The clipped gradient divided by C, so that the noised mean is g~ / C."""
    C = state["C"]
    return shrink(stats.norms, C) / torch.linalg.vector_norm(C), no_extra(stats), state


def _bound_by_one(state: RuleState) -> Bounds:
    """One unit changes a sum in units of C by at most 1 in total."""
    return Bounds(state["C"] / torch.linalg.vector_norm(state["C"]))


AUTO_S = ClipRule(
    name="auto-s",
    init=_init_normalise,
    view=plain_view,
    clip=_scale_by_auto_s,
    bounds=bound_C,
    normalises=True,
    moves=(),
    summary="every gradient scaled to norm C0 |g| / (|g| + stability)",
    reference="Bu et al. 2022",
)

PSAC = ClipRule(
    name="psac",
    init=_init_normalise,
    view=plain_view,
    clip=_scale_by_psac,
    bounds=bound_C,
    normalises=True,
    moves=(),
    summary="gradients scaled to about C0, small ones less than by auto-s",
    reference="Xia et al. 2023 (DP-PSAC)",
)

UNITS_OF_C = ClipRule(
    name="units-of-c",
    init=_init_normalise,
    view=plain_view,
    clip=_clip_in_units_of_C,
    bounds=_bound_by_one,
    normalises=True,
    moves=(),
    summary="clip to C0, and step by eta g~ / C0",
    reference="folklore; for small C it is auto-s",
)
