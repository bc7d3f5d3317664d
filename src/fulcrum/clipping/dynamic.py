"""Dynamic DP (Du et al. 2021): C decreases over the rounds by a public schedule, C_t = C0 rho_c^(t/T).

The other half of that method, decreasing noise (sigma_t = sigma rho_mu^(t/T)), is a noise schedule:
privacy.noise_schedule = "growth". The preset `dynamic` sets both, and sigma is solved so that all rounds,
composed by RDP or PLD, cost the target epsilon; the paper uses a central-limit estimate instead.
"""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import bound_C, clip_to_C, equal_shares, plain_view
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import Released, RuleState


def _init_dynamic(settings: Clip, shape: ModelFacts) -> RuleState:
    start = equal_shares(settings.C0, shape.count)
    return {"C": start, "start": start.clone(), "rho_c": torch.tensor(settings.rho_c)}


def _follow_schedule(state: RuleState, released: Released) -> RuleState:
    """The C of the next round. A round without participants leaves C unchanged."""
    progress = (released.round + 1) / released.rounds
    return {**state, "C": state["start"] * state["rho_c"] ** progress}


DYNAMIC = ClipRule(
    name="dynamic",
    init=_init_dynamic,
    view=plain_view,
    clip=clip_to_C,
    bounds=bound_C,
    adapt=_follow_schedule,
    moves=(),
    summary="C falls by a public schedule, C0 rho_c^(t/T)",
    reference="Du et al. 2021",
)
