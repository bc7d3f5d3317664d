"""Layers without parameters, forward and backward by hand: activations, pooling, flattening."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.engine.stacked import geometry as geo
from fulcrum.engine.stacked.geometry import Window
from fulcrum.models import Tempered


@dataclass(frozen=True)
class Plain:
    """A layer without parameters. forward(h) -> (out, kept); backward(g, kept) -> gradient of h."""

    name: str
    forward: Callable[[Tensor], tuple[Tensor, Any]]
    backward: Callable[[Tensor, Any], Tensor]


def _relu(layer: nn.Module) -> Plain:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.relu(h)
        return out, out

    return Plain("relu", forward, lambda g, out: torch.ops.aten.threshold_backward(g, out, 0))


def _tanh(layer: nn.Module) -> Plain:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.tanh(h)
        return out, out

    return Plain("tanh", forward, lambda g, out: torch.ops.aten.tanh_backward(g, out))


def _sigmoid(layer: nn.Module) -> Plain:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.sigmoid(h)
        return out, out

    return Plain("sigmoid", forward, lambda g, out: torch.ops.aten.sigmoid_backward(g, out))


def _tempered(layer: Any) -> Plain:
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.sigmoid(layer.temperature * h)
        return layer.scale * inner - layer.offset, inner

    def backward(g: Tensor, inner: Tensor) -> Tensor:
        slope = layer.scale * layer.temperature
        return torch.ops.aten.sigmoid_backward(g, inner) * slope  # type: ignore[no-any-return]

    return Plain(f"tempered {layer.extra_repr()}", forward, backward)


ACTIVATIONS: dict[type[nn.Module], Callable[[Any], Plain]] = {
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    Tempered: _tempered,
}


def max_pool(window: Window) -> Plain:
    return Plain("max-pool", lambda h: geo.max_pool(h, window), lambda g, which: geo.max_unpool(g, which, window))


def avg_pool(window: Window) -> Plain:
    return Plain("avg-pool", lambda h: (geo.avg_pool(h, window), None), lambda g, _: geo.avg_unpool(g, window))


def global_pool(height: int, width: int) -> Plain:
    def backward(g: Tensor, _: Any) -> Tensor:
        return (g / (height * width)).expand(*g.shape[:2], height, width, g.shape[-1])

    return Plain("global-pool", lambda h: (h.mean(dim=(2, 3), keepdim=True), None), backward)


def flatten(height: int, width: int, channels: int) -> Plain:
    """To PyTorch's order (C, H, W)."""

    def backward(g: Tensor, _: Any) -> Tensor:
        return g.view(*g.shape[:2], channels, height, width).permute(0, 1, 3, 4, 2)

    return Plain("flatten", lambda h: (h.permute(0, 1, 4, 2, 3).flatten(2), None), backward)
