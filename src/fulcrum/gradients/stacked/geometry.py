"""Convolution and pooling as matrix products on strided views: no kernel launch per image, no autograd.

Images are channels last: h [S, n, H, W, C], where S counts sets of weights and n the examples of each.
A convolution is one matrix product over patches [S, n, P, k], with P output pixels and k = kh * kw * C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

IntPair = tuple[int, int]

NO_GRADIENT = 255
"""Stored instead of the index of the largest pixel: no pixel of the window gets a gradient."""


@dataclass(frozen=True)
class SlidingWindow:
    """A sliding window over images of height x width pixels and `channels` channels."""

    height: int
    width: int
    channels: int
    kernel: IntPair
    stride: IntPair
    padding: IntPair = (0, 0)
    dilation: IntPair = (1, 1)

    @property
    def out(self) -> IntPair:
        """Height and width of the output."""
        sides = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        first, second = ((side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, p, d in sides)
        return first, second

    @property
    def positions(self) -> int:
        """Number of positions P: pixels of the output."""
        return self.out[0] * self.out[1]

    @property
    def size(self) -> int:
        """Number of elements k per window."""
        return self.kernel[0] * self.kernel[1] * self.channels


def extract_patches(h: Tensor, window: SlidingWindow) -> Tensor:
    """The patch at each window position: [S, n, H, W, C] -> [S, n, P, k], in the order (kh, kw, C)."""
    (ph, pw), (sh, sw), (dh, dw) = window.padding, window.stride, window.dilation
    if ph or pw:
        h = F.pad(h, (0, 0, pw, pw, ph, ph))
    sets, n = h.shape[:2]
    a, b, row, column, channel = h.stride()
    view = h.as_strided(
        (sets, n, *window.out, *window.kernel, window.channels),
        (a, b, row * sh, column * sw, row * dh, column * dw, channel),
    )
    return view.reshape(sets, n, window.positions, window.size)


def fold_patches(g: Tensor, window: SlidingWindow) -> Tensor:
    """The transpose of `extract_patches`: adds each patch entry to its pixel, [S, n, P, k] -> [S, n, H, W, C].

    Where the stride divides the kernel, one addition handles stride x stride taps.
    """
    (kh, kw), (sh, sw), (dh, dw), (ph, pw) = window.kernel, window.stride, window.dilation, window.padding
    sets, n, (oh, ow), c = g.shape[0], g.shape[1], window.out, window.channels
    # Blocks of adjacent taps: (taps per block, blocks) for each axis.
    bh = sh if dh == 1 and kh % sh == 0 else 1
    bw = sw if dw == 1 and kw % sw == 0 else 1
    high = max(window.height + 2 * ph, sh * (oh - 1) + dh * (kh - 1) + 1)
    wide = max(window.width + 2 * pw, sw * (ow - 1) + dw * (kw - 1) + 1)
    out = g.new_zeros((sets, n, high, wide, c))
    a, b, row, column, channel = out.stride()
    taps = g.view(sets, n, oh, ow, kh // bh, bh, kw // bw, bw, c)
    for i in range(kh // bh):
        for j in range(kw // bw):
            start = i * bh * dh * row + j * bw * dw * column
            target = out.as_strided(
                (sets, n, oh, ow, bh, bw, c), (a, b, row * sh, column * sw, row, column, channel), start
            )
            target += taps[:, :, :, :, i, :, j]
    return out[:, :, ph : ph + window.height, pw : pw + window.width]


def _view_window_pixel(h: Tensor, window: SlidingWindow, i: int, j: int) -> Tensor:
    """The pixel (i, j) of every window, a view [S, n, oh, ow, C]."""
    (sh, sw), (oh, ow) = window.stride, window.out
    return h[:, :, i : i + sh * (oh - 1) + 1 : sh, j : j + sw * (ow - 1) + 1 : sw]


def max_pool_forward(h: Tensor, window: SlidingWindow) -> tuple[Tensor, Tensor]:
    """The largest pixel of each window, and its index (on ties the first in reading order, as in PyTorch)."""
    best, which = _view_window_pixel(h, window, 0, 0), None
    for tap in range(1, window.kernel[0] * window.kernel[1]):
        other = _view_window_pixel(h, window, tap // window.kernel[1], tap % window.kernel[1])
        highest = torch.maximum(best, other)  # NaN stays NaN, and differs from itself
        larger = highest != best
        best = highest
        which = larger.to(torch.uint8) * tap if which is None else which.masked_fill_(larger, tap)
    if which is None:
        which = torch.zeros_like(best, dtype=torch.uint8)
    return best, which


def max_pool_backward(g: Tensor, which: Tensor, window: SlidingWindow) -> Tensor:
    """The gradient of `max_pool_forward`, [S, n, oh, ow, C] -> [S, n, H, W, C]. Without atomics, so deterministic."""
    out = g.new_zeros((*g.shape[:2], window.height, window.width, window.channels))
    for tap in range(window.kernel[0] * window.kernel[1]):
        target = _view_window_pixel(out, window, tap // window.kernel[1], tap % window.kernel[1])
        target += g * (which == tap)
    return out


def avg_pool_forward(h: Tensor, window: SlidingWindow) -> Tensor:
    """The mean of each window."""
    images = h.flatten(0, 1).permute(0, 3, 1, 2)
    pooled = F.avg_pool2d(images, window.kernel, window.stride)
    return pooled.permute(0, 2, 3, 1).reshape(*h.shape[:2], *window.out, window.channels)


def avg_pool_backward(g: Tensor, window: SlidingWindow) -> Tensor:
    """The gradient of `avg_pool_forward`."""
    (kh, kw), (oh, ow) = window.kernel, window.out
    share = g / (kh * kw)
    if window.stride == window.kernel and (window.height, window.width) == (oh * kh, ow * kw):
        sets, n = g.shape[:2]
        spread = share[:, :, :, None, :, None].expand(sets, n, oh, kh, ow, kw, window.channels)
        return spread.reshape(sets, n, window.height, window.width, window.channels)
    out = g.new_zeros((*g.shape[:2], window.height, window.width, window.channels))
    for tap in range(kh * kw):
        target = _view_window_pixel(out, window, tap // kw, tap % kw)
        target += share
    return out


def relu_avg_pool_backward(g: Tensor, bits: Tensor, window: SlidingWindow) -> Tensor:
    """The gradient of relu and average pooling. Bit i * kw + j of `bits` [S, n, oh, ow, C]: the pixel was positive."""
    (kh, kw) = window.kernel
    share = g / (kh * kw)
    out = g.new_zeros((*g.shape[:2], window.height, window.width, window.channels))
    for tap in range(kh * kw):
        target = _view_window_pixel(out, window, tap // kw, tap % kw)
        target += share * ((bits >> tap) & 1)
    return out
