"""The stacked engine: the clients of a round, and their examples, as one tensor program; made for GPUs.

Clients of similar size train side by side. While they share weights (the first local step) their examples
are one large batch; after that every layer is a batched matrix product with one set of weights per client.
Sequences of Linear, Conv2d, ReLU, Tanh, Sigmoid, tempered sigmoid, MaxPool2d, AvgPool2d, global average
pooling, Flatten and Centre have hand-written passes. Other models run their own forward, one set of weights after the
other, with book-keeping for every parameter (`gradients/stacked/recorded.py`). Models that book-keeping cannot follow
go through torch.func, whose gradients are written out; persons as units, and models that torch.func cannot follow
either, go client by client. `notes` says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from fulcrum.engines.fast import make_ghost_step
from fulcrum.engines.stacked.core import StackedCore
from fulcrum.engines.stacked.rules import StackedState, stack_states, unstack_state
from fulcrum.engines.stacked.trainer import BucketResult, ClientJob, StackedTrainer
from fulcrum.gradients.stacked import fused
from fulcrum.models.prepared import draws_keys
from fulcrum.settings.schema import Clip
from fulcrum.training.client import StepFn, train_client
from fulcrum.training.engine import Engine
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import ClientReply, RoundRequest


class StackedEngine(Engine):
    """Trains all participants of a round together. The module's docstring lists what it can stack."""

    def __init__(self, problem: TrainingProblem, rows_limit: int = 0) -> None:
        self.problem = problem
        self._rows_limit = rows_limit

    @cached_property
    def _trainer_and_notes(self) -> tuple[StackedTrainer | None, tuple[str, ...]]:
        """Made when first asked for: a study prepares many engines and may use none of them."""
        core, notes = build_stacked_core(self.problem, self._rows_limit)
        return (StackedTrainer(core, self.problem.partition.order) if core else None), notes

    @cached_property
    def _step_of_one(self) -> StepFn:
        """The step of clients that go one by one; its recorder settles once how to follow the model."""
        return make_ghost_step(self.problem.make_recorder())

    @property
    def trainer(self) -> StackedTrainer | None:
        """What trains the clients; None where they go through the reference engine."""
        return self._trainer_and_notes[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """What does not go the fast way, and why: sentences for a user."""
        trainer, notes = self._trainer_and_notes
        if trainer is None:
            return notes
        looped = trainer.core.rule.looped
        return (*notes, *((looped,) if looped else ()), *trainer.replayer.notes, *fused.kernel_failures)

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Replies, one per assignment, in order."""
        if self.trainer is None:
            work = self._step_of_one
            for task, state in zip(request.assignments, request.states, strict=True):
                yield train_client(self.problem, request, task, state, work)
            return
        starts = self.problem.partition.starts
        jobs = [
            ClientJob(
                task,
                int(starts[task.client]),
                int(starts[task.client + 1] - starts[task.client]),
                0,
                self.problem.randomness,
                request.weight_decay,
                request.attempt,
            )
            for task in request.assignments
        ]

        def states(members: list[int]) -> StackedState:
            return stack_states([request.states[i] for i in members], self.problem.device)

        params = request.params.to(self.problem.device)[None]
        replies: dict[int, ClientReply] = {}
        for part in self.trainer.train(jobs, params, states, request.round, request.rounds):
            replies |= _build_replies(self.problem, request, part)
        yield from (replies[i] for i in range(len(request.assignments)))


def build_stacked_core(problem: TrainingProblem, rows_limit: int = 0) -> tuple[StackedCore | None, tuple[str, ...]]:
    """The problem on its device, ready to be stacked, and notes; None where it cannot be."""
    if problem.unit != "example":
        return None, (f"unit {problem.unit}: clients go one by one",)
    if draws_keys(problem.model):
        return None, ("random layers draw by example: clients go one by one",)
    core = StackedCore.of(problem, rows_limit)
    if core.program is not None or core.recorder is not None:
        return core, ()
    note = f"gradients are written out by torch.func: {core.reason}"
    failed = _find_functional_failure(core)
    if failed:
        return None, (note, f"and torch.func cannot: {failed}; clients go one by one through the reference engine")
    return core, (note,)


def _find_functional_failure(core: StackedCore) -> str:
    """Why torch.func cannot follow the model; empty if it can."""
    problem = core.problem
    theta = problem.layout.flatten(problem.model).to(problem.device)[None]
    state = stack_states([problem.rule.init(Clip(), problem.shape)], problem.device)
    view, _ = core.rule.view(state, 0, 1)
    try:
        core.record_tape(theta, torch.zeros((1, 2), dtype=torch.int64, device=theta.device), view)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return ""


def _build_replies(problem: TrainingProblem, request: RoundRequest, part: BucketResult) -> dict[int, ClientReply]:
    """A bucket's replies by their position in the request."""
    deltas, extras, last = part.deltas, part.extras, part.steps[-1]
    seen = torch.stack([step.diagnostics for step in part.steps]) if problem.diagnostics else None
    keeps = problem.rule.sound and problem.rule.when == "round"  # such a rule's state does not move on the client
    return {
        position: ClientReply(
            client=request.assignments[position].client,
            delta=deltas[i],
            extra=extras[i],
            events=part.events[i],
            state=request.states[position] if keeps else unstack_state(last.state, i),
            diagnostics=_average_diagnostics(seen[:, i]) if seen is not None else {},
            grid=0.0 if (terms := request.assignments[position].message) is None else terms.grid,
        )
        for i, position in enumerate(part.members)
    }


def _average_diagnostics(seen: Tensor) -> dict[str, float]:
    """Means over the examples of each step [N, 4], then over the steps. Not private."""
    counts = seen[:, 3].clamp_min(1)
    clipped, norm, loss = (seen[:, :3] / counts[:, None]).mean(dim=0).tolist()
    return {"clipped": clipped, "mean_norm": norm, "train_loss": loss, "batch": float(seen[:, 3].mean())}


__all__ = ["StackedEngine", "build_stacked_core"]
