"""How a model is going to be followed: which of its modules are sites, and whether it is a plain sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fulcrum.grads.layers import KINDS, Kind, has_hooks, objection
from fulcrum.models import Layout, Tempered

PLAIN = frozenset(
    {nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, Tempered, nn.Identity}
    | {nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d}
    | {nn.Flatten, nn.Dropout}
)
"""Layers without parameters that keep examples apart and do not care how memory is laid out."""


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
class Program:
    """How a model is going to be followed."""

    sites: dict[nn.Module, Site]
    sequence: tuple[nn.Module, ...]
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


def _sequence(model: nn.Module, sites: dict[nn.Module, Site]) -> tuple[nn.Module, ...]:
    layers = tuple(_flatten(model))
    known = all((type(m) in KINDS and not objection(m)) or (type(m) in PLAIN and not has_hooks(m)) for m in layers)
    merges = any(isinstance(m, nn.Flatten) and m.start_dim < 1 for m in layers)
    return layers if known and not merges else ()


def _flatten(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential and not has_hooks(module):
        for child in module:
            yield from _flatten(child)
    else:
        yield module
