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

`moo-client` keeps one C a client, moved by that client's own releases. `moo-scalar` pays for a better view:
each client also releases the sum over its clipped units of <v, g_i / |g_i|>, which one unit changes by 1 at
most whatever C and d are; here v points along the remembered gradient, against the remembered update. It
sees only clipped units, so its signal ends when raising C no longer changes anything. It rests on the exact
one-step derivative dL/dC = -(eta/B) <grad L(theta'), sum over clipped i of g_i/|g_i| + sigma z>, with the
remembered direction in place of grad L(theta'). With clip.groups = layer a unit counts as clipped where any
of its layers is, with its whole gradient.
"""

from __future__ import annotations

import dataclasses

import torch

from fulcrum.clip.fixed import bound_C, clip_to_C, equal_shares, plain_view, shrink
from fulcrum.clip.oso import part_of_precision
from fulcrum.clip.rule import ClipRule, Shape, heard
from fulcrum.config import Clip
from fulcrum.types import Bounds, Released, State, Stats, View

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


def move(state: State, released: Released, seen: torch.Tensor) -> State:
    """Move C along the alignment seen, then remember this round's release. C stays while there is no memory."""
    total = torch.linalg.vector_norm(state["C"])
    gain = seen - state["kappa"] * total
    step = torch.where(
        state["sign"],
        state["eta_C"] * torch.sign(gain),
        (state["eta_C"] * gain).clamp(-LARGEST_STEP, LARGEST_STEP),
    )
    step = torch.where(state["memory"].any(), step, torch.zeros_like(step))
    moved = torch.clamp(total * torch.exp(step), state["C_min"], state["C_max"])
    memory = state["beta"] * state["memory"] + (1 - state["beta"]) * released.aggregate
    return {**state, "C": state["C"] * (moved / total), "memory": memory}


def adapt_moo(state: State, released: Released) -> State:
    """Move C along the alignment of the released update with its past."""
    return move(state, released, alignment(state, released))


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

MOO_CLIENT = dataclasses.replace(
    MOO, name="moo-client", where="client", summary="as moo, one C a client, from its own releases"
)


# --- moo-scalar ---------------------------------------------------------------------------------


def _along_memory(state: State, t: int, rounds: int) -> View:
    """v: the unit vector of the remembered gradient (updates point the other way); zero with no memory."""
    memory = state["memory"]
    return View(direction=-memory / torch.linalg.vector_norm(memory).clamp_min(1e-30))


def _clip_scalar(stats: Stats, state: State) -> tuple[torch.Tensor, torch.Tensor, State]:
    assert stats.dots is not None  # the view asks for them
    norms = torch.linalg.vector_norm(stats.norms, dim=1)
    clipped = (stats.norms > state["C"]).any(dim=1)
    part = stats.dots / norms.clamp_min(torch.finfo(norms.dtype).tiny)  # in [-1, 1]
    return shrink(stats.norms, state["C"]), torch.where(clipped, part, torch.zeros_like(part))[:, None], state


def _bound_scalar(state: State) -> Bounds:
    return Bounds(state["C"], extra=1.0)


def _adapt_scalar(state: State, released: Released) -> State:
    moved = move(state, released, released.extra[0])
    return {**moved, "C": torch.where(heard(state, released), moved["C"], state["C"])}


MOO_SCALAR = dataclasses.replace(
    MOO,
    name="moo-scalar",
    view=_along_memory,
    clip=_clip_scalar,
    bounds=_bound_scalar,
    adapt=_adapt_scalar,
    share=part_of_precision,
    summary="as moo, from one noised number a client: how its clipped units lie along the direction",
    cost="paid: 1% more noise",
)
