"""One local step of many tasks at once: sample, clip, add up, noise, step. The stacked form of `train_client`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from fulcrum.engines.stacked.core import ClippedSums, StackedCore, StackedTasks, compute_clipped_sums
from fulcrum.engines.stacked.rules import StackedState
from fulcrum.engines.stacked.sampling import compact_rows
from fulcrum.privacy.mechanism import GAUSSIAN_MECHANISM, Mechanism, NoiseMultipliers
from fulcrum.types import Bounds, View

StepTerms = dict[str, Tensor]
"""The public terms of T tasks, each [T]: start and size of its part of `order`; rate; sigma; batch (expected);
noise and noise_extra, the standard deviations in units of the bounds (0: none); lr and weight_decay; asked, 1 where
the step releases the rule's statistics, else 0."""


@dataclass(frozen=True)
class StepResult:
    """After a step: theta [T, d], released extra [T, J], states, and what to check.

    counts [T] are the sampled units (more than the pad: repeat). finite: see `ClippedSums`.
    """

    theta: Tensor
    extra: Tensor
    state: StackedState
    counts: Tensor
    finite: Tensor
    diagnostics: Tensor

    def copy(self) -> StepResult:
        """In tensors of its own, for what a replayed graph will overwrite."""
        state = {name: value.clone() for name, value in self.state.items()}
        rest = (self.counts.clone(), self.finite.clone(), self.diagnostics.clone())
        return StepResult(self.theta.clone(), self.extra.clone(), state, *rest)


def sample_dataset_rows(order: Tensor, terms: StepTerms, uniforms: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the data set [T, pad], mask [T, pad] and counts [T], from uniforms [T, U]."""
    inside = torch.arange(uniforms.shape[1], device=uniforms.device) < terms["size"][:, None]
    places, mask, counts = compact_rows((uniforms < terms["rate"][:, None]) & inside, pad)
    return order[terms["start"][:, None] + places], mask, counts


def add_noise_and_average(
    sums: ClippedSums,
    terms: StepTerms,
    noise: Tensor,
    noise_extra: Tensor,
    view: View,
    mechanism: Mechanism = GAUSSIAN_MECHANISM,
) -> tuple[Tensor, Tensor]:
    """(gradient [T, d], extra [T, J]), per expected unit: what may leave the clients."""
    multipliers = NoiseMultipliers(terms["noise"], terms["noise_extra"])
    scale = mechanism.scale(Bounds(sums.C, sums.extra_bound), multipliers, terms["asked"])
    total, extra, _ = mechanism.release(sums.sum, sums.extra, scale, (noise, noise_extra), {})
    if view.transform is not None:
        total = vmap(view.transform.inverse)(total)
    batch = terms["batch"][:, None]
    return (total / batch).float(), (extra / batch).float()


def run_local_step(
    core: StackedCore,
    pad: int,
    rounds: int,
    order: Tensor,
    *,
    theta: Tensor,
    state: StackedState,
    terms: StepTerms,
    uniforms: Tensor,
    noise: Tensor,
    noise_extra: Tensor,
    t: Tensor,
) -> StepResult:
    """A step of T tasks that have their own weights (theta [T, d]) or share them (theta [1, d]).

    noise [T, m] and noise_extra [T, J] are standard normal.
    """
    count = len(uniforms)
    rows, mask, counts = sample_dataset_rows(order, terms, uniforms, pad)
    sets = len(theta)
    shape = (sets, count // sets, pad)
    numbers = (terms["sigma"], terms["batch"], terms["lr"])
    tasks = StackedTasks(theta, rows.view(shape), mask.view(shape), state, *numbers, t, rounds)
    sums = compute_clipped_sums(core, tasks)
    view, _ = core.rule.view(sums.state, t, rounds)
    gradient, extra = add_noise_and_average(sums, terms, noise, noise_extra, view)
    change = -terms["lr"][:, None] * (gradient + terms["weight_decay"][:, None] * theta)
    after = sums.state
    if core.problem.rule.when == "step":
        public = (terms["noise"] / terms["batch"], terms["asked"])
        _, after = core.rule.adapt(after, change, extra, terms["lr"], torch.ones_like(terms["lr"]), t, rounds, *public)
    return StepResult(theta + change, extra, after, counts, sums.finite, sums.diagnostics)
