"""A clipping rule: a small value made of functions. No rule states its own privacy cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from fulcrum.errors import ConfigError
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.schema import Clip
from fulcrum.types import Bounds, Released, RuleState, Stats, View, make_short_repr


@dataclass(frozen=True)
class ModelFacts:
    """What a rule may know about the model at the start: public facts only.

    dim: number of parameters d. tensors: the number of elements of each parameter tensor, in order. groups: for each
    parameter tensor, the group (0..G-1) it is clipped in, as `clip.groups` asks; empty when flat.
    start: the norm of random initial weights of these layers; larger: the ratio of the actual initial weights' norm to
    it, at least 1. depth: number of layers. mixed: whether the inputs of some layers are whitened. first: the
    fraction of an update that the server's optimiser applies at once. noise: as in `Released`, expected before the run
    (0 without noise). rounds, lr and steps: number of rounds T, learning rate eta and local steps N, from the settings.
    """

    dim: int
    tensors: tuple[int, ...]
    groups: tuple[int, ...] = ()
    start: float = 1.0
    larger: float = 1.0
    depth: int = 1
    mixed: bool = False
    first: float = 1.0
    noise: float = 0.0
    rounds: int = 1
    lr: float = 1.0
    steps: float = 1.0

    @property
    def count(self) -> int:
        """Number of groups G."""
        return max(self.groups) + 1 if self.groups else 1


CLIP_GROUPINGS = ("flat", "layer")
"""Allowed values of clip.groups: clip all parameters together, or each layer to its share of C."""
RuleOptions = type[Any] | Mapping[str, bool | int | float | str] | None
"""A rule's own settings: a frozen dataclass, or name -> default."""
InitFn = Callable[[Clip, ModelFacts], RuleState]
ViewFn = Callable[[RuleState, int, int], View]
ClipFn = Callable[[Stats, RuleState], tuple[torch.Tensor, torch.Tensor, RuleState]]
BoundsFn = Callable[[RuleState], Bounds]
AdaptFn = Callable[[RuleState, Released], RuleState]
ApplyFn = Callable[[RuleState, Released], torch.Tensor]
ShareFn = Callable[[float, float], float]
SecondSumFn = Callable[[Stats, RuleState], torch.Tensor]
CourseFn = Callable[[RuleState, Released], Mapping[str, torch.Tensor]]


def no_statistics_share(sigma: float, batch: float) -> float:
    """The gradient gets all of the precision."""
    return 0.0


def gradient_multiplier(share: ShareFn, sigma: float, batch: float) -> float:
    """The noise multiplier of the gradient where gradient and statistics together have `sigma`."""
    return sigma / math.sqrt(1.0 - share(sigma, batch))


def has_statistics(state: RuleState, released: Released) -> torch.Tensor:
    """Whether statistics were released this round, as a boolean tensor on the state's device."""
    return torch.as_tensor(released.asked, device=state["C"].device) > 0


def keep_state(state: RuleState, released: Released) -> RuleState:
    """An `adapt` that never changes C."""
    return state


def use_aggregate(state: RuleState, released: Released) -> torch.Tensor:
    """An `apply` that returns the aggregate unchanged."""
    return released.aggregate


def no_course(state: RuleState, released: Released) -> Mapping[str, torch.Tensor]:
    """A `course` without numbers of the rule's own."""
    return {}


@dataclass(frozen=True)
class ClipRule:
    """A rule for clipping per-unit gradients and for adapting C.

    init(settings, shape) -> state: C is part of the state.
    view(state, t, T) -> View: what the rule needs to know about each unit.
    clip(stats, state) -> (factors [B, G], extra [B, J], state): the scale of each unit's gradient in
        each group, and the statistics to release. Sound rules return the state unchanged.
    bounds(state) -> Bounds: the most that one unit can change after `clip`.
    adapt(state, released) -> state: sees released values only.
    apply(state, released) -> [d]: the update passed to the server optimiser: the aggregate, or
        a multiple of it. Post-processing of released values, like `adapt`; called with the state before `adapt`.
    share(sigma, batch) -> s in [0, 1): the fraction of the precision 1/sigma^2 for the extra
        statistics. Gradient and extra together always cost as much as one release at sigma:
        1/sigma^2 = (1 - s)/sigma^2 + s/sigma^2. Steps that release no extra (`clip.statistics_interval`) keep the
        gradient's noise and cost only that: sigma / sqrt(1 - s).
    second(stats, state) -> factors [B, G]: requests a second sum of the same gradients with these
        factors, noised and released after the extra statistics (which then have J + d entries). A unit's
        row of extra statistics and its part of the second sum together stay within `bounds.extra`.
    course(state, released) -> {name: number}: what the rule saw in a round, for people who watch the run
        (`RoundResult.course`). Sees what `adapt` sees, so it costs nothing; server rules only.
    where: "server" (one state for the federation) or "client" (one state per client).
    when: "round" or "step" (client rules only).
    sound: whether C depends on released values only. Where False, epsilon is nominal.
    private: False only for `none`: nothing is bounded, nothing is noised, no epsilon holds.
    normalises: True where units are scaled to a norm rather than clipped, so that no C gives plain SGD.
    moves: names of the entries of the state that clip, view, bounds and second read and that follow from releases: all
        that a coordinator sends to a party elsewhere. The party makes the others from its own settings by `init`, and,
        where nothing moves, follows `adapt` over the round numbers (a schedule).
    options: the rule's own settings (`[clip.options]`): a frozen dataclass, or a mapping name -> default. `init`
        gets them as `settings.options`: an instance of the dataclass, or a mapping with all names.
    summary, cost and reference: text for `fulcrum methods`.

    Settings that the functions need (kappa, eta_C) live in the state as tensors, and no function
    branches on values with Python's `if`: so a rule is one constant, and an engine may stack clients
    and runs with different settings.
    """

    __repr__ = make_short_repr

    name: str
    init: InitFn
    view: ViewFn
    clip: ClipFn
    bounds: BoundsFn
    adapt: AdaptFn = keep_state
    apply: ApplyFn = use_aggregate
    share: ShareFn = no_statistics_share
    second: SecondSumFn | None = None
    course: CourseFn = no_course
    where: str = "server"
    when: str = "round"
    sound: bool = True
    private: bool = True
    normalises: bool = False
    moves: tuple[str, ...] = ("C",)
    options: RuleOptions = None
    summary: str = ""
    cost: str = "free"
    reference: str = ""

    def __post_init__(self) -> None:
        if self.options is not None:
            object.__setattr__(self, "init", _add_options_to_init(self))


ClipRule.__module__ = "fulcrum.clipping"  # the public import path: error messages show it


def _add_options_to_init(rule: ClipRule) -> InitFn:
    """`init` of a rule with options: checks the options and fills in defaults first."""
    original = rule.init

    def init(settings: Clip, shape: ModelFacts) -> RuleState:
        options = resolve_rule_options(rule, settings.options)
        return original(dataclasses.replace(settings, options=options), shape)

    return init


def resolve_rule_options(rule: ClipRule, given: Any) -> Any:
    """The options of a rule with their defaults: an instance of its dataclass, or a mapping of all names.

    given: name -> value, as `[clip.options]` has them. Raises ConfigError for an unknown name, for
    a value whose type differs from the default's, and for a missing value without a default.
    """
    declared = rule.options
    if isinstance(declared, type) and isinstance(given, declared):
        return given
    if declared is None:
        if given:
            raise ConfigError(f"clip.options.{next(iter(given))} is set, but the rule {rule.name!r} has no options.")
        return given
    defaults: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    if isinstance(declared, type):
        kinds = {name: hint for name, hint in get_type_hints(declared).items() if name in declared.__dataclass_fields__}
        for field in dataclasses.fields(declared):
            if field.default is not dataclasses.MISSING:
                defaults[field.name] = field.default
    else:
        defaults = dict(declared)
        kinds = {name: type(value) for name, value in defaults.items()}
    for name, value in given.items():
        if name not in kinds:
            near = suggest_nearest_names(name, kinds)
            raise ConfigError(f"clip.options.{name} is not an option of the rule {rule.name!r}; {near}")
        if not _value_fits_type(value, kinds[name]):
            raise ConfigError(f"clip.options.{name} = {value!r} is not {OPTION_KINDS[kinds[name]]}.")
    values = {**defaults, **{n: float(v) if kinds[n] is float else v for n, v in given.items()}}
    lost = [name for name in kinds if name not in values]
    if lost:
        raise ConfigError(
            f"clip.options.{lost[0]} is missing; the rule {rule.name!r} needs {OPTION_KINDS[kinds[lost[0]]]}."
        )
    return declared(**values) if isinstance(declared, type) else values


OPTION_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
"""Types that options may have, in words."""


def _value_fits_type(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)
