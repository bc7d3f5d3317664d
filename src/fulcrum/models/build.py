"""From settings to a model with its public initial weights."""

from __future__ import annotations

import torch
from torch import nn

from fulcrum.errors import ModelError
from fulcrum.models import pretrain as priors
from fulcrum.models import whitening as coordinates
from fulcrum.models.builtin import ACTIVATIONS, AUTO, BUILTIN, Shape, initialise
from fulcrum.models.own import _check, _own
from fulcrum.rng import torch_stream
from fulcrum.settings import schema as config


def build(settings: config.Model, input_shape: Shape, classes: int, seed: int) -> nn.Module:
    """The model that the settings name, for examples of `input_shape` (without the batch) and `classes` labels.

    The same seed gives the same parameters, whatever the global generators hold. `name` may be
    "package.module:factory": the factory is called with those of input_shape, classes, settings and activation
    (a function that makes one activation layer) that it has as parameters, with the global CPU generator seeded
    for the call and restored after it, and must return an nn.Module that maps [B, *input_shape] to [B, classes].
    Raises ModelError where the model cannot be built, or cannot be trained with a bound per example.
    """
    shape = tuple(int(side) for side in input_shape)
    if settings.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"model.activation = {settings.activation!r} is not known; choose one of {known}.")

    def act() -> nn.Module:
        return ACTIVATIONS[settings.activation](settings)

    name = AUTO.get(shape, "linear") if settings.name == "auto" else settings.name
    if name in BUILTIN:
        with torch.device("meta"):  # no memory, and no random numbers drawn
            model = BUILTIN[name](settings, shape, classes, act)
        model = model.to_empty(device="cpu")
        initialise(model, torch_stream(seed, "init"))
        return _started(model, settings, name)
    if ":" not in name:
        known = ", ".join(("auto", *BUILTIN))
        raise ModelError(f"model.name = {name!r} is not known; choose one of {known}, or package.module:factory.")
    model = _own(name, {"input_shape": shape, "classes": classes, "settings": settings, "activation": act}, seed)
    _check(model, name, shape, classes)
    return _started(model, settings, name)


def _started(model: nn.Module, settings: config.Model, name: str) -> nn.Module:
    """The model with the weights that the settings name in place of random ones."""
    found = {} if settings.init == "random" else priors.read(settings.init, name, settings.activation)
    weights, facts = priors.parted(model, found)
    if settings.init != "random":
        priors.put(model, weights, settings.init)
    if settings.coordinates == "plain":
        return model
    facts = coordinates.wanted(facts, settings.coordinates)
    if not facts:
        raise ModelError(
            f"model.coordinates = {settings.coordinates!r} needs what is known of the layers' inputs, which model.init "
            f"= {settings.init!r} does not hold; use painted, or a file that `fulcrum prior` made."
        )
    *_, head = (parameter for parameter, _ in model.named_parameters())
    return coordinates.centred(model, coordinates.partly(model, facts, settings.whiten), head=head in weights)
