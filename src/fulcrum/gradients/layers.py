"""The layers with ghost norms, and their parameter gradients. `layer_ops.py` runs them forward and backward.

A layer is recognised by its exact class: a subclass may compute something else. To add one, add a `GradSampler`
to the table at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.gradients.layer_ops import LayerParams
from fulcrum.gradients.outer_products import ConvGrad, ConvPatches, LinearGrad, WeightGradCost
from fulcrum.gradients.param_grads import EmbeddingGrad, MaterialisedGrad, ParamGrad


@dataclass(frozen=True)
class GradSampler:
    """What ghost norms need to know about a class of layers.

    parts(layer, a, g, params, wanted): for each wanted parameter name its gradients from input a and
        output gradient g, both with examples first; a is `ConvPatches` where the layer kept its patches.
    fits(layer, x): whether the layer treats dimension 0 of x as the batch.
    objection(layer): why this layer is not supported; empty if it is.
    size(layer, shape): cost of the weight's gradients, from the output's shape, where there is a choice of
        method.
    """

    parts: Callable[[Any, Any, Tensor, LayerParams, set[str]], dict[str, ParamGrad]]
    fits: Callable[[Any, Tensor], bool]
    objection: Callable[[Any], str] = lambda layer: ""
    size: Callable[[Any, torch.Size], WeightGradCost | None] = lambda layer, shape: None


# --- linear -------------------------------------------------------------------------------------


def _linear_param_grads(
    layer: nn.Linear, a: Tensor, g: Tensor, params: LayerParams, wanted: set[str]
) -> dict[str, ParamGrad]:
    if a.dim() > 3:
        a, g = a.flatten(1, -2), g.flatten(1, -2)
    makers: dict[str, Callable[[], ParamGrad]] = {
        "weight": lambda: LinearGrad(a, g),
        "bias": lambda: MaterialisedGrad(g if g.dim() == 2 else g.sum(dim=1)),
    }
    return {name: makers[name]() for name in wanted}


def _linear_grad_cost(layer: nn.Linear, shape: torch.Size) -> WeightGradCost:
    return WeightGradCost(1, math.prod(shape[1:-1]), layer.in_features, layer.out_features)


# --- convolutions -------------------------------------------------------------------------------


def _conv_padding(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """Padding left and right of the last dimension, then of the one before, in the order of `F.pad`."""
    amounts: list[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if isinstance(layer.padding, str):
            total = layer.dilation[i] * (layer.kernel_size[i] - 1) if layer.padding == "same" else 0
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [layer.padding[i], layer.padding[i]]
    return amounts


def _conv_param_grads(
    layer: nn.Conv1d | nn.Conv2d, a: Tensor | ConvPatches, g: Tensor, params: LayerParams, wanted: set[str]
) -> dict[str, ParamGrad]:
    def weight() -> ParamGrad:
        if isinstance(a, ConvPatches):
            return a.part(g, params["weight"])
        padding, x, grad, kernel = _conv_padding(layer), a, g, params["weight"]
        around: tuple[int, ...] = ()
        if layer.padding_mode == "zeros" and padding[::2] == padding[1::2]:
            around = tuple(reversed(padding[::2]))  # without a copy of the images
        elif any(padding):
            x = F.pad(x, padding, "constant" if layer.padding_mode == "zeros" else layer.padding_mode)
        stride, dilation = layer.stride, layer.dilation
        if x.dim() == 3:  # a sequence is an image of height 1
            x, grad, kernel = x.unsqueeze(2), grad.unsqueeze(2), kernel.unsqueeze(2)
            stride, dilation, around = (1, *stride), (1, *dilation), ((0, *around) if around else ())
        strides, dilations = (stride[0], stride[1]), (dilation[0], dilation[1])
        return ConvGrad(x, grad, kernel, strides, dilations, layer.groups, around if any(around) else ())

    makers: dict[str, Callable[[], ParamGrad]] = {
        "weight": weight,
        "bias": lambda: MaterialisedGrad(g.flatten(2).sum(dim=2)),
    }
    return {name: makers[name]() for name in wanted}


def _conv_grad_cost(layer: nn.Conv1d | nn.Conv2d, shape: torch.Size) -> WeightGradCost:
    n = layer.groups
    inputs = layer.in_channels // n * math.prod(layer.kernel_size)
    return WeightGradCost(n, math.prod(shape[2:]), inputs, layer.out_channels // n)


# --- normalisation within an example --------------------------------------------------------------


def _group_norm_param_grads(
    layer: nn.GroupNorm, a: Tensor, g: Tensor, params: LayerParams, wanted: set[str]
) -> dict[str, ParamGrad]:
    def total(values: Tensor) -> ParamGrad:
        return MaterialisedGrad(values.reshape(len(values), layer.num_channels, -1).sum(dim=2))

    makers: dict[str, Callable[[], ParamGrad]] = {
        "weight": lambda: total(F.group_norm(a, layer.num_groups, eps=layer.eps) * g),
        "bias": lambda: total(g),
    }
    return {name: makers[name]() for name in wanted}


def _layer_norm_param_grads(
    layer: nn.LayerNorm, a: Tensor, g: Tensor, params: LayerParams, wanted: set[str]
) -> dict[str, ParamGrad]:
    def total(values: Tensor) -> ParamGrad:
        return MaterialisedGrad(values.reshape(len(values), -1, math.prod(layer.normalized_shape)).sum(dim=1))

    makers: dict[str, Callable[[], ParamGrad]] = {
        "weight": lambda: total(F.layer_norm(a, layer.normalized_shape, eps=layer.eps) * g),
        "bias": lambda: total(g),
    }
    return {name: makers[name]() for name in wanted}


# --- embedding ----------------------------------------------------------------------------------


def _embedding_param_grads(
    layer: nn.Embedding, a: Tensor, g: Tensor, params: LayerParams, wanted: set[str]
) -> dict[str, ParamGrad]:
    index, grads = a.reshape(len(a), -1), g.reshape(len(g), -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        skipped = (index == layer.padding_idx).unsqueeze(2)
        grads = torch.where(skipped, torch.zeros((), dtype=grads.dtype), grads)
    return {name: EmbeddingGrad(index, grads, layer.num_embeddings) for name in wanted}


def _embedding_unsupported_reason(layer: nn.Embedding) -> str:
    if layer.max_norm is not None:
        return "max_norm changes the weights during the forward pass"
    return "scale_grad_by_freq counts over the batch" if layer.scale_grad_by_freq else ""


# --- the table ------------------------------------------------------------------------------------

GRAD_SAMPLERS: dict[type[nn.Module], GradSampler] = {
    nn.Linear: GradSampler(_linear_param_grads, lambda layer, x: x.dim() >= 2, size=_linear_grad_cost),
    nn.Conv1d: GradSampler(_conv_param_grads, lambda layer, x: x.dim() == 3, size=_conv_grad_cost),
    nn.Conv2d: GradSampler(_conv_param_grads, lambda layer, x: x.dim() == 4, size=_conv_grad_cost),
    nn.GroupNorm: GradSampler(_group_norm_param_grads, lambda layer, x: x.dim() >= 2),
    nn.LayerNorm: GradSampler(_layer_norm_param_grads, lambda layer, x: x.dim() > len(layer.normalized_shape)),
    nn.Embedding: GradSampler(_embedding_param_grads, lambda layer, x: x.dim() >= 1, _embedding_unsupported_reason),
}


def find_unsupported_reason(layer: nn.Module) -> str:
    """Why ghost norms do not support this layer, or "" if they do."""
    kind = GRAD_SAMPLERS.get(type(layer))
    if kind is None:
        return f"no book-keeping rule for {type(layer).__name__}"
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    if not own <= {"weight", "bias"} or any(True for _ in layer.children()):
        return "its weights are computed from other parameters"
    if has_hooks(layer):
        return "it carries hooks, which may change its input or output"
    return kind.objection(layer)


def has_hooks(layer: nn.Module) -> bool:
    """Whether the module has forward or backward hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, name, None) for name in hooks)
