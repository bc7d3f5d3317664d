"""DP-MacAdam (Tasnim, Sankar and Kosut, arXiv 2606.05435): clipping and Adam from one set of released moments.

Each gradient is centred by the released mean m, divided by a bound b per coordinate, and clipped to norm 1; the noised
mean w of these gives g = b w + m. All that moves follows from g, so none of it costs privacy:

    m_t, v_t: Adam's moments of g, with their bias corrected;    u = (g - m_{t-1}) (g - m_t)
    s_t = beta_1 s_{t-1} + (1 - beta_1) u;    s = clamp(s_t / kappa_t - (b noise)^2, h_1, h_2)
    b_t = s^(1/4) (sum over coordinates of s^(1/2))^(1/2);    theta <- theta - eta m_t / (v_t^(1/2) + gamma)

with kappa_t = 2 (beta_1 - beta_1^t) / (1 + beta_1), for which s_t / kappa_t has exactly the mean of the variance of g,
and `noise` the known noise of w. Here m, b and the moments are
those of the federation's aggregate: a change of coordinates that all parties share. What remains to be chosen is the
learning rate: eta is 0.01 train.lr, so that Adam's usual range is within a factor of ten of train.lr = 1. b starts at
clip.C0 for all coordinates. The paper's h_1 and h_2 were not at hand: of 1e-12 to 1e-3 on three runs on the digits,
h_1 near 1/d was the best, and with the smallest the coordinates whose variance is lost in the noise take all of the
clipped norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulcrum.clipping.fixed import bound_C, clip_to_C, equal_shares
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import Axes, Released, RuleState, View

BETA_1, BETA_2 = 0.9, 0.999
GAMMA = 1e-8
LEAST_VARIANCE, LARGEST_VARIANCE = 1.0, 100.0
"""h_1 and h_2, divided by the number of parameters: where all coordinates are at h_1, b is 1."""
ETA = 0.01
"""Adam's learning rate at train.lr = 1."""


@dataclass(frozen=True)
class Moments:
    """After a release: the running averages m, v, s [d], the number of rounds, and m and v without bias."""

    m: torch.Tensor
    v: torch.Tensor
    s: torch.Tensor
    count: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor


def _init_macadam(settings: Clip, shape: ModelFacts) -> RuleState:
    zeros = torch.zeros(shape.dim)
    return {
        "C": equal_shares(1.0, shape.count),
        "scale": torch.full((shape.dim,), settings.C0),
        "centre": zeros,
        **{name: zeros.clone() for name in ("m", "v", "s")},
        "count": torch.tensor(0.0),
    }


def _view_axes(state: RuleState, t: int, rounds: int) -> View:
    return View(axes=Axes(state["centre"], state["scale"]))


def update_moments(state: RuleState, released: Released) -> Moments:
    """The moments after this release."""
    g = -released.aggregate / (released.lr * released.steps)
    count = state["count"] + 1
    m, v = BETA_1 * state["m"] + (1 - BETA_1) * g, BETA_2 * state["v"] + (1 - BETA_2) * g.square()
    mean, square = m / (1 - BETA_1**count), v / (1 - BETA_2**count)
    s = BETA_1 * state["s"] + (1 - BETA_1) * (g - mean) * (g - state["centre"])
    return Moments(m, v, s, count, mean, square)


def _apply_adam(state: RuleState, released: Released) -> torch.Tensor:
    now = update_moments(state, released)
    return -ETA * released.lr * now.mean / (now.square.sqrt() + GAMMA)


def _adapt_axes(state: RuleState, released: Released) -> RuleState:
    now = update_moments(state, released)
    kappa = 2 * (BETA_1 - BETA_1**now.count) / (1 + BETA_1)
    dim = now.s.numel()
    noise = torch.as_tensor(released.noise, device=now.s.device).square() * state["scale"].square()
    variance = (now.s / kappa.clamp_min(1e-30) - noise).clamp(LEAST_VARIANCE / dim, LARGEST_VARIANCE / dim)
    scale = variance.sqrt().sqrt() * variance.sqrt().sum().sqrt()
    return {
        **state,
        "m": now.m,
        "v": now.v,
        "s": now.s,
        "count": now.count,
        "centre": now.mean,
        "scale": torch.where(now.count > 1, scale, state["scale"]),  # one release has no variance
    }


MACADAM = ClipRule(
    name="macadam",
    init=_init_macadam,
    view=_view_axes,
    clip=clip_to_C,
    bounds=bound_C,
    adapt=_adapt_axes,
    apply=_apply_adam,
    normalises=True,
    moves=("centre", "scale"),
    summary="centred, scaled per coordinate and clipped by released moments, which also make Adam's step",
    reference="Tasnim, Sankar and Kosut 2026 (DP-MacAdam)",
)
