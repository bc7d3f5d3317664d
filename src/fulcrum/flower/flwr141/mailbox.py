"""Requests that wait for parties' nodes, and the replies that came back. In memory, bounded, for several threads."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fulcrum.flower.messages import BadMessage, Envelope
from fulcrum.flower.registry import MessageDelivery

KEPT_SECONDS = 120.0
"""Seconds after its end that a request is kept for a coordinator that may still ask for the reply."""


@dataclass(eq=False)
class Outgoing:
    """A request to one node, and what came back for it."""

    id: str
    node: int
    envelope: Envelope
    seconds: float
    ends: float
    label: str
    wire_id: str = ""
    """The id under which the node knows it: its own for Fulcrum's nodes, an object's for stock SuperNodes."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """What a stock SuperNode fetches of it, piece by piece."""
    answered: bool = False
    reply: Callable[[], Envelope] | None = None
    """Decodes the reply, once it has arrived; in the coordinator's thread."""


class Mailbox:
    """One queue per node. Nobody but the coordinator's own process puts anything into it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock, self._arrived = clock, threading.Lock(), threading.Event()
        self._queues: dict[int, deque[Outgoing]] = {}
        self._sent: dict[str, Outgoing] = {}
        self._by_wire: dict[tuple[int, str], Outgoing] = {}

    # --- the coordinator's side -------------------------------------------------------------------

    def put(self, node: int, envelope: Envelope, seconds: float, label: str) -> Outgoing:
        """Queue a request for a node."""
        with self._lock:
            self._forget_old()
            made = Outgoing(secrets.token_hex(32), node, envelope, seconds, self._clock() + seconds, label)
            made.wire_id = made.id
            self._queues.setdefault(node, deque()).append(made)
            self._sent[made.id] = self._by_wire[node, made.id] = made
        return made

    def collect(self, ids: set[str]) -> list[MessageDelivery]:
        """What has come back for these requests, or that their time is over; each once."""
        now, found = self._clock(), []
        with self._lock:
            ready = [each for each in (self._sent.get(id) for id in ids) if each and (each.reply or each.ends < now)]
            for each in ready:
                self._forget(each)
        for each in ready:
            if each.reply is None:
                found.append(MessageDelivery(each.id, None, "no whole reply arrived in time"))
                continue
            try:
                found.append(MessageDelivery(each.id, each.reply()))
            except BadMessage as error:
                found.append(MessageDelivery(each.id, None, f"its reply was refused: {error}"))
        return found

    def wait(self, seconds: float) -> None:
        """Sleep until a reply arrives, or has arrived since the last call; at most so long."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    def _forget(self, each: Outgoing) -> None:
        self._sent.pop(each.id, None)
        self._by_wire.pop((each.node, each.wire_id), None)
        queue = self._queues.get(each.node)
        if queue and each in queue:
            queue.remove(each)

    def _forget_old(self) -> None:
        now = self._clock()
        for each in [each for each in self._sent.values() if each.ends + KEPT_SECONDS < now]:
            self._forget(each)

    # --- the nodes' side --------------------------------------------------------------------------

    def next(self, node: int, last: str | None) -> Outgoing | None:
        """The request that a node should get now; it stays until the node says that it has it.

        last: the wire id of the last one that it has; None for a node that does not say.
        """
        with self._lock:
            queue = self._queues.get(node)
            now = self._clock()
            while queue:
                first = queue[0]
                if first.ends < now or first.answered or first.wire_id == last:
                    queue.popleft()
                    continue
                return first
            return None

    def took(self, each: Outgoing) -> None:
        """A node has it, or has been sent it."""
        with self._lock:
            queue = self._queues.get(each.node)
            if queue and queue[0] is each:
                queue.popleft()

    def rename(self, each: Outgoing, wire_id: str, objects: dict[str, bytes]) -> None:
        """A stock SuperNode knows the request under another id, and fetches these objects."""
        with self._lock:
            self._by_wire.pop((each.node, each.wire_id), None)
            each.wire_id, each.objects = wire_id, objects
            self._by_wire[each.node, wire_id] = each

    def find(self, node: int, wire_id: str) -> Outgoing | None:
        """The request that this node was sent under this id."""
        with self._lock:
            return self._by_wire.get((node, wire_id))

    def object_for(self, node: int, object_id: str) -> bytes | None:
        """A part of a request to this node; nobody gets parts of another's."""
        with self._lock:
            own = (each for (owner, _), each in self._by_wire.items() if owner == node)
            return next((each.objects[object_id] for each in own if object_id in each.objects), None)

    def answer(self, each: Outgoing, reply: Callable[[], Envelope]) -> bool:
        """Store the reply to a request; the first counts."""
        with self._lock:
            if each.answered:
                return False
            each.answered, each.reply, each.objects = True, reply, {}
        self._arrived.set()
        return True

    def clear(self, node: int) -> None:
        """Drop what waits for a node that has started again: the coordinator asks anew."""
        with self._lock:
            self._queues.pop(node, None)
