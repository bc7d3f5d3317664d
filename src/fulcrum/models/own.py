"""A model of your own: package.module:factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.data.records import Inputs, count_examples, input_shape, input_tensors, map_inputs
from fulcrum.data.tasks import Task
from fulcrum.errors import ModelError
from fulcrum.models.builtin import Shape
from fulcrum.models.checks import _dry, _refuse_by_type, refuse_mixing
from fulcrum.models.layout import Layout
from fulcrum.rng import stream_seed, torch_stream
from fulcrum.settings.registry import call_with_offers, current_folder_importable

# --- models of your own ---------------------------------------------------------------------------


def make_own(factory: Callable[..., Any], name: str, offers: Mapping[str, object], seed: int) -> nn.Module:
    """What a factory makes, called with those of the offers that it has as parameters."""
    if not callable(factory):
        raise ModelError(f"model.name = {name!r} is not a function but {type(factory).__name__}; name a factory.")
    with current_folder_importable(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(seed, ("init",)))
        try:
            model = call_with_offers(factory, offers)
        except Exception as problem:
            raise ModelError(f"model.name = {name!r}: the factory failed with {_words(problem)}.") from problem
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ModelError(f"model.name = {name!r}: the factory must return a torch.nn.Module, not {kind}.")
    return model


def _words(problem: Exception) -> str:
    first = (str(problem).strip().splitlines() or ["no message"])[0].rstrip(".")
    return f"{type(problem).__name__}: {first}"


TRIED = 3
"""Examples on which a model of one's own is tried."""


def made_up_inputs(shape: Shape | Mapping[str, Shape], sample: Inputs | None = None) -> Inputs:
    """Inputs of three examples: uniform numbers in [0, 1); integers from the sample, which shows their range."""
    stream = torch_stream(0, "dry")

    def numbers(sides: Shape) -> Tensor:
        return torch.rand(TRIED, *sides, generator=stream)

    def like(value: Tensor) -> Tensor:
        if value.is_floating_point():
            return numbers(tuple(value.shape[1:]))
        return value[torch.arange(TRIED) % len(value)]

    if sample is not None:
        return map_inputs(like, sample)  # type: ignore[no-any-return]
    if isinstance(shape, Mapping):
        return {name: numbers(sides) for name, sides in shape.items()}
    return numbers(shape)


def _check(model: nn.Module, name: str, sample: Inputs, outputs: int, sequence: bool) -> None:
    """A dry forward pass: trainable parameters, outputs of the right shape, and nothing that mixes examples."""
    Layout.of(model)
    _refuse_by_type(model)
    try:
        _, found, _ = _dry(model, sample)
    except Exception as problem:
        raise ModelError(
            f"model.name = {name!r}: the model failed on a batch of {_shape_words(sample)} examples with "
            f"{_words(problem)}{integer_advice(sample)}."
        ) from problem
    right = isinstance(found, Tensor) and found.dim() == 2 + sequence
    if not right or (found.shape[0], found.shape[-1]) != (TRIED, outputs):
        seen = str(list(found.shape)) if isinstance(found, Tensor) else type(found).__name__
        wanted = f"outputs of shape [3, length, {outputs}]" if sequence else f"logits of shape [3, {outputs}]"
        raise ModelError(f"model.name = {name!r}: 3 examples must give {wanted}, not {seen}.")
    refuse_mixing(model, sample)


def check_outputs(model: nn.Module, sample: Inputs, task: Task) -> None:
    """Raises ModelError where the model's outputs for some examples do not have the shape that the task needs.

    More outputs than classes do no harm; anything else would be broadcast against the targets without a word.
    """
    found, count = _dry(model, sample)[1], count_examples(sample)
    wanted = f"[{count}, {'length, ' if task.sequence else ''}{task.outputs}]"
    seen = str(list(found.shape)) if isinstance(found, Tensor) else type(found).__name__
    fits = isinstance(found, Tensor) and found.dim() == 1 + task.output_dims and len(found) == count
    if not fits or found.shape[-1] < task.outputs or (found.shape[-1] > task.outputs and task.outputs != task.classes):
        raise ModelError(
            f"The model gives outputs of shape {seen} for {count} examples; the task {task.name!r} needs {wanted}."
        )


def integer_advice(sample: Inputs) -> str:
    """What may help a model that fails on integers; "" where there are none."""
    integers = not all(part.is_floating_point() for part in input_tensors(sample))
    return "; x holds integers (token ids): if they are numbers, save x as float32" if integers else ""


def _shape_words(x: Inputs) -> str:
    shape = input_shape(x)
    parts = {"": shape} if isinstance(shape, tuple) else shape
    return ", ".join(f"{name} {'x'.join(map(str, sides))}".strip() for name, sides in parts.items())
