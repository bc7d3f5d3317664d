"""Uses of parameters, found while the model's own forward runs.

A parameter is used by a function (`F.linear`, `torch.conv2d`, ...), whoever calls it. A `UseRecorder` sees every call
that has a trainable parameter among its arguments and looks the function up in one table, `FUNCTION_RULES`. The rule
runs the function and taps its output: the output's gradient, when it arrives, makes the parameter's per-example
gradients. Residual sums, shared weights, parameters at the root and layers called by no module are all the same case.
Calls without a trainable parameter are not touched, so frozen layers cost no gradient.

Where examples are in each tensor is known beforehand (`call_plan.py`). What parameters alone make (`weight.t()`) is
followed as a parameter (`derived.py`). A function that no rule knows goes through vmap, that one call alone. Where even
that is not possible, the parameters become those of a `VmapSite`: the module around the call goes through vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fulcrum.gradients.call_log import list_leaves, name_function
from fulcrum.gradients.call_plan import Axis, Place, PlannedCall, PlanReader
from fulcrum.gradients.derived import CHANGED, DerivedGrad, FollowedTensors, Target
from fulcrum.gradients.outer_products import ConvGrad, LinearGrad, materialise_grads
from fulcrum.gradients.param_grads import MaterialisedGrad, ParamGrad
from fulcrum.gradients.positions import group_rows
from fulcrum.gradients.program import UnsupportedModel
from fulcrum.gradients.rule_tables import FUNCTION_RULES as FUNCTION_RULES
from fulcrum.gradients.rule_tables import LAYER_RULES as LAYER_RULES
from fulcrum.gradients.rule_tables import LayerRule as LayerRule
from fulcrum.gradients.rule_tables import ParameterUse as ParameterUse
from fulcrum.gradients.rule_tables import Rule as Rule
from fulcrum.gradients.rule_tables import UnknownUse as UnknownUse
from fulcrum.gradients.rule_tables import UsePlan as UsePlan
from fulcrum.gradients.rule_tables import UseRecord as UseRecord
from fulcrum.gradients.rule_tables import VmapSite as VmapSite
from fulcrum.gradients.rule_tables import find_function_rule, make_layer_uses
from fulcrum.gradients.rule_tables import register_function_rule as register_function_rule
from fulcrum.gradients.rule_tables import register_layer as register_layer
from fulcrum.gradients.vmap import compute_call_grads, pull_each_example
from fulcrum.models.draws import KeyedDraws, find_active_draws
from fulcrum.models.layout import call_module

MAX_MATERIALISED_RATIO = 1.5
"""Materialised gradients may take this many times the memory of the uses' inputs and outputs."""


OTHER_PATH = "the model takes another path with other data"


Key = TypeVar("Key", int, tuple[int, int])


def choose_written(wanted: Iterable[tuple[int, Key]], room: float) -> set[Key]:
    """Which gradients to materialise, of those where it is cheaper: the smallest, while there is room for them.

    wanted: entries of all examples, and what names the gradient.
    """
    chosen = set()
    for entries, key in sorted(wanted):
        room -= entries
        if room >= 0:
            chosen.add(key)
    return chosen


class _GraphRoot(torch.autograd.Function):
    """Makes a fresh output the start of differentiation, in place, so that in-place activations may follow."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True)
class _Tap:
    """What waits for the gradient of a call's output."""

    function: str
    uses: tuple[ParameterUse, ...]
    targets: tuple[tuple[Target, tuple[int, ...]], ...]
    """Of each use: what it is of, and the parameters behind that which are followed."""
    inputs: tuple[tuple[Tensor, int], ...]
    """Inputs that the uses keep, with the version that they had: an in-place change would go unnoticed."""
    rows: Axis
    """How the rows of the output belong to examples."""
    elements: int
    """Number of elements in these inputs and in the output."""


@dataclass(frozen=True)
class _VmapCall:
    """A call whose gradients come by vmap after the backward pass.

    differentiate(grads) -> gradients [B, ...] by name; targets: of each name. grads: of each result; None where it did
    not arrive.
    """

    differentiate: Callable[[list[Tensor | None]], dict[str, Tensor]]
    targets: dict[str, tuple[Target, tuple[int, ...]]]
    grads: list[Tensor | None]


class UseRecorder(TorchFunctionMode):
    """Collects uses in the forward pass (`with recorder:`) and parameter gradients in the backward pass.

    tensors: the parameters of the layout. examples: their number B. channels_last: whether rules may change the
    memory format of images to the one in which a GPU multiplies them. planning: calls that no rule knows are noted in
    `unknown`, with the reason, and go through vmap.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        examples: int,
        plan: UsePlan,
        channels_last: bool = False,
        planning: bool = False,
    ) -> None:
        super().__init__()
        self.tensors, self.examples, self.channels_last, self.planning = tensors, examples, channels_last, planning
        self.elements = 0
        """Total number of elements in the inputs and outputs of all uses."""
        self.parts: list[list[ParamGrad]] = [[] for _ in tensors]
        self.anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
        self.unknown: dict[int, str] = {}
        self.whole: set[int] = set()
        """Calls that fail with one example only."""
        self.report: tuple[UseRecord, ...] = ()
        """What `list_uses` found in the last pass."""
        self._plan = plan
        self._sizes = [tensor.numel() for tensor in tensors]
        self._followed = FollowedTensors(tensors)
        self._next = PlanReader(plan.calls, examples)
        self._taps: list[_Tap] = []
        self._written: set[tuple[int, int]] = set()
        self._vmap_calls: list[_VmapCall] = []
        self._entered: dict[str, int] = {}
        self._drawn: dict[str, int] = {}  # random numbers that were drawn before each site
        self._function = ""
        self._axes: dict[int, Place] = {}
        self._rows = Axis(0)

    # --- what rules ask ---------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of rows in the current call: examples, or several rows of each."""
        return self.examples * self._rows.each

    def is_tracked(self, value: Any) -> bool:
        """Whether a value is a trainable parameter, or made of such alone."""
        return isinstance(value, Tensor) and bool(self._followed.find_places(value))

    def find_parameters(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The trainable parameters among arguments, also in lists of them."""
        return [value for value in list_leaves((args, kwargs)) if self.is_tracked(value)]

    def find_axis(self, value: Any) -> Place:
        """Where an argument of the current call holds its rows; None where it does not depend on the batch."""
        return self._axes.get(id(value))

    @property
    def found_axis(self) -> Place:
        """Where the first result of the current call holds its rows."""
        return self._plan.calls.calls[self._next.number].found[0]

    def refuse(self, reason: str, *parameters: Any) -> UnknownUse:
        """The error for a use that no rule knows; parameters: those of the call, if not all."""
        return UnknownUse(reason, tuple({place for p in parameters for place in self._followed.find_places(p)}))

    def require_rows(self, parameters: Sequence[Any], *values: Any) -> None:
        """Raises UnknownUse unless the first dimension of each of `values` holds the rows."""
        for value in values:
            axis = self.find_axis(value)
            if not isinstance(axis, Axis) or axis.dim != 0:
                raise self.refuse(f"{self._function} does not see one example per row", *parameters)

    def bring_first(self, parameters: Sequence[Any], value: Tensor, last: int = 1) -> tuple[Tensor, int]:
        """The value with its rows first, and the dimension that held them.

        last: number of dimensions at the end that must not hold them.
        """
        axis = self.find_axis(value)
        if not isinstance(axis, Axis) or axis.dim >= value.dim() - last:
            raise self.refuse(f"{self._function} does not see one example per row", *parameters)
        return (value.movedim(axis.dim, 0) if axis.dim else value), axis.dim

    def tap(
        self, out: Tensor, uses: Sequence[ParameterUse], inputs: Sequence[Tensor] = (), fresh: bool = False
    ) -> Tensor:
        """Records a call. The returned output takes the place of `out`, whose first dimension must be the examples.

        inputs: those that the uses keep. fresh: the output was made for this call and has no history.
        """
        kept = tuple(use for use in uses if self.is_tracked(use.parameter))
        if out.dim() == 0 or len(out) != self.count:
            raise self.refuse(f"{self._function} does not give one example per row", *(use.parameter for use in kept))
        if self._rows.each > 1:
            kept = tuple(
                replace(use, cost=replace(use.cost, positions=use.cost.positions * self._rows.each))
                if use.cost
                else use
                for use in kept
            )
        out = self._root(out)
        elements = out.numel() + sum(value.numel() for value in inputs)
        self.elements += elements
        number = len(self._taps)
        targets = tuple(
            (self._followed.targets[id(use.parameter)], self._followed.find_places(use.parameter)) for use in kept
        )
        versions = tuple((value, value._version) for value in inputs)
        self._taps.append(_Tap(self._function, kept, targets, versions, self._rows, elements))
        out.register_hook(lambda g: self._collect(number, g))
        return out

    # --- the forward pass ---------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or not self._followed.are_among(args, kwargs):
            return func(*args, **kwargs)
        leaves = list_leaves((args, kwargs))
        call = self._next.find(func, leaves, self._followed.find_all_places(leaves), self._followed.hidden)
        if isinstance(call, frozenset):
            raise UnknownUse(OTHER_PATH, tuple(sorted(call)))
        if call.kind == "note":
            return func(*args, **kwargs)
        if call.kind == "derive":
            out = self._followed.derive(func, args, kwargs)
            if out is CHANGED:
                raise self.refuse(f"{name_function(func)} changes in place what parameters made", *leaves)
            return out
        self._function = name_function(func)
        self._begin(call, leaves)
        if call.kind == "use":
            try:
                return self._find_rule(call)(self, func, *args, **kwargs)
            except UnknownUse as problem:
                if not self.planning or not call.is_clear:
                    raise
                self.unknown[self._next.number] = str(problem)
        return self._use_by_vmap(call, func, args, kwargs)

    def _find_rule(self, call: PlannedCall) -> Rule:
        rule = find_function_rule(call.function)
        if not call.is_clear or rule is None or call.given is None:
            words = f"no rule for {self._function}" if call.is_clear else f"rows of {self._function} depend on the data"
            raise UnknownUse(words, tuple(place for place in call.places if place not in self._followed.hidden))
        return rule

    def _begin(self, call: PlannedCall, leaves: list[Any]) -> None:
        """Where the rows are in a call's arguments."""
        given = (None,) * len(leaves) if call.given is None else call.given
        self._axes = {id(leaf): place for leaf, place in zip(leaves, given, strict=True) if isinstance(leaf, Tensor)}
        kinds = [place for place in given if isinstance(place, Axis)] or [p for p in call.found if isinstance(p, Axis)]
        self._rows = Axis(0, kinds[0].each, kinds[0].inner) if kinds else Axis(0)
        for leaf, place in zip(leaves, given, strict=True):
            if isinstance(place, Axis) and (place.each, place.inner) != (self._rows.each, self._rows.inner):
                self._axes[id(leaf)] = None  # no rule expects different numbers of rows

    def _root(self, out: Tensor) -> Tensor:
        """The output as a tensor whose gradient can be taken."""
        if out._is_view():
            # An in-place activation on a view would rewrite history behind the hook.
            out = torch.ops.aten._unsafe_view(out, out.shape)
        return out if out.requires_grad else _GraphRoot.apply(out, self.anchor)  # type: ignore[no-untyped-call]

    # --- calls and modules that go through vmap -------------------------------------------------------

    def _use_by_vmap(self, call: PlannedCall, func: Any, args: Any, kwargs: Any) -> Any:
        """A function that no rule knows: its gradients come by vmap over this call alone."""
        leaves, structure = tree_flatten((args, kwargs))
        places = tuple(place for place in call.places if place not in self._followed.hidden)
        own = {str(n): leaf for n, leaf in enumerate(leaves) if self.is_tracked(leaf)}
        out = func(*args, **kwargs)
        results = tree_leaves(out)
        changed = out is None or any(result is leaf for result in results for leaf in leaves if result is not None)
        if changed or len(call.found) != len(results) or not call.is_clear:
            raise UnknownUse(f"{self._function} changes its argument in place", places)
        versions = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        held = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def run(tensors: Any, filled: list[Any]) -> Any:
            given, named = tree_unflatten([tensors.get(str(n), leaf) for n, leaf in enumerate(filled)], structure)
            return func(*given, **named)

        number = self._next.number

        def differentiate(grads: list[Tensor | None]) -> dict[str, Tensor]:
            if any(leaf._version != version for leaf, version in versions):
                raise UnsupportedModel(f"the input of {name_function(func)} is overwritten in place after its use")
            if call.given is not None:
                try:
                    return compute_call_grads(run, own, held, call.given, call.found, grads, self.examples)
                except (RuntimeError, ValueError, IndexError, TypeError):
                    if not self.planning:
                        raise
                    self.whole.add(number)
            return pull_each_example(lambda tensors: run(tensors, held), own, call.found, grads, self.examples)

        targets = {
            name: (self._followed.targets[id(leaf)], self._followed.find_places(leaf)) for name, leaf in own.items()
        }
        return self._await(out, call.found, _VmapCall(differentiate, targets, [None] * len(results)), places)

    def _await(self, out: Any, found: Sequence[Place], call: _VmapCall, places: tuple[int, ...]) -> Any:
        """The results of a call, from now on waiting for their gradients."""
        results, structure = tree_flatten(out)
        entries = sum(self._count_entries(target) for target, _ in call.targets.values())
        taken = []
        for number, (result, place) in enumerate(zip(results, found, strict=True)):
            if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
                if not isinstance(place, Axis):
                    raise UnknownUse(f"{self._function} gives a result without examples", places)
                result = self._root(result)
                self.elements += result.numel() + entries * self.examples
                result.register_hook(partial(call.grads.__setitem__, number))
            taken.append(result)
        self._vmap_calls.append(call)
        return tree_unflatten(taken, structure)

    def _count_entries(self, target: Target) -> int:
        return self._sizes[target] if isinstance(target, int) else target.shadow.numel()

    def enter_site(self, site: VmapSite) -> None:
        """Called before a site's forward: its parameters are not followed until it ends."""
        self._followed.hidden |= dict.fromkeys(site.places, site.name)
        draws = find_active_draws()
        self._drawn[site.name] = draws.calls if draws else 0

    def leave_site(
        self, site: VmapSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Called after a site's forward, with its output; the returned output takes its place."""
        self._leave(site)
        if not torch.is_grad_enabled():
            return out
        self._function = site.name or "the model"
        planned = self._plan.calls.modules.get(site.name, ())
        number = self._entered[site.name] = self._entered.get(site.name, -1) + 1
        places = tuple(sorted(site.places))
        leaves, structure = tree_flatten((args, kwargs))
        call = planned[number] if number < len(planned) else None
        if call is None or call.given is None or len(call.given) != len(leaves):
            raise UnknownUse(f"{self._function} is called in another way for other data", places)
        fixed = {name: self.tensors[place] for name, place in site.inner.items()}
        own = {name: self.tensors[place] for name, place in site.inner.items() if place in site.places}
        given = call.given
        if not all(isinstance(place, Axis) or place is None for place in (*given, *call.found)):
            raise UnknownUse(f"rows of {self._function} depend on the data", places)
        draws, before = find_active_draws(), self._drawn[site.name]
        if draws is not None:  # the module runs again with the same random numbers
            leaves, given = [*leaves, draws.keys], (*given, Axis(0))

        def run(tensors: Any, filled: list[Any]) -> Any:
            if draws is None:
                arguments, named = tree_unflatten(filled, structure)
                return call_module(module, {**fixed, **tensors}, arguments, named)
            arguments, named = tree_unflatten(filled[:-1], structure)
            with KeyedDraws(filled[-1]) as again:
                again.calls = before
                return call_module(module, {**fixed, **tensors}, arguments, named)

        def differentiate(grads: list[Tensor | None]) -> dict[str, Tensor]:
            return compute_call_grads(run, own, leaves, given, call.found, grads, self.examples)

        targets: dict[str, tuple[Target, tuple[int, ...]]] = {
            name: (place, (place,)) for name, place in site.inner.items() if place in site.places
        }
        return self._await(out, call.found, _VmapCall(differentiate, targets, [None] * len(call.found)), places)

    def _leave(self, site: VmapSite) -> None:
        self._next.skip(self._followed.hidden)
        for place in site.places:
            self._followed.hidden.pop(place, None)

    def leave_layer(self, site: VmapSite, layer: nn.Module, rule: LayerRule, args: tuple[Any, ...], out: Any) -> Any:
        """Called after the forward of a layer that a user registered; the returned output takes its place."""
        self._leave(site)
        if not torch.is_grad_enabled():
            return out
        self._function, self._rows = site.reason, Axis(0)
        own = {name: self.tensors[place] for name, place in site.inner.items()}
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
            raise UnknownUse(f"{site.name} does not map one tensor to one tensor", tuple(site.places))
        planned = self._plan.calls.modules.get(site.name, ())
        number = self._entered[site.name] = self._entered.get(site.name, -1) + 1
        found = planned[number] if number < len(planned) else None
        if found is None or found.given != (Axis(0),) or found.found != (Axis(0),):
            raise UnknownUse(f"{site.name} does not see one example per row", tuple(site.places))
        uses = make_layer_uses(rule, layer, own, args[0].detach(), site.reason)
        return self.tap(out, uses, (args[0],))

    # --- the backward pass ----------------------------------------------------------------------------

    def choose(self) -> None:
        """Chooses, before the backward pass, which gradients to materialise: the smallest, while memory allows."""
        wanted = [
            (use.cost.entries * self.examples, (number, n))
            for number, tap in enumerate(self._taps)
            for n, use in enumerate(tap.uses)
            if use.cost is not None and use.cost.should_materialise
        ]
        self._written = choose_written(wanted, MAX_MATERIALISED_RATIO * self.elements)

    def _collect(self, number: int, g: Tensor) -> None:
        """Makes the parameter gradients of a call from the gradient of its output, and frees its inputs."""
        tap = self._taps[number]
        self._taps[number] = replace(tap, uses=(), targets=(), inputs=())
        if any(value._version != version for value, version in tap.inputs):
            raise UnsupportedModel(f"the input of {tap.function} is overwritten in place after its use")
        for n, (use, (target, places)) in enumerate(zip(tap.uses, tap.targets, strict=True)):
            part = use.make(g)
            if tap.rows.each > 1:
                part = group_rows(part, self.examples, tap.rows.each, tap.rows.inner)
            if (number, n) in self._written and isinstance(part, LinearGrad | ConvGrad):
                part = materialise_grads(part)
            self._add(target, places, part)

    def _add(self, target: Target, places: tuple[int, ...], part: ParamGrad) -> None:
        if isinstance(part, MaterialisedGrad) and part.grads.element_size() < 4:
            part = replace(part, grads=part.grads.float())  # norms and sums are taken in float32
        if isinstance(target, int):
            self.parts[target].append(part)
            return
        moved = target.keeps_norms
        if target.shadow.is_complex():  # two numbers per entry, as the parameters behind it have
            part = MaterialisedGrad(torch.view_as_real(part.rows().resolve_conj()).flatten(1))
        for place in places:
            self.parts[place].append(DerivedGrad(part, target, place, moved, self.examples))

    def finish(self) -> None:
        """After the backward pass: the gradients of all calls that go through vmap."""
        for call in self._vmap_calls:
            try:
                found = call.differentiate(call.grads)
            except (RuntimeError, ValueError, IndexError, TypeError) as problem:
                words = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
                seen = {place for _, each in call.targets.values() for place in each}
                raise UnknownUse(f"vmap failed with: {words}", tuple(sorted(seen))) from problem
            for name, (target, places) in call.targets.items():
                self._add(target, places, MaterialisedGrad(found[name].flatten(1)))

    def list_uses(self) -> Iterator[UseRecord]:
        """What the forward pass saw; after `choose` and before the backward pass."""
        for number, tap in enumerate(self._taps):
            passes_on = any(value.requires_grad for value, _ in tap.inputs)
            for n, (use, (_, places)) in enumerate(zip(tap.uses, tap.targets, strict=True)):
                for m, place in enumerate(places):
                    written, held = (number, n) in self._written, 0 if n or m else tap.elements
                    yield UseRecord(place, tap.function, use.cost, written, held, passes_on)
