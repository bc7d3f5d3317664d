"""Which parameters train: by word (all, head, bias, lora) or by pattern. The others stay frozen, and are public.

choose_trained(model, "head")                 # the last layer
choose_trained(model, "head, *.bias")         # and all biases
choose_trained(model, "encoder.layer.3.*")    # one block
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fulcrum.errors import ModelError
from fulcrum.models.lora import list_adapter_parameters
from fulcrum.settings.registry import find_nearest_name


def choose_trained(model: nn.Module, words: str) -> None:
    """Sets which parameters of the model require a gradient, in place.

    words: separated by commas: "auto" (as the model has them; with adapters: adapters and head), "all", "head"
    (`find_head`), "bias" (all parameters named bias), "lora" (adapters), or patterns of parameter names with * and ?;
    a layer's name stands for all its parameters. ModelError for a word that no parameter fits.
    """
    named = dict(model.named_parameters())
    adapters = list_adapter_parameters(model)
    wanted = [word.strip() for word in words.split(",") if word.strip()] or ["auto"]
    if wanted == ["auto"]:
        if not adapters:
            return
        wanted = ["lora", "head"] if set(find_head(model)) <= set(named) and find_head(model) else ["lora"]
    chosen: set[str] = set()
    for word in wanted:
        found = set(TRAINED_WORDS[word](model)) if word in TRAINED_WORDS else match_names(word, named)
        if not found:
            raise ModelError(f"model.train = {words!r}: {_explain_no_match(word, named)}")
        chosen |= found
    shared = {id(p): name for name, p in named.items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = {shared[id(every[name])] for name in chosen}
    for name, parameter in named.items():
        if parameter.is_floating_point():
            parameter.requires_grad_(name in chosen)


def match_names(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that fit a pattern, or lie in a layer whose name does."""
    return {name for name in names if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")}


def _explain_no_match(word: str, names: Iterable[str]) -> str:
    known = list(names)
    if word in TRAINED_WORDS:
        return f"the model has no parameter that {word!r} names; its parameters are {_name_some(known)}."
    layers = {name.rpartition(".")[0] for name in known} - {""}
    near = find_nearest_name(word, [*layers, *known, *TRAINED_WORDS])
    hint = f"did you mean {near!r}?" if near else f"its parameters are {_name_some(known)}."
    return f"no parameter's name fits {word!r}; {hint}"


def _name_some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", ... ({len(names)} in all)" if len(names) > 6 else "")


# --- the words ------------------------------------------------------------------------------------


def find_head(model: Any) -> list[str]:
    """The parameters of a network's head: what makes its outputs from features.

    timm's networks name it (`get_classifier`). In those of transformers it is what lies outside of the base model. In
    any other network it is the last layer that has parameters, adapters aside.
    """
    own = list(model.named_parameters(remove_duplicate=False))
    if callable(getattr(model, "get_classifier", None)):
        told = model.get_classifier()
        inside = {id(p) for p in told.parameters()} if isinstance(told, nn.Module) else set()
        if inside:
            return [name for name, p in own if id(p) in inside]
    base = getattr(model, "base_model_prefix", "")
    if base and isinstance(getattr(model, base, None), nn.Module):
        outside = [name for name, _ in own if not name.startswith(f"{base}.")]
        if outside:
            return outside
    adapters = set(list_adapter_parameters(model))
    plain = [name for name, _ in own if name not in adapters]
    if not plain:
        return []
    layer = plain[-1].rpartition(".")[0]
    return [name for name in plain if name.rpartition(".")[0] == layer]


def _list_all(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _list_biases(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[2].endswith("bias")]


TRAINED_WORDS: dict[str, Callable[[Any], list[str]]] = {
    "all": _list_all,
    "head": find_head,
    "bias": _list_biases,
    "lora": list_adapter_parameters,
}
"""Words of model.train, and the names of the parameters that they stand for."""
