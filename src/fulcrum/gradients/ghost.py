"""Ghost norms: one forward and backward pass that differentiates layer outputs only, never parameters.

The forward pass records the input a of each use of a parameter; the backward pass computes the gradient g of its
output. Both together make the parameter's per-example gradients (`param_grads.py`); then g is freed. The gradient of
the first layer's input is not computed.

There are two methods. A plain `nn.Sequential` of known layers is run layer by layer with the given parameters and
without autograd (`sequence.py`). Any other model runs its own forward, and the functions that use its parameters are
found as they are called (`uses.py`, `function_rules/`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs
from fulcrum.data.tasks import Task
from fulcrum.gradients import function_rules as function_rules  # fills the table of functions
from fulcrum.gradients import sequence
from fulcrum.gradients.once import once_property
from fulcrum.gradients.outer_products import ConvGrad, ConvPatches, LinearGrad, join_uses, materialise_grads
from fulcrum.gradients.param_grads import BlockedGrad, MaterialisedGrad, ParamGrad, scratch_ranges
from fulcrum.gradients.program import GradProgram, GradSite
from fulcrum.gradients.recording import plan_uses, record_uses
from fulcrum.gradients.rounding import (
    NormTable,
    SquaredNorms,
    add_error,
    add_fast_squares,
    bound_fast_squares,
    bound_roundings,
    fast_squared_norms,
    squared_norms,
    to_norm_table,
)
from fulcrum.gradients.tape import add_squares, check_loss_per_example, find_finite_norms, stack_squares
from fulcrum.gradients.uses import MAX_MATERIALISED_RATIO, UsePlan, UseRecord, UseRecorder, choose_written
from fulcrum.models.layout import ParameterLayout

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
        wanted = [(use.entries, number) for number, use in self.uses.items() if use.entries]
        self.written = choose_written(wanted, MAX_MATERIALISED_RATIO * self.elements)

    def collect(self, number: int, g: Tensor) -> None:
        """Makes the parameter gradients of a use from the gradient of its output, and frees its input."""
        use = self.uses.pop(number)
        site, a = use.site, use.a
        tensors = {name: self.tensors[place] for name, place in site.own.items()}
        assert site.kind is not None  # all layers of a sequence are known
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
    plan: UsePlan | None = None,
    fast: bool = False,
    half: bool = False,
    channels_last: bool = False,
) -> GhostTape:
    """One pass over the batch.

    plan: how a model with its own forward is followed (`plan_uses`); a sequence needs none. fast: measured bounds in
    place of proven ones. half: bf16 where autocast chooses it, with norms and sums in float32. channels_last: see
    `UseRecorder`; a model that views its images as something else then raises RuntimeError. Raises UnsupportedModel
    where the model takes another path than planned, and UnknownUse where a function has no rule.
    """
    tensors = tuple(layout.unflatten(params.detach()).values())
    recorder: _UseRecorder | UseRecorder
    if program.sequence and not half:
        recorder, losses = _record_sequence(program, (tensors,), sequence.require_single_input(x), y, task)
    else:
        plan = plan or plan_uses(model, layout, params, x, y, task)
        recorder, losses = record_uses(model, layout, tensors, x, y, task, plan, half, channels_last)
    parts = tuple(tuple(parts) for parts in recorder.parts)
    return GhostTape(layout, params, losses, parts, recorder.elements, fast)


# --- a plain sequence -----------------------------------------------------------------------------


def record_parts(
    program: GradProgram,
    layout: ParameterLayout,
    params: Sequence[Tensor],
    parts: sequence.Parts,
    x: Tensor,
    y: Tensor,
    task: Task,
) -> GhostTape:
    """One pass of a plain sequence over several clients' examples, with measured bounds.

    params: each client's parameters [d]. parts: where its examples are in x [B, ...] and y. The tape has all examples;
    `GhostTape.select` gives those of a client. An example's numbers are those of a pass over its client alone.
    """
    tensors = [tuple(layout.unflatten(each.detach()).values()) for each in params]
    recorder, losses = _record_sequence(program, tensors, x, y, task, parts)
    return GhostTape(layout, params[0], losses, tuple(map(tuple, recorder.parts)), recorder.elements, fast=True)


def _record_sequence(
    program: GradProgram,
    each: Sequence[tuple[Tensor, ...]],
    x: Tensor,
    y: Tensor,
    task: Task,
    parts: sequence.Parts = (),
) -> tuple[_UseRecorder, Tensor]:
    count = x.shape[0]
    tensors = [sequence.prepare_weights(given, x.device) for given in each]
    recorder = _UseRecorder(count, tensors[0])  # of the weights only shapes and layouts matter
    outputs, steps = sequence.forward_parts(program, tensors, parts, x)
    losses, g = task.compute_losses_and_gradients(outputs, y)
    check_loss_per_example(losses, count)
    numbers = {
        id(step): recorder.add_use(step.node.site, step.seen, step.elements, step.out)
        for step in steps
        if step.node.site is not None
    }
    recorder.choose()
    sequence.backward_sequence(steps, g, lambda step, g: recorder.collect(numbers[id(step)], g), parts)
    return recorder, losses


def list_sequence_uses(program: GradProgram, tensors: tuple[Tensor, ...], x: Tensor) -> tuple[UseRecord, ...]:
    """How a pass of a plain sequence uses each parameter, for a report."""
    recorder = _UseRecorder(len(x), tensors)
    _, steps = sequence.forward_sequence(program, sequence.prepare_weights(tensors, x.device), x)
    used = [(step, step.node.site) for step in steps if step.node.site is not None]
    numbers = [recorder.add_use(site, step.seen, step.elements, step.out) for step, site in used]
    recorder.choose()
    found = []
    for number, (step, site) in zip(numbers, used, strict=True):
        for n, (name, place) in enumerate(site.own.items()):
            cost = site.kind.size(site.module, step.out) if site.kind and name == "weight" else None
            written = cost is not None and number in recorder.written
            held, passes_on = 0 if n else step.elements, step is not used[0][0]
            found.append(UseRecord(place, type(site.module).__name__, cost, written, held, passes_on))
    return tuple(found)


# --- the tape -------------------------------------------------------------------------------------

MAX_SMALL_ENTRIES = 4096
"""Tensors with at most this many entries are joined: a kernel for each of many biases takes longer than its work."""


RELATIVE_GRADS = (MaterialisedGrad, BlockedGrad, LinearGrad)
"""Kinds of gradients that have `fast_squares` and `write_sum`."""


def _join_rows(parts: Sequence[tuple[ParamGrad, ...]]) -> Tensor:
    """Rows [B, all their entries] of small tensors, side by side."""
    return torch.cat([part.grads for uses in parts for part in uses if isinstance(part, MaterialisedGrad)], dim=1)


@dataclass(frozen=True)
class GhostTape:
    """A tape of parameter gradients: for each parameter tensor of the layout, those of all its uses."""

    layout: ParameterLayout
    params: Tensor
    raw_losses: Tensor
    parts: tuple[tuple[ParamGrad, ...], ...]
    elements: int
    """Total number of elements in the inputs and outputs of all sites."""
    fast: bool = False
    """Whether bounds on norms are measured; else proven."""
    known_finite: bool = False
    """Whether every example's loss and gradient is known to be finite."""

    @once_property
    def _small(self) -> frozenset[int]:
        """Tensors with few entries, one use and gradients held as rows: they are treated together."""
        return frozenset(
            place
            for place, parts in enumerate(self.parts)
            if len(parts) == 1
            and isinstance(parts[0], MaterialisedGrad)
            and parts[0].order is None
            and parts[0].grads.shape[1] <= MAX_SMALL_ENTRIES
        )

    @once_property
    def _tensor_squares(self) -> dict[int, SquaredNorms]:
        """Squared norms [B] of each tensor that is not small, and on a CPU not among `_fast_squares`."""
        known = self._fast_squares if self.fast and not self.raw_losses.is_cuda else {}
        return {
            place: self._tensor_squared_norms(parts)
            for place, parts in enumerate(self.parts)
            if place not in self._small and place not in known
        }

    def group_squares(self, groups: tuple[int, ...] = ()) -> SquaredNorms:
        """Squared norms [B, G] in each group, before non-finite examples are zeroed. Nothing waits for a device."""
        found: list[SquaredNorms] = []
        for group in range(max(groups, default=0) + 1):
            members = [i for i in range(len(self.parts)) if not groups or groups[i] == group]
            small = [i for i in members if i in self._small]
            if self.fast and not self.raw_losses.is_cuda:
                found.append(self._add_on_host(members, small))
                continue
            pieces = [self._tensor_squares[i] for i in members if i not in self._small]
            if small:
                rows = _join_rows([self.parts[i] for i in small])
                pieces.append(fast_squared_norms(rows) if self.fast else squared_norms(rows))
            found.append(add_squares(pieces))
        return stack_squares(found)

    def _add_on_host(self, members: list[int], small: list[int]) -> SquaredNorms:
        """Squared norms [B] of one group with measured bounds: what has a relative error is bounded once, as a sum."""
        squares = [self._fast_squares[i] for i in members if i in self._fast_squares]
        pieces = [self._tensor_squares[i] for i in members if i not in self._fast_squares and i not in self._small]
        if small:
            squares.append(add_fast_squares(_join_rows([self.parts[i] for i in small])))
        if squares:
            total = squares[0] if len(squares) == 1 else torch.stack(squares).sum(dim=0)
            pieces.append(bound_fast_squares(total, 2 * self.layout.dim))
        return add_squares(pieces)

    @once_property
    def _fast_squares(self) -> dict[int, Tensor]:
        """Squared norms [B] of each tensor that is not small and whose norm has a relative error; on a CPU."""
        found: dict[int, Tensor] = {}
        for place, parts in enumerate(self.parts):
            if place not in self._small and len(parts) == 1 and isinstance(parts[0], RELATIVE_GRADS):
                squares = parts[0].fast_squares()
                if squares is not None:
                    found[place] = squares
        return found

    def _tensor_squared_norms(self, parts: tuple[ParamGrad, ...]) -> SquaredNorms:
        if len(parts) == 1:
            return parts[0].squared_norms(self.fast)
        squares = self.raw_losses.new_zeros(len(self.raw_losses), dtype=torch.float64)
        if not parts:
            return SquaredNorms(squares, squares, squares)
        # The gradients of several uses of one tensor are summed before the norm is computed.
        joined = join_uses(parts)
        if joined is not None:
            return joined.squared_norms(self.fast)
        size = parts[0].slice(0, 1).rows().numel()
        for start, stop in scratch_ranges(len(squares), 8 * (len(parts) + 1) * size, squares.device):
            total = torch.stack([part.slice(start, stop).rows().double() for part in parts]).sum(dim=0)
            squares[start:stop] = total.square().sum(dim=1)
        lengths = torch.stack([part.squared_norms(self.fast).lengths.sqrt() for part in parts]).sum(dim=0)
        # Rows are written in the gradients' own type, from products of as many positions as each use has.
        error = bound_roundings(max(part.positions for part in parts) + 1, self.raw_losses.dtype)
        found = add_error(squares, lengths, len(parts) + size)
        return found._replace(bounds=(found.bounds.sqrt() + error * lengths).square())

    @once_property
    def _good(self) -> Tensor:
        return find_finite_norms(self._whole_squares, self.raw_losses.dtype) & torch.isfinite(self.raw_losses)

    @once_property
    def _whole_squares(self) -> SquaredNorms:
        return self.group_squares()

    @property
    def positions(self) -> int:
        return max((sum(part.positions for part in parts) for parts in self.parts), default=1)

    @property
    def is_finite(self) -> bool:
        """Whether every example's loss and gradient is finite; waits for the device."""
        return self._all_finite

    @once_property
    def _all_finite(self) -> bool:
        if self.known_finite:
            return True
        if not self.raw_losses.is_cuda:  # a finite sum shows it for all examples at once
            largest = torch.finfo(self.raw_losses.dtype).max
            squares, losses = float(self._whole_squares.bounds.sum()), float(self.raw_losses.sum())
            if squares < largest and math.isfinite(losses):
                return True
        return bool(self._good.all())

    @once_property
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
        squares = self.group_squares(groups) if groups else self._whole_squares
        found = to_norm_table(squares, self.raw_losses.dtype)
        return NormTable(*(self._zero_nonfinite(each) for each in found))

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.norm_table(groups).norms

    def select(self, start: int, stop: int) -> GhostTape:
        """The tape of a range of examples. All of this tape must be finite."""
        parts = tuple(tuple(part.slice(start, stop) for part in own) for own in self.parts)
        share = self.elements * (stop - start) // max(1, self.raw_losses.shape[0])
        return GhostTape(self.layout, self.params, self.raw_losses[start:stop], parts, share, self.fast, True)

    def dots(self, direction: Tensor) -> Tensor:
        total = self.raw_losses.new_zeros(len(self.raw_losses))
        for block, parts in zip(direction.split(self.layout.sizes), self._finite_parts, strict=True):
            for part in parts:
                total = total + part.dots(block)
        return total

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        if not self.known_finite and "_all_finite" not in self.__dict__:
            # No norms were computed: a finite sum proves that every gradient is finite.
            total = self.sum_parts(self.parts, factors, groups, proven)
            if bool(torch.isfinite(total).all()) and bool(torch.isfinite(self.raw_losses).all()):
                return total
        return self.sum_parts(self._finite_parts, self._zero_nonfinite(factors), groups, proven)

    def sum_parts(
        self, parts: tuple[tuple[ParamGrad, ...], ...], factors: Tensor, groups: tuple[int, ...], proven: bool
    ) -> Tensor:
        """Sum of parts with factors [B, G], [d]: those of this tape, or made of them."""
        columns = [factors[:, group] for group in range(factors.shape[1])]
        together = self._sum_small_parts(parts, columns, groups, proven)
        if not factors.is_cuda and not proven:
            return self._write_sums(parts, columns, groups, together)
        blocks = []
        for i, (own, size) in enumerate(zip(parts, self.layout.sizes, strict=True)):
            if i in together:
                blocks.append(together[i])
                continue
            sums = [part.weighted_sum(columns[groups[i] if groups else 0], proven) for part in own]
            nothing = torch.zeros_like(self.params[:1], dtype=torch.float64 if proven else None).expand(size)
            blocks.append(sums[0] if len(sums) == 1 else sum(sums, start=nothing))
        return torch.cat(blocks)

    def _write_sums(
        self,
        parts: tuple[tuple[ParamGrad, ...], ...],
        columns: list[Tensor],
        groups: tuple[int, ...],
        known: dict[int, Tensor],
    ) -> Tensor:
        """As `sum_parts` on a CPU: products are written where they belong, without a copy of a large model's sum."""
        total = torch.empty_like(self.params)
        for i, (own, block) in enumerate(zip(parts, total.split(self.layout.sizes), strict=True)):
            column = columns[groups[i] if groups else 0]
            if i in known:
                block.copy_(known[i])
            elif len(own) == 1 and isinstance(own[0], RELATIVE_GRADS):
                own[0].write_sum(column, block)
            elif own:
                block.copy_(own[0].weighted_sum(column))
                for part in own[1:]:
                    block += part.weighted_sum(column)
            else:
                block.zero_()
        return total

    def _sum_small_parts(
        self, parts: tuple[tuple[ParamGrad, ...], ...], columns: list[Tensor], groups: tuple[int, ...], proven: bool
    ) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for group, column in enumerate(columns):
            places = [i for i in sorted(self._small) if (groups[i] if groups else 0) == group]
            if places:
                rows = _join_rows([parts[i] for i in places])
                total = MaterialisedGrad(rows).weighted_sum(column, proven)
                found |= dict(zip(places, total.split([self.layout.sizes[i] for i in places]), strict=True))
        return found
