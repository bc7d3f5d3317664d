"""A model of your own: package.module:factory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.models.builtin import Shape
from fulcrum.models.checks import _dry, _refuse_by_type, refuse_mixing
from fulcrum.models.layout import Layout
from fulcrum.rng import stream_seed, torch_stream

# --- models of your own ---------------------------------------------------------------------------


def _own(name: str, offers: Mapping[str, object], seed: int) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ModelError(f"model.name = {name!r} cannot be imported: {problem}.") from problem
    if not callable(factory):
        raise ModelError(f"model.name = {name!r} is not a function but {type(factory).__name__}; name a factory.")
    accepted = inspect.signature(factory).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    arguments = {key: value for key, value in offers.items() if anything or key in accepted}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(seed, ("init",)))
        try:
            model = factory(**arguments)
        except Exception as problem:
            raise ModelError(f"model.name = {name!r}: the factory failed with {_words(problem)}.") from problem
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ModelError(f"model.name = {name!r}: the factory must return a torch.nn.Module, not {kind}.")
    return model


def _words(problem: Exception) -> str:
    first = (str(problem).strip().splitlines() or ["no message"])[0].rstrip(".")
    return f"{type(problem).__name__}: {first}"


def _check(model: nn.Module, name: str, shape: Shape, classes: int) -> None:
    """A dry forward pass: trainable parameters, logits of the right shape, and nothing that mixes examples."""
    Layout.of(model)
    _refuse_by_type(model)
    sample = torch.rand(3, *shape, generator=torch_stream(0, "dry"))
    try:
        _, outputs, _ = _dry(model, sample)
    except Exception as problem:
        seen = "x".join(map(str, shape))
        raise ModelError(
            f"model.name = {name!r}: the model failed on a batch of {seen} examples with {_words(problem)}."
        ) from problem
    if not isinstance(outputs, Tensor) or tuple(outputs.shape) != (3, classes):
        seen = str(list(outputs.shape)) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(f"model.name = {name!r}: 3 examples must give logits of shape [3, {classes}], not {seen}.")
    refuse_mixing(model, sample)
