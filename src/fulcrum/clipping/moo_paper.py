"""The paper's Algorithm 1, step by step, to check the paper's results. NOT SOUND: C is set from raw gradients and
losses of the private batch, so the epsilon of a run with it is nominal.

For each example of the batch, in order: C <- max(C - eta_C grad_C, C_min), then the example is clipped to that
C. The paper writes grad_C = kappa - (dL_model/dC) / C; the meaning of the bracket is ambiguous (`clip.reading`):

    loss            kappa - l_i / C                       kappa C tracks the loss
    hypergradient   kappa - eta |g_i| 1[|g_i| > C]        the one-step derivative, grad L(theta') taken as g_i
    derivative      kappa + eta |g_i| 1[|g_i| > C] / C    equation A2 as printed: C falls to C_min

Each client keeps its own C across rounds. The noise of a batch uses the C after its last example.

`moo-paper-batch` moves C once per batch, by the mean of grad_C over the batch, and clips all examples with the
new C: fast, but one step of eta_C instead of one step per example. With eta_C divided by the size
of the batch, `moo-paper` does the same to first order in eta_C.

Differences from the paper:
* the noise is added once per batch and the model moves once per batch; in the paper both are inside the loop
  over examples, which would noise and apply every example again for each example after it;
* each local step starts from the one before; in the paper each starts from theta_t, so that only the last counts;
* the sum is divided by the expected batch size, not the realised one (which would need its own sensitivity);
* an example whose gradient is not finite counts as one with zero gradient and zero loss.
"""

from __future__ import annotations

import dataclasses

import torch

from fulcrum.clipping.fixed import bound_C, equal_shares, no_extra, shrink
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.settings.schema import Clip
from fulcrum.types import RuleState, Stats, View

PAPER_READINGS = ("loss", "hypergradient", "derivative")


def _init_moo_paper(settings: Clip, shape: ModelFacts) -> RuleState:
    return {
        "C": equal_shares(settings.C0, shape.count),
        "kappa": torch.tensor(settings.kappa),
        "eta_C": torch.tensor(settings.eta_C),
        "C_min": torch.tensor(settings.C_min),
        "reading": torch.tensor([settings.reading == name for name in PAPER_READINGS], dtype=torch.float32),
    }


def _view_losses(state: RuleState, t: int, rounds: int) -> View:
    return View(losses=True)


def _compute_C_gradient(
    loss: torch.Tensor, norm: torch.Tensor, C: torch.Tensor, lr: float, state: RuleState
) -> torch.Tensor:
    """grad_C of examples at C, by the state's `reading`."""
    over = lr * norm * (norm > C)
    readings = torch.stack([-loss / C, -over, over / C], dim=-1)
    return state["kappa"] + (readings * state["reading"]).sum(dim=-1)


def _clip_to_C_path(
    path: torch.Tensor, last: torch.Tensor, stats: Stats, state: RuleState
) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """Clip example i to path[i]; C ends at `last`. Groups keep their shares of C."""
    unit = state["C"] / torch.linalg.vector_norm(state["C"])  # [G]
    return shrink(stats.norms, path[:, None] * unit), no_extra(stats), {**state, "C": unit * last}


def _get_losses_and_norms(stats: Stats) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and total norm of each example."""
    assert stats.losses is not None  # the view asks for them
    return stats.losses, torch.linalg.vector_norm(stats.norms, dim=1)


def _clip_example_by_example(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """C moves with every example, in order; padding leaves C unchanged."""
    losses, norms = _get_losses_and_norms(stats)
    C = torch.linalg.vector_norm(state["C"])
    path = []
    for i in range(len(norms)):
        slope = _compute_C_gradient(losses[i], norms[i], C, stats.lr, state)
        C = torch.where(stats.mask[i], torch.maximum(C - state["eta_C"] * slope, state["C_min"]), C)
        path.append(C)
    return _clip_to_C_path(torch.stack(path) if path else norms, C, stats, state)


def _clip_whole_batch(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
    """C moves once, by the mean slope; an empty batch leaves C unchanged."""
    losses, norms = _get_losses_and_norms(stats)
    C = torch.linalg.vector_norm(state["C"])
    slopes = _compute_C_gradient(losses, norms, C, stats.lr, state) * stats.mask
    slope = slopes.sum() / stats.mask.sum().clamp_min(1)
    C = torch.where(stats.mask.any(), torch.maximum(C - state["eta_C"] * slope, state["C_min"]), C)
    return _clip_to_C_path(C.expand_as(norms), C, stats, state)


MOO_PAPER = ClipRule(
    name="moo-paper",
    init=_init_moo_paper,
    view=_view_losses,
    clip=_clip_example_by_example,
    bounds=bound_C,
    where="client",
    sound=False,
    summary="the paper's Algorithm 1: C moves example by example, from raw values",
    cost="no guarantee",
    reference="Ranaweera et al., Algorithm 1",
)

MOO_PAPER_BATCH = dataclasses.replace(
    MOO_PAPER,
    name="moo-paper-batch",
    clip=_clip_whole_batch,
    summary="Algorithm 1 with one step of C a batch, from raw values",
)
