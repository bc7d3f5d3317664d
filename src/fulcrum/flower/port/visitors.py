"""Who is connected, how far each has got, and who is dropped first when places run out."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from fulcrum.flower.port.limits import PortLimits

SILENT, SHAKING, SPEAKING, KNOWN = range(4)
"""Stages of a connection: nothing said; in the TLS handshake; sending a first request; a party that proved its key."""


@dataclass(eq=False)
class Visitor:
    """One connection. Cancelling its task ends it."""

    address: str
    number: int
    task: asyncio.Task[None] | None = None
    stage: int = SILENT
    party: str = ""

    def drop(self) -> None:
        """End the connection."""
        if self.task is not None:
            self.task.cancel()


@dataclass
class Visitors:
    """All connections. A newcomer always gets a place: the stranger that has got least far makes room."""

    limits: PortLimits
    _strangers: dict[int, Visitor] = field(default_factory=dict)
    _parties: dict[str, dict[int, Visitor]] = field(default_factory=lambda: defaultdict(dict))
    _next: int = 0

    def enter(self, address: str) -> tuple[Visitor, list[Visitor]]:
        """A place for a new connection, and the connections that must be dropped for it."""
        self._next += 1
        visitor = Visitor(address, self._next)
        dropped = []
        same = [each for each in self._strangers.values() if each.address == address]
        if len(same) >= self.limits.strangers_per_address:
            dropped.append(_least_far(same))
        elif len(self._strangers) >= self.limits.strangers:
            crowd, _ = Counter(each.address for each in self._strangers.values()).most_common(1)[0]
            dropped.append(_least_far([each for each in self._strangers.values() if each.address == crowd]))
        for each in dropped:
            self._strangers.pop(each.number, None)
        self._strangers[visitor.number] = visitor
        return visitor, dropped

    def promote(self, visitor: Visitor, party: str) -> list[Visitor]:
        """The visitor has proved a party's key; returns the party's connections that are too many."""
        self.leave(visitor)
        visitor.stage, visitor.party = KNOWN, party
        own = self._parties[party]
        own[visitor.number] = visitor
        many = [own[number] for number in sorted(own)[: -self.limits.per_party]]
        for each in many:
            del own[each.number]
        return many

    def leave(self, visitor: Visitor) -> None:
        """The connection has ended."""
        self._strangers.pop(visitor.number, None)
        if visitor.party:
            self._parties[visitor.party].pop(visitor.number, None)

    def of_party(self, party: str) -> list[Visitor]:
        """A party's connections."""
        return list(self._parties[party].values())

    def count(self) -> tuple[int, int]:
        """Connections of strangers and of parties."""
        return len(self._strangers), sum(len(own) for own in self._parties.values())

    def everyone(self) -> list[Visitor]:
        """Every connection."""
        return [*self._strangers.values(), *(each for own in self._parties.values() for each in own.values())]


def _least_far(visitors: list[Visitor]) -> Visitor:
    """The one at the earliest stage, and of those the oldest."""
    return min(visitors, key=lambda each: (each.stage, each.number))
