"""Group norm whose backward pass gives the input's gradient and each example's parameter gradients at once.

PyTorch's own backward pass adds the parameter gradients of all examples up, so that a second pass would be needed. One
triton kernel per direction reads images in either memory format (channels first or last) and float32 or bf16; it
computes in float32. None is returned where there is no triton or no GPU: `function_rules` then uses PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fulcrum.gradients.stacked import fused

MAX_CHANNELS_PER_PROGRAM = 128
"""A program holds the sums of all channels of its groups; larger groups go through PyTorch."""

CHANNELS_PER_READ = 32
"""Channels that a program reads side by side where they are last in memory: 128 bytes of float32."""

TILE_SIZE = 4096
"""Numbers that a program reads at a time."""


@dataclass(frozen=True)
class ParameterGrads:
    """Each example's gradient of the weight and of the bias, [B, C] each, float32."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class _Geometry:
    """Images of C channels in groups of `each` and P pixels; strides of a channel and of a pixel, in elements."""

    channels: int
    each: int
    pixels: int
    by_channel: int
    by_pixel: int

    @staticmethod
    def of(images: Tensor, groups: int) -> _Geometry | None:
        """The geometry of images [B, C, ...]; None where pixels have no single stride or a group is too large."""
        channels, pixels = images.shape[1], math.prod(images.shape[2:])
        each = channels // groups
        if each > MAX_CHANNELS_PER_PROGRAM:
            return None
        if images.is_contiguous():
            return _Geometry(channels, each, pixels, pixels, 1)
        if images.movedim(1, -1).is_contiguous():
            return _Geometry(channels, each, pixels, 1, channels)
        return None

    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        wanted = CHANNELS_PER_READ if self.by_channel == 1 else 1
        block = min(self.channels, self.each * max(1, wanted // self.each))
        wide = 1 << (block - 1).bit_length()
        tall = max(1, min(TILE_SIZE // wide, 1 << (self.pixels - 1).bit_length()))
        blocks = -(-self.channels // block)
        return {
            "C": self.channels, "EACH": self.each, "P": self.pixels, "BY_CHANNEL": self.by_channel,
            "BY_PIXEL": self.by_pixel, "BLOCK": block, "BLOCKS": blocks, "WIDE": wide, "TALL": tall, "num_warps": 8,
        }  # fmt: skip


@dataclass
class _Call:
    """What the backward pass of one call needs, and the input's gradient once it is known."""

    images: Tensor
    weight: Tensor
    geometry: _Geometry
    moments: Tensor
    """Mean and reciprocal standard deviation of each channel's group, [B, C, 2]."""
    out: list[Tensor]
    """The output, until autograd has taken it."""
    slope: Tensor | None = None

    def differentiate(self, g: Tensor) -> ParameterGrads:
        """From the output's gradient; keeps the input's until autograd asks for it."""
        g = _arrange_like(g, self.images)
        slope = torch.empty_like(self.images)
        both = g.new_empty((2, len(g), g.shape[1]), dtype=torch.float32)
        tensors = (self.images, g, self.weight, self.moments, slope, both[0], both[1])
        given = self.geometry.constants()
        done = fused.launch_kernel("group_norm_backward_kernel", len(g) * given["BLOCKS"], tensors, given)
        if not done:
            raise RuntimeError(fused.kernel_failures[-1])
        # Autograd keeps this object until the whole pass is over; the images are not needed any more.
        self.slope, self.images = slope, slope.new_empty(0)
        return ParameterGrads(both[0], both[1])


class GroupNormCall(Protocol):
    """One call of a group norm, here or in `host_group_norm`."""

    out: list[Tensor]
    slope: Tensor | None

    def differentiate(self, g: Tensor) -> ParameterGrads:
        """The parameters' gradients from the output's; puts the input's into `slope`."""
        ...


class HeldGroupNorm(torch.autograd.Function):
    """The output of a call; its backward pass hands out the gradient that `differentiate` found."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, call: GroupNormCall) -> Tensor:
        ctx.call = call
        return call.out.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        call: GroupNormCall = ctx.call
        if call.slope is None:  # no hook asked for the parameters' gradients
            call.differentiate(grads[0])
        slope, call.slope = call.slope, None
        return slope, None


def _arrange_like(values: Tensor, images: Tensor) -> Tensor:
    """The same numbers in the memory format of other images."""
    if images.is_contiguous():
        return values.contiguous()
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def fused_group_norm(
    images: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Callable[[Tensor], ParameterGrads]] | None:
    """The output [B, C, ...] in float32, and the function from its gradient to the parameters' gradients.

    images [B, C, ...]: float32 or bf16. The function must be called with the output's gradient before autograd goes on
    to the images, as a hook on the output is. None where a kernel cannot be used.
    """
    if not fused.can_use_kernels(images) or not images.dim() >= 2 or images.shape[1] % groups:
        return None
    kept = images.detach()
    geometry = _Geometry.of(kept, groups)
    if geometry is None:
        return None
    one = kept.new_ones(kept.shape[1], dtype=torch.float32) if weight is None else weight.detach().float()
    zero = kept.new_zeros(kept.shape[1], dtype=torch.float32) if bias is None else bias.detach().float()
    out = torch.empty_like(kept, dtype=torch.float32)
    moments = kept.new_empty((len(kept), kept.shape[1], 2), dtype=torch.float32)
    given = geometry.constants()
    tensors = (kept, one, zero, out, moments, float(eps))
    if not fused.launch_kernel("group_norm_kernel", len(kept) * given["BLOCKS"], tensors, given):
        return None
    call = _Call(kept, one, geometry, moments, [out])
    return HeldGroupNorm.apply(images, call), call.differentiate  # type: ignore[no-untyped-call]
