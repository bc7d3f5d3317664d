"""A `nn.Sequential` as a list of steps, each with its own forward and backward over stacked sets of weights.

    program, reason = compile_model(model, layout, shape)

Activations are [S, n, F] or [S, n, H, W, C]: S sets of weights (one per run, or one per client once clients
differ), n examples per set. Nothing here uses autograd, so a pass can be recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.gradients.layers import has_hooks
from fulcrum.gradients.stacked import fused
from fulcrum.gradients.stacked import geometry as geo
from fulcrum.gradients.stacked.geometry import IntPair, SlidingWindow
from fulcrum.gradients.stacked.plain import (
    ACTIVATION_BUILDERS,
    ParameterlessLayer,
    build_avg_pool,
    build_centring,
    build_flatten,
    build_global_pool,
    build_max_pool,
    fuse_relu_into_pools,
)
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.whitening import CentringLayer

StackedWeights = tuple[Tensor, ...]
"""The parameter tensors of the layout, each [S, ...]."""


@dataclass(frozen=True)
class StackedSite:
    """A layer with parameters, as a matrix product over P positions: out [S, n, P, o] = a [S, n, P, k] W^T + b.

    weight and bias are indices in the layout (bias None: no bias). window is None for a linear layer; one that
    follows a flattened image has the whole image as its window, so that weights are reordered, not activations.
    """

    weight: int
    bias: int | None
    outputs: int
    window: SlidingWindow | None
    inputs: int
    whole: bool = False
    """A linear layer over a whole image."""

    @property
    def is_convolution(self) -> bool:
        """Whether this layer is a convolution that the library supports."""
        return self.window is not None and not self.whole

    @property
    def positions(self) -> int:
        """Number of positions P."""
        return self.window.positions if self.window else 1

    @property
    def ghost(self) -> bool:
        """Whether the norm is cheaper from the two P x P Gram matrices than from the materialised gradient."""
        return 2 * self.positions**2 <= self.outputs * self.inputs

    def matrix(self, weights: StackedWeights) -> Tensor:
        """W as [S, o, k], in the order of the patches."""
        w = weights[self.weight]
        if self.window is None:
            return w
        w = w.reshape(len(w), self.outputs, self.window.channels, *self.window.kernel)
        return w.permute(0, 1, 3, 4, 2).reshape(len(w), self.outputs, self.inputs)

    @property
    def needs_reordering(self) -> bool:
        """Whether the entry order of the layout differs from that of the patches."""
        return self.window is not None and self.window.channels > 1 and self.window.kernel != (1, 1)

    def to_layout_order(self, rows: Tensor) -> Tensor:
        """Rows of gradients or patches [X, r, k] in the order of the layout, [X, r, ...], as a view."""
        if self.window is None:
            return rows
        split = rows.view(*rows.shape[:2], *self.window.kernel, self.window.channels)
        return split.permute(0, 1, 4, 2, 3)

    def flatten_gradient(self, gradient: Tensor) -> Tensor:
        """A gradient [X, o, k] in the order of the layout, [X, o * k]."""
        return self.to_layout_order(gradient).flatten(1)

    def extract_input_patches(self, h: Tensor) -> Tensor:
        """The patches a [S, n, P, k] of the input h."""
        if self.window is None:
            return h[:, :, None]
        if self.whole:
            return h.reshape(*h.shape[:2], 1, self.inputs)
        found = fused.fused_extract_patches(h, self.window)
        return geo.extract_patches(h, self.window) if found is None else found

    def native(self, h: Tensor, weights: StackedWeights, bare: bool = False) -> Tensor:
        """The output from the library's convolution: one set of weights only, no patches. bare: without the bias."""
        assert self.window is not None
        w, bias = self._get_conv_filters(weights, h.dtype), None
        if self.bias is not None and not bare:
            bias = weights[self.bias][0].to(h.dtype)
        window = self.window
        out = F.conv2d(_to_nchw_images(h), w, bias, window.stride, window.padding, window.dilation)
        return out.permute(0, 2, 3, 1)[None]

    def library_backward(self, g: Tensor, h: Tensor, weights: StackedWeights, wanted: str) -> Tensor:
        """From the library: the gradient of the input ("input"), or of the filters, summed over the examples."""
        assert self.window is not None
        window, back = self.window, torch.ops.aten.convolution_backward
        mask = [wanted == "input", wanted == "weight", False]
        shape = (window.stride, window.padding, window.dilation, False, (0, 0), 1, mask)
        found = back(_to_nchw_images(g), _to_nchw_images(h), self._get_conv_filters(weights, g.dtype), None, *shape)
        if wanted == "input":
            return found[0].permute(0, 2, 3, 1)[None]  # type: ignore[no-any-return]
        return found[1].permute(0, 2, 3, 1).reshape(1, self.outputs, self.inputs)  # type: ignore[no-any-return]

    def _get_conv_filters(self, weights: StackedWeights, dtype: torch.dtype) -> Tensor:
        return weights[self.weight][0].to(dtype).contiguous(memory_format=torch.channels_last)

    def forward(self, a: Tensor, weights: StackedWeights, bare: bool = False) -> Tensor:
        """[S, n, P, k] -> [S, n, o] or [S, n, oh, ow, o]. bare: without the bias."""
        sets, n = a.shape[:2]
        rows, w = a.reshape(sets, -1, self.inputs), self.matrix(weights).to(a.dtype).transpose(1, 2)
        if self.bias is None or bare:
            out = torch.bmm(rows, w)
        else:
            out = torch.baddbmm(weights[self.bias].to(a.dtype)[:, None], rows, w)
        return out.view(sets, n, *self.window.out, self.outputs) if self.window and not self.whole else out

    def backward(self, g: Tensor, weights: StackedWeights) -> Tensor:
        """The gradient of the input, from the gradient of the output."""
        sets, n = g.shape[:2]
        gp = torch.bmm(g.reshape(sets, -1, self.outputs), self.matrix(weights).to(g.dtype))
        if self.window is None:
            return gp
        if self.whole:
            return gp.view(sets, n, self.window.height, self.window.width, self.window.channels)
        gp = gp.view(sets, n, self.positions, self.inputs)
        found = fused.fused_fold_patches(gp, self.window)
        return geo.fold_patches(gp, self.window) if found is None else found


def _to_nchw_images(h: Tensor) -> Tensor:
    """[1, n, H, W, C] as [n, C, H, W], channels last in memory."""
    return h[0].contiguous().permute(0, 3, 1, 2)


@dataclass(frozen=True)
class StackedProgram:
    """A model as steps. image: whether inputs are channels last; shape: of one example as stored."""

    steps: tuple[StackedSite | ParameterlessLayer, ...]
    layout: ParameterLayout
    image: bool
    elements: int
    """Approximate number of elements per example in a pass: patches, activations and their gradients."""

    def table(self, x: Tensor) -> Tensor:
        """Examples in the layout of a pass: [n, C, H, W] -> [n, H, W, C] for images, [n, F] otherwise."""
        return x.permute(0, 2, 3, 1).contiguous() if self.image else x.flatten(1)


# --- from a model to a program --------------------------------------------------------------------


class _UnsupportedLayer(Exception):
    """This model has no hand-written stacked pass; the message says why."""


def compile_model(model: nn.Module, layout: ParameterLayout, shape: Any) -> tuple[StackedProgram | None, str]:
    """The program of a model for examples of `shape` (a tuple), or None and the reason why there is none."""
    try:
        if not isinstance(shape, tuple):
            raise _UnsupportedLayer("it takes several inputs")
        return _compile_sequential(model, layout, shape), ""
    except _UnsupportedLayer as reason:
        return None, str(reason)


def _compile_sequential(model: nn.Module, layout: ParameterLayout, shape: tuple[int, ...]) -> StackedProgram:
    layers = [layer for layer in _list_layers(model) if type(layer) is not nn.Identity]
    named = dict(model.named_parameters())
    places = {id(named[name]): place for place, name in enumerate(layout.names)}
    image = len(shape) == 3 and bool(layers) and type(layers[0]) is not nn.Flatten
    here: tuple[int, ...] = (shape[1], shape[2], shape[0]) if image else (int(torch.Size(shape).numel()),)
    if not image and len(shape) > 1 and (not layers or type(layers[0]) is not nn.Flatten):
        raise _UnsupportedLayer(f"examples of shape {shape} enter a layer that is not Flatten or a convolution")
    steps: list[StackedSite | ParameterlessLayer] = []
    elements = 0
    for i, layer in enumerate(layers):
        before = here
        if _is_full_flatten(layer) and len(here) == 3 and i + 1 < len(layers) and type(layers[i + 1]) is nn.Linear:
            continue
        step, here = _compile_layer(layer, here, places, flattened=i > 0 and _is_full_flatten(layers[i - 1]))
        if step is not None:
            steps.append(step)
            patched = step.positions * step.inputs if isinstance(step, StackedSite) else 0
            written = 0 if not isinstance(step, StackedSite) or step.ghost else step.outputs * step.inputs
            elements += 2 * patched + written + 3 * int(torch.Size(before).numel() + torch.Size(here).numel())
    used = [place for s in steps if isinstance(s, StackedSite) for place in (s.weight, s.bias) if place is not None]
    if len(here) != 1:
        raise _UnsupportedLayer("it does not end in one vector of logits an example")
    if sorted(used) != list(range(len(layout.names))):
        raise _UnsupportedLayer("a parameter is shared between layers or used outside of them")
    return StackedProgram(tuple(fuse_relu_into_pools(steps)), layout, image, elements)


def _list_layers(module: nn.Module) -> list[nn.Module]:
    if has_hooks(module):
        raise _UnsupportedLayer("it has hooks")
    if type(module) is nn.Sequential:
        return [layer for child in module for layer in _list_layers(child)]
    return [module]


def _to_pair(value: Any) -> IntPair:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _is_full_flatten(layer: Any) -> bool:
    return type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1


def _compile_layer(
    layer: Any, here: tuple[int, ...], places: dict[int, int], flattened: bool = False
) -> tuple[StackedSite | ParameterlessLayer | None, tuple[int, ...]]:
    """The step of one layer, and the shape after it. flattened: the layer before was a Flatten, which was left out."""
    kind = type(layer)
    if kind in ACTIVATION_BUILDERS:
        return ACTIVATION_BUILDERS[kind](layer), here
    if kind is CentringLayer:
        found = build_centring(layer, here)
        if found is not None:
            return found
    if _is_full_flatten(layer):
        return (None, here) if len(here) == 1 else (build_flatten(*here), (here[0] * here[1] * here[2],))
    if kind is nn.Linear and len(here) == 1:
        weight, bias = _find_parameter_places(layer, places)
        return StackedSite(weight, bias, layer.out_features, None, layer.in_features), (layer.out_features,)
    if kind is nn.Linear and len(here) == 3 and flattened:
        window = SlidingWindow(*here, (here[0], here[1]), (1, 1))
        weight, bias = _find_parameter_places(layer, places)
        return StackedSite(weight, bias, layer.out_features, window, layer.in_features, whole=True), (
            layer.out_features,
        )
    if len(here) == 3 and kind in IMAGE_LAYER_COMPILERS:
        step = IMAGE_LAYER_COMPILERS[kind](layer, here, places)
        if isinstance(step, StackedSite) and step.window:
            return step, (*step.window.out, step.outputs)
        if step is not None:
            return step, _compute_pooled_shape(layer, here)
    raise _UnsupportedLayer(f"{kind.__name__}({layer.extra_repr()}) has no hand-written form")


def _find_parameter_places(layer: nn.Module, places: dict[int, int]) -> tuple[int, int | None]:
    for parameter in layer.parameters():
        if id(parameter) not in places:
            raise _UnsupportedLayer(f"{type(layer).__name__} has frozen parameters")
    bias = layer.bias
    return places[id(layer.weight)], None if bias is None else places[id(bias)]


def _compile_conv(layer: Any, here: tuple[int, ...], places: dict[int, int]) -> StackedSite | None:
    if layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    window = SlidingWindow(here[0], here[1], here[2], layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    weight, bias = _find_parameter_places(layer, places)
    return StackedSite(weight, bias, layer.out_channels, window, window.size)


def _find_pool_window(layer: Any, here: tuple[int, ...]) -> SlidingWindow | None:
    if _to_pair(layer.padding) != (0, 0) or layer.ceil_mode or _to_pair(getattr(layer, "dilation", 1)) != (1, 1):
        return None
    if getattr(layer, "return_indices", False) or getattr(layer, "divisor_override", None):
        return None
    return SlidingWindow(here[0], here[1], here[2], _to_pair(layer.kernel_size), _to_pair(layer.stride))


def _compile_max_pool(layer: Any, here: tuple[int, ...], places: dict[int, int]) -> ParameterlessLayer | None:
    window = _find_pool_window(layer, here)
    return build_max_pool(window) if window else None


def _compile_avg_pool(layer: Any, here: tuple[int, ...], places: dict[int, int]) -> ParameterlessLayer | None:
    window = _find_pool_window(layer, here)
    return build_avg_pool(window) if window else None


def _compile_global_pool(layer: Any, here: tuple[int, ...], places: dict[int, int]) -> ParameterlessLayer | None:
    return build_global_pool(*here) if layer.output_size in (1, (1, 1)) else None


def _compute_pooled_shape(layer: Any, here: tuple[int, ...]) -> tuple[int, ...]:
    window = None if type(layer) is nn.AdaptiveAvgPool2d else _find_pool_window(layer, here)
    return (*window.out, here[2]) if window else (1, 1, here[2])


IMAGE_LAYER_COMPILERS: dict[
    type[nn.Module], Callable[[Any, tuple[int, ...], dict[int, int]], StackedSite | ParameterlessLayer | None]
] = {
    nn.Conv2d: _compile_conv,
    nn.MaxPool2d: _compile_max_pool,
    nn.AvgPool2d: _compile_avg_pool,
    nn.AdaptiveAvgPool2d: _compile_global_pool,
}
