"""Layers without parameters, forward and backward by hand: activations, pooling, flattening, centring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.gradients.stacked import fused
from fulcrum.gradients.stacked import geometry as geo
from fulcrum.gradients.stacked.geometry import SlidingWindow
from fulcrum.models.builtin import TemperedSigmoid
from fulcrum.models.whitening import CentringLayer


@dataclass(frozen=True)
class PoolSpec:
    """A pooling: mean or max of each window, and its torch functions (as in `ParameterlessLayer`)."""

    window: SlidingWindow
    mean: bool
    forward: Callable[[Tensor], tuple[Tensor, Any]]
    backward: Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class ParameterlessLayer:
    """A layer without parameters. forward(h) -> (out, kept); backward(g, kept) -> gradient of h.

    pool: set for a pooling layer; its forward(h, bias) adds a bias [S, C] first.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Any]]
    backward: Callable[[Tensor, Any], Tensor]
    pool: PoolSpec | None = None


def _build_relu(layer: nn.Module) -> ParameterlessLayer:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.relu(h)
        return out, out

    return ParameterlessLayer("relu", forward, lambda g, out: torch.ops.aten.threshold_backward(g, out, 0))


def _build_tanh(layer: nn.Module) -> ParameterlessLayer:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.tanh(h)
        return out, out

    return ParameterlessLayer("tanh", forward, lambda g, out: torch.ops.aten.tanh_backward(g, out))


def _build_sigmoid(layer: nn.Module) -> ParameterlessLayer:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.sigmoid(h)
        return out, out

    return ParameterlessLayer("sigmoid", forward, lambda g, out: torch.ops.aten.sigmoid_backward(g, out))


def _build_tempered_sigmoid(layer: Any) -> ParameterlessLayer:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.sigmoid(layer.temperature * h)
        return layer.scale * inner - layer.offset, inner

    def backward(g: Tensor, inner: Tensor) -> Tensor:
        slope = layer.scale * layer.temperature
        return torch.ops.aten.sigmoid_backward(g, inner) * slope  # type: ignore[no-any-return]

    return ParameterlessLayer(f"tempered {layer.extra_repr()}", forward, backward)


ACTIVATION_BUILDERS: dict[type[nn.Module], Callable[[Any], ParameterlessLayer]] = {
    nn.ReLU: _build_relu,
    nn.Tanh: _build_tanh,
    nn.Sigmoid: _build_sigmoid,
    TemperedSigmoid: _build_tempered_sigmoid,
}


def build_max_pool(window: SlidingWindow) -> ParameterlessLayer:
    backward = partial(geo.max_pool_backward, window=window)
    return _build_pool(PoolSpec(window, False, lambda h: geo.max_pool_forward(h, window), backward))


def build_avg_pool(window: SlidingWindow) -> ParameterlessLayer:
    return _build_pool(
        PoolSpec(
            window,
            True,
            lambda h: (geo.avg_pool_forward(h, window), None),
            lambda g, _: geo.avg_pool_backward(g, window),
        )
    )


def build_global_pool(height: int, width: int, channels: int) -> ParameterlessLayer:
    def backward(g: Tensor, _: Any) -> Tensor:
        return (g / (height * width)).expand(*g.shape[:2], height, width, g.shape[-1])

    window = SlidingWindow(height, width, channels, (height, width), (height, width))
    return _build_pool(PoolSpec(window, True, lambda h: (h.mean(dim=(2, 3), keepdim=True), None), backward))


def _build_pool(pool: PoolSpec, relu: bool = False) -> ParameterlessLayer:
    """Pooling, with or without relu before it: one kernel if available, else torch. Both use the same notes."""
    window, mean = pool.window, pool.mean

    def by_torch(h: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
        if bias is not None:
            h = h + bias.to(h.dtype)[:, None, None, None]
        if not relu:
            return pool.forward(h)
        if mean:
            out = torch.relu(h)
            return pool.forward(out)[0], out
        best, which = pool.forward(h)  # relu after max gives the same result on fewer elements
        return torch.relu(best), which.masked_fill_(best <= 0, geo.NO_GRADIENT)

    def forward(h: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Any]:
        return fused.fused_pool(h, window, mean, relu, bias) or by_torch(h, bias)

    def backward(g: Tensor, note: Any) -> Tensor:
        if note is None or not note.is_floating_point():
            found = fused.fused_pool_backward(g, note, window, mean, relu)
            if found is not None:
                return found
        if not mean or note is None:
            return pool.backward(g, note)
        if note.is_floating_point():
            return torch.ops.aten.threshold_backward(pool.backward(g, None), note, 0)  # type: ignore[no-any-return]
        return geo.relu_avg_pool_backward(g, note, window)

    kind = "avg-pool" if mean else "max-pool"
    return ParameterlessLayer(f"relu+{kind}" if relu else kind, forward, backward, pool)


def fuse_relu_into_pools(steps: list[Any]) -> list[Any]:
    """The steps with each relu merged into the pooling after it, so that one pass over the data does both."""
    out: list[Any] = []
    for step in steps:
        last = out[-1] if out else None
        if (
            isinstance(step, ParameterlessLayer)
            and step.pool
            and isinstance(last, ParameterlessLayer)
            and last.name == "relu"
        ):
            out[-1] = _build_pool(step.pool, relu=True)
        else:
            out.append(step)
    return out


def build_flatten(height: int, width: int, channels: int) -> ParameterlessLayer:
    """To PyTorch's order (C, H, W)."""

    def backward(g: Tensor, _: Any) -> Tensor:
        return g.view(*g.shape[:2], channels, height, width).permute(0, 1, 3, 4, 2)

    return ParameterlessLayer("flatten", lambda h: (h.permute(0, 1, 4, 2, 3).flatten(2), None), backward)


def build_centring(layer: CentringLayer, here: tuple[int, ...]) -> tuple[ParameterlessLayer, tuple[int, ...]] | None:
    """Pads an image with zeros, then subtracts the mean; and the output shape. None if the mean does not fit."""
    mean, (down, across) = layer.mean.detach().float(), layer.padding
    if mean.dim() != len(here) or (len(here) == 1 and (down or across)):
        return None
    if len(here) == 3:
        mean = mean.permute(1, 2, 0)
    if any(own not in (1, side) for own, side in zip(mean.shape, here, strict=True)):
        return None
    mean = mean.contiguous()  # float32, on the device: bf16 is widened, then rounded once
    mix = layer.mix
    if mix is not None and mix.shape[0] != here[-1]:
        return None

    def mixed(h: Tensor) -> Tensor:  # also its own backward, since M is symmetric
        return h if mix is None else (h.reshape(-1, h.shape[-1]) @ mix.to(h.dtype)).view(h.shape)

    if not (down or across):

        def forward(h: Tensor) -> tuple[Tensor, None]:
            return mixed(torch.sub(h, mean, out=torch.empty_like(h, memory_format=torch.contiguous_format))), None

        return ParameterlessLayer("centre", forward, lambda g, _: mixed(g)), here
    height, width, channels = here
    if mean.shape[:2] != (1, 1):
        return None
    border = -mean

    def padded(h: Tensor) -> tuple[Tensor, None]:
        out = h.new_empty((*h.shape[:2], height + 2 * down, width + 2 * across, channels))
        out.copy_(border)
        torch.sub(h, mean, out=out[:, :, down : down + height, across : across + width])
        return mixed(out), None

    def crop(g: Tensor, _: Any) -> Tensor:
        return mixed(g[:, :, down : down + height, across : across + width])

    return ParameterlessLayer("centre", padded, crop), (height + 2 * down, width + 2 * across, channels)
