"""Book-keeping: one forward and backward pass that differentiates layer outputs only, never parameters.

Each layer with trainable parameters is a site. The forward pass notes the site's input a; the backward
pass brings the gradient g of its output; the two make the layer's parts (`parts.py`), and g is let go
as soon as they are made. The first site's input needs no gradient and gets none.

Two ways through the forward pass. A plain `nn.Sequential` of known layers is run layer by layer with
the given parameters, with channels last in memory on a CPU, where pooling is ten times faster so; the
model itself is not touched, so several threads may share it. Any other model runs by itself with
hooks on its sites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.grads.layers import KINDS
from fulcrum.grads.outer import Conv, Dense, outer_rows
from fulcrum.grads.parts import Part, Rows, ranges
from fulcrum.grads.program import Program, Site
from fulcrum.grads.tape import Loss, column, group_squares
from fulcrum.grads.vmap import module_rows
from fulcrum.models import Layout, call

KEEP = 1.5
"""Written-out gradients may take this many times the memory of the sites' inputs and outputs."""


class Unsuitable(Exception):
    """Book-keeping cannot follow this model; the message says why."""


# --- recording ------------------------------------------------------------------------------------


class _Root(torch.autograd.Function):
    """Makes a fresh output the start of differentiation, in place, so that in-place activations may follow."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True)
class _Use:
    """One pass of the batch through a site."""

    site: Site
    a: Tensor
    version: int
    elements: int
    """Of input and output together."""
    entries: int
    """Of the gradients of all examples, where writing them out pays; else 0."""


class _Recorder:
    """Collects uses on the way forward and parts on the way back."""

    def __init__(self, count: int, tensors: tuple[Tensor, ...]) -> None:
        self.count = count
        self.tensors = tensors
        self.anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
        self.uses: list[_Use] = []
        self.written: set[int] = set()
        self.parts: list[list[Part]] = [[] for _ in tensors]

    def tap(self, site: Site, a: Tensor, out: Tensor) -> Tensor:
        """Notes a use; the returned output takes the place of `out`."""
        if not torch.is_grad_enabled():
            return out
        fits = site.kind is None or site.kind.fits(site.module, a)
        if not fits or a.dim() == 0 or out.dim() == 0 or len(a) != self.count or len(out) != self.count:
            raise Unsuitable(f"{site.name} does not see one example per row")
        if out._is_view():
            # An in-place activation on a view would rewrite history behind the hook below.
            out = torch.ops.aten._unsafe_view(out, out.shape)
        if not out.requires_grad:
            out = _Root.apply(out, self.anchor)  # type: ignore[no-untyped-call]
        size = site.kind.size(site.module, out) if site.kind and "weight" in site.own else None
        entries = size.entries * self.count if size and size.worth_writing else 0
        number = len(self.uses)
        self.uses.append(_Use(site, a.detach(), a._version, a.numel() + out.numel(), entries))
        out.register_hook(lambda g: self.collect(number, g))
        return out

    def backward(self, losses: Tensor) -> None:
        """Brings every output's gradient to `collect`."""
        room = KEEP * sum(use.elements for use in self.uses)
        for number in sorted((n for n, use in enumerate(self.uses) if use.entries), key=lambda n: self.uses[n].entries):
            room -= self.uses[number].entries
            if room >= 0:
                self.written.add(number)
        if losses.requires_grad:
            torch.autograd.grad(losses.sum(), self.anchor, allow_unused=True)

    def collect(self, number: int, g: Tensor) -> None:
        use = self.uses[number]
        site, a = use.site, use.a
        if a._version != use.version:
            raise Unsuitable(f"the input of {site.name} is overwritten in place after its use")
        tensors = {name: self.tensors[place] for name, place in site.own.items()}
        if site.kind is None:
            rows = module_rows(site.module, tensors, a, g)
            found: dict[str, Part] = {name: Rows(grads.flatten(1)) for name, grads in rows.items()}
        else:
            found = site.kind.parts(site.module, a, g, tensors, set(site.own))
        for name, part in found.items():
            written = name == "weight" and number in self.written and isinstance(part, Dense | Conv)
            self.parts[site.own[name]].append(outer_rows(part) if written else part)  # type: ignore[arg-type]


def record_book(
    model: nn.Module, program: Program, layout: Layout, params: Tensor, x: Tensor, y: Tensor, loss: Loss
) -> Book:
    """One pass over the batch. Raises Unsuitable where the model does not keep examples in rows."""
    if model in program.sites and program.sites[model].kind is None:
        raise Unsuitable(program.sites[model].reason)
    tensors = tuple(layout.unflatten(params.detach()).values())
    forward: Callable[..., Tensor] = _run_sequence if program.sequence else _run_hooked
    if program.sequence and x.device.type == "cpu":
        tensors = tuple(_channels_last(t) if t.dim() == 4 else t for t in tensors)
    recorder = _Recorder(len(x), tensors)
    with torch.enable_grad():
        logits = forward(model, program, recorder, layout, x.detach())
        losses = loss(logits, y)
    if losses.shape != (len(x),):
        raise ModelError(f"loss must give one value an example, [B], but gave the shape {list(losses.shape)}.")
    recorder.backward(losses)
    elements = sum(use.elements for use in recorder.uses)
    return Book(layout, params, losses.detach(), tuple(tuple(parts) for parts in recorder.parts), elements)


def _run_sequence(model: nn.Module, program: Program, recorder: _Recorder, layout: Layout, x: Tensor) -> Tensor:
    h, fresh = x, False
    for layer in program.sequence:
        kind = KINDS.get(type(layer))
        if kind is None:
            # A fresh output belongs to nobody else: no second copy for the most common activation.
            h = torch.relu_(h) if fresh and type(layer) is nn.ReLU else layer(h)
            fresh = False
            continue
        site = program.sites.get(layer)
        own = {name: parameter.detach() for name, parameter in layer.named_parameters(recurse=False)}
        if site is not None:
            own |= {name: recorder.tensors[place] for name, place in site.own.items()}
        if not kind.fits(layer, h):
            raise Unsuitable(f"{type(layer).__name__} does not see one example per row")
        a, h = h, kind.run(layer, h, own)
        fresh = site is not None
        if site is not None:
            h = recorder.tap(site, a, h)
    return h


def _run_hooked(model: nn.Module, program: Program, recorder: _Recorder, layout: Layout, x: Tensor) -> Tensor:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
            raise Unsuitable(f"{program.sites[module].name} does not map one tensor to one tensor")
        return recorder.tap(program.sites[module], args[0], out)

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in program.sites]
    try:
        logits: Tensor = call(model, dict(zip(layout.names, recorder.tensors, strict=True)), x)
        return logits
    finally:
        for handle in handles:
            handle.remove()


def _channels_last(weight: Tensor) -> Tensor:
    if weight.shape[1] > 1:
        return weight.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts have the same bytes; the stride says which one the output gets.
    _, _, height, width = weight.shape
    return weight.contiguous().as_strided(weight.shape, (height * width, 1, width, 1))


# --- the tape -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Book:
    """A tape of parts: for each parameter tensor of the layout, those of all its uses."""

    layout: Layout
    params: Tensor
    raw_losses: Tensor
    parts: tuple[tuple[Part, ...], ...]
    elements: int
    """Inputs and outputs of all sites together, in numbers."""

    @cached_property
    def _squares(self) -> Tensor:
        """Squared norms [B, tensors] of each tensor's gradient, before anything is zeroed."""
        return torch.stack([self._tensor_squares(parts) for parts in self.parts], dim=1)

    def _tensor_squares(self, parts: tuple[Part, ...]) -> Tensor:
        if len(parts) == 1:
            return parts[0].squares()
        squares = self.raw_losses.new_zeros(len(self.raw_losses))
        if not parts:
            return squares
        # Several uses of one tensor add up before the norm is taken.
        size = parts[0].slice(0, 1).rows().numel() * squares.element_size()
        for start, stop in ranges(len(squares), 2 * size, squares.device):
            total = torch.stack([part.slice(start, stop).rows() for part in parts]).sum(dim=0)
            squares[start:stop] = total.square().sum(dim=1)
        return squares

    @cached_property
    def _good(self) -> Tensor:
        return torch.isfinite(self._squares.sum(dim=1) + self.raw_losses)

    @cached_property
    def _all_good(self) -> bool:
        return bool(self._good.all())

    @cached_property
    def _clean(self) -> tuple[tuple[Part, ...], ...]:
        if self._all_good:
            return self.parts
        return tuple(tuple(part.only(self._good) for part in parts) for parts in self.parts)

    def _zeroed(self, values: Tensor) -> Tensor:
        if self._all_good:
            return values
        good = self._good.view(-1, *[1] * (values.dim() - 1))
        return torch.where(good, values, torch.zeros((), dtype=values.dtype))

    @property
    def losses(self) -> Tensor:
        return self._zeroed(self.raw_losses)

    def matrix(self) -> Tensor:
        table = self.params.new_zeros(len(self.raw_losses), self.layout.dim)
        for block, parts in zip(table.split(self.layout.sizes, dim=1), self._clean, strict=True):
            for part in parts:
                block += part.rows()
        return table

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self._zeroed(group_squares(self._squares, groups)).sqrt()

    def dots(self, direction: Tensor) -> Tensor:
        total = self.raw_losses.new_zeros(len(self.raw_losses))
        for block, parts in zip(direction.split(self.layout.sizes), self._clean, strict=True):
            for part in parts:
                total = total + part.dots(block)
        return total

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = ()) -> Tensor:
        if "_good" not in self.__dict__:
            # Nobody asked for norms: a finite sum proves that every gradient was finite.
            total = self._sum(self.parts, factors, groups)
            if bool(torch.isfinite(total).all()) and bool(torch.isfinite(self.raw_losses).all()):
                return total
        return self._sum(self._clean, self._zeroed(factors), groups)

    def _sum(self, parts: tuple[tuple[Part, ...], ...], factors: Tensor, groups: tuple[int, ...]) -> Tensor:
        total = torch.zeros_like(self.params)
        for i, (block, own) in enumerate(zip(total.split(self.layout.sizes), parts, strict=True)):
            for part in own:
                block += part.weighted(column(factors, groups, i))
        return total
