"""Which dimension of each tensor in a model's forward holds the examples, and which calls use parameters.

Sizes do not tell: a batch of 16 may meet 16 heads. So the model runs twice, on two and on three examples, and every
call of a function is noted. What has another size the second time belongs to the batch: a dimension of a tensor, the B
in `expand(B, 4)`. What parameters alone make is of one size, and is a parameter for the calls that follow. The plan is
a list of the calls that see parameters, in order; a recorder goes through it in step with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
        split: Tensor = values.unflatten(self.dim, (self.each, count) if self.inner else (count, self.each))
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
    given is None where two batches differ in more than sizes. shapes: of the leaves of its arguments. scope: names of
    the modules that are running. reason: why vmap.
    """

    function: Any
    kind: str
    places: frozenset[int]
    given: tuple[Place, ...] | None
    found: tuple[Place, ...]
    shapes: tuple[tuple[int, ...], ...]
    scope: frozenset[str] = frozenset()
    reason: str = ""

    def fits(self, leaves: Sequence[Any], examples: int) -> bool:
        """Whether arguments have the shapes that were planned, for so many examples."""
        if self.given is None:
            return True
        if len(leaves) != len(self.shapes):
            return False
        for leaf, place, shape in zip(leaves, self.given, self.shapes, strict=True):
            if not isinstance(leaf, Tensor) or place == UNCLEAR:
                continue
            if isinstance(place, Axis):
                dim = place.dim
                shape = (*shape[:dim], place.each * examples, *shape[dim + 1 :])
            if leaf.shape != shape:
                return False
        return True

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
    unsteady: frozenset[str] = frozenset()
    """Modules in which other functions are called for other examples."""

    def by_vmap(self, numbers: dict[int, str], whole: Collection[int] = ()) -> CallPlan:
        """The plan with vmap for some calls, by number; each with its reason. whole: those that need all examples."""
        calls = list(self.calls)
        for n, reason in numbers.items():
            calls[n] = replace(calls[n], kind="vmap", reason=reason)
        for n in whole:
            calls[n] = replace(calls[n], given=None)
        return replace(self, calls=tuple(calls))


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


# --- the two runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """A leaf of a call's arguments or results: its tensor's number, its shape; or its value."""

    number: int = -1
    shape: tuple[int, ...] = ()
    differentiable: bool = False
    is_mask: bool = False
    value: Any = None


@dataclass(frozen=True)
class _LoggedCall:
    function: Any
    recorded: bool
    structure: Any
    given: tuple[_Leaf, ...]
    found: tuple[_Leaf, ...]
    scope: frozenset[str] = frozenset()


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
        self.calls.append(_LoggedCall(func, recorded, structure, given, (), scope))
        out = func(*args, **kwargs)
        # What changes its argument and returns nothing has that argument as its result.
        found = self._note([args[0]] if out is None and args else tree_leaves(out), place, "found")
        self.calls[place] = _LoggedCall(func, recorded, structure, given, found, scope)
        return out

    def _note(self, leaves: Sequence[Any], place: int = -1, side: str = "") -> tuple[_Leaf, ...]:
        for n, leaf in enumerate(leaves):
            if (place, side, n) in self._wanted and isinstance(leaf, Tensor):
                self.values[place, side, n] = leaf.detach().clone()
        return tuple(
            _Leaf(self.number(leaf), tuple(leaf.shape), leaf.requires_grad, leaf.dtype == torch.bool)
            if isinstance(leaf, Tensor)
            else _Leaf(value=leaf)
            for leaf in leaves
        )

    def watch(self, model: nn.Module) -> list[Any]:
        """Handles of hooks that note the calls of all modules."""

        def note(name: str, args: Any, kwargs: Any, out: Any) -> None:
            self._paused = True
            leaves, structure = tree_flatten((args, kwargs))
            call = _LoggedCall(name, True, structure, self._note(leaves), self._note(tree_leaves(out)))
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


def _compare(
    few: _LoggedCall, more: _LoggedCall, ragged: set[int]
) -> tuple[tuple[Place, ...] | None, tuple[Place, ...]]:
    def compare(one: _Leaf, other: _Leaf) -> Place:
        return UNCLEAR if one.number in ragged else _compare_leaf(one, other)

    aligned = few.structure == more.structure
    given = tuple(map(compare, few.given, more.given)) if aligned else None
    if len(few.found) != len(more.found):
        return given, (UNCLEAR,)
    return given, tuple(map(compare, few.found, more.found))


# --- the plan -------------------------------------------------------------------------------------


Run = Callable[[int, CallLog, str], tuple[tuple[Tensor, ...], Sequence[Tensor]]]
"""run(count, log, changed): runs a model on so many examples with a log, and returns the parameters that it ran with,
as tensors that require a gradient, and its inputs. changed: "first" with another first example, "all" with others."""


def make_call_plan(run: Run) -> CallPlan:
    """The plan of a model. Raises UnsupportedModel where it calls other functions for other examples."""
    few, more, other = CallLog(), CallLog(), CallLog()
    parameters, inputs = run(FEW, few, "")
    run(MORE, more, "")
    run(FEW, other, "all")
    unsteady = _find_unsteady(few, more, other)
    tracked = {few.number(tensor): frozenset({place}) for place, tensor in enumerate(parameters)}
    data = {few.number(tensor) for tensor in inputs}
    ragged: set[int] = set()
    calls: list[PlannedCall] = []
    numbers: list[int] = []
    for (number, call), (_, larger) in zip(_leave_out(few, unsteady), _leave_out(more, unsteady), strict=True):
        from_data = any(leaf.number in data for leaf in call.given)
        if from_data:  # also what is changed in place
            touched = {leaf.number for leaf in (*call.found, *call.given[:1]) if leaf.number >= 0}
            data |= touched - tracked.keys()
        ragged |= _find_ragged(call, ragged)
        places: frozenset[int] = frozenset().union(*(tracked.get(leaf.number, ()) for leaf in call.given))
        if not places or not call.recorded:
            continue
        given, found = _compare(call, larger, ragged)
        kind = _choose_kind(call, found)
        if kind == "derive" and from_data:
            kind, found = "use", (UNCLEAR,)  # all that is known of its rows is that some size happens to be the same
        if kind == "derive":
            tracked |= {leaf.number: places for leaf in call.found if leaf.differentiable}
        shapes = tuple(leaf.shape for leaf in call.given)
        calls.append(PlannedCall(call.function, kind, places, given, found, shapes, call.scope))
        numbers.append(number)
    modules = {
        name: tuple(
            PlannedModule(*_compare(*pair, ragged)) for pair in zip(each, more.modules.get(name, ()), strict=False)
        )
        for name, each in few.modules.items()
    }
    return CallPlan(_find_orders(tuple(calls), numbers, run), modules, unsteady)


def _leave_out(log: CallLog, modules: frozenset[str]) -> Iterator[tuple[int, _LoggedCall]]:
    """The calls of a log, numbered, without those in these modules."""
    return ((number, call) for number, call in enumerate(log.calls) if not call.scope & modules)


def _find_unsteady(*logs: CallLog) -> frozenset[str]:
    """The smallest modules in which other functions are called for other examples, or another number of them."""
    left_out: frozenset[str] = frozenset()

    def list_functions(log: CallLog, name: str) -> list[Any]:
        return [call.function for _, call in _leave_out(log, left_out) if name in call.scope]

    if all([call.function for call in log.calls] == [call.function for call in logs[0].calls] for log in logs):
        return left_out
    names = sorted({name for log in logs for call in log.calls for name in call.scope}, key=lambda name: -len(name))
    for name in names:  # what is inside of a module has a longer name
        first, *others = (list_functions(log, name) for log in logs)
        if any(first != other for other in others):
            if not name:
                raise UnsupportedModel("it calls other functions for other examples")
            left_out |= {name}
    return left_out


RAGGED = frozenset(
    getattr(owner, name)
    for name in ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_pack_padded_sequence")
    for owner in (torch, Tensor, torch._VF)
    if hasattr(owner, name)
)
"""Functions whose results have as many rows as the data say."""


def _find_ragged(call: _LoggedCall, ragged: set[int]) -> set[int]:
    """The results of a call whose number of rows depends on the data."""
    indexes = call.function is Tensor.__getitem__
    masked = indexes and any(leaf.is_mask for leaf in call.given[1:])
    results = {leaf.number: leaf.shape for leaf in call.found if leaf.number >= 0}
    if call.function in RAGGED or masked or (call.function is torch.where and len(call.given) == 1):
        return set(results)
    sources = [leaf.shape[:1] for leaf in call.given if leaf.number in ragged]
    first = call.given[0] if call.given else None
    if not sources or (first and first.number not in ragged and not indexes and set(results.values()) == {first.shape}):
        return set()  # what is added or written into a tensor of all examples
    return {number for number, shape in results.items() if shape and (indexes or shape[:1] in sources)}


def _choose_kind(call: _LoggedCall, found: tuple[Place, ...]) -> str:
    tensors = [place for leaf, place in zip(call.found, found, strict=False) if leaf.number >= 0]
    if not tensors:
        return "note"
    return "use" if any(place is not None for place in tensors) else "derive"


def _find_orders(calls: tuple[PlannedCall, ...], numbers: list[int], run: Run) -> tuple[PlannedCall, ...]:
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
    run(FEW, before, "")
    run(FEW, after, "first")

    def order(number: int, side: str, n: int, place: Place) -> Place:
        key = (number, side, n)
        if not isinstance(place, Axis) or key not in before.values or key not in after.values:
            return place
        changed = before.values[key] != after.values[key]
        rows = changed.movedim(place.dim, 0).reshape(changed.shape[place.dim], -1).any(dim=1)
        as_inner = rows.view(place.each, FEW)
        return replace(place, inner=bool(rows.any() and not as_inner[:, 1:].any() and as_inner[1:, 0].any()))

    def settle(call: PlannedCall, number: int) -> PlannedCall:
        given = None if call.given is None else tuple(order(number, "given", n, p) for n, p in enumerate(call.given))
        return replace(call, given=given, found=tuple(order(number, "found", n, p) for n, p in enumerate(call.found)))

    return tuple(settle(call, number) for call, number in zip(calls, numbers, strict=True))
