"""Convolutions in one to three dimensions, and their transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.gradients.function_rules.common import arrange_images, sum_positions, to_compute_type
from fulcrum.gradients.outer_products import ConvGrad, LinearGrad, WeightGradCost
from fulcrum.gradients.param_grads import MaterialisedGrad
from fulcrum.gradients.uses import ParameterUse, UseRecorder, register_function_rule

Size = int | Sequence[int]


def _expand(value: Size, dims: int) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    return found * dims if len(found) == 1 else found


def _pad_amounts(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Padding left and right of the last dimension, then of the one before, in the order of `F.pad`."""
    amounts: list[int] = []
    for i in reversed(range(len(kernel))):
        if isinstance(padding, str):
            total = dilation[i] * (kernel[i] - 1) if padding == "same" else 0
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [padding[i], padding[i]]
    return amounts


def _make_conv_grad(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    padding: tuple[int, ...] = (),
) -> ConvGrad | LinearGrad:
    """A sequence is an image of height 1; a 1x1 convolution is a linear layer over pixels."""
    kernel = weight.shape[2:]
    if groups == 1 and math.prod(kernel) == 1 and not any(padding):
        if max(stride) > 1:
            for dim, (step, n) in enumerate(zip(stride, g.shape[2:], strict=True), 2):
                x = x.narrow(dim, 0, (n - 1) * step + 1)[(slice(None),) * dim + (slice(None, None, step),)]
        return LinearGrad(x.flatten(2).transpose(1, 2), g.flatten(2).transpose(1, 2))
    if x.dim() == 3:
        x, g, weight = x.unsqueeze(2), g.unsqueeze(2), weight.unsqueeze(2)
        stride, dilation, padding = (1, *stride), (1, *dilation), ((0, *padding) if padding else ())
    return ConvGrad(x, g, weight.to(x.dtype), stride, dilation, groups, padding)


def _count_dimensions(recorder: UseRecorder, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """The dimensions of an image; refuses an input that is not one image [C, ...] per example."""
    dims = weight.dim() - 2
    if input.dim() != dims + 2:
        raise recorder.refuse(f"{function.__name__} does not see one example per row", weight, bias)
    recorder.require_rows((weight, bias), input)
    return dims


def _list_uses(of_weight: ParameterUse, bias: Tensor | None) -> list[ParameterUse]:
    """The uses of a convolution's parameters; a bias gets the sum of g [B, O, ...] over pixels."""
    if bias is None:
        return [of_weight]
    return [of_weight, ParameterUse(bias, lambda g: MaterialisedGrad(sum_positions(g.flatten(2), 2)))]


@register_function_rule(torch.conv1d, torch.conv2d, torch.conv3d)
def use_convolution(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Any = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Any:
    """[B, C, ...] -> [B, O, ...] in one to three dimensions."""
    dims = _count_dimensions(recorder, function, input, weight, bias)
    strides, steps = _expand(stride, dims), _expand(dilation, dims)
    around = padding if isinstance(padding, str) else _expand(padding, dims)
    a = arrange_images(recorder, to_compute_type(input))
    out = function(a, weight, bias, strides, around, steps, groups)
    seen, amounts = a.detach(), _pad_amounts(around, tuple(weight.shape[2:]), steps)

    def weight_grads(g: Tensor) -> ConvGrad | LinearGrad:
        if amounts[::2] == amounts[1::2]:
            return _make_conv_grad(seen, g, weight, strides, steps, groups, tuple(reversed(amounts[::2])))
        return _make_conv_grad(F.pad(seen, amounts), g, weight, strides, steps, groups)

    cost = WeightGradCost.of(a, groups, math.prod(out.shape[2:]), math.prod(weight.shape[1:]), len(weight) // groups)
    return recorder.tap(out, _list_uses(ParameterUse(weight, weight_grads, cost), bias), (a,))


@register_function_rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def use_transposed_convolution(
    recorder: UseRecorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Any:
    """The adjoint of a convolution: its weight's gradient is that convolution's, with input and gradient exchanged."""
    dims = _count_dimensions(recorder, function, input, weight, bias)
    strides, around, steps = (_expand(value, dims) for value in (stride, padding, dilation))
    a = to_compute_type(input)
    out = function(a, weight, bias, strides, around, _expand(output_padding, dims), groups, steps)
    seen, kernel = a.detach(), weight.shape[2:]

    def weight_grads(g: Tensor) -> ConvGrad | LinearGrad:
        padded = F.pad(g, _pad_amounts(around, tuple(kernel), steps)) if any(around) else g
        reach = [
            (n - 1) * step + gap * (k - 1) + 1
            for n, step, gap, k in zip(seen.shape[2:], strides, steps, kernel, strict=True)
        ]
        for dim, n in enumerate(reach, 2):
            padded = padded.narrow(dim, 0, n)  # without output_padding
        return _make_conv_grad(padded, seen, weight, strides, steps, groups)

    cost = WeightGradCost.of(a, groups, math.prod(a.shape[2:]), math.prod(weight.shape[1:]), len(weight) // groups)
    return recorder.tap(out, _list_uses(ParameterUse(weight, weight_grads, cost), bias), (a,))
