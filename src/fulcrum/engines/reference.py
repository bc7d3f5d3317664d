"""The reference engine: one client after the other, one step after the other. The oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fulcrum.training.client import make_materialised_step, train_client
from fulcrum.training.engine import Engine
from fulcrum.training.pairwise import mask_reply
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import ClientReply, RoundRequest


@dataclass(frozen=True)
class ReferenceEngine(Engine):
    """Plain loop over clients. masks: whether messages that are masked in pairs carry their masks."""

    problem: TrainingProblem
    masks: bool = True

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Train the participants one by one, with every gradient written out.

        With pairwise masks its messages carry them. Other engines leave them out: they cancel bit for bit.
        """
        work = make_materialised_step(self.problem.make_recorder())
        for task, state in zip(request.assignments, request.states, strict=True):
            reply = train_client(self.problem, request, task, state, work)
            masked = self.masks and task.message is not None
            yield mask_reply(self.problem.randomness, request, reply, request.colluders) if masked else reply
