"""Ghost norms: one forward and backward pass that differentiates layer outputs only, never parameters.

Each layer with trainable parameters is a site. The forward pass records the site's input a; the backward
pass computes the gradient g of its output. Both together make the layer's parameter gradients (`param_grads.py`);
then g is freed. The gradient of the first site's input is not computed.

There are two methods. A plain `nn.Sequential` of known layers is run layer by layer with the given
parameters and without autograd (`sequence.py`). Any other model runs its own forward with hooks on its sites.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs, count_examples, map_inputs
from fulcrum.data.tasks import Task
from fulcrum.gradients import sequence
from fulcrum.gradients.outer_products import ConvGrad, ConvPatches, LinearGrad, materialise_grads
from fulcrum.gradients.param_grads import MaterialisedGrad, ParamGrad, scratch_ranges
from fulcrum.gradients.program import GradProgram, GradSite, UnsupportedModel
from fulcrum.gradients.rounding import NormTable, SquaredNorms, add_error, bound_roundings, to_norm_table
from fulcrum.gradients.tape import check_loss_per_example, find_finite_norms, stack_squares, sum_squares_by_group
from fulcrum.gradients.vmap import compute_module_grads
from fulcrum.models.layout import ParameterLayout, call_with_parameters

MAX_MATERIALISED_RATIO = 1.5
"""Materialised gradients may take this many times the memory of the sites' inputs and outputs."""


# --- recording ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SiteUse:
    """One pass of the batch through a site."""

    site: GradSite
    a: Tensor | ConvPatches
    entries: int
    """Number of entries of all examples' gradients where it is cheaper to materialise them; else 0."""


class _UseRecorder:
    """Collects uses in the forward pass and parameter gradients in the backward pass."""

    def __init__(self, count: int, tensors: tuple[Tensor, ...]) -> None:
        self.count = count
        self.tensors = tensors
        self.elements = 0
        """Total number of elements in the inputs and outputs of all uses."""
        self.uses: dict[int, _SiteUse] = {}
        self.written: set[int] = set()
        self.parts: list[list[ParamGrad]] = [[] for _ in tensors]

    def add_use(self, site: GradSite, a: Tensor | ConvPatches, elements: int, out: torch.Size) -> int:
        """Records a use with the shape of its output; returns the index of the use."""
        size = site.kind.size(site.module, out) if site.kind and "weight" in site.own else None
        entries = size.entries * self.count if size and size.should_materialise else 0
        self.elements += elements
        self.uses[len(self.uses)] = _SiteUse(site, a, entries)
        return len(self.uses) - 1

    def choose(self) -> None:
        """Chooses, before the backward pass, which gradients to materialise: the smallest, while memory allows."""
        room = MAX_MATERIALISED_RATIO * self.elements
        for entries, number in sorted((use.entries, n) for n, use in self.uses.items() if use.entries):
            room -= entries
            if room >= 0:
                self.written.add(number)

    def collect(self, number: int, g: Tensor) -> None:
        """Makes the parameter gradients of a use from the gradient of its output, and frees its input."""
        use = self.uses.pop(number)
        site, a = use.site, use.a
        tensors = {name: self.tensors[place] for name, place in site.own.items()}
        if site.kind is None:
            assert isinstance(a, Tensor)  # only convolutions have patches
            rows = compute_module_grads(site.module, tensors, a, g)
            found: dict[str, ParamGrad] = {name: MaterialisedGrad(grads.flatten(1)) for name, grads in rows.items()}
        else:
            found = site.kind.parts(site.module, a, g, tensors, set(site.own))
        for name, part in found.items():
            written = name == "weight" and number in self.written and isinstance(part, LinearGrad | ConvGrad)
            self.parts[site.own[name]].append(materialise_grads(part) if written else part)  # type: ignore[arg-type]


def record_ghost_tape(
    model: nn.Module,
    program: GradProgram,
    layout: ParameterLayout,
    params: Tensor,
    x: ModelInputs,
    y: Tensor,
    task: Task,
) -> GhostTape:
    """One pass over the batch. Raises UnsupportedModel where dimension 0 of the model's outputs is not the batch."""
    if model in program.sites and program.sites[model].kind is None:
        raise UnsupportedModel(program.sites[model].reason)
    tensors = tuple(layout.unflatten(params.detach()).values())
    if program.sequence:
        recorder, losses = _record_sequence(program, tensors, sequence.require_single_input(x), y, task)
    else:
        recorder, losses = _record_with_hooks(model, program, layout, tensors, x, y, task)
    return GhostTape(layout, params, losses, tuple(tuple(parts) for parts in recorder.parts), recorder.elements)


# --- a plain sequence -----------------------------------------------------------------------------


def _record_sequence(
    program: GradProgram, tensors: tuple[Tensor, ...], x: Tensor, y: Tensor, task: Task
) -> tuple[_UseRecorder, Tensor]:
    tensors = sequence.prepare_weights(tensors, x.device)
    recorder = _UseRecorder(len(x), tensors)
    outputs, steps = sequence.forward_sequence(program, tensors, x)
    losses, g = task.compute_losses_and_gradients(outputs, y)
    check_loss_per_example(losses, len(x))
    numbers = {
        id(step): recorder.add_use(step.node.site, step.seen, step.elements, step.out)
        for step in steps
        if step.node.site is not None
    }
    recorder.choose()
    sequence.backward_sequence(steps, g, lambda step, g: recorder.collect(numbers[id(step)], g))
    return recorder, losses


# --- any other model ------------------------------------------------------------------------------


class _GraphRoot(torch.autograd.Function):
    """Makes a fresh output the start of differentiation, in place, so that in-place activations may follow."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def _record_with_hooks(
    model: nn.Module,
    program: GradProgram,
    layout: ParameterLayout,
    tensors: tuple[Tensor, ...],
    x: ModelInputs,
    y: Tensor,
    task: Task,
) -> tuple[_UseRecorder, Tensor]:
    count = count_examples(x)
    recorder = _UseRecorder(count, tensors)
    anchor = torch.zeros((), device=y.device, requires_grad=True)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        site = program.sites[module]
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
            raise UnsupportedModel(f"{site.name} does not map one tensor to one tensor")
        return tap(site, args[0], out) if torch.is_grad_enabled() else out

    def tap(site: GradSite, a: Tensor, out: Tensor) -> Tensor:
        """Records a use; the returned output replaces `out`."""
        fits = site.kind is None or site.kind.fits(site.module, a)
        if not fits or a.dim() == 0 or out.dim() == 0 or len(a) != count or len(out) != count:
            raise UnsupportedModel(f"{site.name} does not see one example per row")
        if out._is_view():
            # An in-place activation on a view would rewrite history behind the hook below.
            out = torch.ops.aten._unsafe_view(out, out.shape)
        if not out.requires_grad:
            out = _GraphRoot.apply(out, anchor)  # type: ignore[no-untyped-call]
        number, version = recorder.add_use(site, a.detach(), a.numel() + out.numel(), out.shape), a._version

        def arrive(g: Tensor) -> None:
            if a._version != version:
                raise UnsupportedModel(f"the input of {site.name} is overwritten in place after its use")
            recorder.collect(number, g)

        out.register_hook(arrive)
        return out

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in program.sites]
    try:
        with torch.enable_grad():
            inputs = map_inputs(Tensor.detach, x)
            outputs = call_with_parameters(model, dict(zip(layout.names, tensors, strict=True)), inputs)
            losses = check_loss_per_example(task.loss(outputs, y), count)
            total = losses.sum()
    finally:
        for handle in handles:
            handle.remove()
    recorder.choose()
    if total.requires_grad:
        torch.autograd.grad(total, anchor, allow_unused=True)
    return recorder, losses.detach()


# --- the tape -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GhostTape:
    """A tape of parameter gradients: for each parameter tensor of the layout, those of all its uses."""

    layout: ParameterLayout
    params: Tensor
    raw_losses: Tensor
    parts: tuple[tuple[ParamGrad, ...], ...]
    elements: int
    """Total number of elements in the inputs and outputs of all sites."""

    @cached_property
    def _squared_norms(self) -> SquaredNorms:
        """Squared norms [B, tensors] of each tensor's gradient, before non-finite examples are zeroed."""
        return stack_squares([self._tensor_squared_norms(parts) for parts in self.parts])

    def _tensor_squared_norms(self, parts: tuple[ParamGrad, ...]) -> SquaredNorms:
        if len(parts) == 1:
            return parts[0].squared_norms()
        squares = self.raw_losses.new_zeros(len(self.raw_losses), dtype=torch.float64)
        if not parts:
            return SquaredNorms(squares, squares, squares)
        # The gradients of several uses of one tensor are summed before the norm is computed.
        size = parts[0].slice(0, 1).rows().numel()
        for start, stop in scratch_ranges(len(squares), 8 * (len(parts) + 1) * size, squares.device):
            total = torch.stack([part.slice(start, stop).rows().double() for part in parts]).sum(dim=0)
            squares[start:stop] = total.square().sum(dim=1)
        lengths = torch.stack([part.squared_norms().lengths.sqrt() for part in parts]).sum(dim=0)
        # Rows are written in the gradients' own type, from products of as many positions as each use has.
        error = bound_roundings(max(part.positions for part in parts) + 1, self.raw_losses.dtype)
        found = add_error(squares, lengths, len(parts) + size)
        return found._replace(bounds=(found.bounds.sqrt() + error * lengths).square())

    @cached_property
    def _good(self) -> Tensor:
        return find_finite_norms(self._squared_norms, self.raw_losses.dtype) & torch.isfinite(self.raw_losses)

    @property
    def positions(self) -> int:
        return max((sum(part.positions for part in parts) for parts in self.parts), default=1)

    @cached_property
    def _all_finite(self) -> bool:
        return bool(self._good.all())

    @cached_property
    def _finite_parts(self) -> tuple[tuple[ParamGrad, ...], ...]:
        if self._all_finite:
            return self.parts
        return tuple(tuple(part.only(self._good) for part in parts) for parts in self.parts)

    def _zero_nonfinite(self, values: Tensor) -> Tensor:
        if self._all_finite:
            return values
        good = self._good.view(-1, *[1] * (values.dim() - 1))
        return torch.where(good, values, torch.zeros((), dtype=values.dtype))

    @property
    def losses(self) -> Tensor:
        return self._zero_nonfinite(self.raw_losses)

    def matrix(self) -> Tensor:
        table = self.params.new_zeros(len(self.raw_losses), self.layout.dim)
        for block, parts in zip(table.split(self.layout.sizes, dim=1), self._finite_parts, strict=True):
            for part in parts:
                block += part.rows()
        return table

    def norm_table(self, groups: tuple[int, ...] = ()) -> NormTable:
        found = to_norm_table(sum_squares_by_group(self._squared_norms, groups), self.raw_losses.dtype)
        return NormTable(*(self._zero_nonfinite(each) for each in found))

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.norm_table(groups).norms

    def dots(self, direction: Tensor) -> Tensor:
        total = self.raw_losses.new_zeros(len(self.raw_losses))
        for block, parts in zip(direction.split(self.layout.sizes), self._finite_parts, strict=True):
            for part in parts:
                total = total + part.dots(block)
        return total

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        if "_good" not in self.__dict__:
            # No norms were computed: a finite sum proves that every gradient is finite.
            total = self._sum_parts(self.parts, factors, groups, proven)
            if bool(torch.isfinite(total).all()) and bool(torch.isfinite(self.raw_losses).all()):
                return total
        return self._sum_parts(self._finite_parts, self._zero_nonfinite(factors), groups, proven)

    def _sum_parts(
        self, parts: tuple[tuple[ParamGrad, ...], ...], factors: Tensor, groups: tuple[int, ...], proven: bool
    ) -> Tensor:
        columns = [factors[:, group] for group in range(factors.shape[1])]
        blocks = []
        for i, (own, size) in enumerate(zip(parts, self.layout.sizes, strict=True)):
            sums = [part.weighted_sum(columns[groups[i] if groups else 0], proven) for part in own]
            nothing = torch.zeros_like(self.params[:1], dtype=torch.float64 if proven else None).expand(size)
            blocks.append(sums[0] if len(sums) == 1 else sum(sums, start=nothing))
        return torch.cat(blocks)
