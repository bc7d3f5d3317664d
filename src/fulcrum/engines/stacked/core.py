"""What all stacked training shares: data on the device, and the clipped sums of stacked tasks in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fulcrum.clipping.fixed import NONE
from fulcrum.data import Dataset
from fulcrum.data.records import map_inputs
from fulcrum.engines.stacked.rules import StackedRule, StackedState
from fulcrum.engines.stacked.table import DeviceExamples, DeviceInputs, get_resident_examples
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.haar import bound_level_norms
from fulcrum.gradients.program import UnsupportedModel
from fulcrum.gradients.rounding import NormTable, squared_norms
from fulcrum.gradients.stacked import fused
from fulcrum.gradients.stacked.layers import StackedProgram, compile_model
from fulcrum.gradients.stacked.passes import (
    PassOptions,
    StackedTape,
    forward_stacked,
    functional_outputs,
    functional_pass,
    run_stacked_pass,
    unflatten_stacked,
    weigh_rows,
)
from fulcrum.gradients.stacked.recorded import RecordedTape, record_sets
from fulcrum.privacy.bounds import FAST_SUM_MARGIN, SPREAD_IN_OTHER_BASIS, choose_sum_margin
from fulcrum.training.clipped_sum import measure_group_norms
from fulcrum.training.problem import TrainingProblem, assign_coordinate_groups
from fulcrum.types import Axes, SumMargin, Transform, View

PIECE_MEMORY_BYTES = {"cpu": 64 * 2**20, "cuda": 16 * 2**30}
"""Bytes that the activations of one piece of a step may take. A GPU that has less halves it by itself."""

ACTIVATION_SHARE = 2
"""Numbers that a pass holds at its peak, in units of the inputs and outputs of layers with parameters."""


@dataclass
class StackedCore:
    """A problem on its device. `rows_limit`, the most examples in one piece, halves when memory runs out."""

    problem: TrainingProblem
    program: StackedProgram | None
    reason: str
    """Why there is no hand-written program; empty if there is one."""
    table: DeviceExamples | DeviceInputs
    labels: Tensor
    rule: StackedRule
    coordinates: Tensor
    how: PassOptions
    rows_limit: int
    recorder: GradientRecorder | None = None
    """Follows a model without a hand-written program; None where there is one, or where it cannot."""

    @staticmethod
    def of(problem: TrainingProblem, rows_limit: int = 0) -> StackedCore:
        """Moves the data of a problem to its device. rows_limit 0: as many examples in a piece as memory suggests."""
        dataset: Dataset = problem.dataset
        program, reason = compile_model(problem.model, problem.layout, dataset.shape)
        table, labels = get_resident_examples(dataset, "x", program, problem.device)
        native = problem.device.type == "cuda"
        how = PassOptions(problem.precision, native, proven=problem.proven)
        recorder = None
        elements = program.elements if program else 4 * problem.layout.dim
        if program is None:
            recorder, reason, elements = _settle_recorder(problem, table, labels, reason, elements)
        budget = find_piece_budget(problem.device)
        return StackedCore(
            problem,
            program,
            reason,
            table,
            labels,
            StackedRule(problem.rule),
            assign_coordinate_groups(problem.layout, problem.groups).to(problem.device),
            how,
            rows_limit or max(8, budget // (4 * elements)),
            recorder,
        )

    def record_tape(
        self, theta: Tensor, rows: Tensor, view: View, axes: Axes | None = None
    ) -> StackedTape | RecordedTape | MatrixTape:
        """One pass: theta [S, d], rows [S, n] of the data set. axes: of each task, [T, d] each, T a multiple of S."""
        if axes is not None:
            plain = self.record_tape(theta, rows, View())
            gradients = plain.gradients if isinstance(plain, MatrixTape) else plain.matrix()
            by_task = gradients.view(len(axes.centre), -1, gradients.shape[1])
            moved = (by_task - axes.centre[:, None]) / axes.scale[:, None]
            return MatrixTape(moved.view_as(gradients), plain.losses, self.coordinates, None, self.how.proven)
        x, y = self.table.rows(rows), self.labels[rows]
        if self.recorder is not None:
            recorded = record_sets(self.recorder, theta, x, y, self.how)
            if view.transform is None:
                return recorded
            return MatrixTape(recorded.matrix(), recorded.losses, self.coordinates, view.transform, self.how.proven)
        if self.program is None:
            model, layout, task = self.problem.model, self.problem.layout, self.problem.dataset.task
            gradients, losses = functional_pass(model, layout, theta, x, y, task)
            return MatrixTape(gradients, losses, self.coordinates, view.transform, self.how.proven)
        assert isinstance(x, Tensor)  # a hand-written program takes one input
        tape = run_stacked_pass(self.program, theta, x, y, self.problem.dataset.task, self.how)
        if view.transform is None:
            return tape
        return MatrixTape(tape.matrix(), tape.losses, self.coordinates, view.transform, self.how.proven)

    def compute_losses(self, theta: Tensor, rows: Tensor) -> Tensor:
        """Losses [S, n] of rows [S, n] of the data set at weights theta [S, d]: forward passes only."""
        x, y, task = self.table.rows(rows), self.labels[rows], self.problem.dataset.task
        if self.program is None:
            outputs = functional_outputs(self.problem.model, self.problem.layout, theta, x)
        else:
            assert isinstance(x, Tensor)  # a hand-written program takes one input
            weights = unflatten_stacked(self.program.layout, theta)
            outputs = forward_stacked(self.program, weights, x, self.how, keep=False)[0]
        return task.loss(outputs.float(), y)

    def careful(self) -> None:
        """Use masking from now on: a non-finite value was found, and 0 * NaN would leak it into the sums."""
        self.how = replace(self.how, careful=True)


def find_piece_budget(device: torch.device) -> int:
    """Bytes for the activations of one piece: a fixed number, or on a GPU half of what is free if that is more."""
    least = PIECE_MEMORY_BYTES.get(device.type, PIECE_MEMORY_BYTES["cuda"])
    return max(least, torch.cuda.mem_get_info(device)[0] // 2) if device.type == "cuda" else least


def _settle_recorder(
    problem: TrainingProblem, table: DeviceExamples | DeviceInputs, labels: Tensor, reason: str, elements: int
) -> tuple[GradientRecorder | None, str, int]:
    """A recorder that follows the model, or None and why not; and the numbers that an example's pass holds."""
    recorder = problem.make_recorder()
    rows = torch.zeros((1, 1), dtype=torch.int64, device=problem.device)
    x, y = map_inputs(lambda value: value[0], table.rows(rows)), labels[rows[0]]
    own = problem.layout.flatten(problem.model).to(problem.device)
    try:
        recorder.settle(own, x, y)
        held = recorder.record_once(own, x, y, True, problem.precision == "bf16").elements
    except (UnsupportedModel, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"{reason}; {first}", elements
    return recorder, reason, ACTIVATION_SHARE * held


@dataclass
class MatrixTape:
    """Gradients written out [S * n, d], for rules that clip in another domain and for models of any kind."""

    gradients: Tensor
    losses: Tensor
    coordinates: Tensor
    transform: Transform | None
    proven: bool = False
    positions: int = 1

    @property
    def where(self) -> Tensor:
        """The group of each coefficient."""
        return self.coordinates if self.transform is None else self.transform.groups

    def norms(self, groups: int) -> Tensor:
        """[S, n, G]"""
        return self.norm_table(groups).norms

    def norm_table(self, groups: int) -> NormTable:
        """[S, n, G] each; not finite where the gradient is not.

        In another basis, sums of whole gradients change their basis afterwards: A is the whole gradient's norm.
        """
        change, rows = self.transform, self.gradients
        whole = squared_norms(rows).bounds.sqrt()[:, None]
        if change is None:
            table = measure_group_norms(rows, self.where, groups)
        elif change.norms is not None:
            found = fused.fused_haar_level_norms(rows, change.haar) if change.haar else None
            norms = change.norms(rows) if found is None else found
            table = NormTable(norms, bound_level_norms(norms, whole, groups, rows.dtype), whole.expand_as(norms))
        else:
            table = measure_group_norms(change.forward(rows), self.where, groups)
            bounds = table.bounds + bound_level_norms(torch.zeros_like(table.norms), whole, groups, rows.dtype)
            table = NormTable(table.norms, bounds, whole.expand_as(bounds))
        # A row that is not finite must not become finite in the other domain.
        bad = ~torch.isfinite(whole.to(rows.dtype))
        shape = (*self.losses.shape, groups)
        return NormTable(*(each.masked_fill(bad, torch.inf).view(shape) for each in table))

    def dots(self, direction: Tensor, segments: int) -> Tensor:
        """[S, n]"""
        by_task = self.gradients.view(len(direction), -1, direction.shape[1])
        return torch.bmm(by_task, direction[:, :, None]).view(self.losses.shape)

    def zero_examples(self, good: Tensor) -> None:
        """Take examples out of all sums."""
        self.gradients = self.gradients.masked_fill(~good.reshape(-1, 1), 0)

    def weighted_sum(self, factors: Tensor, segments: int) -> Tensor:
        """factors [S, n, G] -> [S * M, m]"""
        tasks = factors.shape[0] * segments
        scales = factors.reshape(tasks, -1, factors.shape[2])
        table = self.gradients.view(tasks, -1, self.gradients.shape[1])
        by_group = weigh_rows(scales.transpose(1, 2), table, self.proven)
        change = self.transform  # linear, so a few sums change their basis in place of every example
        if change is not None and change.own is not None:
            return change.own(by_group)
        if change is not None:
            by_group = change.forward(by_group.flatten(0, 1)).unflatten(0, by_group.shape[:2])
        index = self.where.expand(tasks, 1, -1)
        return by_group.gather(1, index).squeeze(1)


# --- the clipped sums of stacked tasks --------------------------------------------------------------


@dataclass(frozen=True)
class StackedTasks:
    """S sets of weights with M tasks each and B places per task, T = S * M.

    theta [S, d]; rows, mask [S, M, B]; sigma, batch, lr [T]; state of every task. t may be a tensor.
    scale [S, M, B] weights each example in the sums (None: 1), for rows of several clients in one task; then
    sigma, batch and lr [S, M, B] are those of each row's client. units: the most units in a sum, where sums of several
    tasks are added up later; 0: B. probed: whether the step may release statistics, so that losses at the probes of a
    rule's view are wanted.
    """

    theta: Tensor
    rows: Tensor
    mask: Tensor
    state: StackedState
    sigma: Tensor
    batch: Tensor
    lr: Tensor
    t: Any
    rounds: int
    scale: Tensor | None = None
    units: int = 0
    probed: bool = True


@dataclass(frozen=True)
class ClippedSums:
    """Clipped sums [T, m] and extras [T, J] before noise, C [T, G], the extra's bound [T], the state after.

    A rule's second sum is at the end of its extras. Both are float64 where the bounds are proven, else float32.

    finite is False where a sum was not: the step must be repeated carefully. diagnostics [T, 4] are the sums
    over examples of (clipped, norm, loss, 1). Nothing here is private yet.
    """

    sum: Tensor
    extra: Tensor
    C: Tensor
    extra_bound: Tensor
    state: StackedState
    finite: Tensor
    diagnostics: Tensor


def compute_clipped_sums(core: StackedCore, tasks: StackedTasks) -> ClippedSums:
    """Per-example gradients, clipped and added up for every task, in pieces of at most `core.rows_limit` examples."""
    sets, segments, places = tasks.rows.shape
    view, direction = core.rule.view(tasks.state, tasks.t, tasks.rounds)
    limit = core.rows_limit
    if view.axes is not None:  # gradients are written out, and moved to other coordinates
        dim = core.problem.layout.dim
        held = core.program.elements if core.program else 4 * dim
        limit = max(8, limit * held // (held + 4 * dim))
    by_set = max(1, min(sets, limit // (segments * places)))
    by_segment = max(1, min(segments, limit // places))
    by_row = min(places, limit)
    if by_row < places and not core.problem.rule.sound:
        return _sum_in_two_passes(core, tasks, view, direction, by_row)
    blocks: list[ClippedSums] = []
    for s in _split_into_slices(sets, by_set):
        for m in _split_into_slices(segments, by_segment):
            pieces = [_sum_piece(core, tasks, view, direction, s, m, b) for b in _split_into_slices(places, by_row)]
            blocks.append(_add_pieces(pieces))
    return blocks[0] if len(blocks) == 1 else _concatenate_blocks(blocks)


def _split_into_slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


def _select_tasks(value: Tensor, tasks: StackedTasks, s: slice, m: slice) -> Tensor:
    """The part of something [T, ...] that belongs to a block."""
    sets, segments, _ = tasks.rows.shape
    if s == slice(0, sets) and m == slice(0, segments):
        return value
    return value.view(sets, segments, *value.shape[1:])[s, m].flatten(0, 1)


@dataclass(frozen=True)
class _PieceStatistics:
    """Statistics of a piece: norms, norm_bounds, lengths [T, b, G], mask, dots, losses [T, b], good [S, M * b].

    probes [T, b, P]: losses at the probes of the rule's view; None where it has none.
    """

    norms: Tensor
    norm_bounds: Tensor
    lengths: Tensor
    mask: Tensor
    dots: Tensor | None
    losses: Tensor
    good: Tensor
    probes: Tensor | None = None


def _compute_probes(core: StackedCore, tasks: StackedTasks, s: slice, m: slice, b: slice) -> Tensor | None:
    """Losses of a piece's examples at the probes of their tasks: [T, b, P]. Zeros in steps that release none of it.

    Tasks that share weights are one run's, so that they share its probes too.
    """
    found = core.rule.stack_probes(tasks.state, tasks.t, tasks.rounds)  # [T, P, d]
    if found is None:
        return None
    rows, (sets, segments, _) = tasks.rows[s, m, b], tasks.rows.shape
    probes = found.view(sets, segments, *found.shape[1:])[s, 0]  # [S, P, d]
    count, places = len(rows) * rows.shape[1], rows.shape[2]
    if not tasks.probed:
        return tasks.theta.new_zeros((count, places, probes.shape[1]))
    theta, flat = tasks.theta[s], rows.flatten(1)
    losses = [core.compute_losses(theta + probes[:, p], flat) for p in range(probes.shape[1])]
    return torch.stack(losses, dim=2).view(count, places, -1)


def _record_piece(
    core: StackedCore, tasks: StackedTasks, view: View, direction: Tensor | None, s: slice, m: slice, b: slice
) -> tuple[StackedTape | RecordedTape | MatrixTape, _PieceStatistics]:
    rows = tasks.rows[s, m, b]
    sets, segments, places = rows.shape
    mask = tasks.mask[s, m, b].flatten(0, 1)
    theta = tasks.theta[s]
    axes = core.rule.stack_axes(tasks.state, tasks.t, tasks.rounds)
    if axes is not None:
        axes = Axes(*(_select_tasks(value, tasks, s, m) for value in (axes.centre, axes.scale)))
    tape = core.record_tape(theta, rows.flatten(1), view, axes)
    width = tasks.state["C"].shape[1]
    bare = core.problem.rule is NONE and not core.problem.diagnostics
    plain = bare and not core.how.careful
    if plain:  # without clipping norms are not needed: a finite sum proves that all gradients were finite
        norms = tape.losses.new_zeros((*tape.losses.shape, width))
        table = NormTable(norms, norms, norms)
        good = torch.isfinite(tape.losses) & mask.view_as(tape.losses)
    else:
        table = tape.norm_table(width) if isinstance(tape, MatrixTape) else tape.norm_table(core.problem.groups)
        whole = table.norms.sum(dim=2) + table.bounds.sum(dim=2).float()
        good = torch.isfinite(whole) & torch.isfinite(tape.losses) & mask.view_as(whole)
        table = NormTable(*(each.masked_fill(~good[:, :, None], 0) for each in table))
    if core.how.careful:
        tape.zero_examples(good)
    dots = None
    if direction is not None:
        along = tape.dots(_select_tasks(direction, tasks, s, m), segments)
        dots = along.masked_fill(~good, 0).view(sets * segments, places)
    losses = tape.losses.masked_fill(~good, 0).view(sets * segments, places)
    norms, norm_bounds, lengths = (each.view(sets * segments, places, width) for each in table)
    probes = _compute_probes(core, tasks, s, m, b)
    return tape, _PieceStatistics(norms, norm_bounds, lengths, mask, dots, losses, good, probes)


def _choose_margin(core: StackedCore, tasks: StackedTasks, tape: StackedTape | RecordedTape | MatrixTape) -> SumMargin:
    """What the rounding of the sums may take of each unit's bound."""
    moved = isinstance(tape, MatrixTape) and tape.transform is not None
    if core.how.proven:
        units = tasks.units or tasks.rows.shape[2]
        # Sums add up pieces, parts of splits and, in another basis, a few numbers per level.
        return choose_sum_margin(
            units, tape.positions, 2 * units + 4 * 64, **({"usual_spread": SPREAD_IN_OTHER_BASIS} if moved else {})
        )
    margin = FAST_SUM_MARGIN[core.how.precision]
    return SumMargin(margin.eta) if moved else margin


def _sum_piece(
    core: StackedCore, tasks: StackedTasks, view: View, direction: Tensor | None, s: slice, m: slice, b: slice
) -> ClippedSums:
    """The contribution of one block of tasks, and of some of their places."""
    tape, seen = _record_piece(core, tasks, view, direction, s, m, b)
    state = {name: _select_tasks(value, tasks, s, m) for name, value in tasks.state.items()}
    numbers = (tasks.sigma, tasks.batch, tasks.lr)
    scale = None
    if tasks.scale is None:
        sigma, batch, lr = (_select_tasks(value, tasks, s, m) for value in numbers)
    else:
        sigma, batch, lr = (value[s, m, b].flatten(0, 1) for value in numbers)
        scale = tasks.scale[s, m, b].flatten(0, 1)
    losses = seen.losses if view.losses else None
    decided = core.rule.clip(
        state,
        seen.norms,
        seen.mask,
        seen.dots,
        losses,
        sigma,
        batch,
        lr,
        by_row=tasks.scale is not None,
        norm_bounds=seen.norm_bounds,
        lengths=seen.lengths,
        margin=_choose_margin(core, tasks, tape),
        probes=seen.probes,
    )
    return _sum_with_factors(core, tape, seen, decided, scale)


def _sum_with_factors(
    core: StackedCore,
    tape: StackedTape | RecordedTape | MatrixTape,
    seen: _PieceStatistics,
    decided: tuple[Any, ...],
    scale: Tensor | None,
) -> ClippedSums:
    factors, again, extra, state, C, extra_bound = decided
    clipped = ((factors < 1).float().mean(dim=2) * seen.mask).sum(dim=1)
    sizes = torch.linalg.vector_norm(seen.norms, dim=2).sum(dim=1)
    diagnostics = torch.stack([clipped, sizes, seen.losses.sum(dim=1), seen.mask.sum(dim=1).float()], dim=1)
    if scale is not None:
        extra = extra * scale[:, :, None]
    total = _compute_weighted_sum(core, tape, seen, factors, scale)
    statistics = [extra.sum(dim=1, dtype=torch.float64).to(total.dtype)]
    if again.shape[2]:
        statistics.append(_compute_weighted_sum(core, tape, seen, again, scale))
    finite = torch.isfinite(total).all()
    return ClippedSums(total, torch.cat(statistics, dim=1), C, extra_bound, state, finite, diagnostics)


def _compute_weighted_sum(
    core: StackedCore,
    tape: StackedTape | RecordedTape | MatrixTape,
    seen: _PieceStatistics,
    factors: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """Sums of the examples' gradients with these factors [T, b, G]: [T, m]."""
    if scale is not None:
        factors = factors * scale[:, :, None]
    factors = factors.masked_fill(~seen.good.view(*seen.mask.shape, 1), 0)
    sets = len(tape.losses)
    segments = len(factors) // sets
    shaped = factors.reshape(sets, -1, factors.shape[2])
    if not isinstance(tape, MatrixTape):
        return tape.weighted_sum(shaped, core.problem.groups, segments)
    if tape.transform is not None and not tape.proven:
        shaped = limit_group_imbalance(shaped, seen.norms.reshape(shaped.shape))
    return tape.weighted_sum(shaped, segments)


MAX_GROUP_IMBALANCE = 1e3
"""Most that an example's whole gradient, at the factor of one of its groups, may weigh beside all that it adds."""


def limit_group_imbalance(factors: Tensor, norms: Tensor) -> Tensor:
    """Factors [S, n, G] held down where an example is tiny in one group of another basis and huge in the others.

    Sums of each group are made of whole gradients, and all but that group falls out when the sum changes its basis. A
    huge gradient at a small group's factor would leave its rounding behind there, which no bound knows of. norms, as
    factors: of the groups. Smaller factors are always sound.
    """
    norms = torch.where(torch.isfinite(norms), norms, torch.zeros_like(norms))
    adds = torch.linalg.vector_norm(factors * norms, dim=2, keepdim=True)
    whole = torch.linalg.vector_norm(norms, dim=2, keepdim=True)
    return torch.minimum(factors, MAX_GROUP_IMBALANCE * adds / whole.clamp_min(1e-30))


def _sum_in_two_passes(
    core: StackedCore, tasks: StackedTasks, view: View, direction: Tensor | None, by_row: int
) -> ClippedSums:
    """A rule that is not sound may look at a task's whole batch: all statistics first, then the sums."""
    sets, segments, places = tasks.rows.shape
    blocks: list[ClippedSums] = []
    for i in range(sets):
        for j in range(segments):
            s, m = slice(i, i + 1), slice(j, j + 1)
            looks = [
                _record_piece(core, tasks, view, direction, s, m, b)[1] for b in _split_into_slices(places, by_row)
            ]
            names = ("norms", "mask", "losses", "norm_bounds", "lengths")
            norms, mask, losses, *measured = (torch.cat([getattr(x, n) for x in looks], 1) for n in names)
            dots = None if direction is None else torch.cat([x.dots for x in looks if x.dots is not None], 1)
            state = {name: _select_tasks(value, tasks, s, m) for name, value in tasks.state.items()}
            sigma, batch, lr = (_select_tasks(value, tasks, s, m) for value in (tasks.sigma, tasks.batch, tasks.lr))
            factors, again, extra, after, C, bound = core.rule.clip(
                state,
                norms,
                mask,
                dots,
                losses if view.losses else None,
                sigma,
                batch,
                lr,
                norm_bounds=measured[0],
                lengths=measured[1],
            )
            pieces = []
            for b in _split_into_slices(places, by_row):
                tape, seen = _record_piece(core, tasks, view, direction, s, m, b)
                pieces.append(
                    _sum_with_factors(
                        core, tape, seen, (factors[:, b], again[:, b], extra[:, b], after, C, bound), None
                    )
                )
            blocks.append(_add_pieces(pieces))
    return _concatenate_blocks(blocks)


def _add_pieces(pieces: list[ClippedSums]) -> ClippedSums:
    """Pieces of the same tasks as one."""
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        pieces[-1],
        sum=torch.stack([p.sum for p in pieces]).sum(dim=0),
        extra=torch.stack([p.extra for p in pieces]).sum(dim=0),
        finite=torch.stack([p.finite for p in pieces]).all(),
        diagnostics=torch.stack([p.diagnostics for p in pieces]).sum(dim=0),
    )


def _concatenate_blocks(blocks: list[ClippedSums]) -> ClippedSums:
    """Blocks of different tasks as one. They come set by set, segment by segment: the order of the tasks."""

    def together(name: str) -> Tensor:
        return torch.cat([getattr(block, name) for block in blocks])

    return ClippedSums(
        together("sum"),
        together("extra"),
        together("C"),
        together("extra_bound"),
        {name: torch.cat([block.state[name] for block in blocks]) for name in blocks[0].state},
        torch.stack([block.finite for block in blocks]).all(),
        together("diagnostics"),
    )
