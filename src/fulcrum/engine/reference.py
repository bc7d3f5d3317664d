"""The reference engine: one client after the other, one step after the other. The oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fulcrum.local import Problem, train_client
from fulcrum.types import ClientReply, RoundRequest


@dataclass(frozen=True)
class ReferenceEngine:
    """Plain loop over clients."""

    problem: Problem

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Train the participants one by one."""
        for task, state in zip(request.assignments, request.states, strict=True):
            yield train_client(self.problem, request, task, state)
