"""How a model's parameters are followed in a pass that somebody else runs: all that knows the insides of `gradients`.

`find_plan` tries the model out on made-up examples; `FollowedPass` runs one forward pass and takes the gradients of its
outputs back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

from fulcrum.data.tasks import Task
from fulcrum.errors import ModelError
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.program import UnsupportedModel
from fulcrum.gradients.uses import LAYER_RULES, LayerRule, UnknownUse, UseRecorder, VmapSite
from fulcrum.models.layout import ParameterLayout

FollowPlan = tuple[VmapSite, ...]
"""The modules whose parameters go through vmap; all others are followed call by call."""


class _OneOutput(nn.Module):
    """A model whose outputs are one tensor [B, ...], called with tensors by name; `fixed` are its other arguments."""

    def __init__(self, inner: nn.Module, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.inner, self.fixed = inner, dict(fixed)

    def forward(self, **tensors: Tensor) -> Tensor:
        count = len(next(iter(tensors.values())))
        rows = [
            leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]
            for leaf in tree_leaves(self.inner(**tensors, **self.fixed))
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and len(leaf) == count
        ]
        return torch.cat([row for row in rows if row.requires_grad] or rows, dim=1)


def _probe_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss of any outputs [B, O] whose gradient has no zeros: [B]."""
    slopes = torch.cos(torch.arange(outputs.shape[1], device=outputs.device, dtype=outputs.dtype)) + 1.5
    return (outputs * slopes + 0.1 * outputs.square()).sum(dim=1)


PROBE_TASK = Task("outputs", 1, _probe_loss, {}, "loss", lambda outputs: outputs, lambda name, value: torch.zeros(0))
"""In place of a task where only the model is tried out."""


def find_plan(model: nn.Module, layout: ParameterLayout, tensors: Mapping[str, Tensor], fixed: Any) -> FollowPlan:
    """How to follow this model; tensors: made-up inputs of a few examples by name, fixed: its other arguments."""
    probe = _OneOutput(model, fixed)
    own = ParameterLayout.of(probe)
    follower = GradientRecorder(probe, own, PROBE_TASK)
    first = next(iter(tensors.values()))
    follower.settle(own.flatten(probe), dict(tensors), torch.zeros(len(first), device=first.device))
    if follower.objection:
        return (take_whole_model(layout, follower.objection),)
    prefix = "inner."
    found = [replace(site, name=site.name.removeprefix(prefix)) for site in follower.sites or ()]
    if any(site.name in ("", "inner") for site in found):
        return (take_whole_model(layout, found[0].reason),)
    return tuple(found)


def take_whole_model(layout: ParameterLayout, reason: str) -> VmapSite:
    """The model itself as what goes through vmap."""
    places = {name: place for place, name in enumerate(layout.names)}
    return VmapSite("", frozenset(places.values()), places, reason)


def refuse_dropout_by_vmap(model: nn.Module, plan: FollowPlan) -> None:
    """ModelError where a module that goes through vmap has dropout: it would run again, with other numbers."""
    for site in plan:
        for name, module in model.get_submodule(site.name).named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ModelError(
                    f"{site.name or 'the model'} has parameters that are followed by vmap ({site.reason}), and its "
                    f"dropout {name!r} would draw other numbers there; set its probability to 0."
                )


@dataclass(frozen=True)
class FollowedPass:
    """One forward pass of `count` examples, whose outputs wait for their gradients."""

    layout: ParameterLayout
    recorder: UseRecorder
    count: int

    @staticmethod
    def run(
        model: nn.Module,
        layout: ParameterLayout,
        plan: FollowPlan,
        count: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[FollowedPass, Any]:
        """Runs `forward`, the model's own, with detached parameters: nothing is ever added to their .grad."""
        named = dict(model.named_parameters())
        tensors = tuple(named[name].detach() for name in layout.names)
        recorder = UseRecorder(tensors, count)
        slots = find_slots(model, dict(zip(layout.names, tensors, strict=True)))
        root = next((site for site in plan if not site.name), None)
        try:
            with ExitStack() as stack:
                watch_modules(recorder, model, layout, tuple(site for site in plan if site.name), stack)
                stack.enter_context(_reparametrize_module(model, slots))
                if root is None:
                    with recorder:
                        out = forward(*args, **kwargs)
                else:
                    recorder.enter_site(root)
                    out = recorder.leave_site(root, model, args, kwargs, forward(*args, **kwargs))
        except (UnknownUse, UnsupportedModel) as problem:
            raise OtherPath(str(problem)) from None
        return FollowedPass(layout, recorder, count), out

    def go_back(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], losses: Tensor) -> GhostTape:
        """The tape of the pass, from the gradient of each output; losses [B]."""
        recorder = self.recorder
        recorder.choose()
        try:
            torch.autograd.grad(list(outputs), recorder.anchor, list(grads), allow_unused=True)
            recorder.finish()
        except (UnknownUse, UnsupportedModel) as problem:
            raise ModelError(f"per-example gradients cannot follow the model: {problem}.") from None
        first = recorder.tensors[0]
        size = first.new_zeros(1).expand(self.layout.dim)
        parts = tuple(tuple(each) for each in recorder.parts)
        return GhostTape(self.layout, size, losses.to(first.dtype), parts, recorder.elements, True)


class OtherPath(Exception):
    """A pass uses its parameters in another way than the plan knows."""


def watch_modules(
    recorder: UseRecorder, model: nn.Module, layout: ParameterLayout, sites: FollowPlan, hooks: ExitStack
) -> None:
    """Adds hooks to the modules that are not followed call by call, until `hooks` closes."""

    def watch(site: VmapSite) -> None:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            return recorder.leave_site(site, module, args, kwargs, out)

        module = model.get_submodule(site.name)
        hooks.callback(module.register_forward_pre_hook(lambda *_: recorder.enter_site(site)).remove)
        hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def watch_layer(name: str, layer: nn.Module, rule: LayerRule) -> None:
        inner = {each: known[id(p)] for each, p in layer.named_parameters(recurse=False) if id(p) in known}
        site = VmapSite(name, frozenset(inner.values()), inner, type(layer).__name__)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return recorder.leave_layer(site, module, rule, args, out)

        hooks.callback(layer.register_forward_pre_hook(lambda *_: recorder.enter_site(site)).remove)
        hooks.callback(layer.register_forward_hook(after).remove)

    for site in sites:
        watch(site)
    named = dict(model.named_parameters())
    known = {id(named[each]): number for number, each in enumerate(layout.names)}
    for name, module in model.named_modules() if LAYER_RULES else ():
        if type(module) in LAYER_RULES:
            watch_layer(name, module, LAYER_RULES[type(module)])


def find_slots(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under every name that a parameter has in the model."""
    given = {id(parameter): tensors[name] for name, parameter in model.named_parameters() if name in tensors}
    return {
        f"{place}.{name}" if place else name: given[id(parameter)]
        for place, module in model.named_modules()  # each module once
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in given
    }
