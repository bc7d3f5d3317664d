"""What the recorder of uses works with: the tables of rules, which users extend, and the records of uses and plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.gradients.call_plan import CallPlan
from fulcrum.gradients.outer_products import WeightGradCost
from fulcrum.gradients.param_grads import ParamGrad


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

    functions: of PyTorch, operators of `torch.library`, or classes of `torch.autograd.Function`.
    The rule calls the function, and `recorder.tap(out, uses)` on its output.
    """

    def add(rule: Rule) -> Rule:
        for function in functions:
            own = getattr(function, "_opoverload", None)  # of torch.library.custom_op
            FUNCTION_RULES.update(dict.fromkeys((own, own.overloadpacket) if own else (function,), rule))
        return rule

    return add


def find_function_rule(function: Any) -> Rule | None:
    """The rule of a function, of an operator's overload, or of a user's `torch.autograd.Function`."""
    names = (function, getattr(function, "overloadpacket", None), getattr(function, "kind", None))
    return next((FUNCTION_RULES[name] for name in names if name is not None and name in FUNCTION_RULES), None)


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
    inner: all trainable parameters in the module, by their names there. reason: why.
    """

    name: str
    places: frozenset[int]
    inner: dict[str, int]
    reason: str


@dataclass(frozen=True)
class UsePlan:
    """How a model's parameters are followed: call by call, and by vmap for whole modules where that is not possible."""

    calls: CallPlan
    sites: tuple[VmapSite, ...] = ()


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


def make_layer_uses(
    rule: LayerRule, layer: nn.Module, parameters: dict[str, Tensor], a: Tensor, kind: str
) -> list[ParameterUse]:
    """The uses of a registered layer's parameters, for the input a: its rule is asked once, for all of them.

    Raises ModelError where the rule fails, or leaves out a parameter.
    """
    made: dict[str, ParamGrad] = {}

    def make(name: str, g: Tensor) -> ParamGrad:
        if not made:
            try:
                made.update(rule(layer, parameters, a, g))
            except Exception as problem:  # a user's rule may raise any error
                words = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
                raise ModelError(f"The rule registered for {kind} failed: {words}.") from problem
        if name not in made:
            raise ModelError(f"The rule registered for {kind} returns nothing for its parameter {name!r}.")
        return made[name]

    return [ParameterUse(value, partial(make, name)) for name, value in parameters.items()]
