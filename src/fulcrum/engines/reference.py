"""The reference engine: one client after the other, one step after the other. The oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fulcrum.training.client import make_materialised_step, train_client
from fulcrum.training.engine import Engine
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import ClientReply, RoundRequest


@dataclass(frozen=True)
class ReferenceEngine(Engine):
    """Plain loop over clients."""

    problem: TrainingProblem

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Train the participants one by one, with every gradient written out."""
        work = make_materialised_step(self.problem.make_recorder())
        for task, state in zip(request.assignments, request.states, strict=True):
            yield train_client(self.problem, request, task, state, work)
