"""What the loop over rounds asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from fulcrum.types import ClientReply, RoundRequest


class Engine(Protocol):
    """Runs the local training of a round's participants, in the order of the request."""

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """Replies, one an assignment, in order."""
        ...


@runtime_checkable
class Remote(Protocol):
    """An engine whose clients are elsewhere: they may be away, answer late, or refuse from their own ledgers.

    `run` then leaves out those who did not answer, and a repeated round brings the same bytes again.
    """

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """Replies of those who answered, in the order of the request."""
        ...

    def present(self, clients: Sequence[int]) -> list[int]:
        """Those of the clients that can be asked now; waits until there are enough to go on."""
        ...

    def spent(self) -> set[int]:
        """Clients whose own ledger has refused: they take no further part."""
        ...
