"""Adapters: anybody's client as a function (data, seed) -> what it releases.

    function   client(params, data, seed) -> a vector, or arrays in a list, tuple or dict
    opacus     make(data, seed) -> an object (or a tuple) with model, optimizer and loader; one step is taken
    flower     make(data, seed) -> an object with fit(parameters, config), as Flower's NumPyClient has it

data is (x, y), two NumPy arrays. The seed is new in every call; code that draws its randomness from the operating
system may leave it unused.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.analysis.detectors.foreign.claims import Claims
from fulcrum.errors import InputError

Floats = npt.NDArray[np.float64]
Data = tuple[npt.NDArray[Any], npt.NDArray[Any]]


@dataclass(frozen=True)
class Released:
    """What one call released: a vector [d], and numbers beside it by name (metrics, counts)."""

    vector: Floats
    beside: Mapping[str, float] = field(default_factory=dict)


Client = Callable[[Data, int], Released]


def flatten(value: Any) -> Floats:
    """Arrays, tensors, numbers, or lists and dicts of them, as one vector."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple) and value and not all(isinstance(each, int | float) for each in value):
        return np.concatenate([flatten(each) for each in value])
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()  # NumPy has no bfloat16
    try:
        return np.asarray(value, dtype=np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise InputError(f"the client returned {type(value).__name__}, which is no array of numbers.") from error


def collect_numbers(value: Any, prefix: str) -> dict[str, float]:
    """Everything in a dict as numbers by name: yes and no as 1 and 0, words by their checksum, arrays by their entries.

    Whatever leaves the client beside its update tells something where it follows from the records.
    """
    if isinstance(value, Mapping):
        pairs: list[tuple[str, Any]] = [(str(name), each) for name, each in value.items()]
    else:
        pairs = [(f"[{place}]", each) for place, each in enumerate(value)]
    found: dict[str, float] = {}
    for name, each in pairs:
        full = f"{prefix}{name}"
        if hasattr(each, "detach"):
            each = flatten(each) if each.ndim else float(each)
        if isinstance(each, str | bytes):
            found[full] = float(zlib.crc32(each.encode() if isinstance(each, str) else each))
        elif isinstance(each, int | float | np.number | np.bool_):
            found[full] = float(each)
        elif isinstance(each, Mapping):
            found |= collect_numbers(each, f"{full}.")
        elif isinstance(each, list | tuple | np.ndarray):
            found |= collect_numbers(np.ravel(each) if isinstance(each, np.ndarray) else each, full)
    return found


def guard(call: Callable[[], Any], what: str) -> Any:
    """Call user code; whatever it raises is one sentence."""
    try:
        return call()
    except InputError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise InputError(f"{what} failed: {type(error).__name__}: {words}") from error


def adapt_function(target: Any, claims: Claims) -> Client:
    """A plain function client(params, data, seed)."""
    params = np.zeros(claims.parameters)

    def call(data: Data, seed: int) -> Released:
        answer = guard(lambda: target(params.copy(), data, seed), "the client")
        beside = {}
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
            answer, beside = answer[0], collect_numbers(answer[1], "")
        return Released(flatten(answer), beside)  # of new params too: they are zeros before, or the start is measured

    return call


def adapt_opacus(target: Any, claims: Claims) -> Client:
    """A factory make(data, seed) of a model, an optimizer and a loader; the release is one step's change.

    With claims.local_steps above 1, that of so many steps. Buffers (BatchNorm's statistics) are part of the model, and
    of the release. Where Opacus wraps an optimizer other than SGD, the release is the noised gradient.
    """

    def call(data: Data, seed: int) -> Released:
        made = guard(lambda: target(data, seed), "the script")
        model, optimizer, loader, loss = take_parts(made)

        def step() -> Floats:
            before = list_released(model)
            for number, (x, y) in enumerate(loader):
                if number == claims.local_steps:
                    break
                optimizer.zero_grad()
                outputs = model(x)
                # An empty Poisson batch has no mean loss; its step is noise alone.
                (loss(outputs, y) if len(x) else outputs.sum()).backward()
                optimizer.step()
            change: Floats = list_released(model) - before
            weights = [p for p in model.parameters() if p.requires_grad]
            if not is_adaptive(optimizer) or any(p.grad is None for p in weights):
                return change
            size = sum(p.numel() for p in weights)
            return np.concatenate([flatten([p.grad for p in weights]), change[size:]])

        return Released(guard(step, "the script's first step"))

    return call


def list_released(model: Any) -> Floats:
    """What a model shows: its trained parameters, then its buffers of floating-point numbers."""
    shown = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return flatten(shown + [b.detach().clone() for b in model.buffers() if b.is_floating_point()])


def is_adaptive(optimizer: Any) -> bool:
    """Whether Opacus wraps an optimizer that rescales each coordinate, as Adam does: its steps show no deviations."""
    inner = getattr(optimizer, "original_optimizer", None)
    return inner is not None and type(inner).__name__ != "SGD"


def take_parts(made: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader and loss of an object or a tuple; the loss is cross-entropy where there is none."""
    from torch.nn import functional

    if isinstance(made, tuple) and len(made) in (3, 4):
        loss = made[3] if len(made) == 4 else functional.cross_entropy
        return made[0], made[1], made[2], loss
    loader = getattr(made, "loader", None) or getattr(made, "data_loader", None) or getattr(made, "train_loader", None)
    model, optimizer = getattr(made, "model", None), getattr(made, "optimizer", None)
    if model is None or optimizer is None or loader is None:
        raise InputError(
            "the script must return (model, optimizer, loader), or an object with these names, and it returned "
            f"{type(made).__name__}."
        )
    loss = getattr(made, "criterion", None) or getattr(made, "loss", None) or functional.cross_entropy
    return model, optimizer, loader, loss


def adapt_flower(target: Any, claims: Claims) -> Client:
    """A factory make(data, seed) of a client with fit(parameters, config); the update is what fit changes."""

    def call(data: Data, seed: int) -> Released:
        client = guard(lambda: target(data, seed), "the app")
        if not callable(getattr(client, "fit", None)):
            raise InputError(f"the app returned {type(client).__name__}, which has no fit(parameters, config).")
        start = guard(lambda: client.get_parameters({}), "get_parameters")
        answer = guard(lambda: client.fit([np.array(each, copy=True) for each in start], {}), "fit")
        if not (isinstance(answer, tuple) and len(answer) == 3):
            raise InputError("fit must return (parameters, number of examples, metrics).")
        after, count, metrics = answer
        told = metrics if isinstance(metrics, Mapping) else {}
        beside = {"num_examples": float(count), **collect_numbers(told, "metrics.")}
        return Released(flatten(list(after)) - flatten(list(start)), beside)

    return call


ADAPTERS: Mapping[str, Callable[[Any, Claims], Client]] = {
    "function": adapt_function,
    "opacus": adapt_opacus,
    "flower": adapt_flower,
}
"""Adapters by kind."""


def count_needed_arguments(target: Any) -> int:
    """How many arguments a call must have: those by position that have no default; 3 where nobody knows."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return 3
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return 3
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in by_position and each.default is inspect.Parameter.empty for each in parameters)


def choose_kind(target: Any, claims: Claims) -> str:
    """What a target is: a function of three arguments, or a factory of two whose product has `fit` or `model`."""
    if claims.kind != "auto":
        return claims.kind
    if count_needed_arguments(target) != 2:
        return "function"
    example = np.zeros((2, claims.features), dtype=np.float32), np.zeros(2, dtype=np.int64)
    made = guard(lambda: target(example, 0), "the factory")
    return "flower" if hasattr(made, "fit") else "opacus"


def adapt(target: Any, claims: Claims) -> tuple[str, Client]:
    """The kind of a target, and the target as a function (data, seed) -> `Released`."""
    if not callable(target):
        raise InputError(f"the client is {type(target).__name__}; it must be a function or a class.")
    kind = choose_kind(target, claims)
    return kind, ADAPTERS[kind](target, claims)
