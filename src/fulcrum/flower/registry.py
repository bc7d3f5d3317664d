"""Who is who: nodes that come and go on one side, parties with names and keys on the other.

Every node that shows up is greeted, and only an answer that a registered party signed counts. How
envelopes travel is the business of a `Post`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum.flower import keys
from fulcrum.flower.messages import BadMessage, Envelope, pack, read_header
from fulcrum.flower.terms import REFUSALS

Report = Callable[[str, str], None]
"""Called with a party's name (or "") and what happened, in one sentence."""

POLL = 0.03
"""Seconds between looks at the mail."""
HELLO_SECONDS = 3600.0
"""How long a hello waits for an answer: somebody may be reading the terms."""


@dataclass(frozen=True)
class Delivery:
    """What came back for a message: an envelope, or words on why there is none."""

    id: str
    envelope: Envelope | None
    error: str = ""


class Post(Protocol):
    """Carries envelopes to nodes and back. Flower does, and so does a dictionary in a test."""

    def online(self) -> set[int]:
        """Nodes that can be reached now."""
        ...

    def returned(self) -> set[int]:
        """Nodes that have started again since this was last asked: what they had been sent is lost."""
        ...

    def send(self, node: int, envelope: Envelope, seconds: float, label: str) -> str:
        """Send, to be forgotten after so many seconds; the id of the message."""
        ...

    def collect(self, ids: set[str]) -> list[Delivery]:
        """What has come back so far for these messages; each only once."""
        ...


@dataclass(frozen=True)
class Card:
    """What is public about a party: its name and n_k."""

    name: str
    units: int


class Roll:
    """Which node is which party. Every node that shows up is asked; only a signed answer counts."""

    def __init__(
        self,
        post: Post,
        register: Mapping[str, ec.EllipticCurvePublicKey],
        run: str,
        proposal: Mapping[str, Any],
        facts: Mapping[str, Any],
        report: Report,
    ) -> None:
        """facts: what every party must agree on (classes, shape, model, randomness), as in a `welcome`."""
        self.post, self.register, self.run, self.report = post, register, run, report
        self.proposal, self.facts = dict(proposal), dict(facts)
        self.node_of: dict[str, int] = {}
        self.cards: dict[str, Card] = {}
        self._asked: dict[int, tuple[str, Envelope]] = {}
        self._failed: dict[int, tuple[int, float]] = {}  # how often in a row, and until when to leave it alone
        self._returned: set[int] = set()

    def call(self) -> None:
        """Greet new nodes and take in what was answered."""
        back = self.post.returned()
        self._returned |= back
        for node in back:
            self._asked.pop(node, None)
            self._failed.pop(node, None)
        now = time.monotonic()
        patient = {node for node, (_, until) in self._failed.items() if until > now}
        for node in self.post.online() - set(self._asked) - patient:
            nonce = secrets.token_hex(16)
            hello = pack({"kind": "hello", "run": self.run, "nonce": nonce, "proposal": self.proposal})
            self._asked[node] = (self.post.send(node, hello, HELLO_SECONDS, "hello"), hello)
        pending = {sent: (node, hello) for node, (sent, hello) in self._asked.items() if sent}
        for delivery in self.post.collect(set(pending)) if pending else ():
            node, hello = pending[delivery.id]
            self._asked[node] = ("", hello)
            self._take_in(node, hello, delivery)

    def take_returned(self) -> set[str]:
        """Parties whose node has started again since this was last asked."""
        names = {name for name, node in self.node_of.items() if node in self._returned}
        self._returned.clear()
        return names

    def _take_in(self, node: int, hello: Envelope, delivery: Delivery) -> None:
        if delivery.envelope is None:
            # It may have been on its way out, so it is greeted again, after a while that doubles.
            times = self._failed.get(node, (0, 0.0))[0] + 1
            self._failed[node] = times, time.monotonic() + min(60.0, 0.5 * 2**times)
            self.report("", f"a node did not answer the greeting: {delivery.error}")
            self._asked.pop(node)
            return
        try:
            header = opened(delivery.envelope, ("welcome", "refused"), hello, self.run, self.register)
        except BadMessage as error:
            self.report("", f"a node's greeting was refused: {error}")
            return
        name = header["party"]
        if header["kind"] == "refused":
            self.report(name, f"does not take part: {refusal_words(header['code'])}")
            return
        for what, wanted in self.facts.items():
            if header[what] != wanted:
                self.report(name, f"does not fit: its {what} is {header[what]!r}, the run's is {wanted!r}")
                return
        if header["units"] < 1:
            self.report(name, "does not fit: it has no data")
            return
        if self.cards.get(name, Card(name, header["units"])).units != header["units"]:
            self.report(name, "does not fit: it now has another number of units than at the start")
            return
        if self.node_of.get(name, node) != node:
            self._returned.add(node)  # started again without a key to be known by (--insecure)
        if name not in self.node_of:
            self.report(name, f"has joined, with {header['units']} {self.proposal['unit']}s")
        self.node_of[name], self.cards[name] = node, Card(name, header["units"])


def opened(
    reply: Envelope,
    kinds: tuple[str, ...],
    request: Envelope,
    run: str,
    register: Mapping[str, ec.EllipticCurvePublicKey],
) -> dict[str, Any]:
    """The header of a reply that is fresh, for this request, and signed by the party it names."""
    header = read_header(reply, kinds)
    key = register.get(header["party"])
    if key is None:
        raise BadMessage("it names a party that is not in the register.")
    if not keys.is_signed(key, reply):
        raise BadMessage(f"it claims to be from {header['party']}, but the signature is not that party's.")
    sent = read_header(request, ("hello", "round", "done"))
    if (header["run"], header["nonce"], header["request"]) != (run, sent["nonce"], request.digest):
        raise BadMessage("it answers another request than the one that was sent.")
    return header


def refusal_words(code: str) -> str:
    """The words behind a refusal's code; a code that nobody knows is not repeated."""
    return REFUSALS.get(code, "it refused without a known reason")
