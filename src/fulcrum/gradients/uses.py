"""Uses of parameters, found while the model's own forward runs.

A parameter is used by a function (`F.linear`, `torch.conv2d`, ...), whoever calls it. A `UseRecorder` sees every call
that has a trainable parameter among its arguments and looks the function up in one table, `FUNCTION_RULES`. The rule
runs the function and taps its output: the output's gradient, when it arrives, makes the parameter's per-example
gradients. Residual sums, shared weights, parameters at the root and layers called by no module are all the same case.
Calls without a trainable parameter are not touched, so frozen layers cost no gradient.

A call that no rule knows raises `UnknownUse`. Its parameters then become those of a `VmapSite`: the module around the
call runs as it is, and vmap computes the gradients of these parameters alone, from its inputs and output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten as flatten_tree
from torch.utils._pytree import tree_leaves, tree_unflatten

from fulcrum.gradients.outer_products import ConvGrad, LinearGrad, WeightGradCost, materialise_grads
from fulcrum.gradients.param_grads import MaterialisedGrad, ParamGrad
from fulcrum.gradients.program import UnsupportedModel
from fulcrum.gradients.vmap import compute_module_grads

MAX_MATERIALISED_RATIO = 1.5
"""Materialised gradients may take this many times the memory of the uses' inputs and outputs."""


class UnknownUse(Exception):
    """No rule knows how a parameter is used. places: the parameters, as indices in the layout."""

    def __init__(self, reason: str, places: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.places = places


@dataclass(frozen=True)
class ParameterUse:
    """One parameter in one call: how its gradients are made from the gradient g of the call's output."""

    parameter: Tensor
    make: Callable[[Tensor], ParamGrad]
    cost: WeightGradCost | None = None
    """Where there is a choice of methods: what they cost."""


Rule = Callable[..., Any]
"""rule(recorder, function, *args, **kwargs): runs the function and returns its output, tapped."""

FUNCTION_RULES: dict[Any, Rule] = {}


def register_function_rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Adds a rule for functions that take parameters: see docs/own-layer.md.

    The rule calls the function, and `recorder.tap(out, uses)` on its output.
    """

    def add(rule: Rule) -> Rule:
        FUNCTION_RULES.update(dict.fromkeys(functions, rule))
        return rule

    return add


LayerRule = Callable[[Any, dict[str, Tensor], Tensor, Tensor], dict[str, ParamGrad]]
"""rule(layer, parameters, a, g): the gradients of each trainable parameter of a layer, by its name there."""

LAYER_RULES: dict[type[nn.Module], LayerRule] = {}


def register_layer(*classes: type[nn.Module]) -> Callable[[LayerRule], LayerRule]:
    """Adds a rule for a user's layer that maps one tensor a [B, ...] to one tensor [B, ...]: see docs/own-layer.md."""

    def add(rule: LayerRule) -> LayerRule:
        LAYER_RULES.update(dict.fromkeys(classes, rule))
        return rule

    return add


@dataclass(frozen=True)
class VmapSite:
    """A module with parameters that no rule knows how to follow.

    name: of the module in the model; empty for the model itself. places: these parameters, as indices in the layout.
    inner: all trainable parameters in the module, by their names there. reason: the function without a rule.
    """

    name: str
    places: frozenset[int]
    inner: dict[str, int]
    reason: str


@dataclass(frozen=True)
class UseRecord:
    """For a report: a parameter's index, the function that used it, and the cost of its weight's gradient if any."""

    place: int
    function: str
    cost: WeightGradCost | None
    materialised: bool
    elements: int = 0
    """Number of elements in the inputs that the call keeps and in its output, for all examples; with the call's first
    parameter only."""
    passes_on: bool = True
    """Whether the gradient of the call's input is computed too."""


class _GraphRoot(torch.autograd.Function):
    """Makes a fresh output the start of differentiation, in place, so that in-place activations may follow."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


@dataclass
class _TappedCall:
    """A call in the forward pass: what waits for the gradient of its output."""

    function: str
    uses: tuple[ParameterUse, ...]
    inputs: tuple[tuple[Tensor, int], ...]
    """Inputs that the uses keep, with the version that they had: an in-place change would go unnoticed."""
    elements: int = 0
    """Number of elements in these inputs and in the output."""


class UseRecorder(TorchFunctionMode):
    """Collects uses in the forward pass (`with recorder:`) and parameter gradients in the backward pass.

    tensors: the parameters of the layout. count: number of examples B. channels_last: whether rules may change the
    memory format of images to the one in which a GPU multiplies them.
    """

    def __init__(self, tensors: tuple[Tensor, ...], count: int, channels_last: bool = False) -> None:
        super().__init__()
        self.tensors, self.count, self.channels_last = tensors, count, channels_last
        self.elements = 0
        """Total number of elements in the inputs and outputs of all uses."""
        self.parts: list[list[ParamGrad]] = [[] for _ in tensors]
        self.anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._hidden: dict[int, int] = {}
        self._calls: list[_TappedCall] = []
        self._written: set[tuple[int, int]] = set()
        self._site_calls: list[_SiteCall] = []
        self._function = ""
        self.report: tuple[UseRecord, ...] = ()
        """What `list_uses` found in the last pass."""

    # --- the forward pass ---------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = self.find_parameters(args, kwargs)
        if not used or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        self._function = getattr(func, "__name__", str(func))
        rule = FUNCTION_RULES.get(func)
        if rule is not None:
            return rule(self, func, *args, **kwargs)
        out = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            raise self.refuse(f"no rule for {self._function}", *used)
        return out  # a shape, a type, a number

    def find_parameters(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The trainable parameters among arguments, also in lists of them."""
        places, found = self._places, []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if id(value) in places:
                    found.append(value)
            elif isinstance(value, list | tuple):
                found += [each for each in value if id(each) in places]
        return [value for value in found if not self._hidden.get(places[id(value)])]

    def is_tracked(self, value: Any) -> bool:
        """Whether a value is a trainable parameter."""
        place = self._places.get(id(value)) if isinstance(value, Tensor) else None
        return place is not None and not self._hidden.get(place)

    def refuse(self, reason: str, *parameters: Any) -> UnknownUse:
        """The error for a use that no rule knows; parameters: those of the call, if not all."""
        return UnknownUse(reason, tuple(self._places[id(p)] for p in parameters if self.is_tracked(p)))

    def require_rows(self, parameters: Sequence[Any], *values: Tensor) -> None:
        """Raises UnknownUse unless each of `values` has one example per row and is no parameter itself."""
        for value in values:
            if self.is_tracked(value) or value.dim() == 0 or len(value) != self.count:
                raise self.refuse(f"{self._function} does not see one example per row", *parameters)

    def tap(
        self, out: Tensor, uses: Sequence[ParameterUse], inputs: Sequence[Tensor] = (), fresh: bool = False
    ) -> Tensor:
        """Records a call. The returned output takes the place of `out`, whose first dimension must be the examples.

        inputs: those that the uses keep. fresh: the output was made for this call and has no history.
        """
        kept = tuple(use for use in uses if self.is_tracked(use.parameter))
        self.require_rows([use.parameter for use in kept], out)
        if out._is_view():
            # An in-place activation on a view would rewrite history behind the hook below.
            out = torch.ops.aten._unsafe_view(out, out.shape)
        if not out.requires_grad:
            out = _GraphRoot.apply(out, self.anchor)  # type: ignore[no-untyped-call]
        elements = out.numel() + sum(value.numel() for value in inputs)
        self.elements += elements
        number = len(self._calls)
        versions = tuple((value, value._version) for value in inputs)
        self._calls.append(_TappedCall(self._function, kept, versions, elements))
        out.register_hook(lambda g: self._collect(number, g))
        return out

    # --- modules that go through vmap ----------------------------------------------------------------

    def enter_site(self, site: VmapSite) -> None:
        """Called before a site's forward: its parameters are not tracked until it ends."""
        for place in site.places:
            self._hidden[place] = self._hidden.get(place, 0) + 1

    def leave_site(
        self, site: VmapSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Called after a site's forward, with its output; the returned output takes its place."""
        for place in site.places:
            self._hidden[place] -= 1
        if not torch.is_grad_enabled():
            return out
        leaves, shape = flatten_tree(out)
        call = _SiteCall(site, module, args, kwargs, [None] * len(leaves))
        taken = []
        for number, leaf in enumerate(leaves):
            differentiable = isinstance(leaf, Tensor) and leaf.is_floating_point()
            if differentiable and (leaf.dim() == 0 or len(leaf) != self.count):
                reason = f"{site.name or 'the model'} does not give one example per row"
                raise UnknownUse(reason, tuple(sorted(site.places)))
            taken.append(self._tap_site_output(call, number, leaf) if differentiable else leaf)
        self._site_calls.append(call)
        return tree_unflatten(taken, shape)

    def leave_layer(self, site: VmapSite, layer: nn.Module, rule: LayerRule, args: tuple[Any, ...], out: Any) -> Any:
        """Called after the forward of a layer that a user registered; the returned output takes its place."""
        for place in site.places:
            self._hidden[place] -= 1
        if not torch.is_grad_enabled():
            return out
        self._function = site.reason
        own = {name: self.tensors[place] for name, place in site.inner.items()}
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
            raise UnsupportedModel(f"{site.name} does not map one tensor to one tensor")
        self.require_rows(list(own.values()), args[0])
        seen = args[0].detach()
        found: dict[str, ParamGrad] = {}

        def make(name: str, g: Tensor) -> ParamGrad:
            if not found:
                found.update(rule(layer, own, seen, g))
            return found[name]

        uses = [ParameterUse(value, partial(make, name)) for name, value in own.items()]
        return self.tap(out, uses, (args[0],))

    def _tap_site_output(self, call: _SiteCall, number: int, out: Tensor) -> Tensor:
        if out._is_view():
            out = torch.ops.aten._unsafe_view(out, out.shape)
        if not out.requires_grad:
            out = _GraphRoot.apply(out, self.anchor)  # type: ignore[no-untyped-call]
        self.elements += out.numel() + sum(self.tensors[place].numel() for place in call.site.places) * self.count

        def arrive(g: Tensor) -> None:
            call.grads[number] = g

        out.register_hook(arrive)
        return out

    # --- the backward pass ----------------------------------------------------------------------------

    def choose(self) -> None:
        """Chooses, before the backward pass, which gradients to materialise: the smallest, while memory allows."""
        room = MAX_MATERIALISED_RATIO * self.elements
        wanted = [
            (use.cost.entries * self.count, number, n)
            for number, call in enumerate(self._calls)
            for n, use in enumerate(call.uses)
            if use.cost is not None and use.cost.should_materialise
        ]
        for entries, number, n in sorted(wanted):
            room -= entries
            if room >= 0:
                self._written.add((number, n))

    def _collect(self, number: int, g: Tensor) -> None:
        """Makes the parameter gradients of a call from the gradient of its output, and frees its inputs."""
        call = self._calls[number]
        self._calls[number] = _TappedCall(call.function, (), ())
        if any(value._version != version for value, version in call.inputs):
            raise UnsupportedModel(f"the input of {call.function} is overwritten in place after its use")
        for n, use in enumerate(call.uses):
            part = use.make(g)
            if (number, n) in self._written and isinstance(part, LinearGrad | ConvGrad):
                part = materialise_grads(part)
            self.parts[self._places[id(use.parameter)]].append(part)

    def finish(self) -> None:
        """After the backward pass: the gradients of all sites by vmap."""
        for call in self._site_calls:
            own = {name: place for name, place in call.site.inner.items() if place in call.site.places}
            fixed = {name: self.tensors[place] for name, place in call.site.inner.items()}
            wanted = {name: self.tensors[place] for name, place in own.items()}
            found = compute_module_grads(call.module, wanted, fixed, call.args, call.kwargs, call.grads, self.count)
            for name, place in own.items():
                self.parts[place].append(MaterialisedGrad(found[name].flatten(1)))

    def list_uses(self) -> Iterator[UseRecord]:
        """What the forward pass saw; after `choose` and before the backward pass."""
        for number, call in enumerate(self._calls):
            passes_on = any(value.requires_grad for value, _ in call.inputs)
            for n, use in enumerate(call.uses):
                place = self._places[id(use.parameter)]
                written = (number, n) in self._written
                yield UseRecord(place, call.function, use.cost, written, 0 if n else call.elements, passes_on)


@dataclass
class _SiteCall:
    site: VmapSite
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads: list[Tensor | None]
    """The gradient of each output; None where it did not arrive."""
