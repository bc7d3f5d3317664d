"""What each layer's per-example gradients cost, beside what plain training of the layer costs.

    for row in measure_layer_costs(model, task, x, y, CostTerms(batch=64)):
        row.layer, row.way, row.because, row.flop_private / row.flop_plain

FLOP are those of matrix products and convolutions, two per multiply-add, as `torch.utils.flop_counter` counts them;
the rest of a step is bound by memory. Bytes are held at a time: inputs and output of the layer, its gradient, and what
the way needs beside them. Both follow from shapes; nothing is timed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs, count_examples, map_inputs, select_rows
from fulcrum.data.tasks import Task
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.ghost import list_sequence_uses
from fulcrum.gradients.outer_products import WRITE_READ_COST, WeightGradCost
from fulcrum.gradients.param_grads import SCRATCH_BYTES, EmbeddingGrad, OwnGrad, ParamGrad
from fulcrum.gradients.probe import NUM_PROBE_EXAMPLES
from fulcrum.gradients.program import UnsupportedModel
from fulcrum.gradients.recording import list_uses
from fulcrum.gradients.sequence import require_single_input
from fulcrum.gradients.stacked.layers import StackedProgram, StackedSite
from fulcrum.gradients.uses import UnknownUse, UsePlan, UseRecord, VmapSite
from fulcrum.models.layout import ParameterLayout, call_with_parameters

WAYS = ("ghost", "direct", "vmap", "frozen")
"""ghost: norms from inputs and output gradients, sums by the layer's ordinary weight gradient. direct: the gradient of
each example is written. vmap: the same, by torch.func. frozen: no gradient."""


@dataclass(frozen=True)
class LayerCost:
    """One layer in one step. way: one of WAYS. because: why this way, with the layer's sizes.

    flop_plain, bytes_plain: of plain training on the same batch. flop_private, bytes_private: with per-example
    gradients. layer: name of the module, or of the parameter where a module's parameters take several ways.
    """

    layer: str
    way: str
    because: str
    parameters: int
    flop_plain: float
    flop_private: float
    bytes_plain: float
    bytes_private: float


@dataclass(frozen=True)
class CostTerms:
    """What costs depend on beside the model.

    batch: records in a step. records_per_unit: of one protected unit, on average. written_out: why every gradient is
    written out whatever its shape; "" where it is not. item_bytes: bytes per number of an activation. norm_bytes: per
    number of the products that norms come from, 8 where bounds are proven. program: the hand-written passes of the
    stacked engine, where they are used.
    """

    batch: float
    records_per_unit: float = 1.0
    written_out: str = ""
    item_bytes: int = 4
    norm_bytes: int = 4
    program: StackedProgram | None = None

    @property
    def units(self) -> float:
        """Protected units in a step."""
        return self.batch / self.records_per_unit


def measure_layer_costs(
    model: nn.Module, task: Task, x: ModelInputs, y: Tensor, terms: CostTerms
) -> tuple[LayerCost, ...]:
    """The rows of a model's layers, in the order of its parameters; frozen modules last.

    x [n, ...], y [n, ...]: a few examples, of which shapes and types matter, and the range of integers.
    """
    layout = ParameterLayout.of(model)
    rows = torch.arange(NUM_PROBE_EXAMPLES, device=y.device) % count_examples(x)
    x, y = select_rows(x, rows), y[rows]
    own = layout.flatten(model).to(y.device)

    def count() -> dict[str, float]:
        return count_plain_flop(model, layout, task, select_rows(x, slice(0, 1)), y[:1])

    try:
        found = _find_uses(model, layout, task, own, x, y, terms)
    except (UnsupportedModel, UnknownUse, RuntimeError) as problem:
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        counted = count()
        return (_describe_whole_model(layout, counted, terms, first), *_list_frozen(model, counted, terms))
    has_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    counted = count() if has_frozen or found.sites or found.has_unpriced(layout) else {}
    by_place: dict[int, list[_Priced]] = {}
    for site in found.sites:
        for place, priced in _price_site(site, layout, counted, terms).items():
            by_place.setdefault(place, []).append(priced)
    for use in found.uses:
        by_place.setdefault(use.place, []).append(_price_use(use, found.part(use.place), layout, terms, len(y)))
    return (*_gather_layers(layout, by_place, counted, terms.batch), *_list_frozen(model, counted, terms))


@dataclass(frozen=True)
class _Found:
    """How a pass uses the parameters: uses, modules that go through vmap, and the gradients of each parameter."""

    uses: tuple[UseRecord, ...]
    sites: tuple[VmapSite, ...] = ()
    parts: tuple[tuple[ParamGrad, ...], ...] = ()

    def part(self, place: int) -> ParamGrad | None:
        """The gradients of a parameter's first use."""
        return self.parts[place][0] if self.parts and self.parts[place] else None

    def has_unpriced(self, layout: ParameterLayout) -> bool:
        """Whether a use may have products that it does not know of: counting them takes a second or more."""
        return any(
            use.cost is None
            and len(layout.shapes[use.place]) > 1
            and not isinstance(self.part(use.place), EmbeddingGrad)
            for use in self.uses
        )


def _find_uses(
    model: nn.Module, layout: ParameterLayout, task: Task, own: Tensor, x: ModelInputs, y: Tensor, terms: CostTerms
) -> _Found:
    """Raises UnsupportedModel, UnknownUse or RuntimeError where book-keeping cannot follow the model."""
    if terms.program is not None:
        return _Found(list_program_uses(terms.program, len(y)))
    recorder = GradientRecorder(model, layout, task)
    recorder.settle(own, x, y)
    tape = recorder.record_once(own, x, y, fast=True)  # raises the objection, if there is one
    if recorder.plan is None:
        tensors = tuple(layout.unflatten(own).values())
        return _Found(list_sequence_uses(recorder.program, tensors, require_single_input(x)), (), tape.parts)
    sites = (*recorder.plan.sites, *_list_vmap_calls(recorder.plan, layout))
    return _Found(list_uses(model, layout, own, x, y, task, recorder.plan), sites, tape.parts)


def _list_vmap_calls(plan: UsePlan, layout: ParameterLayout) -> tuple[VmapSite, ...]:
    """Calls of functions that no rule knows, each with the module that owns its first parameter."""
    calls = [call for call in plan.calls.calls if call.kind == "vmap" and call.places]
    return tuple(
        VmapSite(layout.names[min(call.places)].rpartition(".")[0], call.places, {}, call.reason) for call in calls
    )


def count_plain_flop(
    model: nn.Module, layout: ParameterLayout, task: Task, x: ModelInputs, y: Tensor
) -> dict[str, float]:
    """FLOP per example of a plain forward and backward pass, by the name of each module, less those of modules in it.

    "" is the model itself.
    """
    from torch.utils.flop_counter import FlopCounterMode  # brings in torch's compiler

    counter = FlopCounterMode(display=False)
    own = {name: value.detach().requires_grad_() for name, value in layout.unflatten(layout.flatten(model)).items()}
    try:
        with counter, torch.enable_grad():
            inputs = map_inputs(Tensor.detach, x)
            loss = task.loss(call_with_parameters(model, own, inputs), y).sum()
            torch.autograd.grad(loss, list(own.values()), allow_unused=True)
    except RuntimeError:  # an operation that cannot be traced: nothing is known but what the uses say
        return {}
    root = type(model).__name__
    whole = {
        name.removeprefix(root).removeprefix("."): sum(found.values()) / len(y)
        for name, found in counter.flop_counts.items()
        if name == root or name.startswith(f"{root}.")
    }
    own_share = dict(whole)
    for name, value in whole.items():
        around = [other for other in whole if other != name and _is_within(name, other)]
        if around:  # a container that is never called, such as a ModuleList, is not among them
            own_share[max(around, key=len)] -= value
    return own_share


def _is_within(name: str, other: str) -> bool:
    """Whether the module of this name is the other one, or in it."""
    return not other or name == other or name.startswith(f"{other}.")


# --- the price of one use ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Priced:
    """A use of a parameter in one step. flop: of the products that training needs (None: see the module's count);
    more: what the way adds to them. held: bytes of inputs and output; extra: what the way holds beside them."""

    way: str
    because: str
    flop: float | None
    more: float
    held: float
    extra: float


def _price_use(
    use: UseRecord, part: ParamGrad | None, layout: ParameterLayout, terms: CostTerms, count: int
) -> _Priced:
    held = terms.item_bytes * use.elements / count * terms.batch
    if use.cost is None:
        return _price_without_choice(use, part, layout.sizes[use.place], terms, held)
    cost = dataclasses.replace(use.cost, positions=round(use.cost.positions * terms.records_per_unit))
    product = 2.0 * use.cost.entries * use.cost.positions * terms.batch
    plain = product * (3 if use.passes_on else 2)
    shape = (
        f"{use.function}, {cost.positions} position{'s' if cost.positions > 1 else ''}, {cost.inputs} x {cost.outputs}"
    )
    written, room = 4.0 * cost.entries, float(SCRATCH_BYTES["cuda"])
    if terms.written_out:
        more = 2.0 * cost.entries * terms.units
        return _Priced("direct", f"{shape}: {terms.written_out}", plain, more, held, written * terms.units)
    if cost.positions == 1:
        because = f"{shape}: the norms of input and output gradient multiply"
        return _Priced("ghost", because, plain, 0.0, held, 16.0 * terms.units)
    grams = terms.norm_bytes * 2.0 * cost.blocks * cost.positions**2
    compared = (
        f"products of positions {format_count(cost.ghost)}, writing {format_count(_price_writing(cost))} multiply-adds"
    )
    if terms.program is not None:
        sizes = (format_count(value) for value in (2 * cost.positions**2, cost.entries))
        compared = "products of positions {} entries, a gradient {}".format(*sizes)
    if use.materialised:
        more = 2.0 * cost.entries * terms.units
        return _Priced("direct", f"{shape}: {compared}", plain, more, held, written * terms.units)
    if cost.prefers_ghost_norms or terms.program is not None:
        more = 2.0 * cost.ghost * terms.units
        return _Priced("ghost", f"{shape}: {compared}", plain, more, held, min(grams * terms.units, room))
    because = f"{shape}: {compared}; written a few at a time for the norm and not kept"
    return _Priced("direct", because, plain, product, held, min(written * terms.units, max(room, written)))


def _price_writing(cost: WeightGradCost) -> int:
    """Multiply-adds that take as long as writing and reading the gradient of one unit."""
    return (cost.write_cost or WRITE_READ_COST) * cost.entries


def _price_without_choice(
    use: UseRecord, part: ParamGrad | None, entries: int, terms: CostTerms, held: float
) -> _Priced:
    if isinstance(part, EmbeddingGrad) and not terms.written_out:
        positions, width = part.index.shape[1], part.g.shape[-1]
        because = f"{use.function}, {positions} positions, {entries // width} x {width}: pairs of equal indices"
        more = 2.0 * positions**2 * width * terms.batch
        return _Priced("ghost", because, None, more, held, terms.norm_bytes * positions**2 * terms.batch)
    if isinstance(part, OwnGrad) and not terms.written_out:
        return _Priced("ghost", f"{use.function}: a registered rule, which has its own cost", None, 0.0, held, 0.0)
    why = f"{entries} entries per example" if not terms.written_out else terms.written_out
    return _Priced("direct", f"{use.function}: {why}", None, 0.0, held, 4.0 * entries * terms.batch)


def _price_site(
    site: VmapSite, layout: ParameterLayout, counted: Mapping[str, float], terms: CostTerms
) -> dict[int, _Priced]:
    """The module runs as it is, and again under vmap; its first parameter stands for the whole module.

    A call alone (`inner` is empty) is priced as two products per entry of its parameters.
    """
    again = terms.batch * sum(f for name, f in counted.items() if _is_within(name, site.name))
    because = f"{site.reason}, in {site.name or 'the model'}: it runs a second time under torch.func"
    if not site.inner:
        again = terms.batch * 4.0 * sum(layout.sizes[place] for place in site.places)
        because = f"{site.reason}: this call alone, under torch.func"
    first = min(site.places)
    return {
        place: _Priced(
            "vmap", because, None, again if place == first else 0.0, 0.0, 4.0 * layout.sizes[place] * terms.batch
        )
        for place in sorted(site.places)
    }


def _describe_whole_model(
    layout: ParameterLayout, counted: Mapping[str, float], terms: CostTerms, reason: str
) -> LayerCost:
    flop, once = terms.batch * sum(counted.values()), 4.0 * layout.dim
    return LayerCost("model", "vmap", reason, layout.dim, flop, flop, once, once + 4.0 * layout.dim * terms.batch)


# --- from uses to layers ----------------------------------------------------------------------------


def _gather_layers(
    layout: ParameterLayout, by_place: Mapping[int, Sequence[_Priced]], counted: Mapping[str, float], batch: float
) -> list[LayerCost]:
    """One row per module; one per parameter with several dimensions where these take several ways."""
    modules: dict[str, list[int]] = {}
    for place, name in enumerate(layout.names):
        modules.setdefault(name.rpartition(".")[0], []).append(place)
    found = []
    for module, places in modules.items():
        used = [place for place in places if by_place.get(place)]
        large = [place for place in used if len(layout.shapes[place]) > 1] or used
        ways = {by_place[place][0].way for place in large}
        split = [[place] for place in large] if len(ways) > 1 else [large]
        rest = [place for place in places if place not in large]
        for n, group in enumerate(split):
            chosen = [*group, *(rest if n == 0 else ())]
            name = module if len(split) == 1 else layout.names[group[0]]
            flop = counted.get(module, 0.0) * batch if n == 0 else 0.0
            found.append(_make_layer(name or "model", chosen, layout, by_place, flop))
    return found


def _make_layer(
    name: str,
    places: Sequence[int],
    layout: ParameterLayout,
    by_place: Mapping[int, Sequence[_Priced]],
    counted: float,
) -> LayerCost:
    """counted: FLOP of the module's plain training, for uses that do not know their own."""
    uses = [priced for place in places for priced in by_place.get(place, ())]
    entries = sum(layout.sizes[place] for place in places)
    held = 4.0 * entries + sum(use.held for use in uses)
    if not uses:
        return LayerCost(name, "frozen", "no example uses it", entries, 0.0, 0.0, held, held)
    known = [use.flop for use in uses if use.flop is not None]
    plain = sum(known) if known else counted
    times = len(by_place[places[0]])
    because = uses[0].because + (f"; used {times} times" if times > 1 else "")
    more, extra = sum(use.more for use in uses), sum(use.extra for use in uses)
    return LayerCost(name, uses[0].way, because, entries, plain, plain + more, held, held + extra)


def _list_frozen(model: nn.Module, counted: Mapping[str, float], terms: CostTerms) -> list[LayerCost]:
    """The largest modules of whose parameters none is trained: they cost what they cost without privacy."""
    found: list[LayerCost] = []

    def visit(module: nn.Module, name: str) -> None:
        own = list(module.parameters())
        if own and not any(p.requires_grad for p in own):
            inner = (f for each, f in counted.items() if _is_within(each, name))
            flop, held = terms.batch * sum(inner), 4.0 * sum(p.numel() for p in own)
            entries = sum(p.numel() for p in own)
            found.append(LayerCost(name or "model", "frozen", "it is not trained", entries, flop, flop, held, held))
            return
        for child, inner_module in module.named_children():
            visit(inner_module, f"{name}.{child}" if name else child)

    visit(model, "")
    return found


def list_program_uses(program: StackedProgram, count: int) -> tuple[UseRecord, ...]:
    """The uses of a hand-written stacked program, for `count` examples."""
    found: list[UseRecord] = []
    for step in program.steps:
        if not isinstance(step, StackedSite):
            continue
        cost = WeightGradCost(1, step.positions, step.inputs, step.outputs)
        written = step.positions > 1 and not step.ghost
        name = "Conv2d" if step.is_convolution else "Linear"
        held = count * step.positions * (step.inputs + step.outputs)
        found.append(UseRecord(step.weight, name, cost, written, held, bool(found)))
        if step.bias is not None:
            found.append(UseRecord(step.bias, name, None, False, 0, True))
    return tuple(found)


# --- for people -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LikeLayers:
    """Layers with the same way, reason and costs. names: of all of them; cost: of one."""

    names: tuple[str, ...]
    cost: LayerCost


def merge_like_layers(rows: Iterable[LayerCost]) -> list[LikeLayers]:
    """Rows that differ by name alone as one, where the first of them stands."""
    found: dict[LayerCost, list[str]] = {}
    for row in rows:
        found.setdefault(dataclasses.replace(row, layer=""), []).append(row.layer)
    return [LikeLayers(tuple(names), dataclasses.replace(cost, layer=names[0])) for cost, names in found.items()]


def format_count(value: float) -> str:
    """A count with three digits and a unit: 1.23M."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"
