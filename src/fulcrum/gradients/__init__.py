"""Per-example gradients of a batch: norms, inner products and clipped sums without writing them all out.

    tape = record_gradients(model, layout, params, x, y, task)
    factors = (C / tape.norms()).clamp(max=1)
    clipped_sum = tape.weighted_sum(factors)

`record_gradients` uses ghost norms for the layers it knows (`ghost.py`) and vmap for everything else (`vmap.py`);
`list_gradient_paths` lists the method of each layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fulcrum.data.records import ModelInputs, list_input_tensors, select_rows, split_inputs
from fulcrum.data.tasks import Task
from fulcrum.errors import ModelError
from fulcrum.gradients import sequence
from fulcrum.gradients.ghost import GhostTape, record_ghost_tape, record_parts
from fulcrum.gradients.memory import retain_freed_memory
from fulcrum.gradients.param_grads import MaterialisedGrad, OwnGrad
from fulcrum.gradients.probe import NUM_PROBE_EXAMPLES, compare_with_autograd
from fulcrum.gradients.program import UnsupportedModel, analyse_model
from fulcrum.gradients.recording import list_uses, plan_uses, use_modules
from fulcrum.gradients.same_bits import refuse_bits_that_depend_on_place
from fulcrum.gradients.tape import ChunkedTape, EmptyTape, GradientTape, PaddedTape
from fulcrum.gradients.uses import (
    ParameterUse,
    UnknownUse,
    UsePlan,
    UseRecord,
    VmapSite,
    register_function_rule,
    register_layer,
)
from fulcrum.gradients.vmap import record_vmap_tape
from fulcrum.models.layout import ParameterLayout, call_with_parameters

__all__ = [
    "PROVEN_BLOCK",
    "GradientRecorder",
    "GradientTape",
    "MaterialisedGrad",
    "OwnGrad",
    "ParameterUse",
    "list_gradient_paths",
    "record_gradients",
    "register_function_rule",
    "register_layer",
    "retain_freed_memory",
]

PASS_MEMORY_BYTES = {"cpu": 24 * 2**20, "cuda": 4 * 2**30}
"""Maximum bytes of layer inputs and outputs per pass: a larger batch is processed in pieces. On a CPU a higher limit
saves a few percent of the time, but every worker needs that memory."""

FEWEST_EXAMPLES, LARGEST_PASS_BYTES = 16, 512 * 2**20
"""A model with its own forward gets at least so many examples per pass, unless they take more bytes than this."""

FEW_EXAMPLES, USUAL_EXAMPLES, LARGEST_HOST_PASS = 16, 64, 384 * 2**20
"""The same on a CPU, where pieces are worked on side by side and add up a sum of the model's size each: two pieces
from FEW_EXAMPLES on, and 4, 8, ... so that a piece has at most USUAL_EXAMPLES and bytes of this number."""

PROVEN_BLOCK = 32
"""Examples per pass where an example's numbers must not depend on how many others there are."""


def get_example_shape(x: ModelInputs) -> Hashable:
    """The shapes of one example's inputs."""
    return tuple(value.shape[1:] for value in list_input_tensors(x))


class GradientRecorder:
    """Records batches of one model and analyses its structure once: `recorder(params, x, y)` is a `GradientTape`.

    task: gives the loss and its gradient in the model's outputs. x is one tensor [B, ...] of any type,
    or several by name; y [B, ...] are the task's targets.

    block: if above 0, every pass sees exactly this many examples, the last one filled up with copies of the first
    example. The numbers of an example then do not depend on how many others there are: matrix products of other shapes
    round differently. 0: passes of any size.

    The model's layers, hooks and frozen parameters must not change while the recorder is in use. Threads may share
    the recorder of a plain `nn.Sequential` (`is_thread_safe`). Any other model gets hooks for the duration of a call,
    and each thread needs a `clone`.
    """

    def __init__(
        self, model: nn.Module, layout: ParameterLayout, task: Task, how: str = "auto", block: int = 0
    ) -> None:
        if how not in ("auto", "book", "vmap"):
            raise ModelError(f"how = {how!r} is not known; choose one of auto, book, vmap.")
        if block and all(value.device.type == "cpu" for value in model.parameters()):
            refuse_bits_that_depend_on_place()
        self.model, self.layout, self.task, self.how, self.block = model, layout, task, how, block
        self.program = analyse_model(model, layout)
        self._plans: dict[Hashable, UsePlan] = {}
        """How the parameters of a model with its own forward are followed, by the shape of examples."""
        self._verdict: str | None = None if how == "auto" and not self.program.sequence else ""
        self._elements: dict[Hashable, int] = {}
        self._channels_last = True
        """Whether images may change their memory format: until the model turns out to rely on it."""

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may use this recorder at the same time."""
        return bool(self.program.sequence) and self.how != "vmap"

    def clone(self) -> GradientRecorder:
        """A recorder of a copy of the model, for another thread; it keeps the results of the analysis."""
        shared: dict[int, Any] = {id(parameter): parameter for parameter in self.model.parameters()}  # never written to
        model = copy.deepcopy(self.model, shared)
        other = GradientRecorder(model, self.layout, self.task, self.how, self.block)
        other._verdict, other._elements = self._verdict, dict(self._elements)
        other._plans, other._channels_last = dict(self._plans), self._channels_last
        return other

    @property
    def sites(self) -> tuple[VmapSite, ...] | None:
        """Modules that go through vmap as a whole; None until the first batch. After `settle`."""
        plan = self.plan
        return () if self.program.sequence else None if plan is None else plan.sites

    @property
    def plan(self) -> UsePlan | None:
        """How the parameters of a model with its own forward are followed. After `settle`."""
        return next(iter(self._plans.values()), None)

    def __call__(self, params: Tensor, x: ModelInputs, y: Tensor) -> GradientTape:
        """One forward and backward pass over x [B, ...], y [B, ...] with the parameters `params` [d]."""
        if len(y) == 0:
            return EmptyTape(params.detach())
        pieces = self.split(params, x, y)
        tapes = tuple(self.record_piece(params, x, y, piece) for piece in pieces)
        return tapes[0] if len(tapes) == 1 else ChunkedTape(tapes, tuple(p.stop - p.start for p in pieces))

    def split(self, params: Tensor, x: ModelInputs, y: Tensor) -> tuple[slice, ...]:
        """The pieces that a batch of at least one example is recorded in.

        They depend on the shapes only, so that a resumed run has the same rounding.
        """
        if self._follows(params, x, y) and not self.block:
            each = self._choose_piece_size(params, x, y)
        else:
            each = self.block or len(y)
        return tuple(slice(start, min(start + each, len(y))) for start in range(0, len(y), each))

    def record_piece(self, params: Tensor, x: ModelInputs, y: Tensor, piece: slice) -> GradientTape:
        """The tape of one piece of `split`."""
        if not self.block:
            if piece == slice(0, len(y)):
                return self._record(params, x, y)
            return self._record(params, select_rows(x, piece), y[piece])
        count = piece.stop - piece.start
        rows = torch.arange(piece.start, piece.start + self.block, device=y.device)
        rows = torch.where(rows < piece.stop, rows, torch.zeros_like(rows))
        return PaddedTape(self._record_block(params, select_rows(x, rows), y[rows]), count, self.block)

    def measure_example(self, params: Tensor, x: ModelInputs, y: Tensor) -> int:
        """Bytes that a pass holds for one example like those of x, y: inputs and outputs of layers; 0: not known."""
        if not self._follows(params, x, y):
            return 0
        return self._elements[get_example_shape(x)] * params.element_size()

    def record_together(self, params: Sequence[Tensor], parts: tuple[slice, ...], x: Tensor, y: Tensor) -> GhostTape:
        """One pass of a plain sequence over the examples of several clients; see `ghost.record_parts`."""
        return record_parts(self.program, self.layout, params, parts, x, y, self.task)

    def _follows(self, params: Tensor, x: ModelInputs, y: Tensor) -> bool:
        """Whether ghost norms are used; settled with the first batch."""
        if self.how == "vmap":
            return False
        try:
            self.settle(params, x, y)
            self._count_elements_once(params, x, y)
        except UnsupportedModel as problem:
            self._verdict = str(problem)
        if self._verdict and self.how == "book":
            raise ModelError(f"book-keeping cannot follow this model ({self._verdict}); use how = 'vmap'.")
        return not self._verdict

    def _record(self, params: Tensor, x: ModelInputs, y: Tensor) -> GradientTape:
        """The tape of a piece that is not empty."""
        if not self._follows(params, x, y):
            return record_vmap_tape(self.model, self.layout, params, x, y, self.task)
        try:
            return self.record_once(params, x, y, fast=not self.block)
        except UnsupportedModel as problem:
            if self.how == "book":
                raise ModelError(f"book-keeping cannot follow this model ({problem}); use how = 'vmap'.") from None
            return record_vmap_tape(self.model, self.layout, params, x, y, self.task)

    def _record_block(self, params: Tensor, x: ModelInputs, y: Tensor) -> GradientTape:
        """A block in parts of one size, as memory allows."""
        if not self._follows(params, x, y):
            return self._record(params, x, y)
        each = self._choose_piece_size(params, x, y)
        each = max(1, len(y) >> (-(-len(y) // each) - 1).bit_length())  # all of one size, as blocks are
        if each >= len(y):
            return self._record(params, x, y)
        parts = zip(split_inputs(x, each), y.split(each), strict=True)
        return ChunkedTape(tuple(self._record(params, *part) for part in parts), (each,) * (len(y) // each))

    def _choose_piece_size(self, params: Tensor, x: ModelInputs, y: Tensor) -> int:
        """Examples in each of equal pieces of a batch."""
        count = len(y)
        shape = get_example_shape(x)
        limit = PASS_MEMORY_BYTES.get(params.device.type, PASS_MEMORY_BYTES["cuda"])
        bytes_each = max(1, self._elements[shape] * params.element_size())
        if not self.program.sequence:  # calls of Python and of autograd want more examples each
            if params.device.type == "cpu":
                most = max(1, min(USUAL_EXAMPLES, LARGEST_HOST_PASS // bytes_each))
                pieces = max(1 << (math.ceil(count / most) - 1).bit_length(), 2 if count >= FEW_EXAMPLES else 1)
                return math.ceil(count / min(pieces, count))
            limit = max(limit, min(FEWEST_EXAMPLES * bytes_each, LARGEST_PASS_BYTES))
        pieces = min(count, max(1, math.ceil(bytes_each * count / limit)))
        return math.ceil(count / pieces)

    def _count_elements_once(self, params: Tensor, x: ModelInputs, y: Tensor) -> None:
        """Finds the number of elements that a pass keeps of one example, for each shape of examples once."""
        shape = get_example_shape(x)
        if shape not in self._elements and not self._verdict:
            few = torch.arange(NUM_PROBE_EXAMPLES, device=y.device) % len(y)
            kept = self.record_once(params, select_rows(x, few), y[few]).elements
            self._elements[shape] = -(-kept // NUM_PROBE_EXAMPLES)

    @torch.no_grad()
    def outputs(self, params: Tensor, x: ModelInputs) -> Tensor:
        """The model's outputs for a batch x with the parameters `params` [d], without a backward pass."""
        tensors = self.layout.unflatten(params.detach())
        if not self.program.sequence:
            found: Tensor = call_with_parameters(self.model, tensors, x)
            return found
        one = sequence.require_single_input(x)
        kernels = sequence.prepare_weights(tuple(tensors.values()), one.device)
        return sequence.forward_sequence(self.program, kernels, one, keep=False)[0]

    @property
    def objection(self) -> str:
        """Why ghost norms are not used for this model; empty if they are. After `settle`."""
        return self._verdict or ""

    def settle(self, params: Tensor, x: ModelInputs, y: Tensor) -> None:
        """Plans, once for each shape of examples, how a model with its own forward is followed."""
        if not self.program.sequence and not self._verdict:
            self._find_plan(params, x, y)

    def _find_plan(self, params: Tensor, x: ModelInputs, y: Tensor) -> UsePlan | None:
        """The plan for examples of this shape; None where there is none, and `objection` says why."""
        shape = get_example_shape(x)
        if shape not in self._plans:
            given = (self.model, self.layout, params, x, y, self.task)
            try:
                if self.how == "auto" and not self.program.sequence:
                    self._plans[shape] = compare_with_autograd(*given)
                else:
                    few = torch.arange(NUM_PROBE_EXAMPLES, device=y.device) % len(y)
                    self._plans[shape] = plan_uses(*given[:3], select_rows(x, few), y[few], self.task)
            except UnsupportedModel as problem:
                self._verdict = str(problem)
                return None
            self._verdict = ""
        return self._plans[shape]

    def record_once(
        self, params: Tensor, x: ModelInputs, y: Tensor, fast: bool = False, half: bool = False
    ) -> GhostTape:
        """One pass over the whole batch, after `settle`; nothing waits for the device.

        Raises UnsupportedModel. fast, half: see `record_ghost_tape`.
        """
        if self._verdict:
            raise UnsupportedModel(self._verdict)
        plan = None if self.program.sequence and not half else self._find_plan(params, x, y)
        if self._verdict:
            raise UnsupportedModel(self._verdict)
        while True:
            given = (self.model, self.program, self.layout, params, x, y, self.task, plan, fast, half)
            try:
                return record_ghost_tape(*given, self._channels_last)
            except UnknownUse as problem:
                # Other data lead another way than planned: vmap for the module around it, from now on.
                plan = plan and use_modules(plan, self.model, self.layout, problem.places, str(problem))
                if plan is None:
                    raise UnsupportedModel(str(problem)) from None
                self._plans[get_example_shape(x)] = plan
            except RuntimeError as problem:
                # Tensor.view asks for the first format; nothing else in a model does.
                if not (self._channels_last and "view" in str(problem)):
                    raise
                self._channels_last = False


_probe_results: WeakKeyDictionary[nn.Module, tuple[ParameterLayout, Task, tuple[Any, ...]]] = WeakKeyDictionary()
"""Results of `GradientRecorder.settle` per model, kept by `record_gradients`."""


def record_gradients(
    model: nn.Module,
    layout: ParameterLayout,
    params: Tensor,
    x: ModelInputs,
    y: Tensor,
    task: Task,
    how: str = "auto",
) -> GradientTape:
    """Runs the batch x [B, ...], y [B, ...] forward and backward with the parameters `params` [d], and keeps what is
    needed to compute with its per-example gradients. For many batches of one model, a `GradientRecorder` saves time.

    The model's own trainable parameters are neither read nor changed; frozen parameters and buffers are the
    model's. `task` gives one loss per example. `how`: "auto"; "book" (ghost norms; raises ModelError where
    the model is not supported); "vmap" (materialised gradients, B times the memory of the model: the reference).

    A model that is not a plain `nn.Sequential` gets hooks for the duration of the call: do not share it between
    threads. With "auto" such a model is first compared with autograd on a few random examples. Where a parameter's
    gradients differ, vmap is used for it from then on: for the function that uses it, or for the module around.
    """
    follower = GradientRecorder(model, layout, task, how)
    known = _probe_results.get(model)
    if how == "auto" and not follower.program.sequence and known is not None and known[:2] == (layout, task):
        follower._verdict, follower._plans, follower._elements = known[2]
    tape = follower(params, x, y)
    if how == "auto" and len(y):
        _probe_results[model] = (layout, task, (follower._verdict, follower._plans, follower._elements))
    return tape


def list_gradient_paths(
    model: nn.Module, x: ModelInputs | None = None, y: Tensor | None = None, task: Task | None = None
) -> list[tuple[str, str, str]]:
    """For each layer with trainable parameters: its name, "book" (ghost norms) or "vmap", and the reason.

    With an example (x [1, ...], y [1, ...], task), the uses of each parameter are those of a pass: which function
    uses it, over how many positions, and which way is cheaper. Without one, layers are known by their class.

    >>> list_gradient_paths(nn.Sequential(nn.Linear(4, 2)))
    [('0', 'book', 'Linear')]
    """
    layout = ParameterLayout.of(model)
    program = analyse_model(model, layout)
    if x is None or y is None or task is None or program.sequence:
        return [
            (site.name or "model", "book", type(site.module).__name__)
            if site.kind
            else (site.name or "model", "vmap", site.reason)
            for site in program.sites.values()
        ]
    recorder = GradientRecorder(model, layout, task)
    own = layout.flatten(model)
    recorder.settle(own, x, y)
    plan = recorder.plan
    if recorder.objection or plan is None:
        return [("model", "vmap", recorder.objection)]
    found: dict[str, tuple[str, str, str]] = {}
    for site in plan.sites:
        for place in site.places:
            found[layout.names[place]] = (layout.names[place], "vmap", f"{site.reason}, in {site.name or 'the model'}")
    for call in plan.calls.calls:
        for place in sorted(call.places) if call.kind == "vmap" else ():
            name = layout.names[place]
            found.setdefault(name, (name, "vmap", f"{call.reason}, for this call alone"))
    few = torch.arange(NUM_PROBE_EXAMPLES, device=y.device) % len(y)
    for use in list_uses(model, layout, own, select_rows(x, few), y[few], task, plan):
        name = layout.names[use.place]
        if use.cost is not None or len(layout.shapes[use.place]) > 1:
            found.setdefault(name, (name, "book", describe_use(use)))
    return list(found.values())


def describe_use(use: UseRecord) -> str:
    """A use in words: the function, and the way that is cheaper for its shape."""
    if use.cost is None:
        return use.function
    cost = use.cost
    shape = f"{cost.positions} positions, {cost.inputs} x {cost.outputs}"
    if cost.positions == 1:
        return f"{use.function}, {shape}: norm from the norms of input and gradient"
    if use.materialised:
        return f"{use.function}, {shape}: gradients written, {cost.entries} numbers per example"
    return f"{use.function}, {shape}: norm from products of positions, {cost.ghost} multiply-adds per example"
