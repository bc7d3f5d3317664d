"""One pass of a model with its own forward, and the plan by which its parameters are followed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs, count_examples, list_input_tensors, map_inputs
from fulcrum.data.tasks import Task
from fulcrum.gradients.call_log import CallLog
from fulcrum.gradients.call_plan import make_call_plan
from fulcrum.gradients.plain_calls import run_plainly
from fulcrum.gradients.program import UnsupportedModel
from fulcrum.gradients.tape import check_loss_per_example
from fulcrum.gradients.uses import LAYER_RULES, UnknownUse, UsePlan, UseRecord, UseRecorder, VmapSite
from fulcrum.models.layout import ParameterLayout, call_with_parameters
from fulcrum.rng import torch_generator

DIFFERS = "its gradients differ from those of autograd"


def record_uses(
    model: nn.Module,
    layout: ParameterLayout,
    tensors: tuple[Tensor, ...],
    x: ModelInputs,
    y: Tensor,
    task: Task,
    plan: UsePlan,
    half: bool = False,
    channels_last: bool = False,
    planning: bool = False,
) -> tuple[UseRecorder, Tensor]:
    """One forward and backward pass: the recorder with all parameters' gradients, and the losses [B].

    Raises UnknownUse where the plan asks for a rule that does not fit.
    """
    count = count_examples(x)
    recorder = UseRecorder(tensors, count, plan, channels_last, planning)
    with run_plainly(model):
        with ExitStack() as hooks, torch.enable_grad():
            attach_hooks(recorder, model, layout, plan, hooks)
            inputs = map_inputs(Tensor.detach, x)
            with torch.autocast(y.device.type, torch.bfloat16, enabled=half), recorder:
                outputs = call_with_parameters(model, dict(zip(layout.names, tensors, strict=True)), inputs)
            if not isinstance(outputs, Tensor):
                raise UnsupportedModel(f"its output is no tensor but {type(outputs).__name__}")
            outputs = outputs.float() if half else outputs
            losses = check_loss_per_example(task.loss(outputs, y), count)
            total = losses.sum()
        recorder.choose()
        recorder.report = tuple(recorder.list_uses())
        if total.requires_grad:
            torch.autograd.grad(total, recorder.anchor, allow_unused=True)
        recorder.finish()
    return recorder, losses.detach()


def attach_hooks(
    recorder: UseRecorder, model: nn.Module, layout: ParameterLayout, plan: UsePlan, hooks: ExitStack
) -> None:
    """Adds hooks to the modules that are not followed call by call, until `hooks` closes."""
    alone = {site.name for site in plan.sites}

    def watch(site: VmapSite) -> None:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            return recorder.leave_site(site, module, args, kwargs, out)

        module = model.get_submodule(site.name)
        hooks.callback(module.register_forward_pre_hook(lambda *_: recorder.enter_site(site)).remove)
        hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def watch_layer(name: str, layer: nn.Module) -> None:
        inner = {each: known[id(p)] for each, p in layer.named_parameters(recurse=False) if id(p) in known}
        site, rule = VmapSite(name, frozenset(inner.values()), inner, type(layer).__name__), LAYER_RULES[type(layer)]

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return recorder.leave_layer(site, module, rule, args, out)

        hooks.callback(layer.register_forward_pre_hook(lambda *_: recorder.enter_site(site)).remove)
        hooks.callback(layer.register_forward_hook(after).remove)

    for site in plan.sites:
        watch(site)
    known = _find_places(model, layout)
    for name, module in model.named_modules() if LAYER_RULES else ():
        if type(module) in LAYER_RULES and name not in alone:
            watch_layer(name, module)


def _find_places(model: nn.Module, layout: ParameterLayout) -> dict[int, int]:
    """The place in the layout of each parameter, by its id."""
    named = dict(model.named_parameters())
    return {id(named[each]): place for place, each in enumerate(layout.names)}


def list_uses(
    model: nn.Module,
    layout: ParameterLayout,
    params: Tensor,
    x: ModelInputs,
    y: Tensor,
    task: Task,
    plan: UsePlan,
) -> tuple[UseRecord, ...]:
    """How a pass uses each parameter, for a report."""
    tensors = tuple(layout.unflatten(params.detach()).values())
    return record_uses(model, layout, tensors, x, y, task, plan)[0].report


# --- the plan -------------------------------------------------------------------------------------


def make_up_inputs(x: ModelInputs, count: int, changed: str = "") -> ModelInputs:
    """So many examples: random numbers in [0, 1); integers from the data, which alone show what is valid.

    changed: "first": another first example; "all": other examples.
    """
    stream = torch_generator(0, "probe", changed == "all")
    index = torch.arange(count)
    index = (index + (index == 0) * int(changed == "first") + count * int(changed == "all")) % count_examples(x)

    def made_up(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value[index.to(value.device)]
        drawn = torch.rand((count, *value.shape[1:]), generator=stream, dtype=value.dtype)
        drawn[0] = drawn[0] * 0.5 + 0.25 if changed == "first" else drawn[0]
        return drawn.to(value.device)

    found: ModelInputs = map_inputs(made_up, x)
    return found


def plan_uses(
    model: nn.Module, layout: ParameterLayout, params: Tensor, x: ModelInputs, y: Tensor, task: Task
) -> UsePlan:
    """The plan for examples like x, y: runs the model on made-up ones. Raises UnsupportedModel where there is none."""
    tensors = tuple(layout.unflatten(params.detach()).values())

    def run(count: int, log: CallLog, changed: str) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
        leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        with ExitStack() as hooks:
            hooks.enter_context(run_plainly(model))
            for handle in log.watch(model):
                hooks.callback(handle.remove)
            inputs = make_up_inputs(x, count, changed)
            with torch.enable_grad(), log:
                call_with_parameters(model, dict(zip(layout.names, leaves, strict=True)), inputs)
        return leaves, list_input_tensors(inputs)

    plan = UsePlan(make_call_plan(run))
    known = _find_places(model, layout)
    for name in sorted(plan.calls.unsteady):
        inner = {each: known[id(p)] for each, p in model.get_submodule(name).named_parameters() if id(p) in known}
        site = VmapSite(name, frozenset(inner.values()), inner, "it calls other functions for other examples")
        plan = replace(plan, sites=(*plan.sites, site)) if inner else plan
    few = make_up_inputs(x, len(y))
    for _ in range(2 + 2 * len(tensors) * (1 + max(name.count(".") for name in layout.names))):
        try:
            recorder, _ = record_uses(model, layout, tensors, few, y, task, plan, planning=True)
            return replace(plan, calls=plan.calls.by_vmap(recorder.unknown, recorder.whole))
        except UnknownUse as problem:
            plan = use_modules(plan, model, layout, problem.places or range(len(tensors)), str(problem))
    raise UnsupportedModel("no module around its unknown uses has one example per row")


def use_modules(
    plan: UsePlan, model: nn.Module, layout: ParameterLayout, places: Iterable[int], reason: str
) -> UsePlan:
    """The plan with vmap for the modules that own these parameters; or for those around, where it is so already."""
    sites = {site.name: site for site in plan.sites}
    known = _find_places(model, layout)
    for place in places:
        around = layout.names[place]
        for name, site in list(sites.items()):
            if place in site.places:
                around = name
                sites[name] = replace(site, places=site.places - {place})
                if not sites[name].places:
                    del sites[name]
        if not around:
            raise UnsupportedModel(reason)
        name = around.rpartition(".")[0]
        while isinstance(model.get_submodule(name), torch.jit.ScriptModule) and name:
            name = name.rpartition(".")[0]  # its parameters cannot be exchanged
        inner = {each: known[id(p)] for each, p in model.get_submodule(name).named_parameters() if id(p) in known}
        site = sites.get(name, VmapSite(name, frozenset(), inner, reason))
        sites[name] = replace(site, places=site.places | {place})
    return replace(plan, sites=tuple(sites.values()))


def use_vmap(plan: UsePlan, places: frozenset[int]) -> UsePlan | None:
    """The plan with vmap for the functions that use these parameters; None where it is so already, or not possible."""
    numbers = {n: DIFFERS for n, call in enumerate(plan.calls.calls) if call.kind == "use" and call.places & places}
    return replace(plan, calls=plan.calls.by_vmap(numbers)) if numbers else None
