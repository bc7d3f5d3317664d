"""Multi-objective clipping: C descends L_model(C) + kappa C, seen through released updates only.

One step ahead, raising log C changes the loss by minus the part of the clipped update that points
downhill, plus a price. The server cannot see the true descent direction, but it has an estimate it
paid for already: the moving average of the updates released so far. With v its unit vector and D_t
the released aggregate of round t,

    A_t = <v_{t-1}, D_t> / (eta N C_t)

is the share of a fully clipped step that keeps going the same way. While A_t > kappa C_t a larger C
would have gone further in a direction that has proved right, so C grows; when the updates stop
agreeing with their past (overshooting, or noise), C shrinks:

    C_{t+1} = clamp(C_t exp(eta_C phi(A_t - kappa C_t)), C_min, C_max),   phi = sign or identity.

Everything here is a function of releases: it costs no privacy. Projecting on one fixed direction
leaves noise sigma/(q n), without the sqrt(d) that the norm of D_t would carry.
"""

from __future__ import annotations

import torch

from fulcrum.clip.fixed import bound_C, clip_to_C, equal_shares, plain_view
from fulcrum.clip.rule import ClipRule, Shape
from fulcrum.config import Clip
from fulcrum.types import Released, State

LARGEST_STEP = 0.3
"""phi = identity moves log C by at most this a round."""


def init_moo(settings: Clip, shape: Shape) -> State:
    """C0 split over the groups, an empty memory, and the settings the update needs."""
    return {
        "C": equal_shares(settings.C0, shape.count),
        "memory": torch.zeros(shape.dim),
        "kappa": torch.tensor(settings.kappa),
        "eta_C": torch.tensor(settings.eta_C),
        "beta": torch.tensor(settings.beta),
        "sign": torch.tensor(settings.phi == "sign"),
        "C_min": torch.tensor(settings.C_min),
        "C_max": torch.tensor(settings.C_max),
    }


def alignment(state: State, released: Released) -> torch.Tensor:
    """A_t: how much of a fully clipped step went along the remembered direction. 0 with no memory."""
    total = torch.linalg.vector_norm(state["C"])
    memory = state["memory"]
    length = torch.linalg.vector_norm(memory)
    along = torch.dot(memory, released.aggregate) / length.clamp_min(1e-30)
    return torch.where(length > 0, along / (released.lr * released.steps * total), 0.0)


def adapt_moo(state: State, released: Released) -> State:
    """Move C along the alignment, then remember this round's release."""
    total = torch.linalg.vector_norm(state["C"])
    gain = alignment(state, released) - state["kappa"] * total
    step = torch.where(
        state["sign"],
        state["eta_C"] * torch.sign(gain),
        (state["eta_C"] * gain).clamp(-LARGEST_STEP, LARGEST_STEP),
    )
    step = torch.where(state["memory"].any(), step, torch.zeros_like(step))
    moved = torch.clamp(total * torch.exp(step), state["C_min"], state["C_max"])
    memory = state["beta"] * state["memory"] + (1 - state["beta"]) * released.aggregate
    return {**state, "C": state["C"] * (moved / total), "memory": memory}


MOO = ClipRule(
    name="moo",
    init=init_moo,
    view=plain_view,
    clip=clip_to_C,
    bounds=bound_C,
    adapt=adapt_moo,
    summary="C learned from the alignment of released updates",
    reference="Ranaweera et al.; sound form of this project",
)
