"""One local step of many tasks at once: sample, clip, add up, noise, step. The stacked form of `train_client`.

`run_local_step` is for seeded simulations: one tensor program, whose noise is added without rounding to a grid. It
leaves out at most 2^-21 of the noise's standard deviation (`exact_noise.GRID_BITS`); the random numbers are those of
the reference. In real use, and in proven arithmetic, the program ends with the clipped sums (`sum_local_step`), and
`release_local_step` releases each task's sum as all engines do: integers on a grid (`release_rows_with_noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fulcrum.engines.stacked.core import ClippedSums, StackedCore, StackedTasks, compute_clipped_sums
from fulcrum.engines.stacked.draws import draw_normal_rows, draw_uniform_rows
from fulcrum.engines.stacked.rules import StackedState
from fulcrum.engines.stacked.sampling import compact_rows
from fulcrum.privacy.mechanism import (
    GAUSSIAN_MECHANISM,
    Mechanism,
    NoiseMultipliers,
    compute_charged_scale,
    release_rows_with_noise,
)
from fulcrum.privacy.pairwise.integers import round_rows_to_messages
from fulcrum.rng import Randomness, StreamKey
from fulcrum.types import Assignment, Axes, Bounds, View

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
    messages: Tensor | None = None
    """With pairwise masks what leaves instead of an update: integers modulo 2^32, int32 [T, d]."""

    def copy_state(self) -> StepResult:
        """The states in tensors of their own, for what lives longer than the next replay of a graph."""
        return replace(self, state={name: value.clone() for name, value in self.state.items()})

    def copy(self) -> StepResult:
        """All in tensors of its own, for what a replayed graph will overwrite."""
        state = self.copy_state().state
        rest = (self.counts.clone(), self.finite.clone(), self.diagnostics.clone())
        return StepResult(self.theta.clone(), self.extra.clone(), state, *rest, messages=self.messages)


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
    axes: Axes | None = None,
) -> tuple[Tensor, Tensor]:
    """(gradient [T, d], extra [T, J]), per expected unit: what may leave the clients. axes: of each task."""
    multipliers = NoiseMultipliers(terms["noise"], terms["noise_extra"])
    scale = mechanism.scale(Bounds(sums.C, sums.extra_bound), multipliers, terms["asked"])
    total, extra, _ = mechanism.release(sums.sum, sums.extra, scale, (noise, noise_extra), {})
    if view.transform is not None:
        total = vmap(view.transform.inverse)(total)
    batch = terms["batch"][:, None]
    mean = (total / batch).float()
    return mean if axes is None else axes.inverse(mean), (extra / batch).float()


@dataclass(frozen=True)
class StepSums:
    """The clipped sums of a step before noise, and how many units each task sampled [T]."""

    sums: ClippedSums
    counts: Tensor


def sum_local_step(
    core: StackedCore,
    pad: int,
    rounds: int,
    order: Tensor,
    *,
    theta: Tensor,
    state: StackedState,
    terms: StepTerms,
    uniforms: Tensor,
    t: Tensor,
) -> StepSums:
    """Samples and clipped sums of T tasks that have their own weights (theta [T, d]) or share them (theta [1, d])."""
    rows, mask, counts = sample_dataset_rows(order, terms, uniforms, pad)
    shape = (len(theta), len(uniforms) // len(theta), pad)
    numbers = (terms["sigma"], terms["batch"], terms["lr"])
    tasks = StackedTasks(theta, rows.view(shape), mask.view(shape), state, *numbers, t, rounds)
    return StepSums(compute_clipped_sums(core, tasks), counts)


def _end_step(
    core: StackedCore,
    found: StepSums,
    theta: Tensor,
    terms: StepTerms,
    released: tuple[Tensor, Tensor],
    t: Tensor,
    rounds: int,
) -> StepResult:
    """The step itself, and the rule's own step, from what was released: (gradient [T, d], extra [T, J])."""
    gradient, extra = released
    change = -terms["lr"][:, None] * (gradient + terms["weight_decay"][:, None] * theta)
    after = found.sums.state
    if core.problem.rule.when == "step":
        public = (terms["noise"] / terms["batch"], terms["asked"])
        steps = torch.ones_like(terms["lr"])
        _, after, _ = core.rule.adapt(after, change, extra, terms["lr"], steps, t, rounds, *public)
    return StepResult(theta + change, extra, after, found.counts, found.sums.finite, found.sums.diagnostics)


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
    """A step of T tasks, as one program. noise [T, m] and noise_extra [T, J] are standard normal."""
    given: dict[str, Any] = {"theta": theta, "state": state, "terms": terms, "t": t}
    found = sum_local_step(core, pad, rounds, order, uniforms=uniforms, **given)
    return _finish_local_step(core, found, rounds, noise=noise, noise_extra=noise_extra, **given)


def _finish_local_step(
    core: StackedCore,
    found: StepSums,
    rounds: int,
    *,
    theta: Tensor,
    state: StackedState,
    terms: StepTerms,
    noise: Tensor,
    noise_extra: Tensor,
    t: Tensor,
) -> StepResult:
    """Noise and the step. state: that before the step, which has no part in it."""
    after = found.sums.state
    view, axes = core.rule.get_first_view(after, t, rounds), core.rule.stack_axes(after, t, rounds)
    released = add_noise_and_average(found.sums, terms, noise, noise_extra, view, axes=axes)
    return _end_step(core, found, theta, terms, released, t, rounds)


@dataclass(frozen=True)
class DrawnNumbers:
    """How many random numbers a program draws for each of its tasks: uniforms, normals for sums and for extras."""

    uniforms: int
    noise: int
    noise_extra: int


def draw_and_sum_local_step(
    core: StackedCore, pad: int, rounds: int, order: Tensor, numbers: DrawnNumbers, *, streams: Tensor, **given: Any
) -> StepSums:
    """As `sum_local_step`; the program makes the uniform numbers itself, from streams int32 [1 or 3, T, 11]."""
    uniforms = draw_uniform_rows(streams[0], given["terms"]["size"], numbers.uniforms)
    return sum_local_step(core, pad, rounds, order, uniforms=uniforms, **given)


def draw_and_run_local_step(
    core: StackedCore, pad: int, rounds: int, order: Tensor, numbers: DrawnNumbers, *, streams: Tensor, **given: Any
) -> StepResult:
    """As `run_local_step`; the program makes all random numbers itself, from streams int32 [3, T, 11]."""
    found = draw_and_sum_local_step(core, pad, rounds, order, numbers, streams=streams, **given)
    # Drawn after the sums: what they needed of memory is free by now.
    noise, noise_extra = draw_normal_rows(streams[1], numbers.noise), draw_normal_rows(streams[2], numbers.noise_extra)
    return _finish_local_step(core, found, rounds, noise=noise, noise_extra=noise_extra, **given)


@dataclass(frozen=True)
class TaskRelease:
    """The release of one task's step: the task, whether it releases the rule's statistics, and its noise.

    batch: the expected batch size. place: (round, client, step), and the attempt where it is not 0; it names the
    streams of the noise.
    """

    task: Assignment
    batch: float
    asked: bool
    randomness: Randomness
    place: StreamKey


def release_local_step(
    core: StackedCore,
    found: StepSums,
    theta: Tensor,
    terms: StepTerms,
    releases: Sequence[TaskRelease],
    t: Tensor,
    rounds: int,
) -> StepResult:
    """A step from its clipped sums: each task's release on its grid, then the step. Tasks without one are padding."""
    sums = found.sums
    limits, C = sums.extra_bound.tolist(), sums.C.cpu()
    scales = [
        compute_charged_scale(
            core.problem.rule,
            Bounds(C[i], limits[i]),
            own.task.rate,
            own.task.sigma,
            own.batch,
            own.asked,
            own.task.noise_parties,
        )
        for i, own in enumerate(releases)
    ]
    sources = [(own.randomness, own.place) for own in releases]
    asked = [own.task.message for own in releases if own.task.message is not None]
    if asked:
        messages = round_rows_to_messages(sums.sum, [float(scale.sum) for scale in scales], asked, sources)
        none = sums.sum.new_zeros((len(sums.sum), 0), dtype=torch.float32)
        return StepResult(theta, none, sums.state, found.counts, sums.finite, sums.diagnostics, messages)
    total, extra = release_rows_with_noise(sums.sum, sums.extra, scales, sources)
    view, axes = core.rule.get_first_view(sums.state, t, rounds), core.rule.stack_axes(sums.state, t, rounds)
    gradient = total if view.transform is None else vmap(view.transform.inverse)(total)
    batch = terms["batch"][:, None]
    mean = gradient / batch
    mean = mean if axes is None else axes.inverse(mean)
    return _end_step(core, found, theta, terms, (mean, extra / batch), t, rounds)
