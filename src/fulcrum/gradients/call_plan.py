"""Which dimension of each tensor in a model's forward holds the examples, and which calls use parameters.

Sizes do not tell: a batch of 16 may meet 16 heads. So the model runs twice, on two and on three examples, and every
call of a function is noted. What has another size the second time belongs to the batch: a dimension of a tensor, the B
in `expand(B, 4)`. What parameters alone make is of one size, and is a parameter for the calls that follow. The plan is
a list of the calls that see parameters, in order; a recorder goes through it in step with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fulcrum.gradients.program import UnsupportedModel

FEW, MORE = 2, 3
"""Examples in the two runs. Not 1: a model may `squeeze`."""


@dataclass(frozen=True)
class Axis:
    """Where a tensor holds its examples: dimension `dim`, with `each` rows for each of them.

    Rows stand as [B, each]; `inner`: as [each, B].
    """

    dim: int
    each: int = 1
    inner: bool = False

    def bring_first(self, values: Tensor, count: int) -> Tensor:
        """[B, ...], where dimension `dim` of an example has `each` rows."""
        split = values.unflatten(self.dim, (self.each, count) if self.inner else (count, self.each))
        return split.movedim(self.dim + 1 if self.inner else self.dim, 0)


@dataclass(frozen=True)
class Scaled:
    """A number, or several, that grew with the batch: what it is for one example."""

    for_one: Any


UNCLEAR = "unclear"
"""In place of an axis: the size grew, but not in proportion to the batch."""

Place = Axis | Scaled | str | None
"""Of an argument or result: an axis, a number that grew, UNCLEAR, or None for what does not depend on the batch."""


@dataclass(frozen=True)
class PlannedCall:
    """A call that sees parameters, or what parameters alone make.

    kind: "note" (its result is no tensor), "derive" (from parameters alone), "use" (by a rule), "vmap" (the function,
    alone). places: the parameters, as indices in the layout. given, found: of each leaf of its arguments and results;
    given is None where two batches differ in more than sizes. reason: why vmap.
    """

    function: Any
    kind: str
    places: frozenset[int]
    given: tuple[Place, ...] | None
    found: tuple[Place, ...]
    reason: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether every batch dimension is known."""
        return UNCLEAR not in (*(self.given or ()), *self.found)


@dataclass(frozen=True)
class PlannedModule:
    """One call of a module: the places of the leaves of its arguments and of its results."""

    given: tuple[Place, ...] | None
    found: tuple[Place, ...]


@dataclass(frozen=True)
class CallPlan:
    """The calls of a forward pass that see parameters, and the calls of each module by its name."""

    calls: tuple[PlannedCall, ...]
    modules: dict[str, tuple[PlannedModule, ...]] = field(default_factory=dict)

    def by_vmap(self, numbers: dict[int, str]) -> CallPlan:
        """The plan with vmap for some calls, by number; each with its reason."""
        calls = tuple(
            replace(call, kind="vmap", reason=numbers[n]) if n in numbers else call for n, call in enumerate(self.calls)
        )
        return replace(self, calls=calls)


def name_function(function: Any) -> str:
    """The name of a function or operator; of a property such as `Tensor.T`, the property's."""
    name = str(getattr(function, "__name__", function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else name


def iterate_leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from iterate_leaves(value)
        elif isinstance(value, dict):
            yield from iterate_leaves(value.values())
        else:
            yield value


# --- the two runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """A leaf of a call's arguments or results: its tensor's number, its shape; or its value."""

    number: int = -1
    shape: tuple[int, ...] = ()
    differentiable: bool = False
    value: Any = None


@dataclass(frozen=True)
class _LoggedCall:
    function: Any
    recorded: bool
    structure: Any
    given: tuple[_Leaf, ...]
    found: tuple[_Leaf, ...]


class CallLog(TorchFunctionMode):
    """Notes every call of a function, and every call of a module that `watch` follows.

    wanted: leaves whose values are kept, as (call, "given" or "found", number of the leaf).
    """

    def __init__(self, wanted: frozenset[tuple[int, str, int]] = frozenset()) -> None:
        super().__init__()
        self.calls: list[_LoggedCall] = []
        self.modules: dict[str, list[_LoggedCall]] = {}
        self.values: dict[tuple[int, str, int], Tensor] = {}
        self._wanted = wanted
        self._numbers: Any = WeakIdKeyDictionary()
        self._next = 0

    def number(self, tensor: Tensor) -> int:
        """The same for the same tensor, and for no other."""
        if tensor not in self._numbers:
            self._numbers[tensor] = self._next
            self._next += 1
        return int(self._numbers[tensor])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorded, place = torch.is_grad_enabled(), len(self.calls)
        leaves, structure = tree_flatten((args, kwargs))
        given = self._note(leaves, place, "given")
        self.calls.append(_LoggedCall(func, recorded, structure, given, ()))
        out = func(*args, **kwargs)
        # What changes its argument and returns nothing has that argument as its result.
        found = self._note([args[0]] if out is None and args else tree_leaves(out), place, "found")
        self.calls[place] = _LoggedCall(func, recorded, structure, given, found)
        return out

    def _note(self, leaves: Sequence[Any], place: int = -1, side: str = "") -> tuple[_Leaf, ...]:
        for n, leaf in enumerate(leaves):
            if (place, side, n) in self._wanted and isinstance(leaf, Tensor):
                self.values[place, side, n] = leaf.detach().clone()
        return tuple(
            _Leaf(self.number(leaf), tuple(leaf.shape), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else _Leaf(value=leaf)
            for leaf in leaves
        )

    def watch(self, model: nn.Module) -> list[Any]:
        """Handles of hooks that note the calls of all modules."""

        def note(name: str, args: Any, kwargs: Any, out: Any) -> None:
            leaves, structure = tree_flatten((args, kwargs))
            call = _LoggedCall(name, True, structure, self._note(leaves), self._note(tree_leaves(out)))
            self.modules.setdefault(name, []).append(call)

        def make_hook(name: str) -> Callable[..., None]:
            return lambda module, args, kwargs, out: note(name, args, kwargs, out)

        return [
            module.register_forward_hook(make_hook(name), with_kwargs=True)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]


def _compare_leaf(few: _Leaf, more: _Leaf) -> Place:
    if few.number >= 0 or more.number >= 0:
        if len(few.shape) != len(more.shape):
            return UNCLEAR
        grown = [dim for dim, pair in enumerate(zip(few.shape, more.shape, strict=True)) if pair[0] != pair[1]]
        if not grown:
            return None
        each, rest = divmod(few.shape[grown[0]], FEW)
        fits = len(grown) == 1 and not rest and each and more.shape[grown[0]] == each * MORE
        return Axis(grown[0], each) if fits else UNCLEAR
    if isinstance(few.value, torch.Size) and isinstance(more.value, torch.Size) and len(few.value) == len(more.value):
        sides = [_scale(a, b) for a, b in zip(few.value, more.value, strict=True)]
        if None in sides:
            return UNCLEAR
        return Scaled(torch.Size(sides)) if few.value != more.value else None  # type: ignore[arg-type]
    if type(few.value) is int and type(more.value) is int:
        found = _scale(few.value, more.value)
        return UNCLEAR if found is None else Scaled(found) if few.value != more.value else None
    if isinstance(few.value, slice) and isinstance(more.value, slice):
        return None if few.value == more.value else UNCLEAR
    return None


def _scale(few: int, more: int) -> int | None:
    """The number for one example, from those of the two runs; None where they are not in proportion."""
    if few == more:
        return few
    each, rest = divmod(few, FEW)
    return each if not rest and more == each * MORE else None


def _compare(few: _LoggedCall, more: _LoggedCall) -> tuple[tuple[Place, ...] | None, tuple[Place, ...]]:
    aligned = few.structure == more.structure
    given = tuple(map(_compare_leaf, few.given, more.given)) if aligned else None
    if len(few.found) != len(more.found):
        return given, (UNCLEAR,)
    return given, tuple(map(_compare_leaf, few.found, more.found))


# --- the plan -------------------------------------------------------------------------------------


def make_call_plan(run: Callable[[int, CallLog, bool], tuple[Tensor, ...]]) -> CallPlan:
    """The plan of a model.

    run(count, log, changed) runs it on so many examples with a log and returns the parameters that it ran with, as
    tensors that require a gradient; changed: with another first example. Raises UnsupportedModel where the number of
    calls depends on the number of examples.
    """
    few, more = CallLog(), CallLog()
    own = {few.number(tensor): place for place, tensor in enumerate(run(FEW, few, False))}
    run(MORE, more, False)
    if [call.function for call in few.calls] != [call.function for call in more.calls]:
        raise UnsupportedModel("it calls other functions for a batch of another size")
    tracked = {number: frozenset({place}) for number, place in own.items()}
    calls: list[PlannedCall] = []
    numbers: list[int] = []
    for number, (call, other) in enumerate(zip(few.calls, more.calls, strict=True)):
        places: frozenset[int] = frozenset().union(*(tracked.get(leaf.number, ()) for leaf in call.given))
        if not places or not call.recorded:
            continue
        given, found = _compare(call, other)
        kind = _choose_kind(call, found)
        if kind == "derive":
            tracked |= {leaf.number: places for leaf in call.found if leaf.differentiable}
        calls.append(PlannedCall(call.function, kind, places, given, found))
        numbers.append(number)
    modules = {
        name: tuple(PlannedModule(*_compare(*pair)) for pair in zip(each, more.modules.get(name, ()), strict=False))
        for name, each in few.modules.items()
    }
    return CallPlan(_find_orders(tuple(calls), numbers, run), modules)


def _choose_kind(call: _LoggedCall, found: tuple[Place, ...]) -> str:
    tensors = [place for leaf, place in zip(call.found, found, strict=False) if leaf.number >= 0]
    if not tensors:
        return "note"
    return "use" if any(place is not None for place in tensors) else "derive"


def _find_orders(
    calls: tuple[PlannedCall, ...], numbers: list[int], run: Callable[[int, CallLog, bool], tuple[Tensor, ...]]
) -> tuple[PlannedCall, ...]:
    """Whether the rows of several examples in one dimension stand as [B, each] or [each, B].

    The model runs with another first example: the rows that change are its own.
    """
    wanted = frozenset(
        (number, side, n)
        for call, number in zip(calls, numbers, strict=True)
        for side, leaves in (("given", call.given or ()), ("found", call.found))
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, Axis) and leaf.each > 1
    )
    if not wanted:
        return calls
    before, after = CallLog(wanted), CallLog(wanted)
    run(FEW, before, False)
    run(FEW, after, True)

    def order(number: int, side: str, n: int, place: Place) -> Place:
        key = (number, side, n)
        if not isinstance(place, Axis) or key not in before.values or key not in after.values:
            return place
        rows = (before.values[key] != after.values[key]).movedim(place.dim, 0).flatten(1).any(dim=1)
        as_inner = rows.view(place.each, FEW)
        return replace(place, inner=bool(rows.any() and not as_inner[:, 1:].any() and as_inner[1:, 0].any()))

    def settle(call: PlannedCall, number: int) -> PlannedCall:
        given = None if call.given is None else tuple(order(number, "given", n, p) for n, p in enumerate(call.given))
        return replace(call, given=given, found=tuple(order(number, "found", n, p) for n, p in enumerate(call.found)))

    return tuple(settle(call, number) for call, number in zip(calls, numbers, strict=True))
