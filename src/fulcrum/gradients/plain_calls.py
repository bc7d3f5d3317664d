"""While a pass is recorded, checkpointed and compiled parts of a model run as plain Python, and its own functions show.

Checkpointing runs a part again in the backward pass, a compiled part hides its calls, and so does a user's
`torch.autograd.Function`: all would go unnoticed by a recorder. A recorded batch goes through in pieces that fit
memory, so that checkpoints save nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import checkpoint

_lock = threading.Lock()
_users = {"checkpoints": 0, "functions": 0, "compiled": 0}
_undo: dict[str, Callable[[], None]] = {}


class _RunAtOnce:
    """In place of torch's reentrant checkpoints."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)


def _step_aside(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what torch does before and after a checkpointed part."""
    yield


def _disable_checkpoints() -> Callable[[], None]:
    names = {"CheckpointFunction": _RunAtOnce, "_checkpoint_without_reentrant_generator": _step_aside}
    before = {name: getattr(checkpoint, name) for name in names if hasattr(checkpoint, name)}
    for name in before:
        setattr(checkpoint, name, names[name])

    def undo() -> None:
        for name, value in before.items():
            setattr(checkpoint, name, value)

    return undo


@dataclass(frozen=True)
class FunctionCall:
    """A user's `torch.autograd.Function` as a function that a recorder sees."""

    kind: Any
    plain: Any

    @property
    def __name__(self) -> str:
        return str(self.kind.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain.__func__(self.kind, *args, **kwargs)


def _show_functions() -> Callable[[], None]:
    """Calls of `torch.autograd.Function`s are shown to recorders, as those of torch's own functions are."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = FunctionCall(cls, plain)
        if has_torch_function(args):
            return handle_torch_function(call, args, *args, **kwargs)
        return call(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]

    def undo() -> None:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]

    return undo


def _disable_compiled() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    stance.__enter__()
    return lambda: stance.__exit__(None, None, None)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is one that `torch.compile` returned, or was compiled in place."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


@contextmanager
def run_plainly(model: nn.Module) -> Iterator[None]:
    """Checkpoints and compiled modules are off within this block, in any number of threads at a time."""
    wanted = {"checkpoints": _disable_checkpoints, "functions": _show_functions}
    if any(map(is_compiled, model.modules())):
        wanted["compiled"] = _disable_compiled
    with _lock:
        for name, disable in wanted.items():
            if not _users[name]:
                _undo[name] = disable()
            _users[name] += 1
    try:
        yield
    finally:
        with _lock:
            for name in wanted:
                _users[name] -= 1
                if not _users[name]:
                    _undo.pop(name)()
