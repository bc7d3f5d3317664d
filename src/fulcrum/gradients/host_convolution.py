"""Each example's gradient of a convolution's weight on a CPU, by compiled code, with its norm; no patch is copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fulcrum.gradients.compiled import MOST_LANES, address, find_kernels
from fulcrum.gradients.param_grads import EntryOrder, MaterialisedGrad

if TYPE_CHECKING:
    from fulcrum.gradients.outer_products import ConvGrad

_FIELDS = (
    "count channels height width a_example a_channel a_row a_column outputs tall wide g_example g_channel g_row"
    " g_column kernel_height kernel_width step_y step_x pad_y pad_x"
)


class ConvolutionShape(ctypes.Structure):
    """`Shape` of compiled/convolution.c."""

    _fields_ = tuple((name, ctypes.c_long) for name in _FIELDS.split())


def fits_compiled_convolution(part: ConvGrad) -> bool:
    """Whether `write_conv_grads` can take these: two dimensions, float32, one group, no gaps in the kernel."""
    plain = part.groups == 1 and len(part.stride) == 2 and max(part.dilation) == 1
    plain = plain and part.a.shape[1] == part.weight.shape[1] and part.g.shape[1] == part.weight.shape[0]
    kind = part.a.dtype == part.g.dtype == torch.float32 and not part.a.is_cuda
    return plain and kind and part.g.numel() > 0 and find_kernels() is not None


def write_conv_grads(part: ConvGrad) -> MaterialisedGrad:
    """The gradients of a part that fits, with their squared norms."""
    library = find_kernels()
    assert library is not None
    outputs, channels, *kernel = part.weight.shape
    shape = describe_convolution(part.a, part.g, kernel, part.stride, part.padding or (0, 0))
    scratch = make_convolution_scratch(shape)
    grads = torch.empty((len(part.g), kernel[0] * kernel[1] * channels * outputs))
    squares = torch.empty(len(part.g), dtype=torch.float64)
    tensors = (part.a, part.g, grads, squares, scratch)
    library.fulcrum_conv_grads(*map(address, tensors), ctypes.byref(shape))
    return MaterialisedGrad(grads, EntryOrder((*kernel, channels, outputs), (3, 2, 0, 1)), squares)


def describe_convolution(
    a: Tensor, g: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> ConvolutionShape:
    """Sizes and strides of images a [B, C, H, W] and outputs g [B, O, h, w]."""
    return ConvolutionShape(*a.shape, *a.stride(), *g.shape[1:], *g.stride(), *kernel, *stride, *padding)


def make_convolution_scratch(shape: ConvolutionShape) -> Tensor:
    """Zeros for one image with zeros around it, and for its output."""
    framed = (shape.height + 2 * shape.pad_y) * (shape.width + 2 * shape.pad_x) * shape.channels
    outputs = -(-shape.outputs // MOST_LANES) * MOST_LANES
    return torch.zeros(framed + shape.tall * shape.wide * outputs + 4 * MOST_LANES)
