"""What the loop over rounds asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fulcrum.types import ClientReply, RoundRequest


class Engine(Protocol):
    """Runs the local training of a round's participants. Subclass it and write `run`; the rest has defaults.

    The defaults are those of an engine on this machine. An engine whose parties are elsewhere sets `remote`: its
    parties may be away, answer late, or refuse from their own ledgers, and `run` leaves out those who did not answer.
    """

    remote: bool = False

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """Replies, one per assignment, in the order of the request."""
        ...

    def list_reachable_clients(self, clients: Sequence[int]) -> Sequence[int]:
        """Those of the clients that can be asked now; may wait until there are enough to go on."""
        return clients

    def spent(self) -> set[int]:
        """Clients whose own ledger has refused: they take no further part."""
        return set()

    def replays_rounds(self, randomness_mode: str) -> bool:
        """Whether a round that is played again releases the same bytes again, so that it costs nothing."""
        return randomness_mode != "secure"
