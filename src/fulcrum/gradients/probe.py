"""The one comparison of a model with its own forward with autograd, before it is trained."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs, map_inputs, select_rows
from fulcrum.data.tasks import Task
from fulcrum.errors import ModelError
from fulcrum.gradients.ghost import GhostTape, record_ghost_tape
from fulcrum.gradients.plain_calls import run_plainly
from fulcrum.gradients.program import GradProgram, UnsupportedModel
from fulcrum.gradients.recording import DIFFERS, make_up_inputs, plan_uses, use_modules, use_vmap
from fulcrum.gradients.uses import UnknownUse, UsePlan
from fulcrum.models.layout import ParameterLayout, call_with_parameters
from fulcrum.models.prepared import EXAMPLE_KEYS

NUM_PROBE_EXAMPLES = 3
"""Number of examples for the one comparison with autograd of a model with its own forward."""

ROOM = {torch.float64: (1e-6, 1e-9), torch.float32: (1e-3, 1e-6)}
"""How far a gradient may be from autograd's, in units of its own norm and of the norm over all parameters."""


def compare_with_autograd(
    model: nn.Module, layout: ParameterLayout, params: Tensor, x: ModelInputs, y: Tensor, task: Task
) -> UsePlan:
    """The plan by which a model is followed. Raises UnsupportedModel where there is none.

    Tested on random examples with the model's own parameters in float64, against autograd on one example after the
    other. The result depends neither on the data nor on the training progress, so that a resumed run takes the same
    path. Dropout without keys is off: it draws other numbers for one example than for three.
    """
    index = torch.arange(NUM_PROBE_EXAMPLES, device=y.device) % len(y)
    few = torch.zeros_like(y[index])  # not the data's: a huge one would overflow and decide for everybody
    probe = make_up_inputs(x, NUM_PROBE_EXAMPLES)
    try:
        twin = _copy_without_dropout(model, x)
    except (RuntimeError, TypeError) as problem:
        raise ModelError(
            f"The model cannot be copied with copy.deepcopy, which every worker needs: {_find_first_line(problem)}."
        ) from problem
    try:
        wide: ModelInputs = map_inputs(lambda value: value.double() if value.is_floating_point() else value, probe)
        return _probe(twin.double(), layout, layout.flatten(twin).to(params.device), wide, few, task)
    except RuntimeError:  # the model insists on float32
        twin = _copy_without_dropout(model, x)
    try:
        return _probe(twin, layout, layout.flatten(twin).to(params), probe, few, task)
    except RuntimeError as problem:
        raise UnsupportedModel(_find_first_line(problem)) from problem


def _find_first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")


def _copy_without_dropout(model: nn.Module, x: ModelInputs) -> nn.Module:
    """A copy that draws no random numbers, or (with keys among its inputs) the same for an example in any batch."""
    twin = copy.deepcopy(model)
    if not isinstance(x, Tensor) and EXAMPLE_KEYS in x:
        return twin
    for module in twin.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return twin


def _probe(twin: nn.Module, layout: ParameterLayout, own: Tensor, x: ModelInputs, y: Tensor, task: Task) -> UsePlan:
    """The first plan whose gradients are those of autograd: for what differs, vmap over functions, then modules."""
    program = GradProgram({}, ())
    plan = plan_uses(twin, layout, own, x, y, task)
    truth = _differentiate_each(twin, layout, own, x, y, task)
    if not any(bool(value.norm() > 0) for row in truth for value in row):
        raise UnsupportedModel("it has no finite gradients to compare")
    while True:
        try:
            tape = record_ghost_tape(twin, program, layout, own, x, y, task, plan, fast=True)
        except UnknownUse as problem:
            plan = use_modules(plan, twin, layout, problem.places, str(problem))
            continue
        wrong = _find_differences(tape, truth)
        if not wrong:
            return plan
        plan = use_vmap(plan, wrong) or use_modules(plan, twin, layout, sorted(wrong), DIFFERS)


def _differentiate_each(
    twin: nn.Module, layout: ParameterLayout, own: Tensor, x: ModelInputs, y: Tensor, task: Task
) -> list[tuple[Tensor, ...]]:
    """The gradient in each tensor of the layout, one example after the other."""
    tensors = {name: value.detach().requires_grad_() for name, value in layout.unflatten(own).items()}
    rows = []
    for row in range(len(y)):
        part = slice(row, row + 1)
        with torch.enable_grad(), run_plainly(twin):
            loss = task.loss(call_with_parameters(twin, tensors, select_rows(x, part)), y[part]).sum()
            given = (loss, list(tensors.values()))
            rows.append(torch.autograd.grad(*given, allow_unused=True, materialize_grads=True))
    return rows


def _find_differences(tape: GhostTape, truth: list[tuple[Tensor, ...]]) -> frozenset[int]:
    """The tensors whose gradients or norms differ from the true ones."""
    norms = tape.norms(tuple(range(len(tape.parts))))
    wrong = set()
    for row, wanted in enumerate(truth):
        size = torch.stack([value.double().norm() for value in wanted]).norm()
        for place, (value, uses) in enumerate(zip(wanted, tape.parts, strict=True)):
            found = torch.zeros_like(value).reshape(-1)
            for use in uses:
                found = found + use.slice(row, row + 1).rows().reshape(-1)
            own, whole = ROOM.get(value.dtype, ROOM[torch.float32])
            room = own * value.norm() + whole * size
            if not ((found - value.reshape(-1)).norm() <= room and (norms[row, place] - value.norm()).abs() <= room):
                wrong.add(place)
    return frozenset(wrong)
