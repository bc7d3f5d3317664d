"""Products of patches from products of pixels: the Gram matrix of a convolution's input on a CPU, without patches.

The patches of two outputs i and j have the inner product sum_o <x(i + o), x(j + o)> over the kernel's offsets o. So the
Gram matrix of patches is a sum of shifted Gram matrices of pixels: a ninth of the multiplications for a kernel of
3 x 3, and no copies of patches. Offsets along rows and along columns are added up one after the other. With a stride of
2 the offsets see four images, of even or odd rows and columns; each of these (`Phase`) is treated alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

ADDITION_COST = 8
"""Cost of adding one entry of a shifted matrix, in multiply-adds."""


@dataclass(frozen=True)
class Phase:
    """What some offsets of a kernel see along one side of an image: pixels first, first + stride, ...

    count: their number. shifts: offset by offset, how many of these pixels later than its own number an output looks.
    """

    first: int
    count: int
    shifts: tuple[int, ...]


def list_phases(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[Phase, ...]:
    """The phases of one side of `size` pixels."""
    seen: dict[int, list[int]] = {}
    for place in range(kernel):
        shift, first = divmod(place * dilation - padding, stride)
        seen.setdefault(first, []).append(shift)
    return tuple(Phase(first, max(0, -(-(size - first) // stride)), tuple(shifts)) for first, shifts in seen.items())


@dataclass(frozen=True)
class PixelProducts:
    """How the Gram matrix of a convolution's patches is made of pixels. out: height and width of the output.

    rows, columns: the phases of both sides.
    """

    rows: tuple[Phase, ...]
    columns: tuple[Phase, ...]
    stride: tuple[int, int]
    out: tuple[int, int]

    def cost(self, channels: int) -> int:
        """Multiply-adds per example, about."""
        total = 0
        for down, across in self._pairs():
            pixels = (down.count * across.count) ** 2
            total += pixels * channels
            total += ADDITION_COST * len(across.shifts) * (down.count * self.out[1]) ** 2
            total += ADDITION_COST * len(down.shifts) * (self.out[0] * self.out[1]) ** 2
        return total

    def _pairs(self) -> Iterator[tuple[Phase, Phase]]:
        return ((down, across) for down in self.rows for across in self.columns)

    def gram(self, images: Tensor) -> Tensor:
        """Inner products of the patches of images [B, C, H, W]: [B, T, T]."""
        total: Tensor | None = None
        height, width = self.out
        for down, across in self._pairs():
            seen = images[:, :, down.first :: self.stride[0], across.first :: self.stride[1]]
            if not (down.count and across.count):
                continue
            sides = (len(images), down.count, across.count, down.count, across.count)
            found = multiply_pixels(seen).view(sides)
            found = _add_shifted(found, width, across.shifts, (2, 4))
            found = _add_shifted(found, height, down.shifts, (1, 3))
            total = found if total is None else total.add_(found)
        if total is None:
            return images.new_zeros((len(images), height * width, height * width))
        return total.view(len(images), height * width, -1)


def multiply_pixels(images: Tensor) -> Tensor:
    """Inner products of the pixels of images [B, C, ...], in either memory format: [B, pixels, pixels]."""
    rows = images.movedim(1, -1).flatten(1, -2)  # [B, pixels, C]; a view unless pixels were left out
    return torch.bmm(rows, rows.transpose(1, 2))


def _add_shifted(gram: Tensor, size: int, shifts: Sequence[int], dims: tuple[int, int]) -> Tensor:
    """Sums over shifts of gram at (i + shift, j + shift), for i and j in 0..size-1 along the two dimensions."""
    one, two = dims
    count = gram.shape[one]
    shape = list(gram.shape)
    shape[one] = shape[two] = size
    whole = size == count and 0 in shifts
    total = gram.clone() if whole else gram.new_zeros(shape)
    for shift in shifts:
        first, last = max(0, -shift), min(size, count - shift)
        if (whole and shift == 0) or first >= last:
            continue
        n = last - first
        seen = gram.narrow(one, first + shift, n).narrow(two, first + shift, n)
        total.narrow(one, first, n).narrow(two, first, n).add_(seen)
    return total


@lru_cache(maxsize=256)
def plan_pixel_products(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    out: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> PixelProducts | None:
    """The way from pixels for a convolution in two dimensions: sizes of image, kernel and output. None elsewhere."""
    if not len(image) == len(kernel) == len(out) == 2:
        return None
    around = padding or (0, 0)
    rows, columns = (list_phases(image[i], kernel[i], stride[i], around[i], dilation[i]) for i in range(2))
    return PixelProducts(rows, columns, (stride[0], stride[1]), (out[0], out[1]))
