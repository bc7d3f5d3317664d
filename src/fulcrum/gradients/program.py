"""How a model is going to be followed: which of its modules are sites, and whether it is a plain sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fulcrum.gradients.layers import KINDS, Kind, has_hooks, objection
from fulcrum.models.builtin import Tempered
from fulcrum.models.layout import Layout
from fulcrum.models.whitening import Centre

PLAIN = frozenset(
    {nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, Tempered, nn.Identity}
    | {nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d}
    | {nn.Flatten, nn.Dropout, Centre}
)
"""Layers without parameters that keep examples apart and do not care how memory is laid out."""


class Unsuitable(Exception):
    """Book-keeping cannot follow this model; the message says why."""


@dataclass(frozen=True)
class Site:
    """A module whose parameters get gradients. kind None: it alone goes through vmap."""

    name: str
    module: nn.Module
    kind: Kind | None
    own: dict[str, int]
    """Local name of each trainable parameter -> its place in the layout."""
    reason: str = ""


@dataclass(frozen=True)
class Node:
    """A layer of a plain sequence. kind and site are None for layers without parameters, or none to train."""

    layer: nn.Module
    kind: Kind | None
    site: Site | None
    frozen: dict[str, Tensor]
    """Its parameters that are not trained, by local name."""


@dataclass(frozen=True)
class Program:
    """How a model is going to be followed."""

    sites: dict[nn.Module, Site]
    sequence: tuple[Node, ...]
    """The layers in order where the model is a plain sequence; else empty."""


def analyse(model: nn.Module, layout: Layout) -> Program:
    """Finds the sites: the layers that book-keeping knows, and the smallest modules around everything else."""
    named = dict(model.named_parameters())
    places = {id(named[name]): place for place, name in enumerate(layout.names)}
    sites = {site.module: site for site in _sites(model, "", places)}
    return Program(sites, _sequence(model, sites))


def _sites(module: nn.Module, name: str, places: dict[int, int]) -> Iterator[Site]:
    def trainable(recurse: bool) -> dict[str, int]:
        return {n: places[id(p)] for n, p in module.named_parameters(recurse=recurse) if id(p) in places}

    own = trainable(recurse=False)
    if not own:
        for child_name, child in module.named_children():
            yield from _sites(child, f"{name}.{child_name}" if name else child_name, places)
        return
    reason = objection(module)
    yield (
        Site(name, module, None, trainable(recurse=True), reason)
        if reason
        else Site(name, module, KINDS[type(module)], own)
    )


def _sequence(model: nn.Module, sites: dict[nn.Module, Site]) -> tuple[Node, ...]:
    layers = tuple(_flatten(model))
    known = all((type(m) in KINDS and not objection(m)) or (type(m) in PLAIN and not has_hooks(m)) for m in layers)
    merges = any(isinstance(m, nn.Flatten) and m.start_dim < 1 for m in layers)
    return tuple(_node(layer, sites.get(layer)) for layer in layers) if known and not merges else ()


def _node(layer: nn.Module, site: Site | None) -> Node:
    trained = site.own if site else {}
    frozen = {n: p.detach() for n, p in layer.named_parameters(recurse=False) if n not in trained}
    return Node(layer, KINDS.get(type(layer)), site, frozen)


def _flatten(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential and not has_hooks(module):
        for child in module:
            yield from _flatten(child)
    else:
        yield module
