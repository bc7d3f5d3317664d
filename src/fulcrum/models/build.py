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
from fulcrum.models.adapted import adapt_model
from fulcrum.models.builtin import ACTIVATIONS, AUTO_MODELS, BUILTIN_MODELS, InputShape, initialise_weights
from fulcrum.models.imported import find_family
from fulcrum.models.norms import convert_norms
from fulcrum.models.own import build_own_model, check_own_model, make_trial_inputs
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
    if "/" in name:
        raise ModelError(
            f"model.name = {name!r}: there is no {name}/config.json; give the folder of a saved transformers model, or "
            "package.module:factory."
        )
    known = ("auto", *MODELS.names())
    near = find_nearest_name(name, known)
    hint = f"; did you mean {near!r}?" if near else "; torchvision:NAME, timm:NAME and transformers:FOLDER too."
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
    notes: list[str] | None = None,
) -> nn.Module:
    """The model that the settings name, for examples of `input_shape` (without the batch; one per name where an example
    has several inputs) and with `outputs` numbers per prediction: the task's outputs.

    The same seed gives the same parameters, whatever the state of the global generators. `name` may be
    "package.module:factory", or a name that `register_model` or an installed package (entry points fulcrum.models) has
    added: the factory is called with those of input_shape, outputs, classes, num_classes (the same number), task,
    settings and activation (a function that makes one activation layer) that it has as parameters, and with all of
    `model.arguments`. The global CPU generator is seeded for the call and restored after it. The factory must return an
    nn.Module that maps [B, *input_shape] to [B, outputs], or to [B, L, outputs] where the task predicts a `sequence`
    (with `task`, as the task says). sample: inputs of some examples, which show their type: the trial run takes
    integers from the sample and draws numbers at random. notes: a list that gets sentences for the user, such as a head
    that starts at random.
    Weights are loaded first; then BatchNorm is converted, adapters are added, and what does not train is frozen.
    Raises ModelError where the model cannot be built, or cannot be trained with a bound per example.
    """
    shape = _to_int_shape(input_shape)
    sequence = task.sequence if task is not None else sequence
    name = resolve_model_name(settings, shape)
    model = build_network(settings, shape, outputs, seed, sequence, task, notes)
    model = adapt_model(apply_initial_weights(model, settings, name, notes), settings, seed)
    if name in BUILTIN_MODELS:
        return model
    return check_own_model(model, name, make_trial_inputs(shape, sample), outputs, sequence)


def resolve_model_name(settings: config.Model, shape: InputShape | Mapping[str, InputShape]) -> str:
    """model.name, where "auto" chooses by the shape of an example."""
    if settings.name != "auto":
        return settings.name
    return AUTO_MODELS.get(shape, "linear") if isinstance(shape, tuple) else "linear"


def build_network(
    settings: config.Model,
    input_shape: InputShape | Mapping[str, InputShape],
    outputs: int,
    seed: int,
    sequence: bool = False,
    task: Task | None = None,
    notes: list[str] | None = None,
) -> nn.Module:
    """The network that model.name names, as its factory makes it: neither model.init nor any change is applied."""
    shape = _to_int_shape(input_shape)
    if settings.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelError(f"model.activation = {settings.activation!r} is not known; choose one of {known}.")

    def act() -> nn.Module:
        return ACTIVATIONS[settings.activation](settings)

    name = resolve_model_name(settings, shape)
    if name in BUILTIN_MODELS:
        if not isinstance(shape, tuple) or sequence:
            what = "a prediction per position" if isinstance(shape, tuple) else "several inputs"
            raise ModelError(
                f"model.name = {settings.name!r} has no form for {what}; name your own package.module:factory."
            )
        with torch.device("meta"):  # no memory, and no random numbers drawn
            model = BUILTIN_MODELS[name](settings, shape, outputs, act)
        model = model.to_empty(device="cpu")
        initialise_weights(model, torch_generator(seed, "init"))
        return model
    family = find_family(name)
    if family is None:
        offers = {
            "input_shape": shape,
            "outputs": outputs,
            "classes": outputs,
            "task": task,
            "settings": settings,
            "activation": act,
        }
        return build_own_model(find_factory(name), name, offers, settings.arguments, seed)
    build, rest = family

    def make() -> nn.Module:
        return build(rest, shape, outputs, task, settings.arguments, [] if notes is None else notes)

    return build_own_model(make, name, {}, {}, seed)


def _to_int_shape(shape: InputShape | Mapping[str, InputShape]) -> InputShape | dict[str, InputShape]:
    if isinstance(shape, Mapping):
        return {name: tuple(int(side) for side in part) for name, part in shape.items()}
    return tuple(int(side) for side in shape)


def apply_initial_weights(
    model: nn.Module, settings: config.Model, name: str, notes: list[str] | None = None
) -> nn.Module:
    """The model with the weights named in the settings instead of random ones, in the coordinates that they name."""
    if settings.init == priors.ZERO_INIT_NAME:
        priors.set_to_zero(model)
    drawn = settings.init in ("random", priors.ZERO_INIT_NAME)
    found = {} if drawn else priors.load_weights(settings.init, name, settings.activation)
    weights, facts = priors.split_input_statistics(model, found)
    if set(weights) - {*dict(model.named_parameters()), *dict(model.named_buffers())}:
        model = convert_norms(model, settings.norm)  # weights of an earlier run, whose norms have other names
    if not drawn:
        said = priors.assign_weights(model, weights, settings.init)
        if notes is not None and settings.init != priors.SYNTHETIC_INIT_NAME:
            notes += said
    if settings.coordinates == "plain":
        return model
    facts = coordinates.select_statistics(facts, settings.coordinates)
    if not facts:
        raise ModelError(
            f"model.coordinates = {settings.coordinates!r} needs what is known of the layers' inputs, which model.init "
            f"= {settings.init!r} does not hold; use synthetic, or a file that `fulcrum prior` made."
        )
    *_, head = (parameter for parameter, _ in model.named_parameters())
    return coordinates.centre_model(
        model, coordinates.whiten_partially(model, facts, settings.whiten), head=head in weights
    )
