"""What a curious server may look at while stacked runs go on: every party's release of every round."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fulcrum.engines.batched.server import BatchedServer


class ReleaseWatch(Protocol):
    """Sees each party's released update, round by round; for attacks and audits of simulated runs.

    It must be a tensor program without numbers from the host: on a GPU it is recorded once and replayed.
    """

    def begin(self, server: BatchedServer, steps: int) -> None:
        """Called once, before the first round. steps: local steps per round."""
        ...

    def look(self, releases: Tensor) -> None:
        """Called in each round before the server moves. releases [P, d]: run by run, party by party; 0: took no part.

        `server.theta` [R, d] is still the model that the parties started from, and `server.t` the round.
        """
        ...

    def list_state_tensors(self) -> list[Tensor]:
        """All tensors that `look` changes: rounds may be repeated, and then they are put back."""
        ...
