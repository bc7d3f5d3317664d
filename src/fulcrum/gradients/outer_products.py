"""Per-example gradients that are sums of outer products: linear layers and convolutions.

The gradient of example b is sum_t g_t a_t^T over the positions t that share the weights. It is
materialised once where that is cheaper. Otherwise its norm is computed from a few gradients at a time, or from the
two Gram matrices over positions ("ghost"), and sums are the layer's ordinary weight gradient with
scaled output gradients.

Symbols: B examples, T positions, K inputs and O outputs per position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.host_convolution import fits_compiled_convolution, write_conv_grads
from fulcrum.gradients.param_grads import (
    DOUBLE_SCRATCH,
    BlockedGrad,
    EntryOrder,
    MaterialisedGrad,
    scale_rows,
    scratch_ranges,
    zero_masked_rows,
)
from fulcrum.gradients.pixel_grams import PixelProducts, multiply_pixels, plan_pixel_products
from fulcrum.gradients.rounding import (
    SquaredNorms,
    add_error,
    add_fast_error,
    add_fast_squares,
    from_fast_grams,
    ghost_squared_norms,
    multiply_squared_norms,
    squared_norms,
)
from fulcrum.gradients.stacked import fused
from fulcrum.gradients.stacked.geometry import SlidingWindow

WRITE_READ_COST = 20
"""Cost of writing and reading one entry of a per-example gradient on a CPU, in multiply-adds."""

LARGE_ENTRIES = {2**16: 2, 2**17: 3}
"""Gradients of more entries than these do not stay in a CPU's cache: each entry costs so many times as much."""

SHIFTED_SCRATCH = {"cpu": 2**20, "cuda": 2**28}
"""Maximum bytes of images with zeros around them, and of their gradients, at a time."""

SHIFTED_CHANNELS = 8
"""Channels from which a CPU multiplies shifted images in place of patches: with fewer the products are too small."""

CUDA_WRITE_READ_COST = {"float32": 100, "tf32": 600, "bf16": 600}
"""The same on a GPU, by the precision of products: 45, 200 and 400 TFLOP/s against 3.5 TB/s; more for the
first two, since written gradients also take memory."""


def find_write_cost(values: Tensor) -> int:
    """The cost of an entry for a layer with this input; 0: that of a CPU."""
    if not values.is_cuda:
        return 0
    if values.dtype in (torch.bfloat16, torch.float16):
        return CUDA_WRITE_READ_COST["bf16"]
    rounded = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return CUDA_WRITE_READ_COST["tf32" if rounded else "float32"]


@dataclass(frozen=True)
class WeightGradCost:
    """Work and memory of a layer's per-example weight gradients: `blocks` of O x K, over T positions."""

    blocks: int
    positions: int
    inputs: int
    outputs: int
    write_cost: int = 0
    """Cost of writing and reading an entry, in multiply-adds; 0: WRITE_READ_COST."""

    @staticmethod
    def of(values: Tensor, blocks: int, positions: int, inputs: int, outputs: int) -> WeightGradCost:
        """The cost on the device and in the precision of a layer's input."""
        cost = find_write_cost(values)
        if not cost:
            entries = inputs * outputs
            cost = WRITE_READ_COST * max([1, *(times for limit, times in LARGE_ENTRIES.items() if entries > limit)])
        return WeightGradCost(blocks, positions, inputs, outputs, cost)

    @property
    def entries(self) -> int:
        """Number of entries n of the weight."""
        return self.blocks * self.inputs * self.outputs

    @property
    def ghost(self) -> int:
        """Multiply-adds per example for the norm from the two Gram matrices over positions."""
        return self.blocks * self.positions**2 * (self.inputs + self.outputs)

    @property
    def should_materialise(self) -> bool:
        """Whether materialising the gradient once is cheaper than a ghost norm followed by a separate sum."""
        return self.positions > 1 and (self.write_cost or WRITE_READ_COST) * self.entries < self.ghost

    @property
    def prefers_ghost_norms(self) -> bool:
        """Whether the norm of a gradient that is not kept is cheaper from Gram matrices."""
        return self.ghost < (self.positions + (self.write_cost or WRITE_READ_COST)) * self.entries


def multiply(one: Tensor, other: Tensor) -> Tensor:
    """A matrix product; of bf16 numbers (`other`) added up in float32."""
    if other.dtype != torch.bfloat16:
        return one @ other
    if other.is_cuda:
        return torch.mm(one.to(other.dtype), other, out_dtype=torch.float32)
    return one.float() @ other.float()


def multiply_batches(one: Tensor, other: Tensor) -> Tensor:
    """The same for batches of matrices."""
    if other.dtype != torch.bfloat16:
        return torch.bmm(one, other)
    if other.is_cuda:
        return torch.bmm(one.to(other.dtype), other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())


@dataclass(frozen=True)
class LinearGrad:
    """A linear layer's weight [O, K]: inputs a [B, T, K], output gradients g [B, T, O]; or [B, K] and [B, O]."""

    a: Tensor
    g: Tensor
    order: EntryOrder | None = None
    """Order of the weight's entries where it is not [O, K]: a convolution over patches."""

    @property
    def size(self) -> WeightGradCost:
        positions = self.a.shape[1] if self.a.dim() == 3 else 1
        return WeightGradCost.of(self.a, 1, positions, self.a.shape[-1], self.g.shape[-1])

    def matmul_operands(self) -> tuple[Tensor, Tensor]:
        """Inputs [B, K, T] and output gradients [B, T, O]."""
        if self.a.dim() == 2:
            return self.a.unsqueeze(2), self.g.unsqueeze(1)
        return self.a.transpose(1, 2), self.g

    @property
    def positions(self) -> int:
        return self.size.positions

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        if self.positions == 1:
            return multiply_squared_norms(squared_norms(self.a.flatten(1)), squared_norms(self.g.flatten(1)))
        return outer_squared_norms(self, fast)

    def fast_squares(self) -> Tensor | None:
        """Squared norms [B] with a relative error, where there is one position: the product of two."""
        if self.a.dim() == 3 and self.a.shape[1] > 1:
            return None
        return add_fast_squares(self.a.flatten(1)).mul_(add_fast_squares(self.g.flatten(1)))

    def dots(self, direction: Tensor) -> Tensor:
        stored = self.order.to_stored(direction) if self.order else direction
        along = F.linear(self.a, stored.view(self.g.shape[-1], self.a.shape[-1]).to(self.a.dtype))
        return (along * self.g).flatten(1).sum(dim=1, dtype=direction.dtype)

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        if proven:
            total = self._sum_in_float64(factors).reshape(-1)
        else:
            total = multiply(*self._scaled_operands(factors)).reshape(-1)
        return self.order.to_parameter(total) if self.order else total

    def write_sum(self, factors: Tensor, block: Tensor) -> None:
        """Write `weighted_sum` into block [n]."""
        slopes, inputs = self._scaled_operands(factors)
        if self.order is None and inputs.dtype == slopes.dtype == block.dtype:
            torch.mm(slopes, inputs, out=block.view(len(slopes), -1))
        else:
            block.copy_(self.weighted_sum(factors))

    def _scaled_operands(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Output gradients [O, B * T] and inputs [B * T, K], one of them times the factors: the smaller is copied."""
        a, g = self.a, self.g
        if a.shape[-1] < g.shape[-1]:
            a = scale_rows(a, factors.to(a.dtype))
        else:
            g = scale_rows(g, factors.to(g.dtype))
        return g.flatten(0, -2).t(), a.flatten(0, -2)

    def _sum_in_float64(self, factors: Tensor) -> Tensor:
        """[O, K] in float64, a few examples at a time."""
        size = self.size
        total = torch.zeros((size.outputs, size.inputs), dtype=torch.float64, device=self.g.device)
        each = 8 * size.positions * (size.inputs + size.outputs)
        for start, stop in scratch_ranges(len(self.g), each, self.g.device, DOUBLE_SCRATCH):
            g = scale_rows(self.g[start:stop].double(), factors[start:stop].double()).flatten(0, -2)
            total.addmm_(g.t(), self.a[start:stop].double().flatten(0, -2))
        return total

    def rows(self) -> Tensor:
        a, g = self.matmul_operands()
        grads = multiply_batches(g.transpose(1, 2), a.transpose(1, 2)).flatten(1)
        return self.order.to_parameter(grads) if self.order else grads

    def only(self, good: Tensor) -> LinearGrad:
        return LinearGrad(zero_masked_rows(self.a, good), zero_masked_rows(self.g, good), self.order)

    def slice(self, start: int, stop: int) -> LinearGrad:
        return LinearGrad(self.a[start:stop], self.g[start:stop], self.order)


@dataclass(frozen=True)
class ConvPatches:
    """The input patches [B, T, kh * kw * C] of a convolution, and their source."""

    values: Tensor
    source: Tensor
    """The convolution's input [B, C, H, W]."""
    size: tuple[int, int]
    """Height and width of the output, T = h w."""

    def matrix(self, weight: Tensor) -> Tensor:
        """The convolution's weight [O, C, kh, kw] as [O, kh * kw * C]."""
        return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)

    def part(self, g: Tensor, weight: Tensor) -> LinearGrad:
        """The weight's gradients, from the gradient g [B, O, h, w] of the output."""
        grads = g.permute(0, 2, 3, 1).reshape(len(g), -1, g.shape[1])
        return LinearGrad(self.values, grads, _patch_entry_order(1, weight))


def unfold_patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]
) -> ConvPatches:
    """The patches of images x [B, C, H, W], copied with their channels last."""
    (kh, kw), (dy, dx), (py, px) = kernel, stride, padding
    image = F.pad(x.permute(0, 2, 3, 1), (0, 0, px, px, py, py)).contiguous()
    count, height, width, c = image.shape
    h, w = (height - kh) // dy + 1, (width - kw) // dx + 1
    row = width * c
    shape, strides = (count, h, w, kh), (height * row, dy * row, dx * c, row)
    if image.device.type == "cpu" and kw * c <= SHORT_RUN:
        patches = _copy_runs(image, shape, strides, kw * c)
    else:
        patches = image.as_strided((*shape, kw * c), (*strides, 1))
    return ConvPatches(patches.reshape(count, h * w, kh * kw * c), x, (h, w))


SHORT_RUN = 16
"""Numbers side by side up to which NumPy copies them faster, as one number of that many bytes."""


def _copy_runs(source: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], run: int) -> Tensor:
    """A copy [*shape, run] of a contiguous source's runs of `run` numbers, `strides` numbers apart."""
    size = source.element_size()
    whole = f"V{size * run}"
    found = torch.empty((*shape, run), dtype=source.dtype)
    view = np.ndarray(shape, whole, source.numpy(), strides=tuple(size * step for step in strides))
    np.copyto(found.numpy().view(whole)[..., 0], view)
    return found


def _patch_entry_order(groups: int, weight: Tensor) -> EntryOrder:
    """Entry order of a gradient [groups, O, patch] over patches with channels last, for a weight [O, C, kh, kw]."""
    o, c, *kernel = weight.shape
    last = 2 + len(kernel)
    return EntryOrder((groups, o // groups, *kernel, c), (0, 1, last, *range(2, last)))


@dataclass(frozen=True)
class ConvGrad:
    """A convolution's weight [O, C / groups, kh, kw]: inputs a [B, C, H, W], output gradients g [B, O, h, w].

    Or in three dimensions.
    """

    a: Tensor
    g: Tensor
    weight: Tensor
    """The layer's weight; only its shape and layout matter."""
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...] = ()
    """Zeros around the inputs in each dimension; empty: none."""

    @property
    def size(self) -> WeightGradCost:
        outputs, inputs = self.weight.shape[0] // self.groups, math.prod(self.weight.shape[1:])
        return WeightGradCost.of(self.a, self.groups, math.prod(self.g.shape[2:]), inputs, outputs)

    @property
    def copies_channels_last(self) -> bool:
        """Whether channels last in memory gives longer contiguous copies of patches."""
        kw, stride = self.weight.shape[-1], self.stride[-1]
        run = self.weight.shape[1] * (kw if self.dilation[-1] == 1 and self.groups == 1 else 1)
        return run >= (self.g.shape[-1] if stride == 1 else 1)

    def matmul_operands(self) -> tuple[Tensor, Tensor]:
        """Patches [B * groups, K, T] and output gradients [B * groups, T, O / groups].

        The patches are a strided view, copied once: on CUDA `F.unfold` would start a kernel per image.
        """
        n, (c, *kernel), out = self.groups, self.weight.shape[1:], self.g.shape[2:]
        copied = self._extract_patches()
        if copied is not None:
            return copied.transpose(1, 2), self.g.movedim(1, -1).flatten(1, -2)
        last = torch.channels_last if len(out) == 2 else torch.channels_last_3d
        around = [amount for p in reversed(self.padding) for amount in (p, p)]
        padded = F.pad(self.a, around) if any(around) else self.a
        a = padded.contiguous(memory_format=last if self.copies_channels_last else torch.contiguous_format)
        by_example, by_channel, *by_pixel = a.stride()
        steps = (gap * s for gap, s in zip(self.dilation, by_pixel, strict=True))
        moves = (step * s for step, s in zip(self.stride, by_pixel, strict=True))
        view = a.as_strided(
            (len(a), n, c, *kernel, *out),
            (by_example, c * by_channel, by_channel, *steps, *moves),
            a.storage_offset(),
        )
        positions, entries, dims = math.prod(out), c * math.prod(kernel), len(out)
        if self.copies_channels_last:
            moved = view.permute(0, 1, *range(3 + dims, 3 + 2 * dims), *range(3, 3 + dims), 2)
            patches = moved.reshape(len(a) * n, positions, entries).transpose(1, 2)
        else:
            patches = view.reshape(len(a) * n, entries, positions)
        return patches, self.g.reshape(len(a) * n, -1, positions).transpose(1, 2)

    def _extract_patches(self) -> Tensor | None:
        """Patches [B, T, K] by one kernel, where there is one for this device and layer: None elsewhere."""
        if (
            self.groups > 1
            or len(self.stride) != 2
            or not self.copies_channels_last
            or not fused.can_use_kernels(self.a)
        ):
            return None
        (_, c, kh, kw), (height, width) = self.weight.shape, self.a.shape[2:]
        (sh, sw), (dh, dw) = self.stride, self.dilation
        ph, pw = self.padding or (0, 0)
        window = SlidingWindow(height, width, c, (kh, kw), (sh, sw), (ph, pw), (dh, dw))
        if window.out != tuple(self.g.shape[2:]):
            return None
        found = fused.fused_extract_patches(self.a.permute(0, 2, 3, 1).contiguous().unsqueeze(0), window)
        return None if found is None else found[0]

    @property
    def can_shift(self) -> bool:
        """Whether the gradients are products of shifted images (`_multiply_shifted`) on this device."""
        plain = self.groups == 1 and max(self.stride) == max(self.dilation) == 1 and len(self.stride) == 2
        kind = self.g.dtype
        wide = kind == self.a.dtype and kind in (torch.float32, torch.float64) and not self.g.is_cuda
        return plain and wide and self.weight.shape[1] >= SHIFTED_CHANNELS and math.prod(self.weight.shape[2:]) > 1

    @property
    def pixel_products(self) -> PixelProducts | None:
        """How inner products of patches are made of those of pixels; None where patches are as cheap, or on a GPU."""
        if self.groups > 1 or self.a.is_cuda or not self.a.dtype == self.g.dtype == torch.float32:
            return None
        sizes = (tuple(self.a.shape[2:]), tuple(self.weight.shape[2:]), tuple(self.g.shape[2:]))
        plan = plan_pixel_products(*sizes, self.stride, self.padding, self.dilation)
        channels, *kernel = self.weight.shape[1:]
        by_patches = self.positions**2 * channels * math.prod(kernel)
        return plan if plan is not None and plan.cost(channels) < by_patches else None

    @property
    def order(self) -> EntryOrder | None:
        """Entry order of the gradients, [groups, O, patch] each, with the patch as it was copied."""
        return _patch_entry_order(self.groups, self.weight) if self.copies_channels_last else None

    @property
    def positions(self) -> int:
        return self.size.positions

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        return outer_squared_norms(self, fast)

    def dots(self, direction: Tensor) -> Tensor:
        weight = direction.view(self.weight.shape).to(self.a.dtype)
        convolve = F.conv2d if weight.dim() == 4 else F.conv3d
        out = convolve(self.a, weight, None, self.stride, self.padding or 0, self.dilation, self.groups)
        return (out * self.g).flatten(1).sum(dim=1, dtype=direction.dtype)

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        if proven:
            return self._sum_in_float64(factors)
        nothing, wanted = (0,) * len(self.stride), (False, True, False)
        arguments = (self.stride, self.padding or nothing, self.dilation, False, nothing, self.groups, wanted)
        scaled = scale_rows(self.g, factors.to(self.g.dtype))
        grad = torch.ops.aten.convolution_backward(scaled, self.a, self.weight, None, *arguments)[1]
        return torch.as_tensor(grad).reshape(-1).to(factors.dtype)

    def _sum_in_float64(self, factors: Tensor) -> Tensor:
        """[n] in float64: one product over the positions of a few examples at a time."""
        size, order, blocks = self.size, self.order, self.size.blocks
        total = torch.zeros((blocks, size.outputs, size.inputs), dtype=torch.float64, device=self.g.device)
        each = 8 * blocks * size.positions * (size.inputs + 2 * size.outputs)
        for start, stop in scratch_ranges(len(self.g), each, self.g.device, DOUBLE_SCRATCH):
            count = stop - start
            a, g = self.slice(start, stop).matmul_operands()  # [count * blocks, K, T], [count * blocks, T, O]
            rows = a.transpose(1, 2).unflatten(0, (count, blocks)).transpose(0, 1).double()  # [blocks, count, T, K]
            slopes = g.unflatten(0, (count, blocks)).transpose(0, 1).double() * factors[start:stop, None, None].double()
            total.baddbmm_(slopes.flatten(1, 2).transpose(1, 2), rows.flatten(1, 2))
        found = total.reshape(-1)
        return order.to_parameter(found) if order else found

    def rows(self) -> Tensor:
        return materialise_grads(self).rows()

    def only(self, good: Tensor) -> ConvGrad:
        return dataclasses.replace(self, a=zero_masked_rows(self.a, good), g=zero_masked_rows(self.g, good))

    def slice(self, start: int, stop: int) -> ConvGrad:
        return dataclasses.replace(self, a=self.a[start:stop], g=self.g[start:stop])


def materialise_grads(part: LinearGrad | ConvGrad) -> MaterialisedGrad | BlockedGrad:
    """Materialises the gradients; for a convolution, in pieces that fit the cache."""
    if isinstance(part, ConvGrad) and fits_compiled_convolution(part):
        return write_conv_grads(part)
    if isinstance(part, ConvGrad) and part.can_shift:
        return _multiply_shifted(part)
    size, count, order = part.size, len(part.g), part.order
    swap = size.inputs < size.outputs  # the longer dimension last: better use of vector registers
    sides = (size.inputs, size.outputs) if swap else (size.outputs, size.inputs)
    kind = torch.float32 if part.g.dtype == torch.bfloat16 else part.g.dtype
    grads = part.g.new_empty((count * size.blocks, *sides), dtype=kind)
    patches = part.g.element_size() * size.blocks * size.positions * size.inputs if isinstance(part, ConvGrad) else 0
    for start, stop in scratch_ranges(count, patches, part.g.device):
        whole = stop - start == count
        a, g = (part if whole else part.slice(start, stop)).matmul_operands()
        block = grads if whole else grads[start * size.blocks : stop * size.blocks]
        one, other = (a, g) if swap else (g.transpose(1, 2), a.transpose(1, 2))
        if other.dtype == kind:
            torch.bmm(one, other, out=block)
        else:
            block.copy_(multiply_batches(one, other))
    return MaterialisedGrad(grads.view(count, -1), _swap_entry_order(order, size) if swap else order)


def _multiply_shifted(part: ConvGrad) -> BlockedGrad:
    """The gradients of a convolution with stride 1, one entry of its kernel after the other, without patches.

    The rows of an image stand one after the other. What the entry (y, x) of the kernel sees of them is the same long
    row from another place on: y rows and x pixels later. The output's gradient gets rows of the same length, filled up
    with zeros. Channels are last in memory: so products are fastest, also where images must be turned for them.
    """
    outputs, channels, kh, kw = part.weight.shape
    ph, pw = part.padding or (0, 0)
    height, wide = part.a.shape[2] + 2 * ph, part.a.shape[3] + 2 * pw
    tall, across = part.g.shape[2:]
    positions = (tall - 1) * wide + across
    blocks = part.g.new_empty((kh * kw, part.g.shape[0], outputs, channels))
    each = part.g.element_size() * wide * (height * channels + tall * outputs)
    ranges = list(scratch_ranges(part.g.shape[0], each, part.g.device, SHIFTED_SCRATCH))
    most = max(stop - start for start, stop in ranges)
    images = _make_frame(part.a, most, height, wide)
    slopes = _make_frame(part.g, most, tall, wide)
    inside = images[:, :, ph : height - ph, pw : wide - pw]
    rows = images.flatten(2).transpose(1, 2)  # [n, pixels, C]
    columns = slopes.flatten(2)[:, :, :positions]  # [n, O, positions]
    filled = slopes[..., :across]
    starts = [y * wide + x for y in range(kh) for x in range(kw)]
    seen = [rows.as_strided((most, positions, channels), rows.stride(), n * channels) for n in starts]
    for start, stop in ranges:  # what is around stays zero
        count = stop - start
        if count < most:
            inside, filled, columns = inside[:count], filled[:count], columns[:count]
            seen = [view[:count] for view in seen]
        inside.copy_(part.a[start:stop])
        filled.copy_(part.g[start:stop])
        for view, block in zip(seen, blocks[:, start:stop].unbind(), strict=True):
            torch.bmm(columns, view, out=block)
    return BlockedGrad(blocks.flatten(2), EntryOrder((kh, kw, outputs, channels), (2, 3, 0, 1)))


def _make_frame(values: Tensor, count: int, height: int, width: int) -> Tensor:
    """Zeros [count, C, height, width] for values [B, C, ...], with channels last in memory."""
    return values.new_zeros((count, height, width, values.shape[1])).permute(0, 3, 1, 2)


def join_uses(parts: Sequence[object]) -> LinearGrad | None:
    """Several linear uses of one weight as one, with the positions of all: gradients are sums over positions.

    None where some use is of another kind.
    """
    linear = [part for part in parts if isinstance(part, LinearGrad) and part.order is None]
    if len(linear) < len(parts) or len({part.a.dtype for part in linear}) > 1:
        return None
    a = [part.a if part.a.dim() == 3 else part.a.unsqueeze(1) for part in linear]
    g = [part.g if part.g.dim() == 3 else part.g.unsqueeze(1) for part in linear]
    return LinearGrad(torch.cat(a, dim=1), torch.cat(g, dim=1))


def _swap_entry_order(order: EntryOrder | None, size: WeightGradCost) -> EntryOrder:
    """The entry order of gradients stored with the output last, from the order with the output first."""
    if order is None:
        return EntryOrder((size.blocks, size.inputs, size.outputs), (0, 2, 1))
    n, *rest = order.sizes  # blocks, then all dimensions of the outputs, then those of the inputs
    split = next(i for i in range(len(rest) + 1) if math.prod(rest[:i]) == size.outputs)
    moved = {0: 0, **{i + 1: i + 1 + (len(rest) - split if i < split else -split) for i in range(len(rest))}}
    return EntryOrder((n, *rest[split:], *rest[:split]), tuple(moved[i] for i in order.permutation))


def outer_squared_norms(part: LinearGrad | ConvGrad, fast: bool = False) -> SquaredNorms:
    """Squared norms of the gradients by the cheaper method, without keeping the gradients.

    In float64, with proven bounds; or (`fast`) in the gradients' own type, with measured ones.
    """
    size, count = part.size, len(part.g)
    fast = fast and part.g.dtype != torch.float64
    by_ghost = size.prefers_ghost_norms or size.positions == 1
    if fast and by_ghost and isinstance(part, ConvGrad) and (products := part.pixel_products) is not None:
        return _pixel_squared_norms(part, products)
    ghost, written = (
        (fast_ghost_squared_norms, _fast_written_squared_norms)
        if fast
        else (ghost_squared_norms, _written_squared_norms)
    )
    copied = size.inputs + size.outputs if not fast or isinstance(part, ConvGrad) else 0  # of a and g
    entries = size.blocks * size.positions * (copied + 3 * size.positions)
    if not by_ghost:
        entries = max(entries, size.entries)
    pieces = []
    for start, stop in scratch_ranges(count, (4 if fast else 8) * entries, part.g.device):
        a, g = (part if stop - start == count else part.slice(start, stop)).matmul_operands()
        found = ghost(a, g) if by_ghost else written(a, g)
        if size.blocks > 1:
            found = SquaredNorms(*(each.view(stop - start, size.blocks).sum(dim=1) for each in found))
        pieces.append(found)
    if len(pieces) == 1:
        return pieces[0]
    none = torch.zeros(0, dtype=torch.float64, device=part.g.device)
    return (
        SquaredNorms(*(torch.cat(each) for each in zip(*pieces, strict=True)))
        if pieces
        else SquaredNorms(none, none, none)
    )


def _pixel_squared_norms(part: ConvGrad, products: PixelProducts) -> SquaredNorms:
    """As `fast_ghost_squared_norms` for a convolution, whose patches are not copied."""
    pieces = []
    for start, stop in scratch_ranges(len(part.g), 4 * 6 * part.positions**2, part.g.device):
        gram = products.gram(part.a[start:stop])
        pieces.append(from_fast_grams(gram, multiply_pixels(part.g[start:stop])))
    return SquaredNorms(*(torch.cat(each) for each in zip(*pieces, strict=True)))


def fast_ghost_squared_norms(inputs: Tensor, grads: Tensor) -> SquaredNorms:
    """As `rounding.ghost_squared_norms`, with Gram matrices in float32 and a measured bound on the error."""
    if inputs.shape[2] == 1:
        return multiply_squared_norms(squared_norms(inputs.flatten(1)), squared_norms(grads.flatten(1)))
    gram = multiply_batches(inputs.transpose(1, 2), inputs)
    other = multiply_batches(grads, grads.transpose(1, 2))
    return from_fast_grams(gram, other)


def _fast_written_squared_norms(inputs: Tensor, grads: Tensor) -> SquaredNorms:
    lengths = torch.linalg.vector_norm(inputs, dim=1, dtype=torch.float32) * torch.linalg.vector_norm(
        grads, dim=2, dtype=torch.float32
    )
    values = squared_norms(multiply_batches(inputs, grads)).values
    return add_fast_error(values, lengths.double().sum(dim=1))


def _written_squared_norms(inputs: Tensor, grads: Tensor) -> SquaredNorms:
    """Squared norms of sum_t g_t a_t^T from a [B, K, T] and g [B, T, O], each gradient written out in float64."""
    a, g = inputs.double(), grads.double()
    lengths = (torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(g, dim=2)).sum(dim=1)
    squares = torch.bmm(a, g).square().sum(dim=(1, 2))
    return add_error(squares, lengths, a.shape[2] + a.shape[1] * g.shape[2])
