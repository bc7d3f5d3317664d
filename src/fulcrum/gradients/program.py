"""Analysis of a model: which of its modules are sites, and whether it is a plain sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fulcrum.gradients.layers import GRAD_SAMPLERS, GradSampler, find_unsupported_reason, has_hooks
from fulcrum.models.builtin import TemperedSigmoid
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.whitening import CentringLayer

PARAMETERLESS_LAYERS = frozenset(
    {nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, TemperedSigmoid, nn.Identity}
    | {nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d}
    | {nn.Flatten, nn.Dropout, CentringLayer}
)
"""Layers without parameters that do not mix examples and do not depend on the memory layout."""


class UnsupportedModel(Exception):
    """Ghost norms do not support this model; the message says why."""


@dataclass(frozen=True)
class GradSite:
    """A module whose parameters get gradients. kind None: this module uses vmap."""

    name: str
    module: nn.Module
    kind: GradSampler | None
    own: dict[str, int]
    """Local name of each trainable parameter -> its index in the layout."""
    reason: str = ""


@dataclass(frozen=True)
class SequenceNode:
    """A layer of a plain sequence. kind and site are None for layers without trainable parameters."""

    layer: nn.Module
    kind: GradSampler | None
    site: GradSite | None
    frozen: dict[str, Tensor]
    """Its parameters that are not trained, by local name."""


@dataclass(frozen=True)
class GradProgram:
    """The sites of a model, and its layers where it is a plain sequence."""

    sites: dict[nn.Module, GradSite]
    sequence: tuple[SequenceNode, ...]
    """The layers in order where the model is a plain sequence; else empty."""


def analyse_model(model: nn.Module, layout: ParameterLayout) -> GradProgram:
    """Finds the sites: the layers with ghost norms, and the smallest modules around all other parameters."""
    named = dict(model.named_parameters())
    places = {id(named[name]): place for place, name in enumerate(layout.names)}
    sites = {site.module: site for site in _find_sites(model, "", places)}
    return GradProgram(sites, _find_sequence(model, sites))


def _find_sites(module: nn.Module, name: str, places: dict[int, int]) -> Iterator[GradSite]:
    def trainable(recurse: bool) -> dict[str, int]:
        return {n: places[id(p)] for n, p in module.named_parameters(recurse=recurse) if id(p) in places}

    own = trainable(recurse=False)
    if not own:
        for child_name, child in module.named_children():
            yield from _find_sites(child, f"{name}.{child_name}" if name else child_name, places)
        return
    reason = find_unsupported_reason(module)
    yield (
        GradSite(name, module, None, trainable(recurse=True), reason)
        if reason
        else GradSite(name, module, GRAD_SAMPLERS[type(module)], own)
    )


def _find_sequence(model: nn.Module, sites: dict[nn.Module, GradSite]) -> tuple[SequenceNode, ...]:
    layers = tuple(_flatten_sequential(model))
    known = all(
        (type(m) in GRAD_SAMPLERS and not find_unsupported_reason(m))
        or (type(m) in PARAMETERLESS_LAYERS and not has_hooks(m))
        for m in layers
    )
    merges = any(isinstance(m, nn.Flatten) and m.start_dim < 1 for m in layers)
    return tuple(_build_sequence_node(layer, sites.get(layer)) for layer in layers) if known and not merges else ()


def _build_sequence_node(layer: nn.Module, site: GradSite | None) -> SequenceNode:
    trained = site.own if site else {}
    frozen = {n: p.detach() for n, p in layer.named_parameters(recurse=False) if n not in trained}
    return SequenceNode(layer, GRAD_SAMPLERS.get(type(layer)), site, frozen)


def _flatten_sequential(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential and not has_hooks(module):
        for child in module:
            yield from _flatten_sequential(child)
    else:
        yield module
