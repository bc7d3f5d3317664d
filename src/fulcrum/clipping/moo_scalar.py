"""Two variants of moo-c: one C per client, and a C learned from a released number that costs privacy.

`moo-client` is moo-c with a C for each client, adapted by that client's own releases: no extra cost, but noisier.

`moo-scalar` pays for a better estimate. With its gradient each client releases

    a_k = sum over clipped units i of <v, g_i / |g_i|> + noise,

which one unit changes by 1 at most, whatever C and d are. v is the unit vector of the remembered gradient,
which is minus the moving average of released updates. A = sum of w_k a_k / (N q n_k), a_k summed over the N
steps, replaces moo-c's alignment, and C moves as in moo-c. It counts clipped units only, so its signal
vanishes when raising C no longer changes anything. It is based on the exact one-step derivative

    dL/dC = -(eta/B) <grad L(theta'), sum over clipped i of g_i/|g_i| + sigma z>,     z the noise drawn,

with the remembered direction in place of grad L(theta'). The number takes 2% of the precision (its noise is
7.1 sigma, the gradient's 1.01 sigma). With clip.groups = layer a unit counts as clipped, with its whole gradient,
if any of its layers is clipped.
"""

from __future__ import annotations

import dataclasses

import torch

from fulcrum.clipping.fixed import shrink
from fulcrum.clipping.moo import MOO_C, compute_log_step
from fulcrum.clipping.oso import fixed_statistics_share
from fulcrum.clipping.rule import has_statistics
from fulcrum.types import Bounds, Released, RuleState, Stats, View

MOO_CLIENT = dataclasses.replace(
    MOO_C, name="moo-client", where="client", summary="as moo-c, one C a client, from its own releases"
)


def _view_along_memory(state: RuleState, t: int, rounds: int) -> View:
    """v: the unit vector of the remembered gradient (updates point the other way); zero with no memory."""
    memory = state["memory"]
    return View(direction=-memory / torch.linalg.vector_norm(memory).clamp_min(1e-30))


def _clip_and_project(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    assert stats.dots is not None  # the view asks for them
    norms = torch.linalg.vector_norm(stats.norms, dim=1)
    clipped = (stats.norms > state["C"]).any(dim=1)
    part = stats.dots / norms.clamp_min(torch.finfo(norms.dtype).tiny)  # in [-1, 1]
    return shrink(stats.norms, state["C"]), torch.where(clipped, part, torch.zeros_like(part))[:, None], state


def _bound_projection(state: RuleState) -> Bounds:
    return Bounds(state["C"], extra=1.0)


def _adapt_to_projection(state: RuleState, released: Released) -> RuleState:
    total = torch.linalg.vector_norm(state["C"])
    step = torch.where(
        has_statistics(state, released), compute_log_step(state, released.extra[0]), torch.zeros_like(total)
    )
    moved = torch.clamp(total * torch.exp(step), state["C_min"], state["C_max"])
    memory = state["beta"] * state["memory"] + (1 - state["beta"]) * released.aggregate
    return {**state, "C": state["C"] * (moved / total), "memory": memory}


def _describe_projection(state: RuleState, released: Released) -> dict[str, torch.Tensor]:
    """The released projection takes the place of the alignment; 0 in a round that released none."""
    seen = torch.where(has_statistics(state, released), released.extra[0], torch.zeros_like(released.extra[0]))
    return {"alignment": seen, "penalty": state["kappa"] * torch.linalg.vector_norm(state["C"])}


MOO_SCALAR = dataclasses.replace(
    MOO_C,
    name="moo-scalar",
    view=_view_along_memory,
    clip=_clip_and_project,
    bounds=_bound_projection,
    adapt=_adapt_to_projection,
    course=_describe_projection,
    share=fixed_statistics_share,
    moves=("C", "memory"),
    summary="as moo-c, from one noised number a client: how its clipped units lie along the direction",
    cost="paid: 1% more noise",
)
