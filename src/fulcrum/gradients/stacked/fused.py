"""Patches, pooling and norms in one kernel each where triton and a GPU are available; else None, and torch is used.

The torch code of `geometry` is the reference: every function here gives the same values, up to one rounding
of bf16. FULCRUM_TRITON=0 disables them. Kernels are compiled when first used (triton keeps them on disk); if that
fails, `kernel_failures` says why and torch is used from then on.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fulcrum.gradients.haar import haar_level_norms
from fulcrum.gradients.rounding import UNDERFLOW, SquaredNorms
from fulcrum.gradients.stacked.geometry import SlidingWindow

BLOCK_SIZE = 1024
"""Number of output elements per triton program."""

kernel_failures: list[str] = []
"""Why the kernels are not used although they are enabled; empty if they work."""


@cache
def _triton_status() -> tuple[bool, bool]:
    """(installed and not turned off, run by triton's interpreter): checked once per process."""
    there = os.environ.get("FULCRUM_TRITON", "1") != "0" and importlib.util.find_spec("triton") is not None
    return there, there and os.environ.get("TRITON_INTERPRET", "0") == "1"


def can_use_kernels(values: Tensor) -> bool:
    """Whether the kernels support this tensor."""
    there, interpreted = _triton_status()
    fits = values.dtype in (torch.float32, torch.bfloat16) and values.numel() > 0
    return there and not kernel_failures and fits and (values.is_cuda or interpreted)


def _launch_per_image(name: str, size: int, images: int, tensors: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Runs a kernel that writes `size` elements per image; False if it could not be compiled."""
    block = min(BLOCK_SIZE, max(64, 1 << (size - 1).bit_length()))
    blocks = -(-size // block)
    return launch_kernel(name, images * blocks, tensors, {**given, "BLOCKS": blocks, "BLOCK": block})


def launch_kernel(name: str, programs: int, tensors: tuple[Any, ...], given: dict[str, Any]) -> bool:
    try:
        from fulcrum.gradients.stacked import kernels

        with torch.cuda.device_of(tensors[0]):  # triton launches on the current device
            getattr(kernels, name)[(programs,)](*tensors, **given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        kernel_failures.append(f"no fused kernels: {name}: {type(error).__name__}: {first}")
        return False
    return True


def _window_constants(window: SlidingWindow) -> dict[str, int]:
    (oh, ow), (kh, kw), (sh, sw) = window.out, window.kernel, window.stride
    sides = {"H": window.height, "W": window.width, "C": window.channels, "OH": oh, "OW": ow}
    return {**sides, "KH": kh, "KW": kw, "SH": sh, "SW": sw}


def fused_extract_patches(h: Tensor, window: SlidingWindow) -> Tensor | None:
    """As `geometry.extract_patches`."""
    if not can_use_kernels(h):
        return None
    sets, n = h.shape[:2]
    out = h.new_empty((sets, n, window.positions, window.size))
    (ph, pw), (dh, dw) = window.padding, window.dilation
    given = {**_window_constants(window), "PH": ph, "PW": pw, "DH": dh, "DW": dw}
    done = _launch_per_image(
        "extract_patches_kernel", window.positions * window.size, sets * n, (h.contiguous(), out), given
    )
    return out if done else None


def fused_fold_patches(g: Tensor, window: SlidingWindow) -> Tensor | None:
    """As `geometry.fold_patches`; sums of bf16 are accumulated in float32."""
    if not can_use_kernels(g) or window.dilation != (1, 1):
        return None
    out = g.new_empty((*g.shape[:2], window.height, window.width, window.channels))
    given = {**_window_constants(window), "PH": window.padding[0], "PW": window.padding[1]}
    size = window.height * window.width * window.channels
    return (
        out
        if _launch_per_image("fold_patches_kernel", size, g.shape[0] * g.shape[1], (g.contiguous(), out), given)
        else None
    )


def fused_pool(
    h: Tensor, window: SlidingWindow, mean: bool, relu: bool, bias: Tensor | None
) -> tuple[Tensor, Any] | None:
    """Adds bias [S, C], applies relu, then max or mean per window; also returns a note for `fused_pool_backward`."""
    area = window.kernel[0] * window.kernel[1]
    if not can_use_kernels(h) or area > (31 if mean and relu else 255):
        return None
    sets, n = h.shape[:2]
    out = h.new_empty((sets, n, *window.out, window.channels))
    kind = torch.int32 if mean and area > 8 else torch.uint8
    noted = relu or not mean
    note = torch.empty_like(out, dtype=kind) if noted else out
    given = {**_window_constants(window), "BIAS": bias is not None, "RELU": relu, "MEAN": mean}
    tensors = (h.contiguous(), out if bias is None else bias.to(h.dtype).contiguous(), out, note, n)
    done = _launch_per_image("pool_kernel", window.positions * window.channels, sets * n, tensors, given)
    return (out, note if noted else None) if done else None


def fused_pool_backward(g: Tensor, note: Tensor | None, window: SlidingWindow, mean: bool, relu: bool) -> Tensor | None:
    """The gradient of `fused_pool`, from its note."""
    if not can_use_kernels(g) or (note is None and (relu or not mean)):
        return None
    out = g.new_empty((*g.shape[:2], window.height, window.width, window.channels))
    g = g.contiguous()
    size = window.height * window.width * window.channels
    given = {**_window_constants(window), "RELU": relu, "MEAN": mean}
    tensors = (g, g if note is None else note.contiguous(), out)
    return out if _launch_per_image("pool_backward_kernel", size, g.shape[0] * g.shape[1], tensors, given) else None


GRAM_ERROR = 256 * 2.0**-23
"""Largest relative error of an entry of a Gram matrix in `ghost_norm_kernel`, in units of the product of the two rows'
lengths: blocks of at most 64 products of three tf32 parts each, 192 additions that a tensor core truncates to 2^-23,
and 2^-21 for what three parts leave out; what combines the blocks in float64 is far below the rest."""


def fused_ghost_squared_norms(a: Tensor, g: Tensor) -> SquaredNorms | None:
    """Squared norm of each example's g^T a from its two Gram matrices: [X, P, k], [X, P, o] -> [X].

    For up to 64 positions. Each float32 product is computed as three tf32 products. The computed square is off by at
    most ((1 + GRAM_ERROR)^2 - 1) A^2, with A = sum_p |a_p| |g_p|.
    """
    positions = a.shape[1]
    exact = a.is_cuda and a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    if not can_use_kernels(a) or exact or positions > 64:
        return None
    out = a.new_empty((len(a), 2), dtype=torch.float64)
    k, o = a.shape[2], g.shape[2]
    tall = max(16, 1 << (positions - 1).bit_length())
    wide, narrow = (min(64, max(16, 1 << (width - 1).bit_length())) for width in (k, o))
    given = {"P": positions, "K": k, "OUT": o, "TALL": tall, "WIDE": wide, "NARROW": narrow}
    if not launch_kernel("ghost_norm_kernel", len(a), (a.contiguous(), g.contiguous(), out), given):
        return None
    error = (1 + GRAM_ERROR) ** 2 - 1
    # Products too small for float32 are lost: bound each by the smallest number, as `rounding.squared_norms` does.
    lengths = out[:, 1].square() * (1 + 4 * error) + positions**2 * (k + o) * UNDERFLOW[torch.float32]
    values = out[:, 0].clamp_min(0)
    return SquaredNorms(values, torch.minimum(values + error * lengths, lengths), lengths)


HAAR_LEVELS_PER_KERNEL, HAAR_BLOCK_SIZE = 6, 2048
"""Haar levels per kernel, and elements per program of one warp: 64 per thread, 32 left at the end."""


def fused_haar_level_norms(x: Tensor, count: int) -> Tensor | None:
    """As `haar.haar_level_norms` of rows [B, d] in float32: each launch reads them once and leaves 1 of 64 elements."""
    if not can_use_kernels(x) or x.dtype != torch.float32 or x.shape[1] <= 1 << HAAR_LEVELS_PER_KERNEL:
        return None
    finer: list[Tensor] = []  # squared norms, from fine to coarse
    while x.shape[1] > 1 << HAAR_LEVELS_PER_KERNEL:
        n, d = x.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        blocks = -(-d // HAAR_BLOCK_SIZE)
        energies = x.new_empty((n, blocks, HAAR_LEVELS_PER_KERNEL), dtype=torch.float64)
        rest = x.new_empty((n, blocks * (HAAR_BLOCK_SIZE >> HAAR_LEVELS_PER_KERNEL)))
        given = {
            "BLOCKS": blocks,
            "BLOCK": HAAR_BLOCK_SIZE,
            "DEPTH": HAAR_LEVELS_PER_KERNEL,
            "D": d,
            "WIDE": _readable_row_length(x),
            "STRIDE": x.stride(0),
        }
        if not launch_kernel("haar_levels_kernel", n * blocks, (x, energies, rest), {**given, "num_warps": 1}):
            return None
        finer += energies.sum(dim=1).unbind(1)
        x, count = rest[:, : -(-d // (1 << HAAR_LEVELS_PER_KERNEL))], count - HAAR_LEVELS_PER_KERNEL
    return torch.cat([haar_level_norms(x, count), torch.stack(finer[::-1], dim=1).sqrt().float()], dim=1)


def _readable_row_length(x: Tensor) -> int:
    """Elements of each row [B, d] that may be read: d rounded up to 16 if memory continues after the last row."""
    n, d = x.shape
    rounded = -(-d // 16) * 16
    held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return rounded if (n - 1) * x.stride(0) + rounded <= held else d
