"""Parts whose gradients are sums of outer products: linear layers and convolutions.

The gradient of example b is sum_t g_t a_t^T over the positions t that share the weights. It is written
out once where that pays; else its norm comes from it a few examples at a time, or from the two Gram
matrices over positions ("ghost"), and sums come from the layer's ordinary weight gradient with
scaled output gradients.

Letters: B examples, T positions, K inputs and O outputs of each position.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.param_grads import Order, Rows, ranges, row_squares, scale, zero_out

TOUCH = 20
"""What it costs to write and read back one entry of a per-example gradient, in multiply-adds."""


@dataclass(frozen=True)
class Size:
    """Work and memory of a layer's per-example weight gradients: `blocks` of O x K, over T positions."""

    blocks: int
    positions: int
    inputs: int
    outputs: int

    @property
    def entries(self) -> int:
        """n, the entries of the weight."""
        return self.blocks * self.inputs * self.outputs

    @property
    def ghost(self) -> int:
        """Multiply-adds of an example's norm from the two Gram matrices over positions."""
        return self.blocks * self.positions**2 * (self.inputs + self.outputs)

    @property
    def worth_writing(self) -> bool:
        """Whether writing the gradient out once beats a ghost norm followed by a separate sum."""
        return self.positions > 1 and TOUCH * self.entries < self.ghost

    @property
    def by_ghost(self) -> bool:
        """Whether, where the gradient is not kept, its norm is cheaper by Gram matrices."""
        return self.ghost < (self.positions + TOUCH) * self.entries


def ghost_squares(inputs: Tensor, grads: Tensor) -> Tensor:
    """Squared norms [B] of sum_t g_t a_t^T from a [B, K, T] and g [B, T, O], as sum_st <a_s, a_t><g_s, g_t>.

    Where positions cancel almost wholly the sum loses its digits, and too small a norm would let an
    example through unclipped; so it is never taken below what rounding can account for.
    """
    if inputs.shape[2] == 1:
        return row_squares(inputs) * row_squares(grads)
    gram = torch.bmm(inputs.transpose(1, 2), inputs)
    other = torch.bmm(grads, grads.transpose(1, 2))
    lengths = gram.diagonal(dim1=1, dim2=2) * other.diagonal(dim1=1, dim2=2)
    largest = lengths.sqrt().sum(dim=1).square()  # the squared norm if nothing cancelled
    return torch.maximum((gram * other).sum(dim=(1, 2)), 100 * torch.finfo(gram.dtype).eps * largest)


@dataclass(frozen=True)
class Dense:
    """A linear layer's weight [O, K]: inputs a [B, T, K], output gradients g [B, T, O]; or [B, K] and [B, O]."""

    a: Tensor
    g: Tensor
    order: Order | None = None
    """Where the weight's entries lie in another order than [O, K]: a convolution over patches."""

    @property
    def size(self) -> Size:
        return Size(1, self.a.shape[1] if self.a.dim() == 3 else 1, self.a.shape[-1], self.g.shape[-1])

    def operands(self) -> tuple[Tensor, Tensor]:
        """Inputs [B, K, T] and output gradients [B, T, O]."""
        if self.a.dim() == 2:
            return self.a.unsqueeze(2), self.g.unsqueeze(1)
        return self.a.transpose(1, 2), self.g

    def squares(self) -> Tensor:
        if self.size.positions == 1:
            return row_squares(self.a) * row_squares(self.g)
        return outer_squares(self)

    def dots(self, direction: Tensor) -> Tensor:
        stored = self.order.to_stored(direction) if self.order else direction
        along = F.linear(self.a, stored.view(self.g.shape[-1], self.a.shape[-1]))
        return (along * self.g).flatten(1).sum(dim=1)

    def weighted(self, factors: Tensor) -> Tensor:
        total = (scale(self.g, factors).flatten(0, -2).t() @ self.a.flatten(0, -2)).reshape(-1)
        return self.order.to_parameter(total) if self.order else total

    def rows(self) -> Tensor:
        a, g = self.operands()
        grads = torch.bmm(g.transpose(1, 2), a.transpose(1, 2)).flatten(1)
        return self.order.to_parameter(grads) if self.order else grads

    def only(self, good: Tensor) -> Dense:
        return Dense(zero_out(self.a, good), zero_out(self.g, good), self.order)

    def slice(self, start: int, stop: int) -> Dense:
        return Dense(self.a[start:stop], self.g[start:stop], self.order)


@dataclass(frozen=True)
class Patches:
    """The patches [B, T, kh * kw * C] that a convolution's kernel sees, and where they came from."""

    values: Tensor
    source: Tensor
    """The convolution's input [B, C, H, W]."""
    size: tuple[int, int]
    """Height and width of the output, T = h w."""

    def matrix(self, weight: Tensor) -> Tensor:
        """The convolution's weight [O, C, kh, kw] as [O, kh * kw * C]."""
        return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)

    def part(self, g: Tensor, weight: Tensor) -> Dense:
        """The weight's part, from the gradient g [B, O, h, w] of the output."""
        grads = g.permute(0, 2, 3, 1).reshape(len(g), -1, g.shape[1])
        return Dense(self.values, grads, _patch_order(1, weight))


def unfold(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> Patches:
    """The patches of images x [B, C, H, W], copied with their channels last."""
    (kh, kw), (dy, dx), (py, px) = kernel, stride, padding
    image = F.pad(x.permute(0, 2, 3, 1), (0, 0, px, px, py, py)).contiguous()
    count, height, width, c = image.shape
    h, w = (height - kh) // dy + 1, (width - kw) // dx + 1
    row = width * c
    view = image.as_strided((count, h, w, kh, kw * c), (height * row, dy * row, dx * c, row, 1))
    return Patches(view.reshape(count, h * w, kh * kw * c), x, (h, w))


def _patch_order(groups: int, weight: Tensor) -> Order:
    """Of a gradient [groups, O, patch] over patches with channels last, for a weight [O, C, kh, kw]."""
    o, c, kh, kw = weight.shape
    return Order((groups, o // groups, kh, kw, c), (0, 1, 4, 2, 3))


@dataclass(frozen=True)
class Conv:
    """A convolution's weight [O, C / groups, kh, kw]: inputs a [B, C, H, W] padded already, g [B, O, h, w]."""

    a: Tensor
    g: Tensor
    weight: Tensor
    """The layer's weight; only its shape and layout matter."""
    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def size(self) -> Size:
        outputs = self.weight.shape[0] // self.groups
        return Size(self.groups, math.prod(self.g.shape[2:]), math.prod(self.weight.shape[1:]), outputs)

    @property
    def by_channels(self) -> bool:
        """Whether patches are copied in longer runs when channels come last in memory."""
        kw, stride = self.weight.shape[3], self.stride[1]
        run = self.weight.shape[1] * (kw if self.dilation[1] == 1 and self.groups == 1 else 1)
        return run >= (self.g.shape[3] if stride == 1 else 1)

    def operands(self) -> tuple[Tensor, Tensor]:
        """Patches [B * groups, K, T] and output gradients [B * groups, T, O / groups].

        The patches are a strided view, copied once: on CUDA `F.unfold` would start a kernel per image.
        """
        n, (_, c, kh, kw), (h, w) = self.groups, self.weight.shape, self.g.shape[2:]
        layout = torch.channels_last if self.by_channels else torch.contiguous_format
        a = self.a.contiguous(memory_format=layout)
        sb, sc, sh, sw = a.stride()
        (dy, dx), (ry, rx) = self.stride, self.dilation
        view = a.as_strided(
            (len(a), n, c, kh, kw, h, w), (sb, c * sc, sc, ry * sh, rx * sw, dy * sh, dx * sw), a.storage_offset()
        )
        if self.by_channels:
            patches = view.permute(0, 1, 5, 6, 3, 4, 2).reshape(len(a) * n, h * w, kh * kw * c).transpose(1, 2)
        else:
            patches = view.reshape(len(a) * n, c * kh * kw, h * w)
        return patches, self.g.reshape(len(a) * n, -1, h * w).transpose(1, 2)

    @property
    def order(self) -> Order | None:
        """Of the entries of `outer` gradients, [groups, O, patch] each, the patch as it was copied."""
        return _patch_order(self.groups, self.weight) if self.by_channels else None

    def squares(self) -> Tensor:
        return outer_squares(self)

    def dots(self, direction: Tensor) -> Tensor:
        weight = direction.view(self.weight.shape)
        out = F.conv2d(self.a, weight, None, self.stride, 0, self.dilation, self.groups)
        return (out * self.g).sum(dim=(1, 2, 3))

    def weighted(self, factors: Tensor) -> Tensor:
        nothing, wanted = (0, 0), (False, True, False)
        arguments = (self.stride, nothing, self.dilation, False, nothing, self.groups, wanted)
        grad = torch.ops.aten.convolution_backward(scale(self.g, factors), self.a, self.weight, None, *arguments)[1]
        return torch.as_tensor(grad).reshape(-1)

    def rows(self) -> Tensor:
        return outer_rows(self).rows()

    def only(self, good: Tensor) -> Conv:
        return dataclasses.replace(self, a=zero_out(self.a, good), g=zero_out(self.g, good))

    def slice(self, start: int, stop: int) -> Conv:
        return dataclasses.replace(self, a=self.a[start:stop], g=self.g[start:stop])


def outer_rows(part: Dense | Conv) -> Rows:
    """Writes the gradients out, with their squared norms; a convolution's a cacheful of patches at a time."""
    size, count, order = part.size, len(part.g), part.order
    swap = size.inputs < size.outputs  # the longer side last: better use of vector registers
    sides = (size.inputs, size.outputs) if swap else (size.outputs, size.inputs)
    grads = part.g.new_empty(count * size.blocks, *sides)
    patches = part.g.element_size() * size.blocks * size.positions * size.inputs if isinstance(part, Conv) else 0
    for start, stop in ranges(count, patches, part.g.device):
        whole = stop - start == count
        a, g = (part if whole else part.slice(start, stop)).operands()
        block = grads if whole else grads[start * size.blocks : stop * size.blocks]
        torch.bmm(a, g, out=block) if swap else torch.bmm(g.transpose(1, 2), a.transpose(1, 2), out=block)
    return Rows(grads.view(count, -1), _swapped(order, size) if swap else order)


def _swapped(order: Order | None, size: Size) -> Order:
    """The order of gradients stored with the output last, from the order with it first."""
    if order is None:
        return Order((size.blocks, size.inputs, size.outputs), (0, 2, 1))
    n, o, *patch = order.sizes
    last = len(order.sizes) - 1
    return Order((n, *patch, o), tuple(0 if i == 0 else last if i == 1 else i - 1 for i in order.permutation))


def outer_squares(part: Dense | Conv) -> Tensor:
    """Squared norms of the gradients, by the cheaper way, keeping none of them."""
    size, count = part.size, len(part.g)
    squares = part.g.new_empty(count)
    entries = size.blocks * size.positions * (size.inputs + 2 * size.positions)
    if size.positions > 1 and not size.by_ghost:
        entries = max(entries, size.entries)
    for start, stop in ranges(count, part.g.element_size() * entries, part.g.device):
        a, g = part.slice(start, stop).operands()
        by_ghost = size.by_ghost or size.positions == 1
        found = ghost_squares(a, g) if by_ghost else row_squares(torch.bmm(a, g))
        squares[start:stop] = found.view(stop - start, size.blocks).sum(dim=1)
    return squares
