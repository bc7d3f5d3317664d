"""A log of every call of a function while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


def name_function(function: Any) -> str:
    """The name of a function or operator; of a property such as `Tensor.T`, the property's."""
    name = str(getattr(function, "__name__", function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else name


def list_leaves(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts: as `tree_leaves`, in less time."""
    found: list[Any] = []
    _add_leaves(value, found)
    return found


def _add_leaves(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is tuple or kind is list:
        for each in value:
            _add_leaves(each, found)
    elif kind is dict:
        for each in value.values():
            _add_leaves(each, found)
    elif isinstance(value, tuple | list | dict):
        found.extend(tree_leaves(value))
    else:
        found.append(value)


@dataclass(frozen=True)
class LoggedLeaf:
    """A leaf of a call's arguments or results: its tensor's number, its shape; or its value."""

    number: int = -1
    shape: tuple[int, ...] = ()
    differentiable: bool = False
    is_mask: bool = False
    value: Any = None


@dataclass(frozen=True)
class LoggedCall:
    """A call of a function, or of a module by its name. recorded: whether autograd was on."""

    function: Any
    recorded: bool
    structure: Any
    given: tuple[LoggedLeaf, ...]
    found: tuple[LoggedLeaf, ...]
    scope: frozenset[str] = frozenset()


class CallLog(TorchFunctionMode):
    """Notes every call of a function, and every call of a module that `watch` follows.

    wanted: leaves whose values are kept, as (call, "given" or "found", number of the leaf).
    """

    def __init__(self, wanted: frozenset[tuple[int, str, int]] = frozenset()) -> None:
        super().__init__()
        self.calls: list[LoggedCall] = []
        self.modules: dict[str, list[LoggedCall]] = {}
        self.values: dict[tuple[int, str, int], Tensor] = {}
        self._wanted = wanted
        self._numbers: Any = WeakIdKeyDictionary()
        self._next, self._paused = 0, False
        self._scope: list[str] = []

    def number(self, tensor: Tensor) -> int:
        """The same for the same tensor, and for no other."""
        if tensor not in self._numbers:
            self._numbers[tensor] = self._next
            self._next += 1
        return int(self._numbers[tensor])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        recorded, place = torch.is_grad_enabled(), len(self.calls)
        leaves, structure = tree_flatten((args, kwargs))
        given = self._note(leaves, place, "given")
        scope = frozenset(self._scope)
        self.calls.append(LoggedCall(func, recorded, structure, given, (), scope))
        out = func(*args, **kwargs)
        # What changes its argument and returns nothing has that argument as its result.
        found = self._note([args[0]] if out is None and args else tree_leaves(out), place, "found")
        self.calls[place] = LoggedCall(func, recorded, structure, given, found, scope)
        return out

    def _note(self, leaves: Sequence[Any], place: int = -1, side: str = "") -> tuple[LoggedLeaf, ...]:
        for n, leaf in enumerate(leaves):
            if (place, side, n) in self._wanted and isinstance(leaf, Tensor):
                self.values[place, side, n] = leaf.detach().clone()
        return tuple(
            LoggedLeaf(self.number(leaf), tuple(leaf.shape), leaf.requires_grad, leaf.dtype == torch.bool)
            if isinstance(leaf, Tensor)
            else LoggedLeaf(value=leaf)
            for leaf in leaves
        )

    def watch(self, model: nn.Module) -> list[Any]:
        """Handles of hooks that note the calls of all modules."""

        def note(name: str, args: Any, kwargs: Any, out: Any) -> None:
            self._paused = True
            leaves, structure = tree_flatten((args, kwargs))
            call = LoggedCall(name, True, structure, self._note(leaves), self._note(tree_leaves(out)))
            self.modules.setdefault(name, []).append(call)
            self._paused = False
            self._scope.remove(name)

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: self._scope.append(name)

        def leave(name: str) -> Callable[..., None]:
            return lambda module, args, kwargs, out: note(name, args, kwargs, out)

        handles: list[Any] = []
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                handles.append(module.register_forward_pre_hook(enter(name)))
                handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
        return handles
