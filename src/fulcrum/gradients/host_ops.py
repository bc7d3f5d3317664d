"""Layers of small networks on a CPU, by compiled code: strided convolutions and pooling, with channels last.

Functions for the table of `layer_ops.py`; each `..._fits` says whether there is compiled code for a layer and an input.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.gradients.compiled import MOST_LANES, address, find_kernels
from fulcrum.gradients.host_convolution import ConvolutionShape, describe_convolution, make_convolution_scratch

Params = Mapping[str, Tensor]


def _is_taken(x: Tensor) -> bool:
    taken = x.dim() == 4 and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    return taken and find_kernels() is not None


def _covers(x: Tensor, kernel: tuple[int, ...], padding: tuple[int, int] = (0, 0)) -> bool:
    """Whether a window fits the images, with the zeros around them."""
    return all(size + 2 * pad >= side for size, pad, side in zip(x.shape[2:], padding, kernel, strict=True))


def to_pair(value: Any) -> tuple[int, int]:
    """A layer's number for both directions, or its two numbers, as two."""
    down, right = (value, value) if isinstance(value, int) else value
    return down, right


def _to_images(rows: Tensor) -> Tensor:
    """[B, H, W, C] -> [B, C, H, W], with channels last in memory."""
    return rows.permute(0, 3, 1, 2)


# --- convolutions -------------------------------------------------------------------------------


def strided_convolution_fits(layer: nn.Conv2d, x: Tensor) -> bool:
    """With a stride of 1 PyTorch's convolution is as fast."""
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and layer.groups == 1
    if not plain or max(layer.stride) == 1 or max(layer.dilation) > 1 or not _is_taken(x):
        return False
    # PyTorch refuses what does not belong together; code in C would read what is not there.
    belongs = x.shape[1] == layer.in_channels and layer.weight.dtype == torch.float32
    return belongs and _covers(x, layer.kernel_size, to_pair(layer.padding))


def run_convolution(layer: nn.Conv2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, Tensor]:
    """The output, and the input for the way back."""
    return run_convolution_parts(layer, x, (params,), (slice(0, x.shape[0]),))


def run_convolution_parts(
    layer: nn.Conv2d, x: Tensor, params: Sequence[Params], parts: Sequence[slice]
) -> tuple[Tensor, Tensor]:
    """The same with other parameters for each part of the batch."""
    library = find_kernels()
    assert library is not None
    sizes = zip(x.shape[2:], layer.kernel_size, layer.stride, to_pair(layer.padding), strict=True)
    tall, wide = ((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes)
    outputs = layer.out_channels
    out = x.new_empty((x.shape[0], tall, wide, outputs))
    scratch: Tensor | None = None
    for part, own in zip(parts, params, strict=True):
        images, block = x[part], out[part]
        shape = _describe(layer, images, _to_images(block))
        if scratch is None:
            scratch = make_convolution_scratch(shape)  # what is around the images stays zero
        padded = -(-outputs // MOST_LANES) * MOST_LANES
        weight = F.pad(own["weight"].permute(2, 3, 1, 0), (0, padded - outputs)).contiguous()
        bias = weight.new_zeros(padded)
        if "bias" in own:
            bias[:outputs] = own["bias"]
        tensors = map(address, (images, weight, bias, block, scratch))
        library.fulcrum_conv_forward(*tensors, ctypes.byref(shape), ctypes.c_long(padded))
    return _to_images(out), x


def run_convolution_back(layer: nn.Conv2d, memo: Tensor, params: Params, g: Tensor) -> Tensor:
    """The gradient of the input, from that of the output. Only the shape of the input counts."""
    library = find_kernels()
    assert library is not None
    (_, channels, height, width), count = memo.shape, g.shape[0]
    found = g.new_empty((count, height, width, channels))
    shape = _describe(layer, _to_images(found), g)
    kernel_height, kernel_width = layer.kernel_size
    row = kernel_width * channels
    padded = -(-row // MOST_LANES) * MOST_LANES
    rows = params["weight"].permute(2, 0, 3, 1).reshape(kernel_height, layer.out_channels, row)
    weight = F.pad(rows, (0, padded - row)).contiguous()
    scratch = make_convolution_scratch(shape)
    tensors = map(address, (g, weight, found, scratch))
    library.fulcrum_conv_back(*tensors, ctypes.byref(shape), ctypes.c_long(padded))
    return _to_images(found)


def _describe(layer: nn.Conv2d, images: Tensor, slopes: Tensor) -> ConvolutionShape:
    return describe_convolution(images, slopes, layer.kernel_size, layer.stride, to_pair(layer.padding))


# --- pooling ------------------------------------------------------------------------------------


class _Pool(ctypes.Structure):
    """`Pool` of compiled/pooling.c."""

    _names = "count channels height width tall wide kernel_height kernel_width step_y step_x"
    _fields_ = tuple((name, ctypes.c_long) for name in _names.split())


def max_pool_fits(layer: nn.MaxPool2d, x: Tensor) -> bool:
    """Windows without padding or gaps, of at most 256 pixels."""
    plain = to_pair(layer.padding) == (0, 0) and to_pair(layer.dilation) == (1, 1) and not layer.ceil_mode
    height, width = to_pair(layer.kernel_size)
    return plain and not layer.return_indices and height * width <= 256 and _is_taken(x) and _covers(x, (height, width))


def run_max_pool(layer: nn.MaxPool2d, x: Tensor, params: Params, mine: bool) -> tuple[Tensor, tuple[_Pool, Tensor]]:
    """The output, and what the way back needs: the sizes, and where each number came from."""
    library = find_kernels()
    assert library is not None
    rows = x.permute(0, 2, 3, 1).contiguous()
    count, height, width, channels = rows.shape
    kernel, step = to_pair(layer.kernel_size), to_pair(layer.stride)
    tall, wide = (height - kernel[0]) // step[0] + 1, (width - kernel[1]) // step[1] + 1
    shape = _Pool(count, channels, height, width, tall, wide, *kernel, *step)
    out = rows.new_empty((count, tall, wide, channels))
    where = rows.new_empty(out.shape, dtype=torch.uint8)
    library.fulcrum_max_pool(*map(address, (rows, out, where)), ctypes.byref(shape))
    return _to_images(out), (shape, where)


def run_max_pool_back(layer: nn.MaxPool2d, memo: tuple[_Pool, Tensor], params: Params, g: Tensor) -> Tensor:
    """The gradient of the input."""
    library = find_kernels()
    assert library is not None
    shape, where = memo
    rows = g.permute(0, 2, 3, 1).contiguous()
    found = rows.new_empty((shape.count, shape.height, shape.width, shape.channels))
    library.fulcrum_max_pool_back(*map(address, (rows, where, found)), ctypes.byref(shape))
    return _to_images(found)
