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
from torch import Tensor

from fulcrum.gradients.call_log import CallLog, LoggedCall, LoggedLeaf
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


# --- two runs compared ------------------------------------------------------------------------------


def _compare_leaf(few: LoggedLeaf, more: LoggedLeaf) -> Place:
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


def _compare(few: LoggedCall, more: LoggedCall, ragged: set[int]) -> tuple[tuple[Place, ...] | None, tuple[Place, ...]]:
    def compare(one: LoggedLeaf, other: LoggedLeaf) -> Place:
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


def _leave_out(log: CallLog, modules: frozenset[str]) -> Iterator[tuple[int, LoggedCall]]:
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


def _find_ragged(call: LoggedCall, ragged: set[int]) -> set[int]:
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


def _choose_kind(call: LoggedCall, found: tuple[Place, ...]) -> str:
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


class PlanReader:
    """Goes through a plan in step with a pass over so many examples."""

    def __init__(self, plan: CallPlan, examples: int) -> None:
        self._calls, self._examples, self._next = plan.calls, examples, 0

    @property
    def number(self) -> int:
        """Of the call that was found last."""
        return self._next - 1

    def find(
        self, function: Any, leaves: list[Any], places: set[int], hidden: dict[int, str]
    ) -> PlannedCall | frozenset[int]:
        """The next call of the plan, which must be that of a function with these arguments and parameters behind them.

        If it is not: the parameters whose call was expected and did not come, or came and was not expected.
        """
        self.skip(hidden)
        call = self._calls[self._next] if self._next < len(self._calls) else None
        planned = call is not None and call.function == function and places <= call.places
        if call is not None and planned and call.fits(leaves, self._examples):
            self._next += 1
            return call
        if call is None or not any(places <= later.places for later in self._calls[self._next :]):
            return frozenset(places)
        return call.places

    def skip(self, hidden: dict[int, str]) -> None:
        """Leaves out the next calls that only see parameters which a running module follows by itself."""
        while self._next < len(self._calls) and hidden:
            call = self._calls[self._next]
            if not all(place in hidden and hidden[place] in call.scope for place in call.places):
                break
            self._next += 1
