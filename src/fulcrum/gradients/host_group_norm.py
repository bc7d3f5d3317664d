"""Group norm on a CPU: one pass gives all gradients, those of parameters per example.

PyTorch's own backward pass adds the parameter gradients of all examples up, and is several times slower for images with
channels last; so is its forward pass for small images. Compiled code takes images of either format. Without it, images
with channels last go through PyTorch's operations in rows of several pixels side by side (`_Rows`), which keep their
inner loops long; others go through PyTorch's own group norm, twice.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.gradients.compiled import MOST_LANES, address, find_kernels
from fulcrum.gradients.group_norm import HeldGroupNorm, ParameterGrads

LARGE_IMAGE = 1024
"""Pixels from which PyTorch's forward pass is the faster one: it has another loop for these."""

ROW_NUMBERS = 512
"""Numbers side by side in a row, where there are as many pixels."""


CACHED_NUMBERS = 2**17
"""Numbers that are worked on at a time, so that they stay in a core's cache."""


@dataclass(frozen=True)
class _Rows:
    """Images [B, C, ...] with channels last as rows [B, n, k C]: k pixels side by side."""

    pixels: int
    channels: int
    groups: int
    k: int

    @staticmethod
    def of(images: Tensor, groups: int) -> _Rows:
        channels, pixels = images.shape[1], math.prod(images.shape[2:])
        most = max(1, min(pixels, ROW_NUMBERS // channels))
        return _Rows(pixels, channels, groups, next(k for k in range(most, 0, -1) if pixels % k == 0))

    def view(self, images: Tensor) -> Tensor:
        return images.movedim(1, -1).reshape(len(images), self.pixels // self.k, self.k * self.channels)

    def split(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Tensors of rows, a few examples at a time."""
        each = max(1, CACHED_NUMBERS // (self.pixels * self.channels))
        return zip(*(values.split(each) for values in rows), strict=True)

    def add(self, rows: Tensor) -> Tensor:
        """Sums over pixels, [B, C]."""
        return self.fold(rows.sum(dim=1))

    def fold(self, sums: Tensor) -> Tensor:
        """Sums of rows [B, k C] as sums over pixels, [B, C]."""
        return sums.view(len(sums), self.k, self.channels).sum(dim=1)

    def add_groups(self, values: Tensor) -> Tensor:
        """Sums over the channels of each group of [B, C], for each of them: [B, C]."""
        parts = values.view(len(values), self.groups, -1)
        return parts.sum(dim=2, keepdim=True).expand_as(parts).contiguous().view(values.shape)

    def widen(self, values: Tensor) -> Tensor:
        """[B, C] -> [B, 1, k C], to combine with rows."""
        return values.unsqueeze(1).expand(-1, self.k, -1).reshape(len(values), 1, -1)


@dataclass
class _Call:
    """What the backward pass of one call needs, and the input's gradient once it is known."""

    rows: _Rows
    images: Tensor
    """The input, as rows."""
    centre: Tensor
    """The mean of each channel's group, [B, C]."""
    rise: Tensor
    """One over its standard deviation, [B, C]."""
    weight: Tensor
    out: list[Tensor]
    """The output, until autograd has taken it."""
    slope: Tensor | None = None

    def differentiate(self, g: Tensor) -> ParameterGrads:
        """From the output's gradient; keeps the input's until autograd asks for it."""
        rows, rise, shape = self.rows, self.rise, g.shape
        g = rows.view(g)
        count = rows.pixels * (rows.channels // rows.groups)
        bias = rows.add(g)
        weight = rows.fold(torch.cat([torch.mul(*both).sum(dim=1) for both in rows.split(g, self.images)]))
        weight.addcmul_(bias, self.centre, value=-1).mul_(rise)
        along = rows.add_groups(weight * self.weight).mul_(rise.square()).div_(-count)
        level = rows.add_groups(bias * self.weight).mul_(rise).div_(-count).addcmul_(along, self.centre, value=-1)
        found = torch.empty_like(g)
        wide = (rows.widen(level), rows.widen(along), rows.widen(rise * self.weight))
        for part, own, start, slope, factor, image in rows.split(found, g, *wide, self.images):
            torch.addcmul(start, image, slope, out=part).addcmul_(own, factor)
        # Autograd keeps this object until the whole pass is over; the images are not needed any more.
        self.slope, self.images = _to_images(found, shape), found.new_empty(0)
        return ParameterGrads(weight, bias)


def _to_images(rows: Tensor, shape: torch.Size) -> Tensor:
    return rows.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def host_group_norm(
    images: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Callable[[Tensor], ParameterGrads]] | None:
    """As `group_norm.fused_group_norm`, on a CPU; None unless float32, and compiled or with channels last."""
    compiled = _run_compiled(images, groups, weight, bias, eps)
    if compiled is not None:
        return compiled
    last = images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
    if images.dtype != torch.float32 or not last or images.is_contiguous() or not images.numel():
        return None
    kept = images.detach()
    rows = _Rows.of(kept, groups)
    own = kept.new_ones(rows.channels) if weight is None else weight.detach()
    if rows.pixels < LARGE_IMAGE:
        out, centre, rise = _normalise(rows, kept, own, bias, eps)
    else:
        size = (len(kept), rows.channels, rows.pixels)
        out, *moments = torch.native_group_norm(kept, weight, bias, *size, groups, eps)
        out = out.detach()
        centre, rise = (each.detach().repeat_interleave(rows.channels // groups, dim=1) for each in moments)
    call = _Call(rows, rows.view(kept), centre, rise, own, [out])
    return HeldGroupNorm.apply(images, call), call.differentiate  # type: ignore[no-untyped-call]


def _normalise(
    rows: _Rows, images: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the mean and one over the standard deviation of each channel's group, [B, C] each."""
    count = rows.pixels * (rows.channels // rows.groups)
    given = rows.view(images)
    centre = rows.add_groups(rows.add(given)).div_(count)
    squares = [(part - middle).square_().sum(dim=1) for part, middle in rows.split(given, rows.widen(centre))]
    rise = rows.add_groups(rows.fold(torch.cat(squares))).div_(count).add_(eps).rsqrt_()
    steep = rise * weight
    level = centre.mul(steep).neg_() if bias is None else torch.addcmul(bias.detach(), centre, steep, value=-1)
    out = torch.addcmul(rows.widen(level), given, rows.widen(steep))
    return _to_images(out, images.shape), centre, rise


# --- compiled -----------------------------------------------------------------------------------


class _Images(ctypes.Structure):
    """`Images` of compiled/group_norm.c."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("count", "channels", "pixels", "groups", "last"))


@dataclass
class _CompiledCall:
    """As `_Call`. centre, rise [B, C]: of each channel's group."""

    images: Tensor
    weight: Tensor
    centre: Tensor
    rise: Tensor
    shape: _Images
    out: list[Tensor]
    slope: Tensor | None = None

    def differentiate(self, g: Tensor) -> ParameterGrads:
        """From the output's gradient; keeps the input's until autograd asks for it."""
        library, images = find_kernels(), self.images
        assert library is not None
        if not images.numel():
            raise RuntimeError("the backward pass of this group norm was done before; its images are gone.")
        last = torch.channels_last if self.shape.last else torch.contiguous_format
        slope, own = torch.empty_like(images), g.float().contiguous(memory_format=last)
        grads = images.new_empty((2, *images.shape[:2]))
        known = (own, images, self.weight, self.centre, self.rise, slope, grads[0], grads[1])
        _call(library.fulcrum_group_norm_back, known, self.shape)
        # Autograd keeps this object until the whole pass is over; the images are not needed any more.
        self.slope, self.images = slope, slope.new_empty(0)
        return ParameterGrads(grads[0], grads[1])


def _call(function: Callable[..., None], tensors: tuple[Tensor, ...], shape: _Images, *numbers: float) -> None:
    scratch = torch.empty(4 * shape.channels, dtype=torch.float64)
    function(*map(address, tensors), address(scratch), ctypes.byref(shape), *map(ctypes.c_double, numbers))


def _run_compiled(
    images: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Callable[[Tensor], ParameterGrads]] | None:
    """None where there is no compiled code for these images."""
    if images.dtype != torch.float32 or images.is_cuda or images.dim() < 2 or not images.numel():
        return None
    channels, last = images.shape[1], not images.is_contiguous()
    if last and not (images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)):
        return None
    if channels % groups or (last and channels % MOST_LANES):
        return None
    library = find_kernels()
    if library is None:
        return None
    kept = images.detach()
    own = kept.new_ones(channels) if weight is None else weight.detach().contiguous()
    start = kept.new_zeros(channels) if bias is None else bias.detach().contiguous()
    if any(each.dtype != torch.float32 or each.shape != (channels,) for each in (own, start)):
        return None
    shape = _Images(len(kept), channels, math.prod(kept.shape[2:]), groups, last)
    out, moments = torch.empty_like(kept), kept.new_empty((2, len(kept), channels))
    _call(library.fulcrum_group_norm, (kept, own, start, out, moments[0], moments[1]), shape, eps)
    call = _CompiledCall(kept, own, moments[0], moments[1], shape, [out])
    return HeldGroupNorm.apply(images, call), call.differentiate  # type: ignore[no-untyped-call]
