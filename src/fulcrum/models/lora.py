"""Low-rank adapters (LoRA): W + s B A in place of W, where only A [r, in] and B [out, r] train.

    adapted = add_adapters(model, rank=4, alpha=8.0, targets=("*.query", "*.value"), seed=0)
    plain = merge_adapters(adapted)      # W + s B A written into W: the layers of before

s is alpha / rank. B starts as zero, so that the adapted network is the network of before. Adapters of peft are known
too (`list_adapter_parameters`), and merged by peft itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.errors import ModelError
from fulcrum.rng import torch_generator


class LoraLayer(nn.Module):
    """A layer x W^T + b whose W has a low-rank change: base(x) + scale (x A^T) B^T.

    base: nn.Linear, or Conv1D of transformers, whose weight is [in, out].
    """

    def __init__(self, base: nn.Module, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        weight = base.get_parameter("weight")
        outputs, inputs = weight.shape if isinstance(base, nn.Linear) else weight.shape[::-1]
        self.base, self.scale = base.requires_grad_(False), scale
        bound = 1 / math.sqrt(inputs)
        first = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(first.to(weight))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank).to(weight))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """The base layer with the change written into its weight."""
        weight = self.base.get_parameter("weight")
        change = self.scale * (self.lora_B.double() @ self.lora_A.double())
        weight.copy_((weight.double() + (change if isinstance(self.base, nn.Linear) else change.T)).to(weight.dtype))
        return self.base


def add_adapters(model: nn.Module, rank: int, alpha: float, targets: Sequence[str], seed: int) -> nn.Module:
    """A copy of the model with adapters on the layers whose names fit the targets; everything else is frozen.

    rank above 0. alpha: 0 means rank, a scale of 1. targets: patterns of layer names; empty: every linear layer but
    the head. ModelError where no layer fits, or a layer that fits is not linear.
    """
    from fulcrum.models.trained import find_head, match_names

    adapted = copy.deepcopy(model)
    head = {name.rpartition(".")[0] for name in find_head(adapted)}
    usable = list_adaptable_layers(adapted)
    names = {name for name, _ in adapted.named_modules() if name}
    if targets:
        wanted = set()
        for pattern in targets:
            fitting = match_names(pattern, names) | match_names(f"*.{pattern}", names)
            if not fitting:
                known = ", ".join(sorted({name.rpartition(".")[2] for name in usable})[:12])
                raise ModelError(
                    f"model.lora_targets: no layer's name fits {pattern!r}; the last parts of linear layers' names "
                    f"are {known}."
                )
            if not fitting & set(usable):
                kind = type(adapted.get_submodule(sorted(fitting)[0])).__name__
                raise ModelError(
                    f"model.lora_targets: what fits {pattern!r} is a {kind}, and adapters are for linear layers that "
                    "are called by themselves."
                )
            wanted |= fitting & set(usable)
    else:
        wanted = {name for name in usable if name not in head}
    if not wanted:
        raise ModelError("model.lora: the model has no linear layer besides its head; set model.lora to 0.")
    adapted.requires_grad_(False)
    scale = (alpha or rank) / rank
    for name in [name for name in usable if name in wanted]:
        parent, _, last = name.rpartition(".")
        layer = LoraLayer(usable[name], rank, scale, torch_generator(seed, "lora", name))
        setattr(adapted.get_submodule(parent) if parent else adapted, last, layer.train(usable[name].training))
    return adapted


def list_adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers that are called by themselves and share their weight with no other layer, by name."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    inside = {
        f"{name}.{child}"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)  # reads the weights of its layer itself
        for child, _ in module.named_modules()
    }
    return {
        name: layer
        for name, layer in model.named_modules()
        if name and name not in inside and _is_linear(layer) and owners[id(layer.weight)] == 1
    }


def _is_linear(layer: Any) -> bool:
    return type(layer) is nn.Linear or (type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"))


def list_adapter_parameters(model: nn.Module) -> list[str]:
    """The names of adapters' parameters: ours, and those of peft."""
    parts = ("lora_", "adapter_", "ia3_", "prompt_encoder", "vera_", "hada_")
    return [name for name, _ in model.named_parameters() if any(part.startswith(parts) for part in name.split("."))]


def merge_adapters(model: nn.Module) -> nn.Module:
    """A copy of the model without adapters, their change written into the weights; the model itself without any."""
    if callable(getattr(model, "merge_and_unload", None)):
        merged: nn.Module = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        return merged
    if not any(isinstance(layer, LoraLayer) for layer in model.modules()):
        return model
    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LoraLayer):
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent) if parent else plain, last, layer.merge())
    return plain
