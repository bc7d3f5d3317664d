"""The parameters of a model as one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fulcrum.errors import ModelError

# --- the parameters as one vector -------------------------------------------------------------


@dataclass(frozen=True)
class ParameterLayout:
    """The position of each trainable parameter in the flat vector [d]. A shared parameter appears once.

    names, shapes: of the parameter tensors, in order. layers: for each tensor the number of its layer; tensors
    of the same module have the same number, counted from 0 in order of appearance. lookups: indices of tensors that
    are embedding tables, [vocabulary, width].
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    layers: tuple[int, ...]
    lookups: tuple[int, ...] = ()

    @staticmethod
    def of(model: nn.Module) -> ParameterLayout:
        """The layout of a model's parameters that require a gradient; ModelError if there are none."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        lazy = [name for name, p in named if nn.parameter.is_lazy(p)]
        if lazy:
            raise ModelError(f"Parameter {lazy[0]!r} has no shape yet; run the model once before handing it over.")
        if not named:
            raise ModelError("The model has no trainable parameters; at least one must require a gradient.")
        empty = [name for name, p in named if p.numel() == 0]
        if empty:
            shape = list(dict(named)[empty[0]].shape)
            raise ModelError(
                f"Parameter {empty[0]!r} has shape {shape} and so no number in it; give its layer at least one input "
                "and one output."
            )
        owners: dict[str, int] = {}
        layers = tuple(owners.setdefault(name.rpartition(".")[0], len(owners)) for name, _ in named)
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        lookups = tuple(place for place, (_, p) in enumerate(named) if id(p) in tables)
        return ParameterLayout(tuple(name for name, _ in named), tuple(p.shape for _, p in named), layers, lookups)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each tensor."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The start of each tensor in the vector."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    @cached_property
    def dim(self) -> int:
        """Number of trainable parameters d."""
        return sum(self.sizes)

    @cached_property
    def depth(self) -> int:
        """Number of tensors with more than one dimension: about the number of layers."""
        return sum(len(shape) > 1 for shape in self.shapes)

    @cached_property
    def expected_init_norm(self) -> float:
        """Approximate norm of all weights under PyTorch's default initialisation.

        A layer's weights are uniform within 1 / sqrt(fan in), so their squares add up to a third of its outputs;
        biases are left out. For an embedding, the inputs are the words and the outputs are its columns. The norm
        depends on the shapes only. It is 1 for a model with only vectors and scalars.
        """
        outputs = sum(
            shape[1 if place in self.lookups else 0] for place, shape in enumerate(self.shapes) if len(shape) > 1
        )
        return math.sqrt(outputs / 3) or 1.0

    def flatten(self, model: nn.Module) -> Tensor:
        """A copy of the model's parameters as one vector, [d]."""
        named = dict(model.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, params: Tensor) -> dict[str, Tensor]:
        """Views into `params` [d] by parameter name."""
        pieces = params.split(self.sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, pieces, self.shapes, strict=True)}

    def write(self, model: nn.Module, params: Tensor) -> None:
        """Copies `params` [d] into the model."""
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in self.unflatten(params).items():
                named[name].copy_(values)


def call_with_parameters(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor | Mapping[str, Tensor]) -> Any:
    """The model's output with `tensors` (by parameter name, see `ParameterLayout.unflatten`) instead of its own.

    inputs: one tensor, the model's argument; or several by name, its keyword arguments.

    As `torch.func.functional_call`, which loses the parameters of a module that appears twice in the model.
    The model is unchanged afterwards, but must not be shared between threads during the call.
    """
    if isinstance(inputs, Tensor):
        return call_module(model, tensors, (inputs,), {})
    return call_module(model, tensors, (), dict(inputs))


def call_module(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `call_with_parameters`, with any arguments."""
    given = {id(parameter): tensors[name] for name, parameter in module.named_parameters() if name in tensors}
    slots: dict[str, Tensor] = {}
    for place, child in module.named_modules():  # each module once
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in given:
                slots[f"{place}.{name}" if place else name] = given[id(parameter)]
    return functional_call(module, slots, args, kwargs, tie_weights=False)
