"""Forward and backward of single layers, without autograd, for plain sequences.

A `LayerOp` runs a layer and returns its output with a memo. From the memo and the gradient of the output it
computes the gradient of the input. The common layers of small models are implemented here; any
other layer uses autograd for that layer only. On a CPU images have their channels last in memory, because
pooling is then many times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.gradients import host_ops
from fulcrum.gradients.host_ops import to_pair
from fulcrum.gradients.outer_products import ConvPatches, unfold_patches
from fulcrum.models.builtin import TemperedSigmoid
from fulcrum.models.whitening import CentringLayer

LayerParams = Mapping[str, Tensor]
"""A layer's own parameters by local name: weight, bias."""

aten = torch.ops.aten


@dataclass(frozen=True)
class LayerOp:
    """Forward and backward of a layer.

    run(layer, x, params, mine) -> (output, memo); `mine`: x is not needed elsewhere and may be overwritten.
    back(layer, memo, params, g) -> gradient of x, from the gradient g of the output, which it may overwrite.
    suits(layer, x): whether this op supports this layer and input.
    spare: whether `back` does not need the output, so that the next layer may overwrite it.
    output(layer, x, params): the output only, for passes without backward, where that is cheaper.
    run_parts(layer, x, params of each part, parts): as `run`, with other parameters for each part of the batch, where
    that is cheaper than one after the other; its one memo then serves `back` of every part.
    """

    run: Callable[[Any, Tensor, LayerParams, bool], tuple[Tensor, Any]]
    back: Callable[[Any, Any, LayerParams, Tensor], Tensor]
    suits: Callable[[Any, Tensor], bool] = lambda layer, x: True
    spare: bool = False
    output: Callable[[Any, Tensor, LayerParams], Tensor] | None = None
    run_parts: Callable[[Any, Tensor, Sequence[LayerParams], Sequence[slice]], tuple[Tensor, Any]] | None = None


# --- any layer, by autograd ---------------------------------------------------------------------


def build_autograd_op(call: Callable[[Any, Tensor, LayerParams], Tensor], spare: bool = False) -> LayerOp:
    """An op that differentiates `call(layer, x, params)` with respect to x only."""

    def run(layer: Any, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, Any]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(x.is_floating_point())
            out = call(layer, leaf, params)
        return out.detach(), (leaf, out)

    def back(layer: Any, memo: tuple[Tensor, Tensor], params: LayerParams, g: Tensor) -> Tensor:
        leaf, out = memo
        (grad,) = torch.autograd.grad(out, leaf, g, materialize_grads=True)
        return grad

    return LayerOp(run, back, spare=spare)


def _call_layer(layer: nn.Module, x: Tensor, params: LayerParams) -> Tensor:
    out: Tensor = layer(x.clone() if getattr(layer, "inplace", False) else x)
    return out


# --- linear and convolutions --------------------------------------------------------------------


def _linear_forward(layer: nn.Linear, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, None]:
    return F.linear(x, params["weight"], params.get("bias")), None


def _linear_backward(layer: nn.Linear, memo: None, params: LayerParams, g: Tensor) -> Tensor:
    return g @ params["weight"]


def _run_convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, params: LayerParams) -> Tensor:
    # PyTorch's own forward, which first pads by padding_mode, with the given parameters.
    out: Tensor = layer._conv_forward(x, params["weight"], params.get("bias"))
    return out


def _conv_forward(layer: nn.Conv2d, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, Tensor]:
    return _run_convolution(layer, x, params), x


def _conv_backward(layer: nn.Conv2d, memo: Tensor, params: LayerParams, g: Tensor) -> Tensor:
    numbers = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
    grad: Tensor = aten.convolution_backward(g, memo, params["weight"], None, *numbers, (True, False, False))[0]
    return grad


def _conv_is_supported(layer: nn.Conv2d, x: Tensor) -> bool:
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _patches_forward(layer: nn.Conv2d, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, ConvPatches]:
    return _patches_forward_parts(layer, x, (params,), (slice(0, x.shape[0]),))


def _patches_forward_parts(
    layer: nn.Conv2d, x: Tensor, params: Sequence[LayerParams], parts: Sequence[slice]
) -> tuple[Tensor, ConvPatches]:
    patches = unfold_patches(x, layer.kernel_size, layer.stride, layer.padding)  # type: ignore[arg-type]
    positions = patches.size[0] * patches.size[1]
    rows = patches.values.flatten(0, 1)
    out = rows.new_empty((rows.shape[0], layer.out_channels))
    for part, own in zip(parts, params, strict=True):
        place = slice(part.start * positions, part.stop * positions)
        block, bias = out[place], own.get("bias")
        torch.mm(rows[place], patches.matrix(own["weight"]).t(), out=block)
        if bias is not None:
            block.add_(bias)  # `addmm` would first write the bias to all rows
    return out.view(x.shape[0], *patches.size, layer.out_channels).permute(0, 3, 1, 2), patches


def _patches_backward(layer: nn.Conv2d, memo: ConvPatches, params: LayerParams, g: Tensor) -> Tensor:
    # Only the shape of the input counts; a part of the batch has fewer examples than there are patches of.
    return _conv_backward(layer, memo.source[: g.shape[0]], params, g)


def _patches_are_supported(layer: nn.Conv2d, x: Tensor) -> bool:
    """Where the stride skips positions, one product over patches is a third faster than the CPU's convolution,
    and the gradients reuse the patches."""
    strided = max(layer.stride) > 1 and max(layer.dilation) == 1 and layer.groups == 1
    return strided and x.device.type == "cpu" and _conv_is_supported(layer, x)


# --- activations and shapes -----------------------------------------------------------------------


def _relu_forward(layer: nn.ReLU, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, Tensor]:
    out = torch.relu_(x) if mine else torch.relu(x)
    return out, out


def _relu_backward(layer: nn.ReLU, memo: Tensor, params: LayerParams, g: Tensor) -> Tensor:
    dense = g.is_contiguous() or g.is_contiguous(memory_format=torch.channels_last)
    into = g if dense else torch.empty_like(memo)
    grad: Tensor = aten.threshold_backward.grad_input(g, memo, 0, grad_input=into)
    return grad


def _tanh_forward(layer: nn.Tanh, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, Tensor]:
    out = torch.tanh_(x) if mine else torch.tanh(x)
    return out, out


def _tanh_backward(layer: nn.Tanh, memo: Tensor, params: LayerParams, g: Tensor) -> Tensor:
    grad: Tensor = aten.tanh_backward(g, memo)
    return grad


def _tempered_forward(layer: TemperedSigmoid, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, Tensor]:
    rise = (x * layer.temperature).sigmoid_()
    return rise * layer.scale - layer.offset, rise


def _tempered_backward(layer: TemperedSigmoid, memo: Tensor, params: LayerParams, g: Tensor) -> Tensor:
    grad: Tensor = aten.sigmoid_backward(g, memo)
    return grad.mul_(layer.scale * layer.temperature)


def _flatten_forward(layer: nn.Flatten, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, torch.Size]:
    return x.flatten(layer.start_dim, layer.end_dim), x.shape


def _flatten_backward(layer: nn.Flatten, memo: torch.Size, params: LayerParams, g: Tensor) -> Tensor:
    return g.reshape(memo)


def _centre_forward(layer: CentringLayer, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, torch.Size]:
    if any(layer.padding):
        return layer.mixed(F.pad(x, layer.pad_amounts).sub_(layer.mean)), x.shape
    into = x if mine else torch.empty_like(x)  # memory layout of x, not of the mean
    return layer.mixed(torch.sub(x, layer.mean, out=into)), x.shape


def _centre_backward(layer: CentringLayer, memo: torch.Size, params: LayerParams, g: Tensor) -> Tensor:
    if not any(layer.padding):
        return layer.mixed(g)
    down, across = layer.padding
    return layer.mixed(g[:, :, down : down + memo[2], across : across + memo[3]])


# --- pooling ------------------------------------------------------------------------------------


def _window_slices(size: int, stride: int) -> tuple[slice, slice]:
    """First and second positions of all windows of two."""
    reach = stride * ((size - 2) // stride) + 1
    return slice(0, reach, stride), slice(1, reach + 1, stride)


def _max_pool_output(layer: nn.MaxPool2d, x: Tensor, params: LayerParams) -> Tensor:
    """Windows of 2 x 2: along the rows, then across them."""
    plain = to_pair(layer.padding) == (0, 0) and to_pair(layer.dilation) == (1, 1) and not layer.ceil_mode
    if not plain or to_pair(layer.kernel_size) != (2, 2) or x.device.type != "cpu":
        found: Tensor = layer(x)
        return found
    down, right = to_pair(layer.stride)
    image = x.permute(0, 2, 3, 1)
    one, two = _window_slices(image.shape[2], right)
    rows = torch.maximum(image[:, :, one], image[:, :, two])
    one, two = _window_slices(rows.shape[1], down)
    return torch.maximum(rows[:, one], rows[:, two]).permute(0, 3, 1, 2)


def _max_pool_arguments(layer: nn.MaxPool2d) -> tuple[Any, ...]:
    numbers = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return *map(to_pair, numbers), layer.ceil_mode


def _max_pool_forward(
    layer: nn.MaxPool2d, x: Tensor, params: LayerParams, mine: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    out, where = aten.max_pool2d_with_indices(x, *_max_pool_arguments(layer))
    return out, (x, where)


def _max_pool_backward(layer: nn.MaxPool2d, memo: tuple[Tensor, Tensor], params: LayerParams, g: Tensor) -> Tensor:
    x, where = memo
    grad: Tensor = aten.max_pool2d_with_indices_backward(g, x, *_max_pool_arguments(layer), where)
    return grad


def _avg_pool_forward(layer: nn.AvgPool2d, x: Tensor, params: LayerParams, mine: bool) -> tuple[Tensor, Tensor]:
    return layer(x), x


def _avg_pool_backward(layer: nn.AvgPool2d, memo: Tensor, params: LayerParams, g: Tensor) -> Tensor:
    window, stride, padding = to_pair(layer.kernel_size), to_pair(layer.stride), to_pair(layer.padding)
    (height, width), (down, right) = memo.shape[2:], window
    covered = window == stride and padding == (0, 0) and layer.divisor_override is None
    if covered and height % down == width % right == 0 and memo.is_contiguous(memory_format=torch.channels_last):
        # Each pixel is in one window: its share is written once, in place of added to zeros.
        spread = torch.empty_like(memo)
        image = spread.permute(0, 2, 3, 1).view(len(memo), height // down, down, width // right, right, -1)
        image.copy_((g / (down * right)).permute(0, 2, 3, 1)[:, :, None, :, None])
        return spread
    numbers = (window, stride, padding, layer.ceil_mode, layer.count_include_pad, layer.divisor_override)
    grad: Tensor = aten.avg_pool2d_backward(g, memo, *numbers)
    return grad


def _global_pool_forward(
    layer: nn.AdaptiveAvgPool2d, x: Tensor, params: LayerParams, mine: bool
) -> tuple[Tensor, Tensor]:
    return x.mean(dim=(2, 3), keepdim=True), x


def _global_pool_backward(layer: nn.AdaptiveAvgPool2d, memo: Tensor, params: LayerParams, g: Tensor) -> Tensor:
    share = g / (memo.shape[2] * memo.shape[3])
    return torch.empty_like(memo).copy_(share)  # memory layout of the images


def _global_pool_is_supported(layer: nn.AdaptiveAvgPool2d, x: Tensor) -> bool:
    return x.dim() == 4 and layer.output_size in (1, (1, 1))


# --- the table ----------------------------------------------------------------------------------

AUTOGRAD_OP = build_autograd_op(_call_layer)
"""For a layer without parameters that has no op in the table."""

LAYER_OPS: dict[type[nn.Module], tuple[LayerOp, ...]] = {
    nn.Linear: (LayerOp(_linear_forward, _linear_backward, spare=True),),
    nn.Conv1d: (build_autograd_op(_run_convolution, spare=True),),
    nn.Conv2d: (
        LayerOp(
            host_ops.run_convolution,
            host_ops.run_convolution_back,
            host_ops.strided_convolution_fits,
            spare=True,
            run_parts=host_ops.run_convolution_parts,
        ),
        LayerOp(
            _patches_forward,
            _patches_backward,
            _patches_are_supported,
            spare=True,
            output=_run_convolution,
            run_parts=_patches_forward_parts,
        ),
        LayerOp(_conv_forward, _conv_backward, _conv_is_supported, spare=True),
        build_autograd_op(_run_convolution, spare=True),
    ),
    nn.GroupNorm: (
        build_autograd_op(
            lambda layer, x, p: F.group_norm(x, layer.num_groups, p.get("weight"), p.get("bias"), layer.eps)
        ),
    ),
    nn.LayerNorm: (
        build_autograd_op(
            lambda layer, x, p: F.layer_norm(x, layer.normalized_shape, p.get("weight"), p.get("bias"), layer.eps)
        ),
    ),
    nn.Embedding: (build_autograd_op(lambda layer, x, p: F.embedding(x, p["weight"], layer.padding_idx)),),
    nn.ReLU: (LayerOp(_relu_forward, _relu_backward),),
    nn.Tanh: (LayerOp(_tanh_forward, _tanh_backward),),
    TemperedSigmoid: (LayerOp(_tempered_forward, _tempered_backward),),
    CentringLayer: (LayerOp(_centre_forward, _centre_backward, spare=True),),
    nn.Flatten: (LayerOp(_flatten_forward, _flatten_backward),),
    nn.MaxPool2d: (
        LayerOp(host_ops.run_max_pool, host_ops.run_max_pool_back, host_ops.max_pool_fits),
        LayerOp(_max_pool_forward, _max_pool_backward, output=_max_pool_output),
    ),
    nn.AvgPool2d: (LayerOp(_avg_pool_forward, _avg_pool_backward),),
    nn.AdaptiveAvgPool2d: (
        LayerOp(_global_pool_forward, _global_pool_backward, _global_pool_is_supported),
        AUTOGRAD_OP,
    ),
}
"""The ops of each layer class; the first whose `suits` is True is used."""


def find_layer_op(layer: nn.Module, x: Tensor) -> LayerOp:
    """The op for `layer` on inputs like x."""
    return next(move for move in LAYER_OPS.get(type(layer), (AUTOGRAD_OP,)) if move.suits(layer, x))
