"""From settings to a model with its public initial weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from fulcrum.data.records import ModelInputs
from fulcrum.data.tasks import Task
from fulcrum.errors import ModelError
from fulcrum.models import pretrain as priors
from fulcrum.models import whitening as coordinates
from fulcrum.models.builtin import ACTIVATIONS, AUTO_MODELS, BUILTIN_MODELS, InputShape, initialise_weights
from fulcrum.models.own import _check_own_model, build_own_model, make_trial_inputs
from fulcrum.rng import torch_generator
from fulcrum.settings import schema as config
from fulcrum.settings.registry import Registry, find_nearest_name

F = TypeVar("F", bound=Callable[..., Any])

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model.name", noun="factory", entry_points="fulcrum.models", error=ModelError
)
"""Model factories by name: built-in ones, and those that users add."""
for _name, _factory in BUILTIN_MODELS.items():
    MODELS.add(_name, _factory)


def register_model(name: str) -> Callable[[F], F]:
    """A decorator that registers a model factory under a name; `build_model` lists the factory's arguments."""
    return MODELS.register(name)


def find_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of that name, or of package.module:factory; ModelError with the nearest name if there is none."""
    if ":" in name or name in MODELS.names():
        return MODELS.find(name)
    known = ("auto", *MODELS.names())
    near = find_nearest_name(name, known)
    hint = f"; did you mean {near!r}?" if near else "."
    raise ModelError(
        f"model.name = {name!r} is not known; choose one of {', '.join(known)}, or package.module:factory{hint}"
    )


def is_built_in(settings: config.Model) -> bool:
    """Whether the settings name a built-in model; built-in models take numbers, not token ids."""
    return settings.name == "auto" or settings.name in BUILTIN_MODELS


def build_model(
    settings: config.Model,
    input_shape: InputShape | Mapping[str, InputShape],
    outputs: int,
    seed: int,
    sample: ModelInputs | None = None,
    sequence: bool = False,
    task: Task | None = None,
) -> nn.Module:
    """The model that the settings name, for examples of `input_shape` (without the batch; one per name where an example
    has several inputs) and with `outputs` numbers per prediction: the task's outputs.

    The same seed gives the same parameters, whatever the state of the global generators. `name` may be
    "package.module:factory", or a name that `register_model` or an installed package (entry points fulcrum.models) has
    added: the factory is called with those of input_shape, outputs, classes (the same number), task, settings and
    activation (a function that makes one activation layer) that it has as parameters, with the global CPU generator
    seeded for the call and restored after it, and must return an nn.Module that maps [B, *input_shape] to
    [B, outputs], or to [B, L, outputs] where the task predicts a `sequence` (with `task`, as the task says). sample:
    inputs of some examples, which show their type: the trial run takes integers from the sample and draws numbers at
    random.
    Raises ModelError where the model cannot be built, or cannot be trained with a bound per example.
    """
    shape = _to_int_shape(input_shape)
    sequence = task.sequence if task is not None else sequence
    if settings.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"model.activation = {settings.activation!r} is not known; choose one of {known}.")

    def act() -> nn.Module:
        return ACTIVATIONS[settings.activation](settings)

    single = shape if isinstance(shape, tuple) else None
    name = (AUTO_MODELS.get(single, "linear") if single else "linear") if settings.name == "auto" else settings.name
    if name in BUILTIN_MODELS:
        if single is None or sequence:
            what = "several inputs" if single is None else "a prediction per position"
            raise ModelError(
                f"model.name = {settings.name!r} has no form for {what}; name your own package.module:factory."
            )
        with torch.device("meta"):  # no memory, and no random numbers drawn
            model = BUILTIN_MODELS[name](settings, single, outputs, act)
        model = model.to_empty(device="cpu")
        initialise_weights(model, torch_generator(seed, "init"))
        return _apply_initial_weights(model, settings, name)
    model = build_own_model(
        find_factory(name),
        name,
        {
            "input_shape": shape,
            "outputs": outputs,
            "classes": outputs,
            "task": task,
            "settings": settings,
            "activation": act,
        },
        seed,
    )
    _check_own_model(model, name, make_trial_inputs(shape, sample), outputs, sequence)
    return _apply_initial_weights(model, settings, name)


def _to_int_shape(shape: InputShape | Mapping[str, InputShape]) -> InputShape | dict[str, InputShape]:
    if isinstance(shape, Mapping):
        return {name: tuple(int(side) for side in part) for name, part in shape.items()}
    return tuple(int(side) for side in shape)


def _apply_initial_weights(model: nn.Module, settings: config.Model, name: str) -> nn.Module:
    """The model with the weights named in the settings instead of random ones."""
    if settings.init == priors.ZERO_INIT_NAME:
        priors.set_to_zero(model)
    drawn = settings.init in ("random", priors.ZERO_INIT_NAME)
    found = {} if drawn else priors.load_weights(settings.init, name, settings.activation)
    weights, facts = priors.split_input_statistics(model, found)
    if not drawn:
        priors.assign_weights(model, weights, settings.init)
    if settings.coordinates == "plain":
        return model
    facts = coordinates.select_statistics(facts, settings.coordinates)
    if not facts:
        raise ModelError(
            f"model.coordinates = {settings.coordinates!r} needs what is known of the layers' inputs, which model.init "
            f"= {settings.init!r} does not hold; use painted, or a file that `fulcrum prior` made."
        )
    *_, head = (parameter for parameter, _ in model.named_parameters())
    return coordinates.centre_model(
        model, coordinates.whiten_partially(model, facts, settings.whiten), head=head in weights
    )
