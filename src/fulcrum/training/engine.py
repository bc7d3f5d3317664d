"""The interface of an engine, as the loop over rounds uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fulcrum.types import ClientReply, RoundRequest


class Engine(Protocol):
    """Runs the local training of a round's participants. Subclass it and write `run`; the rest has defaults.

    The defaults suit an engine on this machine. An engine with parties on other machines sets `remote`: its parties
    may be offline, reply late, or refuse because of their own ledgers. `run` omits parties that did not reply.
    """

    remote: bool = False

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """Replies, one per assignment, in the order of the request."""
        ...

    def list_reachable_clients(self, clients: Sequence[int]) -> Sequence[int]:
        """The clients that can be reached now; may wait until there are enough of them."""
        return clients

    def spent(self) -> set[int]:
        """Clients whose own ledger refused a round; they take part in no later round."""
        return set()

    def replays_rounds(self, randomness_mode: str) -> bool:
        """Whether a repeated round releases the same bytes, so that it costs nothing."""
        return randomness_mode != "secure"
