"""Materialised per-example gradients for any module: slow, general, and the reference for ghost norms.

`torch.func.vmap` over the gradient of one example; where an operation has no batching rule (such as
an LSTM), a plain loop over the examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap
from torch.utils._pytree import tree_leaves

from fulcrum.data.records import ModelInputs, count_examples, map_inputs, select_rows
from fulcrum.data.tasks import Task
from fulcrum.gradients.call_plan import Axis, Place, Scaled
from fulcrum.gradients.once import once_property
from fulcrum.gradients.param_grads import sum_rows_in_float64
from fulcrum.gradients.plain_calls import run_plainly
from fulcrum.gradients.rounding import NormTable, SquaredNorms, squared_norms, to_norm_table
from fulcrum.gradients.tape import (
    GradientTape,
    find_finite_norms,
    select_group_factors,
    stack_squares,
    sum_squares_by_group,
)
from fulcrum.models.layout import ParameterLayout, call_with_parameters

VMAP_MEMORY_BYTES = 256 * 2**20
"""Maximum bytes of gradients per vmap call."""


@dataclass(frozen=True)
class MaterialisedTape:
    """A tape that holds all gradients [B, d] as a matrix."""

    layout: ParameterLayout
    raw_losses: Tensor
    raw: Tensor

    @once_property
    def _good(self) -> Tensor:
        return find_finite_norms(self._squares(self.raw), self.raw.dtype) & torch.isfinite(self.raw_losses)

    def _squares(self, grads: Tensor) -> SquaredNorms:
        """Squared norms [B, tensors]."""
        return stack_squares([squared_norms(block) for block in grads.split(self.layout.sizes, dim=1)])

    @once_property
    def _grads(self) -> Tensor:
        return torch.where(self._good.unsqueeze(1), self.raw, torch.zeros((), dtype=self.raw.dtype))

    @property
    def losses(self) -> Tensor:
        return torch.where(self._good, self.raw_losses, torch.zeros((), dtype=self.raw_losses.dtype))

    def matrix(self) -> Tensor:
        return self._grads

    @property
    def positions(self) -> int:
        return 1

    def norm_table(self, groups: tuple[int, ...] = ()) -> NormTable:
        return to_norm_table(sum_squares_by_group(self._squares(self._grads), groups), self.raw.dtype)

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.norm_table(groups).norms

    def dots(self, direction: Tensor) -> Tensor:
        return self._grads @ direction

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        factors = torch.where(self._good.unsqueeze(1), factors, torch.zeros((), dtype=factors.dtype))
        blocks = self._grads.split(self.layout.sizes, dim=1)
        add = sum_rows_in_float64 if proven else torch.matmul
        return torch.cat([add(select_group_factors(factors, groups, i), block) for i, block in enumerate(blocks)])


def record_vmap_tape(
    model: nn.Module, layout: ParameterLayout, params: Tensor, x: ModelInputs, y: Tensor, task: Task
) -> GradientTape:
    """Gradients of every example by vmap over the whole model."""

    def one(tensors: Mapping[str, Tensor], example: ModelInputs, target: Tensor) -> Tensor:
        outputs: Tensor = call_with_parameters(model, tensors, map_inputs(lambda value: value.unsqueeze(0), example))
        return task.loss(outputs, target.unsqueeze(0)).reshape(())

    tensors = layout.unflatten(params.detach())
    with run_plainly(model):
        grads, losses = _compute_per_example_grads(one, tensors, (x, y), with_value=True)
    return MaterialisedTape(
        layout,
        losses,
        torch.cat([grads[n].reshape(len(y), size) for n, size in zip(layout.names, layout.sizes, strict=True)], dim=1),
    )


def compute_call_grads(
    run: Callable[[Mapping[str, Tensor], list[Any]], Any],
    tensors: Mapping[str, Tensor],
    leaves: Sequence[Any],
    given: Sequence[Place],
    found: Sequence[Place],
    grads: Sequence[Tensor | None],
    count: int,
) -> dict[str, Tensor]:
    """One call's gradients [B, ...] of each of `tensors`, from its arguments and the gradients of its results.

    run(tensors, leaves) makes the call with other tensors and other leaves of its arguments. given, found: where the
    examples are in the leaves of its arguments and results.
    """
    rows = {
        str(n): place.bring_first(leaf.detach(), count)
        for n, (leaf, place) in enumerate(zip(leaves, given, strict=True))
        if isinstance(place, Axis)
    }
    upstream = {
        f"g{n}": place.bring_first(g, count)
        for n, (g, place) in enumerate(zip(grads, found, strict=True))
        if g is not None and isinstance(place, Axis)
    }
    if not upstream:
        return {name: t.new_zeros((count, *t.shape)) for name, t in tensors.items()}
    fixed = [place.for_one if isinstance(place, Scaled) else leaf for leaf, place in zip(leaves, given, strict=True)]

    def one(own: Mapping[str, Tensor], example: Mapping[str, Tensor], _: Tensor) -> Tensor:
        out = tree_leaves(run(own, [example.get(str(n), leaf) for n, leaf in enumerate(fixed)]))
        return torch.stack([(out[int(n[1:])] * example[n]).sum() for n in upstream]).sum()

    nothing = next(iter(upstream.values())).new_zeros(count)
    return _compute_per_example_grads(one, tensors, ({**rows, **upstream}, nothing), with_value=False)[0]


def pull_each_example(
    run: Callable[[Mapping[str, Tensor]], Any],
    tensors: Mapping[str, Tensor],
    found: Sequence[Place],
    grads: Sequence[Tensor | None],
    count: int,
) -> dict[str, Tensor]:
    """As `compute_call_grads` for a call that cannot be made with one example: it is made once, with all.

    Each example's gradient is that of all results with the gradients of the other examples' rows set to zero.
    """
    own = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    with torch.enable_grad():
        out = tree_leaves(run(own))
    pairs = [(out[n], g, place) for n, (g, place) in enumerate(zip(grads, found, strict=True)) if g is not None]
    rows: list[tuple[Tensor, ...]] = []
    for example in range(count if pairs else 0):
        slopes = []
        for _, g, place in pairs:
            assert isinstance(place, Axis)
            kept = torch.zeros_like(g)
            place.bring_first(kept, count)[example] = place.bring_first(g, count)[example]
            slopes.append(kept)
        given = ([each[0] for each in pairs], list(own.values()), slopes)
        rows.append(torch.autograd.grad(*given, retain_graph=True, allow_unused=True, materialize_grads=True))
    if not rows:
        return {name: t.new_zeros((count, *t.shape)) for name, t in tensors.items()}
    return {name: torch.stack(each) for name, each in zip(own, zip(*rows, strict=True), strict=True)}


def _compute_per_example_grads(
    one: Callable[..., Tensor], tensors: Mapping[str, Tensor], batch: tuple[ModelInputs, Tensor], with_value: bool
) -> tuple[dict[str, Tensor], Tensor]:
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    derivative = grad_and_value(one) if with_value else grad(one)
    chunk = max(1, min(len(batch[1]), VMAP_MEMORY_BYTES // max(1, size)))
    if chunk < len(batch[1]):
        chunk = 1 << (chunk.bit_length() - 1)  # divides a block of one size
    try:
        with _without_fallback_warning():
            found: Any = vmap(derivative, in_dims=(None, 0, 0), chunk_size=chunk)(tensors, *batch)
    except RuntimeError:
        return _loop_over_examples(one, tensors, batch)
    return found if with_value else (found, torch.empty(0))


@contextlib.contextmanager
def _without_fallback_warning() -> Iterator[None]:
    """Without PyTorch's word for its own developers that an operation, such as packing sequences, goes by a loop."""
    switch = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", lambda wanted: None)
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _loop_over_examples(
    one: Callable[..., Tensor], tensors: Mapping[str, Tensor], batch: tuple[ModelInputs, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    rows: list[tuple[Tensor, ...]] = []
    values: list[Tensor] = []
    x, y = batch
    for row in range(count_examples(x)):
        with torch.enable_grad():
            value = one(leaves, select_rows(x, row), y[row])
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        rows.append(found)
        values.append(value.detach())
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    return dict(zip(leaves, stacked, strict=True)), torch.stack(values)
