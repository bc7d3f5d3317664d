"""HyFreeDP (Liu and Bu, ICLR 2025) in a sound form: automatic clipping, and a step length from noised losses.

Every gradient is scaled to norm eta / lr, so that a local step of agreeing gradients has length eta, whatever the
learning rate; eta starts at train.lr, and clip.C0 has no effect. Every fifth round (clip.statistics_rounds) the parties
also release three sums of losses, each limited to [0, R]: at the weights before the last step of the server
(theta - moved), after it (theta), and as far on the other side (theta - 2 moved). A parabola through the three means
L_0, L_+ and L_- has its minimum at b / a steps:

    b = (L_- - L_+) / 2,   a = L_+ + L_- - 2 L_0;   where a > 0 and b > 0: eta <- 0.1 eta + 0.9 eta clamp(b / a, 1/2, 2)
    R <- max(L_0, 0.01)

What differs from the paper. There, losses are accounted as if their batch were sampled apart from the gradient's. It is
the same batch: at q = 0.02 and epsilon 6.38 that allows a true epsilon of 13.8. Here a step with losses is one
joint Gaussian release over one sample, (sigma_g^-2 + 3 sigma_l^-2)^(-1/2), and the plan composes both kinds of steps.
There the losses are those around the coming step, in a second message; here those around the last one, in the same
message as the gradient: the direction is known before the batch is drawn, so one message is enough and the
losses do not favour the batch that chose it. The share of the precision makes the gradient's noise 1.01 times
that of DP-SGD in all rounds, to first order.
"""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import equal_shares
from fulcrum.clipping.rule import ClipRule, ModelFacts, has_statistics
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, Released, RuleState, Stats, View

PROBE_ROUNDS = 5
GRADIENT_NOISE = 1.01
"""Noise of the gradient in all rounds, as a multiple of DP-SGD's at the same epsilon."""
LOSS_SHARE = 1 - 1 / (PROBE_ROUNDS * GRADIENT_NOISE**2 - (PROBE_ROUNDS - 1))
"""Share of a probe round's precision: PROBE_ROUNDS / sigma^2 = (PROBE_ROUNDS - 1) / sigma_g^2 + 1 / sigma_probe^2."""
KEEP = 0.1
FIRST_LIMIT, LEAST_LIMIT = 1.0, 0.01
PROBES = (-1.0, 0.0, -2.0)
"""Where losses are wanted, in units of the last change of the weights, from the current ones: L_0, L_+, L_-."""


def _init_hyfree(settings: Clip, shape: ModelFacts) -> RuleState:
    return {
        "C": equal_shares(1.0, shape.count),
        "moved": torch.zeros(shape.dim),
        "limit": torch.tensor(FIRST_LIMIT),
        "stability": torch.tensor(settings.stability),
        "C_min": torch.tensor(settings.C_min),
        "C_max": torch.tensor(settings.C_max),
    }


def _view_last_step(state: RuleState, t: int, rounds: int) -> View:
    return View(probes=torch.stack([factor * state["moved"] for factor in PROBES]))


def _scale_and_limit_losses(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    assert stats.probes is not None  # the view asks for them
    # A loss that is not a number counts as 0, an infinite one as the limit.
    losses = torch.nan_to_num(stats.probes, nan=0.0).clamp_min(0.0)
    limited = torch.minimum(losses, state["limit"]) * stats.mask[:, None]
    return state["C"] / (stats.norms + state["stability"]), limited, state


def _bound_losses(state: RuleState) -> Bounds:
    return Bounds(state["C"], extra=state["limit"] * len(PROBES) ** 0.5)


def _share_of_losses(sigma: float, batch: float) -> float:
    return LOSS_SHARE


def _adapt_by_parabola(state: RuleState, released: Released) -> RuleState:
    before, after, behind = released.extra.unbind()
    slope, bend = (behind - after) / 2, after + behind - 2 * before
    best = (slope / bend.clamp_min(1e-12)).clamp(0.5, 2.0)
    asked = has_statistics(state, released)
    known = asked & (slope > 0) & (bend > 0) & (state["moved"] != 0).any()
    total = torch.linalg.vector_norm(state["C"])
    wanted = (total * (KEEP + (1 - KEEP) * best)).clamp(state["C_min"], state["C_max"])
    moved = released.aggregate if released.moved is None else released.moved
    return {
        **state,
        "C": torch.where(known, state["C"] * (wanted / total), state["C"]),
        "limit": torch.where(asked, before.clamp_min(LEAST_LIMIT), state["limit"]).to(state["limit"]),
        "moved": moved.to(state["moved"]),
    }


HYFREE = ClipRule(
    name="hyfree",
    init=_init_hyfree,
    view=_view_last_step,
    clip=_scale_and_limit_losses,
    bounds=_bound_losses,
    adapt=_adapt_by_parabola,
    share=_share_of_losses,
    normalises=True,
    moves=("C", "moved", "limit"),
    summary="every gradient scaled to one norm; the step length from noised losses around the last step",
    cost="paid: 1% more noise",
    reference="Liu and Bu 2025 (HyFreeDP), accounted as one release per batch",
)
