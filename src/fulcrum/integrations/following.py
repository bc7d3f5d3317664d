"""How a model's parameters are followed in a pass that somebody else runs: all that knows the insides of `gradients`.

`find_plan` tries the model out on made-up examples. `FollowedPass` runs one forward pass by that plan and takes the
gradients of its outputs back; where there is no plan, `WholePass` does the same by vmap over the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fulcrum.data.tasks import Task
from fulcrum.errors import ModelError
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.param_grads import MaterialisedGrad
from fulcrum.gradients.plain_calls import run_plainly
from fulcrum.gradients.program import UnsupportedModel
from fulcrum.gradients.recording import attach_hooks
from fulcrum.gradients.uses import UnknownUse, UsePlan, UseRecorder
from fulcrum.models.draws import KeyedDraws
from fulcrum.models.layout import ParameterLayout, call_module

# --- trying the model out -----------------------------------------------------------------------------


def _probe_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss of any outputs [B, O] whose gradient has no zeros: [B]."""
    slopes = torch.cos(torch.arange(outputs.shape[1], device=outputs.device, dtype=outputs.dtype)) + 1.5
    return (outputs * slopes + 0.1 * outputs.square()).sum(dim=1)


PROBE_TASK = Task("outputs", 1, _probe_loss, {}, "loss", lambda outputs: outputs, lambda name, value: torch.zeros(0))
"""In place of a task where only the model is tried out."""


def give_one_output(model: nn.Module, fixed: Mapping[str, Any]) -> None:
    """Changes the model's class: called with tensors by name, it gives all its outputs as one tensor [B, ...].

    fixed: its other arguments. A class, not an attribute of the model: copies of the model have it too.
    """
    kind = type(model)

    def forward(self: nn.Module, **tensors: Tensor) -> Tensor:
        count = len(next(iter(tensors.values())))
        found = tree_leaves(kind.forward(self, **tensors, **fixed))
        rows = [leaf.reshape(count, -1) for leaf in found if is_float_rows(leaf, count)]
        return torch.cat([row for row in rows if row.requires_grad] or rows, dim=1)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def is_float_rows(leaf: Any, count: int) -> bool:
    """Whether a value is a tensor of floating-point numbers with one row per example."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count and leaf.is_floating_point()


def find_plan(twin: nn.Module, layout: ParameterLayout, tensors: Mapping[str, Tensor], fixed: Any) -> UsePlan | None:
    """How to follow a model; None where only vmap over the whole model can.

    twin: a copy of the model that may be changed. tensors: made-up inputs of a few examples by name.
    """
    random = draws_numbers(twin)
    silence(twin)
    give_one_output(twin, fixed)
    follower = GradientRecorder(twin, layout, PROBE_TASK)
    first = next(iter(tensors.values()))
    follower.settle(layout.flatten(twin), dict(tensors), torch.zeros(len(first), device=first.device))
    # A module that runs again in vmap would draw other numbers.
    return None if follower.objection or (random and follower.plan and follower.plan.sites) else follower.plan


def draws_numbers(model: nn.Module) -> bool:
    """Whether a model seems to have random layers, such as dropout."""
    return any(value > 0 for module in model.modules() for value in _list_chances(module).values())


def silence(model: nn.Module) -> None:
    """Sets the probabilities of random layers to 0."""
    for module in model.modules():
        for name in _list_chances(module):
            setattr(module, name, 0.0)


def _list_chances(module: nn.Module) -> dict[str, float]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or name == "p")
    }


# --- one pass -------------------------------------------------------------------------------------------


class OtherPath(Exception):
    """A pass uses its parameters in another way than the plan knows."""


class RecordedPass(Protocol):
    """A forward pass of `count` examples, whose outputs wait for their gradients."""

    @property
    def count(self) -> int: ...

    def go_back(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], losses: Tensor) -> GhostTape: ...


@dataclass(frozen=True)
class PassInputs:
    """A call of the model: forward, its own, and its arguments; keys [B] of the examples, for random layers."""

    model: nn.Module
    layout: ParameterLayout
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: Tensor

    @property
    def count(self) -> int:
        """Number of examples B."""
        return len(self.keys)

    def detach_parameters(self) -> dict[str, Tensor]:
        """The parameters of the layout without history, by name."""
        named = dict(self.model.named_parameters())
        return {name: named[name].detach() for name in self.layout.names}


def make_tape(layout: ParameterLayout, parts: Any, losses: Tensor, like: Tensor, elements: int) -> GhostTape:
    """A tape of parameter gradients."""
    size = like.new_zeros(1).expand(layout.dim)
    return GhostTape(layout, size, losses.to(like.dtype), tuple(map(tuple, parts)), elements, True)


@dataclass(frozen=True)
class FollowedPass:
    """A pass by a plan, call by call."""

    given: PassInputs
    recorder: UseRecorder

    @property
    def count(self) -> int:
        return self.given.count

    @staticmethod
    def run(given: PassInputs, plan: UsePlan) -> tuple[FollowedPass, Any]:
        """Runs the model with detached parameters, so that nothing is added to their .grad. Raises OtherPath."""
        tensors = given.detach_parameters()
        recorder = UseRecorder(tuple(tensors.values()), given.count, plan)
        try:
            with ExitStack() as stack:
                stack.enter_context(run_plainly(given.model))
                attach_hooks(recorder, given.model, given.layout, plan, stack)
                stack.enter_context(_reparametrize_module(given.model, find_slots(given.model, tensors)))
                stack.enter_context(recorder)
                stack.enter_context(KeyedDraws(given.keys))
                out = given.forward(*given.args, **given.kwargs)
        except (UnknownUse, UnsupportedModel) as problem:
            raise OtherPath(str(problem)) from None
        return FollowedPass(given, recorder), out

    def go_back(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], losses: Tensor) -> GhostTape:
        """The tape of the pass, from the gradient of each output; losses [B]."""
        recorder = self.recorder
        recorder.choose()
        try:
            with run_plainly(self.given.model):
                torch.autograd.grad(list(outputs), recorder.anchor, list(grads), allow_unused=True)
                recorder.finish()
        except (UnknownUse, UnsupportedModel) as problem:
            raise ModelError(f"per-example gradients cannot follow the model: {problem}.") from None
        return make_tape(self.given.layout, recorder.parts, losses, recorder.tensors[0], recorder.elements)


@dataclass(frozen=True)
class WholePass:
    """A pass whose gradients come by vmap over the whole model, which runs again for each example alone."""

    given: PassInputs
    places: tuple[int, ...]
    """The outputs, as leaves of what the model gives."""

    @property
    def count(self) -> int:
        return self.given.count

    @staticmethod
    def run(given: PassInputs) -> tuple[WholePass, Any]:
        """Runs the model; its outputs are leaves that wait for gradients."""
        tensors = given.detach_parameters()
        with (
            torch.no_grad(),
            _reparametrize_module(given.model, find_slots(given.model, tensors)),
            KeyedDraws(given.keys),
        ):
            out = given.forward(*given.args, **given.kwargs)
        leaves, shape = tree_flatten(out)
        places = tuple(n for n, leaf in enumerate(leaves) if is_float_rows(leaf, given.count))
        taken = [leaf.detach().clone().requires_grad_() if n in places else leaf for n, leaf in enumerate(leaves)]
        return WholePass(given, places), tree_unflatten(taken, shape)

    def go_back(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], losses: Tensor) -> GhostTape:
        """The tape of the pass, from the gradient of each output; losses [B]."""
        given = self.given
        leaves, shape = tree_flatten((given.args, given.kwargs))
        rows = {
            n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == self.count
        }

        def one(tensors: dict[str, Tensor], own: list[Tensor], slopes: list[Tensor], key: Tensor) -> Tensor:
            mine = iter(own)
            filled = [next(mine).unsqueeze(0) if n in rows else leaf for n, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(filled, shape)
            with KeyedDraws(key.reshape(1)):
                found = tree_leaves(call_module(given.model, tensors, args, kwargs))
            return torch.stack([(found[n][0] * g).sum() for n, g in zip(self.places, slopes, strict=True)]).sum()

        tensors = given.detach_parameters()
        batch = ([leaves[n] for n in sorted(rows)], list(grads), given.keys)
        differentiate = grad(one)
        try:
            made: dict[str, Tensor] = vmap(differentiate, in_dims=(None, 0, 0, 0))(tensors, *batch)
        except RuntimeError:  # a function that vmap does not know: one example after the other
            each = [
                differentiate(tensors, [x[i] for x in batch[0]], [g[i] for g in batch[1]], batch[2][i])
                for i in range(self.count)
            ]
            made = {name: torch.stack([found[name] for found in each]) for name in tensors}
        parts = [(MaterialisedGrad(made[name].flatten(1)),) for name in given.layout.names]
        return make_tape(given.layout, parts, losses, next(iter(tensors.values())), given.layout.dim * self.count)


def find_slots(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under every name that a parameter has in the model."""
    given = {id(parameter): tensors[name] for name, parameter in model.named_parameters() if name in tensors}
    return {
        f"{place}.{name}" if place else name: given[id(parameter)]
        for place, module in model.named_modules()  # each module once
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in given
    }
