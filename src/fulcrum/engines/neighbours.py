"""Neighbour replay: the sums of one step with a unit and without it, by the code that trains, before any noise.

    replay = replay_neighbours(problem, "parallel", state, rows, target=0)
    assert replay.ratio <= 1

Neighbours by zero-out: without the unit its place in the batch stays, with a record of zeros, and it contributes
nothing. All else is the same: rows, places, shapes, weights. The difference of the two sums, in units of what the
rule's bounds charge for, must be at most 1 with `privacy.arithmetic = proven`, and at most 1 + FAST_MARGIN with `fast`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.clipping import find_rule
from fulcrum.clipping.rule import ClipRule
from fulcrum.data import from_arrays, split
from fulcrum.data.records import map_inputs
from fulcrum.engines.fast import make_ghost_step
from fulcrum.engines.stacked.core import StackedCore, StackedTasks, compute_clipped_sums
from fulcrum.gradients.precision import use_matmul_precision
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import SeededRandomness
from fulcrum.settings.schema import Data
from fulcrum.training.client import LocalStepTerms, StepSample, make_materialised_step
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import RuleState, Stats

FAST_MARGIN = {"float32": 5e-4, "tf32": 0.15, "bf16": 0.3}
"""By precision, how far beyond its bound a unit may move the sums of `privacy.arithmetic = fast`. Measured by
benchmarks/adversarial_search.py for batches of up to 1,000 units, not proven: tf32 and bf16 round a unit's own products
by 2^-10 and 2^-9, which `FAST_SUM_MARGIN` limits to 128 times C, and float32 sums of the others round too. tf32 and
bf16 are for simulations; a tighter limit would shrink the gradients of long sequences, whose products cancel."""


@dataclass(frozen=True)
class StepSums:
    """A step's sum [m] and statistics [J] before noise, float64, and their bounds: |C| and that of the statistics."""

    sum: Tensor
    extra: Tensor
    reach: float
    extra_bound: float


@dataclass(frozen=True)
class NeighbourReplay:
    """How far a unit moves a step's sum and its statistics, in units of what is charged for them."""

    sum: float
    extra: float

    @property
    def ratio(self) -> float:
        """moved / claimed, the worse of the two."""
        return max(self.sum, self.extra)


@dataclass(frozen=True)
class ReplayedStep:
    """A step: records `rows` [b] of the data set, of units `slots` [b] (0..count-1), at weights theta [d]."""

    theta: Tensor
    rows: Tensor
    slots: Tensor
    count: int
    terms: LocalStepTerms


SumsFn = Callable[[TrainingProblem, ReplayedStep, RuleState, Tensor], StepSums]
"""(problem, step, rule's state, present [count]) -> the step's sums over the units that are present."""


def leave_out(rule: ClipRule, present: Tensor) -> ClipRule:
    """The rule with nothing contributed by units where present [B] is False. A batch may come in pieces, in order."""
    seen = slice(0, 0)

    def clip(stats: Stats, state: RuleState) -> tuple[Tensor, Tensor, RuleState]:
        nonlocal seen
        start = seen.stop % len(present)
        seen = slice(start, start + len(stats.norms))
        here = present[seen, None]
        factors, extra, state = rule.clip(stats, state)
        return torch.where(here, factors, 0.0), torch.where(here, extra, 0.0), state

    def second(stats: Stats, state: RuleState) -> Tensor:
        assert rule.second is not None
        return torch.where(present[seen, None], rule.second(stats, state), 0.0)

    return dataclasses.replace(rule, clip=clip, second=None if rule.second is None else second)


def _sum_on_one_client(ghost: bool) -> SumsFn:
    def sums(problem: TrainingProblem, step: ReplayedStep, state: RuleState, present: Tensor) -> StepSums:
        if not bool(present.all()):
            problem = dataclasses.replace(problem, rule=leave_out(problem.rule, present))
        recorder = problem.make_recorder()
        work = (make_ghost_step if ghost else make_materialised_step)(recorder)
        view = problem.rule.view(state, 0, 1)
        sample = StepSample(step.theta, step.rows, step.slots, step.count, probes=view.probes)
        with use_matmul_precision(problem.precision, problem.device):
            found = work(problem, sample, view, state, step.terms)
        reach = float(torch.linalg.vector_norm(found.bounds.C.double()))
        return StepSums(found.sum.double(), found.extra.double(), reach, float(found.bounds.extra))

    return sums


def _sum_stacked(problem: TrainingProblem, step: ReplayedStep, state: RuleState, present: Tensor) -> StepSums:
    core, device = StackedCore.of(problem), problem.device
    rows, mask = step.rows.to(device)[None, None], present.to(device)[None, None]
    stacked = {name: value.to(device)[None] for name, value in state.items()}
    sigma, batch, lr = (torch.full((1,), float(value), device=device) for value in dataclasses.astuple(step.terms))
    tasks = StackedTasks(step.theta.to(device)[None], rows, mask, stacked, sigma, batch, lr, 0, 1)
    with use_matmul_precision(problem.precision, device):
        found = compute_clipped_sums(core, tasks)
        if not bool(found.finite):
            core.careful()
            found = compute_clipped_sums(core, tasks)
    reach = float(torch.linalg.vector_norm(found.C[0].double()))
    return StepSums(found.sum[0].double(), found.extra[0].double(), reach, float(found.extra_bound[0]))


STEP_SUMS: dict[str, SumsFn] = {
    "reference": _sum_on_one_client(ghost=False),
    "parallel": _sum_on_one_client(ghost=True),
    "stacked": _sum_stacked,
}
"""The step of each engine. The stacked one knows unit `example` only."""


def replay_neighbours(
    problem: TrainingProblem,
    engine: str,
    state: RuleState,
    rows: Tensor,
    target: int,
    slots: Tensor | None = None,
    theta: Tensor | None = None,
    sigma: float = 1.0,
    batch: float = 0.0,
) -> NeighbourReplay:
    """One step of records `rows` [b] with unit `target` and without it. slots [b]: the unit of each row; None: rows."""
    slots = torch.arange(len(rows)) if slots is None else slots
    count = int(slots.max()) + 1
    theta = problem.layout.flatten(problem.model).detach() if theta is None else theta
    step = ReplayedStep(theta, rows, slots, count, LocalStepTerms(sigma, batch or float(count), 1.0))
    present = torch.ones(count, dtype=torch.bool, device=problem.device)
    absent = present.clone()
    absent[target] = False
    nulled = null_records(problem, rows[slots == target])
    one = STEP_SUMS[engine](problem, step, state, present)
    other = STEP_SUMS[engine](nulled, step, state, absent)
    return NeighbourReplay(
        _measure_move(one.sum, other.sum, one.reach), _measure_move(one.extra, other.extra, one.extra_bound)
    )


def null_records(problem: TrainingProblem, rows: Tensor) -> TrainingProblem:
    """The same problem with records of zeros in place of `rows`; targets are kept, since no rule sees them."""
    records = problem.dataset.records

    def zeroed(values: Tensor) -> Tensor:
        values = values.clone()
        values[rows] = 0
        return values

    changed = problem.dataset.with_changes(x=map_inputs(zeroed, records.x))
    return dataclasses.replace(problem, dataset=changed)


def _measure_move(one: Tensor, other: Tensor, bound: float) -> float:
    """|one - other| / bound; 0 where nothing moved, infinite where something that must not move did."""
    moved = float(torch.linalg.vector_norm(one - other))
    if moved == 0:
        return 0.0
    return moved / bound if bound > 0 else float("inf")


def build_replay_problem(
    x: Tensor, y: Tensor, model: nn.Module, rule: str | ClipRule, layers: bool = False, **changes: Any
) -> TrainingProblem:
    """A problem of one party that holds the records x [n, ...], y [n]; `changes` are those of `TrainingProblem`.

    layers: clip each layer to its share of C.
    """
    person = changes.pop("person", None)
    classes = int(y.max()) + 1
    dataset = from_arrays(x, y, x[:1], y[:1], classes=max(2, classes), **({} if person is None else {"person": person}))
    partition = split(dataset, Data(parties=1, partition="iid", min_examples=1), 0)
    device = changes.get("device", torch.device("cpu"))
    model = model.to(device)
    layout = ParameterLayout.of(model)
    problem = TrainingProblem(
        dataset,
        partition,
        model,
        layout,
        find_rule(rule) if isinstance(rule, str) else rule,
        SeededRandomness(0),
        groups=layout.layers if layers else (),
    )
    return dataclasses.replace(problem, **changes)
