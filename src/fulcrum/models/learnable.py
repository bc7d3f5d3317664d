"""What cannot learn, said before training: token ids beyond a table, numbers too large for gradients, missing classes.

Checks of private records say which field is wrong and what would be right, never a value: as the checks of arrays do.
Classes are counted in public records alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fulcrum.data.dataset import Dataset
from fulcrum.data.records import ModelInputs, Records
from fulcrum.errors import DataError
from fulcrum.models.prepared import unwrap_model

LARGEST_FEATURE = 1e15
"""Numbers beyond this leave no room for the squares of gradients in float32, so such a record would never count."""


class _TableWatch(TorchFunctionMode):
    """Notes the embedding tables that inputs are looked up in. inputs: by name; found: name -> (size, table)."""

    def __init__(self, inputs: dict[str, Tensor], names: dict[int, str]) -> None:
        super().__init__()
        self.inputs, self.names = inputs, names
        self.found: dict[str, tuple[int, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag) and len(args) > 1:
            index, table = args[0], args[1]
            for name, value in self.inputs.items():
                if index.numel() == value.numel() and torch.equal(index.reshape(-1), value.reshape(-1)):
                    known = self.found.get(name, (len(table) + 1, ""))
                    if len(table) < known[0]:
                        self.found[name] = (len(table), self.names.get(id(table), "a table"))
        return func(*args, **kwargs)


@torch.no_grad()
def find_token_limits(model: nn.Module, sample: ModelInputs) -> dict[str, tuple[int, str]]:
    """The size and name of the table that each integer input is looked up in; inputs by name, "x" for a single one.

    sample: inputs of some examples. An input that is changed before it is looked up is not found.
    """
    network = unwrap_model(model)
    named = {"x": sample} if isinstance(sample, Tensor) else dict(sample)
    # Numbers of their own for each input, so that two inputs are not taken for each other; all tables have row 0 and 1.
    probes = {}
    for number, (name, value) in enumerate(named.items()):
        if not value.is_floating_point() and value.dtype != torch.bool and value.dim() > 1:
            probe = torch.zeros_like(value).reshape(-1)
            probe[number % len(probe)] = 1
            probes[name] = probe.view_as(value)
    if not probes:
        return {}
    inputs = {**named, **probes}
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    watch = _TableWatch(probes, names)
    # A model may refuse made-up ids; what was seen until then counts.
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception), watch:
        _ = network(inputs["x"]) if isinstance(sample, Tensor) else network(**inputs)
    return watch.found


def check_learnable(model: nn.Module, dataset: Dataset) -> list[str]:
    """Warnings about what the model cannot learn from this data; DataError where records can never count.

    dataset: with the inputs as the model takes them.
    """
    parts = {"x": dataset.train, "x_test": dataset.test, "x (held out)": dataset.held_out}
    held = {where: records for where, records in parts.items() if records is not None and len(records)}
    for where, records in held.items():
        refuse_large_features(where, records)
    if held:
        sample = next(iter(held.values())).take(torch.zeros(2, dtype=torch.int64)).x
        limits = find_token_limits(model, sample)
        for where, records in held.items():
            refuse_unknown_tokens(where, records, limits)
    return list_missing_classes(dataset)


def _name_inputs(where: str, records: Records) -> dict[str, tuple[str, Tensor]]:
    """Each input's name -> (its name in a sentence, its values)."""
    if isinstance(records.x, Tensor):
        return {"x": (where, records.x)}
    return {name: (f"{where}[{name!r}]", value) for name, value in records.x.items()}


def refuse_large_features(where: str, records: Records) -> None:
    """DataError where a number is so large that a record's gradient overflows."""
    for said, value in _name_inputs(where, records).values():
        if value.is_floating_point() and value.numel():
            low, high = torch.aminmax(value)
            if max(-float(low), float(high)) > LARGEST_FEATURE:
                raise DataError(
                    f"{said} holds numbers beyond {LARGEST_FEATURE:g}, from which nothing is learned: their gradients "
                    "overflow; divide it by a public constant, so that numbers lie around 1."
                )


def refuse_unknown_tokens(where: str, records: Records, limits: dict[str, tuple[int, str]]) -> None:
    """DataError where token ids lie outside of the table that the model looks them up in."""
    for name, (said, value) in _name_inputs(where, records).items():
        if name in limits and value.numel() and not value.is_floating_point():
            size, table = limits[name]
            low, high = torch.aminmax(value)
            if int(low) < 0 or int(high) >= size:
                raise DataError(
                    f"{said} holds token ids outside of the model's vocabulary: {table} has {size} rows, so ids must "
                    f"lie in 0..{size - 1}; use the tokenizer of this model, or a larger table."
                )


def list_missing_classes(dataset: Dataset) -> list[str]:
    """A warning where public training records leave classes out; of private records nothing is said."""
    train, task = dataset.train, dataset.task
    if train is None or not dataset.public or task.classes < 2 or task.target_dims:
        return []
    held = set(torch.unique(train.y).tolist())
    missing = [k for k in range(task.classes) if k not in held]
    if not missing:
        return []
    which = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return [
        f"Nobody holds a training record of class {which} ({len(missing)} of {task.classes} classes), so the model "
        "cannot learn it; check task.classes."
    ]
