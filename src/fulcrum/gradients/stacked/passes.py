"""One forward and backward pass over stacked examples, with norms and sums of their gradients.

    tape = run_stacked_pass(program, theta, x, y, task, how)
    norms = tape.norms(groups); total = tape.weighted_sum(factors, groups, segments)

Examples are [S, n]: n for each of S sets of weights. A sum is taken over segments of them: with `segments`
M the n examples are M equal parts (the clients of a run that still share its weights), and sums are [S * M, d].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fulcrum.data.records import ModelInputs, map_inputs
from fulcrum.data.tasks import Task
from fulcrum.gradients.param_grads import scratch_ranges
from fulcrum.gradients.rounding import (
    NormTable,
    SquaredNorms,
    ghost_squared_norms,
    multiply_squared_norms,
    squared_norms,
    to_norm_table,
)
from fulcrum.gradients.stacked import fused
from fulcrum.gradients.stacked.layers import StackedProgram, StackedSite, StackedWeights
from fulcrum.gradients.stacked.plain import ParameterlessLayer
from fulcrum.models.layout import ParameterLayout, call_with_parameters

PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
"""Types of activations. Norms, sums, noise and weights are always float32."""

ROW_ALIGNMENT = 32
"""Elements in 128 bytes: aligned rows of gradients have vectorised reads and writes, whatever d is."""


@dataclass(frozen=True)
class PassOptions:
    """Speed choices of a pass. native: use the library's convolution where all examples share weights.

    careful: also zero the activations and gradients of examples that count as zero, since 0 * NaN is NaN;
    only needed after a non-finite value was found. proven: sums in float64, whatever the precision of the passes.
    """

    precision: str = "float32"
    native: bool = False
    careful: bool = False
    proven: bool = False


def unflatten_stacked(layout: ParameterLayout, theta: Tensor) -> StackedWeights:
    """[S, d] -> each parameter tensor [S, ...]."""
    pieces = theta.split(layout.sizes, dim=1)
    return tuple(p.unflatten(1, s) if len(s) else p[:, 0] for p, s in zip(pieces, layout.shapes, strict=True))


def batched_matmul(a: Tensor, b: Tensor) -> Tensor:
    """A batched product with a float32 result, whatever the type of its inputs."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)  # inputs keep their type, sums are in float32
    return torch.bmm(a.float(), b.float())


MIN_SUM_TERMS = 1024
"""Minimum number of terms per part of a split sum."""


def count_sum_splits(rows: int, positions: int) -> int:
    """Number of equal parts of a sum: the most that divide the examples and keep MIN_SUM_TERMS terms per part."""
    most = rows * positions // MIN_SUM_TERMS
    return next((count for count in range(min(rows, most), 1, -1) if rows % count == 0), 1)


def split_for_float64(rows: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Slices of `rows` things of `elements` numbers each, few enough to be widened to float64 at a time."""
    for start, stop in scratch_ranges(rows, 8 * elements, device, FLOAT64_BYTES):
        yield slice(start, stop)


FLOAT64_BYTES = {"cpu": 4 * 2**20, "cuda": 2 * 2**30}
"""Maximum bytes of numbers that are widened to float64 at a time."""


# --- the tape of a hand-written pass --------------------------------------------------------------


@dataclass
class _StackedSiteUse:
    """A site's input h, its patches a [S, n, P, k] (computed on first use) and output gradient g [S, n, P, o]."""

    site: StackedSite
    h: Tensor
    a: Tensor | None
    g: Tensor = field(default_factory=lambda: torch.empty(0))
    written: Tensor | None = None
    """The gradients of all examples [S, n, o, k], where the norm needed them."""

    added: Tensor | None = None
    """Sum of g over the positions, computed on first use."""

    def bias_gradients(self) -> Tensor:
        """The bias gradient of each example, [S, n, o] in float32."""
        if self.added is None:
            g = self.g
            self.added = g[:, :, 0].float() if g.shape[2] == 1 else g.sum(dim=2, dtype=torch.float32)
        return self.added

    def seen(self) -> Tensor:
        if self.a is None:
            self.a = self.site.extract_input_patches(self.h)
        return self.a

    def squared_norms(self) -> SquaredNorms:
        """Squared norm of each example's weight gradient [S, n], with its bounds."""
        site, a, g = self.site, self.seen(), self.g
        if site.positions == 1:
            return multiply_squared_norms(squared_norms(a, 2), squared_norms(g, 2))
        sets, n = a.shape[:2]
        rows, slopes = a.flatten(0, 1), g.flatten(0, 1)
        if site.ghost:
            found = fused.fused_ghost_squared_norms(rows, slopes)
            if found is None:
                each = site.positions * (site.inputs + site.outputs + 2 * site.positions)
                pieces = [
                    torch.stack(ghost_squared_norms(rows[part].transpose(1, 2), slopes[part]))
                    for part in split_for_float64(sets * n, each, a.device)
                ]
                found = SquaredNorms(*torch.cat(pieces, dim=1))
            return SquaredNorms(*(each.view(sets, n) for each in found))
        self.written = batched_matmul(slopes.transpose(1, 2), rows).view(sets, n, site.outputs, site.inputs)
        return squared_norms(self.written, 2)

    def write(self, place: Tensor) -> None:
        """Writes the weight gradient of each example to `place` [S * n, o * k], in the layout's order."""
        site, a, g = self.site, self.seen().flatten(0, 1), self.g.flatten(0, 1).transpose(1, 2)
        if site.needs_reordering and site.positions >= site.outputs:
            found = site.to_layout_order(batched_matmul(g, a))
            place.view(found.shape).copy_(found)
            return
        a = site.to_layout_order(a).reshape(a.shape)  # fewer elements to reorder than in the gradient, or none
        place = place.view(len(a), site.outputs, site.inputs)
        if a.dtype == place.dtype:
            torch.bmm(g, a, out=place)
        else:
            place.copy_(batched_matmul(g, a))

    def total(self, factors: Tensor, segments: int, weights: StackedWeights, how: PassOptions) -> Tensor:
        """Sum over each segment of factor times weight gradient: factors [S, n] -> [S * M, o * k]."""
        site = self.site
        sets, n = factors.shape
        groups, rows = sets * segments, n // segments
        if self.written is not None:
            table = self.written.view(groups, rows, site.outputs * site.inputs)
            flat = weigh_rows(factors.view(groups, 1, rows), table, how.proven)
            return site.flatten_gradient(flat.view(groups, site.outputs, site.inputs))
        if how.proven:
            return site.flatten_gradient(self._total_in_float64(factors.view(groups, rows)))
        scaled = self.g * factors[:, :, None, None].to(self.g.dtype)
        # The library returns a sum of bf16 products in bf16: its rounding would grow with the batch.
        if how.native and groups == 1 and site.is_convolution and scaled.dtype == torch.float32:
            assert site.window is not None
            shaped = scaled.view(1, n, *site.window.out, site.outputs)
            return site.flatten_gradient(site.library_backward(shaped, self.h, weights, "weight").float())
        # A small matrix that is a very long sum uses few of a GPU's processors: compute partial sums, then add them.
        parts = count_sum_splits(rows, site.positions)
        a = self.seen().reshape(groups * parts, -1, site.inputs)
        g = scaled.reshape(groups * parts, -1, site.outputs)
        return site.flatten_gradient(batched_matmul(g.transpose(1, 2), a).unflatten(0, (groups, parts)).sum(dim=1))

    def _total_in_float64(self, factors: Tensor) -> Tensor:
        """Sum over rows of factor times weight gradient, in float64: factors [X, r] -> [X, o, k]."""
        site, (groups, rows) = self.site, factors.shape
        a = self.seen().reshape(groups, rows, site.positions, site.inputs)
        g = self.g.reshape(groups, rows, site.positions, site.outputs)
        total = factors.new_zeros((groups, site.outputs, site.inputs), dtype=torch.float64)
        each = groups * site.positions * (site.inputs + 2 * site.outputs)
        for part in split_for_float64(rows, each, a.device):
            scaled = g[:, part].double() * factors[:, part, None, None].double()
            total.baddbmm_(scaled.flatten(1, 2).transpose(1, 2), a[:, part].double().flatten(1, 2))
        return total

    def dots(self, direction: Tensor, segments: int) -> Tensor:
        """Inner product of each example's weight gradient with a direction [S * M, o, k]: [S, n]."""
        site = self.site
        a, g = self.seen(), self.g
        sets, n = a.shape[:2]
        groups, rows = sets * segments, n // segments
        through = batched_matmul(g.reshape(groups, rows * site.positions, site.outputs), direction.to(g.dtype))
        return (through.view(sets, n, -1) * a.reshape(sets, n, -1)).sum(dim=2)

    def zero_examples(self, good: Tensor) -> None:
        """Excludes examples where good [S, n] is False, whatever values they have."""
        bad = ~good[:, :, None, None]
        self.a = self.seen().masked_fill(bad, 0)
        self.h = self.h.masked_fill(~good.view(*good.shape, *[1] * (self.h.dim() - 2)), 0)
        self.g, self.added = self.g.masked_fill(bad, 0), None
        if self.written is not None:
            self.written = self.written.masked_fill(bad, 0)


@dataclass
class StackedTape:
    """The tape of a hand-written pass. losses [S, n], float32, unmasked (padding and NaN included)."""

    layout: ParameterLayout
    weights: StackedWeights
    how: PassOptions
    uses: list[_StackedSiteUse]
    losses: Tensor

    @property
    def positions(self) -> int:
        """The most products that add up to one entry of an example's gradient."""
        return max((use.site.positions for use in self.uses), default=1)

    def norm_table(self, groups: tuple[int, ...]) -> NormTable:
        """[S, n, G] each; not finite where the gradient is not."""
        table: list[list[SquaredNorms]] = [[] for _ in range(max(groups, default=0) + 1)]
        for use in self.uses:
            table[_find_group(groups, use.site.weight)].append(use.squared_norms())
            if use.site.bias is not None:
                table[_find_group(groups, use.site.bias)].append(squared_norms(use.bias_gradients(), 2))
        added = [[torch.stack(each).sum(dim=0) for each in zip(*parts, strict=True)] for parts in table]
        squares = SquaredNorms(*(torch.stack(each, dim=2) for each in zip(*added, strict=True)))
        return to_norm_table(squares, torch.float32)

    def dots(self, direction: Tensor, segments: int) -> Tensor:
        """Inner products with a direction [S * M, d]: [S, n]."""
        parts = unflatten_stacked(self.layout, direction)
        total = torch.zeros_like(self.losses)
        for use in self.uses:
            total = total + use.dots(use.site.matrix(parts), segments)
            if use.site.bias is not None:
                along = parts[use.site.bias].view(len(self.losses), segments, 1, -1)
                slopes = use.bias_gradients().view(len(self.losses), segments, -1, use.site.outputs)
                total = total + (slopes * along).sum(dim=3).flatten(1)
        return total

    def matrix(self) -> Tensor:
        """Every example's gradient, [S * n, d], in rows whose stride is a multiple of 128 bytes."""
        dim = self.layout.dim
        whole = self.losses.new_empty((self.losses.numel(), -(-dim // ROW_ALIGNMENT) * ROW_ALIGNMENT))[:, :dim]
        places = whole.split(self.layout.sizes, dim=1)
        for use in self.uses:
            use.write(places[use.site.weight])
            if use.site.bias is not None:
                places[use.site.bias].copy_(use.bias_gradients().flatten(0, 1))
        return whole

    def zero_examples(self, good: Tensor) -> None:
        """Excludes the examples where good [S, n] is False from all sums."""
        for use in self.uses:
            use.zero_examples(good)

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...], segments: int) -> Tensor:
        """Sum over each segment of factor times gradient: factors [S, n, G] -> [S * M, d].

        float32, or float64 where the bounds are proven.
        """
        table: list[Tensor] = [self.losses] * len(self.layout.names)
        sets, n = factors.shape[:2]
        for use in self.uses:
            own = factors[:, :, _find_group(groups, use.site.weight)].contiguous()
            table[use.site.weight] = use.total(own, segments, self.weights, self.how)
            if use.site.bias is not None:
                own = factors[:, :, _find_group(groups, use.site.bias)].reshape(sets * segments, 1, n // segments)
                slopes = use.bias_gradients().view(sets * segments, n // segments, -1)
                table[use.site.bias] = weigh_rows(own, slopes, self.how.proven).squeeze(1)
        return torch.cat(table, dim=1)


def weigh_rows(factors: Tensor, rows: Tensor, proven: bool) -> Tensor:
    """factors [X, G, r] times rows [X, r, m]: [X, G, m], in float32, or in float64 a few rows at a time."""
    if not proven:
        return torch.bmm(factors, rows)
    total = factors.new_zeros((len(rows), factors.shape[1], rows.shape[2]), dtype=torch.float64)
    for part in split_for_float64(rows.shape[1], len(rows) * rows.shape[2], rows.device):
        total.baddbmm_(factors[:, :, part].double(), rows[:, part].double())
    return total


def _find_group(groups: tuple[int, ...], tensor: int) -> int:
    return groups[tensor] if groups else 0


def forward_stacked(
    program: StackedProgram, weights: StackedWeights, x: Tensor, how: PassOptions, keep: bool
) -> tuple[Tensor, list[Any]]:
    """Outputs [S, n, O], and what the backward pass needs of each step (nothing unless `keep`)."""
    h = x.to(PRECISIONS[how.precision])
    kept: list[Any] = []
    bias: Tensor | None = None
    for i, step in enumerate(program.steps):
        if not isinstance(step, StackedSite):
            h, note = step.forward(h) if bias is None else step.forward(h, bias)
            bias = None
        else:
            bias = _find_deferred_bias(program, i, weights, h)
            bare = bias is not None
            if how.native and len(h) == 1 and step.is_convolution:
                note, h = _StackedSiteUse(step, h, None), step.native(h, weights, bare)
            else:
                a = step.extract_input_patches(h)
                note, h = _StackedSiteUse(step, h, a), step.forward(a, weights, bare)
        kept.append(note if keep else None)
    return h, kept


def _find_deferred_bias(program: StackedProgram, i: int, weights: StackedWeights, h: Tensor) -> Tensor | None:
    """A convolution's bias [S, C] where the next pooling kernel adds it; else None."""
    step, after = program.steps[i], program.steps[i + 1] if i + 1 < len(program.steps) else None
    if (
        not isinstance(step, StackedSite)
        or step.bias is None
        or not isinstance(after, ParameterlessLayer)
        or after.pool is None
    ):
        return None
    return weights[step.bias] if fused.can_use_kernels(h) else None


def run_stacked_pass(
    program: StackedProgram, theta: Tensor, x: Tensor, y: Tensor, task: Task, how: PassOptions
) -> StackedTape:
    """Forward and backward for x [S, n, ...] and targets y [S, n, ...] with weights theta [S, d]."""
    weights = unflatten_stacked(program.layout, theta)
    outputs, kept = forward_stacked(program, weights, x, how, keep=True)
    losses, g = task.compute_losses_and_gradients(outputs.float(), y)
    g = g.to(outputs.dtype)
    sites = [i for i, step in enumerate(program.steps) if isinstance(step, StackedSite)]
    uses: list[_StackedSiteUse] = []
    for i in range(len(program.steps) - 1, sites[0] - 1, -1):
        step, note = program.steps[i], kept[i]
        if not isinstance(step, StackedSite):
            g = step.backward(g, note)
            continue
        note.g = g.reshape(*g.shape[:2], step.positions, step.outputs)
        uses.append(note)
        if i == sites[0]:
            break
        by_library = how.native and len(g) == 1 and step.is_convolution
        g = step.library_backward(g, note.h, weights, "input") if by_library else step.backward(g, weights)
    return StackedTape(program.layout, weights, how, uses, losses)


# --- any other model: gradients written out by torch.func -----------------------------------------


def functional_pass(
    model: nn.Module, layout: ParameterLayout, theta: Tensor, x: ModelInputs, y: Tensor, task: Task
) -> tuple[Tensor, Tensor]:
    """Gradients [S * n, d] and losses [S, n] of any model that torch.func supports."""

    def loss(flat: Tensor, one: ModelInputs, target: Tensor) -> Tensor:
        outputs = call_with_parameters(model, layout.unflatten(flat), map_inputs(lambda value: value[None], one))
        return task.loss(outputs, target[None]).reshape(())

    each: Callable[..., Any] = vmap(vmap(grad_and_value(loss), in_dims=(None, 0, 0)))
    gradients, losses = each(theta, x, y)
    return gradients.flatten(0, 1), losses


def functional_outputs(model: nn.Module, layout: ParameterLayout, theta: Tensor, x: ModelInputs) -> Tensor:
    """Outputs [S, n, ...] of any model."""

    def one_set(flat: Tensor, rows: ModelInputs) -> Tensor:
        return call_with_parameters(model, layout.unflatten(flat), rows)  # type: ignore[no-any-return]

    return vmap(one_set)(theta, x)


__all__ = [
    "PRECISIONS",
    "PassOptions",
    "StackedTape",
    "functional_outputs",
    "functional_pass",
    "run_stacked_pass",
    "unflatten_stacked",
]
