"""What the rules of several families share."""

from __future__ import annotations

import torch
from torch import Tensor

from fulcrum.gradients.compiled import find_kernels
from fulcrum.gradients.uses import UseRecorder


def sum_positions(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """A sum in float32 where the numbers have fewer digits."""
    return values.sum(dim=dim, dtype=torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else None)


def to_compute_type(value: Tensor) -> Tensor:
    """An input in the type in which autocast will multiply it, so that it is held once."""
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


LARGE_IMAGE = 1024
"""Pixels from which a CPU convolves faster with channels last: of smaller images the norms in between lose as much."""

LARGE_COMPILED_IMAGE = 256
"""The same where the norms in between are compiled."""


def arrange_images(recorder: UseRecorder, images: Tensor) -> Tensor:
    """Images [B, C, H, W] in the memory format in which they are convolved fastest.

    Channels last for large images on a CPU, and on a GPU where tensor cores convolve; full float32 is faster there with
    channels first. What follows keeps the format, so that it is seldom changed in a pass.
    """
    if not recorder.channels_last or images.dim() != 4:
        return images
    if not images.is_cuda:
        enough = LARGE_IMAGE if find_kernels() is None else LARGE_COMPILED_IMAGE
        large = images.shape[2] * images.shape[3] >= enough
        last = images.device.type == "cpu" and images.dtype == torch.float32 and large
        return images.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    if images.dtype == torch.bfloat16 or (images.dtype == torch.float32 and conv.fp32_precision == "tf32"):
        return images.contiguous(memory_format=torch.channels_last)
    return images
