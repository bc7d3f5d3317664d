"""Your own model: package.module:factory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs, count_examples, get_input_shape, list_input_tensors, map_inputs
from fulcrum.data.tasks import Task
from fulcrum.errors import FulcrumError, ModelError
from fulcrum.models.builtin import InputShape
from fulcrum.models.checks import run_dry, validate_by_type, validate_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.prepared import add_example_keys, draws_keys, prepare_model, refuse_odd_module
from fulcrum.rng import derive_stream_seed, torch_generator
from fulcrum.settings.registry import call_with_supported_arguments, current_folder_importable

# --- your own models ------------------------------------------------------------------------------


def build_own_model(
    factory: Callable[..., Any],
    name: str,
    offers: Mapping[str, object],
    arguments: Mapping[str, object],
    seed: int,
) -> nn.Module:
    """The model from a factory, called with those offers that match its parameters, and with all arguments.

    A factory that takes any keyword and fails on one of the offers is called again with num_classes alone: many
    libraries' factories pass their keywords on to a class.
    """
    if not callable(factory):
        raise ModelError(f"model.name = {name!r} is not a function but {type(factory).__name__}; name a factory.")
    with current_folder_importable(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_stream_seed(seed, ("init",)))
        try:
            model = _call_factory(factory, offers, arguments)
        except FulcrumError:
            raise
        except Exception as problem:
            raise ModelError(
                f"model.name = {name!r}: the factory failed with {_describe_failure(problem)}."
            ) from problem
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ModelError(f"model.name = {name!r}: the factory must return a torch.nn.Module, not {kind}.")
    return model


def _call_factory(factory: Callable[..., Any], offers: Mapping[str, object], arguments: Mapping[str, object]) -> Any:
    given = functools.partial(factory, **arguments) if arguments else factory
    offered = {name: value for name, value in offers.items() if name not in arguments}
    try:
        named = inspect.signature(factory).parameters
    except (ValueError, TypeError):  # built-ins without a signature
        return given()
    if "outputs" in offered and "num_classes" in named and "num_classes" not in arguments:
        offered["num_classes"] = offered["outputs"]
    try:
        return call_with_supported_arguments(given, offered)
    except TypeError as problem:
        passes_on = any(each.kind is each.VAR_KEYWORD for each in named.values())
        if not passes_on or "outputs" not in offered or "unexpected keyword argument" not in str(problem):
            raise
    return factory(**{"num_classes": offered["outputs"], **arguments})


def _describe_failure(problem: Exception) -> str:
    first = (str(problem).strip().splitlines() or ["no message"])[0].rstrip(".")
    return f"{type(problem).__name__}: {first}"


NUM_TRIAL_EXAMPLES = 3
"""Number of examples for the trial run of a user's own model."""


def make_trial_inputs(shape: InputShape | Mapping[str, InputShape], sample: ModelInputs | None = None) -> ModelInputs:
    """Inputs of three examples: uniform numbers in [0, 1); integers from the sample, which shows their range."""
    stream = torch_generator(0, "dry")

    def numbers(sides: InputShape) -> Tensor:
        return torch.rand(NUM_TRIAL_EXAMPLES, *sides, generator=stream)

    def like(value: Tensor) -> Tensor:
        if value.is_floating_point():
            return numbers(tuple(value.shape[1:]))
        return value[torch.arange(NUM_TRIAL_EXAMPLES) % len(value)]

    if sample is not None:
        return map_inputs(like, sample)  # type: ignore[no-any-return]
    if isinstance(shape, Mapping):
        return {name: numbers(sides) for name, sides in shape.items()}
    return numbers(shape)


def check_own_model(model: nn.Module, name: str, sample: ModelInputs, outputs: int, sequence: bool) -> nn.Module:
    """The model as engines train it, after a dry pass over made-up examples.

    Checked are trainable parameters, outputs of the right shape and finite, and that nothing mixes examples.
    """
    where = f"model.name = {name!r}: "
    refuse_odd_module(model)
    ParameterLayout.of(model)
    validate_by_type(model)
    try:
        ready = prepare_model(model, sample)
        _, found, _ = run_dry(ready, sample)
    except FulcrumError:
        raise
    except Exception as problem:
        raise ModelError(
            f"{where}the model failed on a batch of {_describe_shape(sample)} examples with "
            f"{_describe_failure(problem)}{suggest_integer_inputs(sample)}."
        ) from problem
    right = isinstance(found, Tensor) and found.dim() == 2 + sequence
    if not right or (found.shape[0], found.shape[-1]) != (NUM_TRIAL_EXAMPLES, outputs):
        seen = str(list(found.shape)) if isinstance(found, Tensor) else type(found).__name__
        wanted = f"outputs of shape [3, length, {outputs}]" if sequence else f"logits of shape [3, {outputs}]"
        raise ModelError(f"{where}3 examples must give {wanted}, not {seen}.")
    refuse_nonfinite_outputs(found, where)
    validate_prepared(ready, sample)
    return ready


def refuse_nonfinite_outputs(found: Tensor, where: str = "") -> None:
    """ModelError where no made-up example has finite outputs: such a model cannot learn."""
    if found.numel() and not bool(torch.isfinite(found).flatten(1).all(dim=1).any()):
        raise ModelError(
            f"{where}the model gives NaN or infinite outputs for made-up examples of numbers between 0 and 1, so that "
            "nothing can be learned; check its weights, and divisions and logarithms in its forward."
        )


def validate_prepared(model: nn.Module, sample: ModelInputs) -> None:
    """As `validate_model`; where the model has random layers, also with keys of the examples."""
    validate_model(model, sample)
    if draws_keys(model):
        validate_model(model, add_example_keys(sample, 1, torch.arange(count_examples(sample))))


def check_outputs(model: nn.Module, sample: ModelInputs, task: Task) -> None:
    """Raises ModelError where the model's outputs for some examples do not have the shape that the task needs.

    More outputs than classes are allowed; any other mismatch would silently be broadcast against the targets.
    """
    found, count = run_dry(model, sample)[1], count_examples(sample)
    wanted = f"[{count}, {'length, ' if task.sequence else ''}{task.outputs}]"
    seen = str(list(found.shape)) if isinstance(found, Tensor) else type(found).__name__
    fits = isinstance(found, Tensor) and found.dim() == 1 + task.output_dims and len(found) == count
    if not fits or found.shape[-1] < task.outputs or (found.shape[-1] > task.outputs and task.outputs != task.classes):
        raise ModelError(
            f"The model gives outputs of shape {seen} for {count} examples; the task {task.name!r} needs {wanted}."
        )


def suggest_integer_inputs(sample: ModelInputs) -> str:
    """A hint for a model that fails on integers; "" if there are no integers."""
    integers = not all(part.is_floating_point() for part in list_input_tensors(sample))
    words = "; x holds integers: as token ids each must be below the size of the model's embedding; if they are numbers"
    return f"{words}, save x as float32" if integers else ""


def _describe_shape(x: ModelInputs) -> str:
    shape = get_input_shape(x)
    parts = {"": shape} if isinstance(shape, tuple) else shape
    return ", ".join(f"{name} {'x'.join(map(str, sides))}".strip() for name, sides in parts.items())
