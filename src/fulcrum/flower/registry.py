"""Which Flower node is which party: nodes connect and disconnect, parties have names and keys.

The coordinator greets every node that connects, and counts an answer only if a registered party signed it.
A `Transport` carries the envelopes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum.flower import keys
from fulcrum.flower.display import show_value
from fulcrum.flower.known_ledgers import LedgerBook
from fulcrum.flower.messages import BadMessage, Envelope, pack_envelope, read_message_header
from fulcrum.flower.port.presence import PartyPresence
from fulcrum.flower.refusals import REFUSAL_TEXTS
from fulcrum.flower.signing import RequestSigner
from fulcrum.flower.units import PartyInfo, PartyReportFn, find_wrong_claim

__all__ = [
    "MessageDelivery",
    "PartyInfo",
    "PartyRegistry",
    "PartyReportFn",
    "Transport",
    "describe_refusal",
    "verify_signed_reply",
]

POLL_SECONDS = 0.03
"""Seconds between two polls of a transport that cannot say when a reply arrives."""
WAIT_SECONDS = 0.25
"""Seconds between two polls of one that can, where none arrives."""
PASSING_REFUSALS = frozenset({"signature", "signer", "expired", "internal"})
"""Refusals of a greeting whose cause may pass, such as a certificate that was just renewed: it is sent again later."""
NOTICE_TIMEOUT_SECONDS = 60.0
"""Seconds that a sentence for a party's people waits to be fetched."""
HELLO_TIMEOUT_SECONDS = 3600.0
"""Seconds that a hello waits for an answer: a person may be reading the terms."""


@dataclass(frozen=True)
class MessageDelivery:
    """What came back for a message: an envelope, or a sentence on why there is none."""

    id: str
    envelope: Envelope | None
    error: str = ""


class Transport(Protocol):
    """Carries envelopes to nodes and back: Flower's grid, or a dictionary in a test."""

    def online(self) -> set[int]:
        """Nodes that can be reached now."""
        ...

    def restarted(self) -> set[int]:
        """Nodes that have started again since the last call: messages that they had received are lost."""
        ...

    def send(self, node: int, envelope: Envelope, seconds: float, label: str) -> str:
        """Send an envelope that expires after `seconds`; returns the id of the message."""
        ...

    def collect(self, ids: set[str]) -> list[MessageDelivery]:
        """What has come back so far for these messages; each delivery is returned once."""
        ...


class PartyRegistry:
    """Which node is which party. Every node that connects is greeted; only a signed answer counts."""

    def __init__(
        self,
        transport: Transport,
        public_keys: Mapping[str, ec.EllipticCurvePublicKey],
        run: str,
        proposal: Mapping[str, Any],
        required: Mapping[str, Any],
        report: PartyReportFn,
        signer: RequestSigner | None = None,
        ledgers: LedgerBook | None = None,
        registered_units: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """required: what every party's `welcome` must say (shape, model, task, randomness).

        ledgers: which ledger each party has paid from. registered_units: numbers of units fixed at registration.
        signer: the coordinator's key; None sends requests unsigned, which only parties in this process accept.
        """
        self.signer, self.ledgers, self.registered_units = signer, ledgers or LedgerBook(), registered_units
        self.transport, self.public_keys, self.run, self.report = transport, public_keys, run, report
        self.proposal, self.required = dict(proposal), dict(required)
        self.node_of: dict[str, int] = {}
        self.parties: dict[str, PartyInfo] = {}
        self.refusals: dict[str, str] = {}  # parties that do not take part, and the sentence that says why
        self.heard: dict[str, float] = {}  # when a party's greeting was last answered, on the monotonic clock
        self.on_poll: Callable[[], None] = lambda: None  # called with every poll: the operator's view
        self._greeted: dict[int, tuple[str, Envelope]] = {}
        self._failed: dict[int, tuple[int, float]] = {}  # failures in a row, and when to greet it again
        self._restarted: set[int] = set()
        self._presence: dict[str, PartyPresence] = {}
        self._looked = 0.0

    def presence(self) -> dict[str, PartyPresence]:
        """Since when each party is online or offline, and why; {} where the transport does not know."""
        look: Callable[[], dict[str, PartyPresence]] = getattr(self.transport, "presence", dict)
        return look()

    def _report_presence(self) -> None:
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        self._looked = now
        take_notices: Callable[[], list[tuple[str, str]]] = getattr(self.transport, "take_notices", list)
        for name, words in take_notices():
            self.report(name, words)
        for name, each in self.presence().items():
            before = self._presence.get(name)
            self._presence[name] = each
            if before is None or (before.online, before.cause) == (each.online, each.cause):
                continue
            if not each.online and not each.detail:
                self.report(name, each.words)
            elif each.online and before.cause != "never":
                self.report(name, f"is back after {max(0.0, each.since - before.since):.0f} s")

    def poll(self) -> None:
        """Greet new nodes, and register the parties that answered; say who went away or came back."""
        self._report_presence()
        restarted = self.transport.restarted()
        self._restarted |= restarted
        for node in restarted:
            self._greeted.pop(node, None)
            self._failed.pop(node, None)
        now = time.monotonic()
        resting = {node for node, (_, until) in self._failed.items() if until > now}
        for node in self.transport.online() - set(self._greeted) - resting:
            hello = self.pack_request("hello", find_node_party(self.transport, node), proposal=self.proposal)
            self._greeted[node] = (self.transport.send(node, hello, HELLO_TIMEOUT_SECONDS, "hello"), hello)
        pending = {sent: (node, hello) for node, (sent, hello) in self._greeted.items() if sent}
        for delivery in self.transport.collect(set(pending)) if pending else ():
            node, hello = pending[delivery.id]
            self._greeted[node] = ("", hello)
            self._register_party(node, hello, delivery)
        self.on_poll()

    def wait(self) -> None:
        """Sleep until a reply arrives, where the transport can tell; otherwise a moment."""
        wait = getattr(self.transport, "wait", None)
        if wait is None:
            time.sleep(POLL_SECONDS)
        else:
            wait(WAIT_SECONDS)

    def greet_again(self, name: str) -> None:
        """Greet a party once more, unless a greeting is under way; `heard` says when it answered."""
        node = self.node_of.get(name)
        if node is not None and not self._greeted.get(node, ("", None))[0]:
            self._greeted.pop(node, None)

    def refuse(self, name: str, why: str) -> None:
        """Note and report that a party does not take part."""
        self.refusals[name] = why
        self.report(name, why)

    def pack_request(self, kind: str, party: str, **more: Any) -> Envelope:
        """A signed request without arrays, with a fresh nonce. party: whom it is for; "" where that is not known."""
        header = {"kind": kind, "run": self.run, "nonce": secrets.token_hex(16), **more}
        return self.sign(pack_envelope({**header, "party": party} if party else header))

    def sign(self, request: Envelope) -> Envelope:
        """The request with the coordinator's signature."""
        return request if self.signer is None else self.signer.sign(request)

    def refuse_party(self, party: str, words: str, node: int | None = None) -> None:
        """Say here and at the party why it does not take part. Nothing waits for its answer."""
        self.refuse(party, words)
        node = self.node_of.get(party) if node is None else node
        if node is not None:
            notice = self.pack_request("notice", party, text=f"{party} {words}"[:2000])
            self.transport.send(node, notice, NOTICE_TIMEOUT_SECONDS, "notice")

    def take_restarted_parties(self) -> set[str]:
        """Parties whose node has started again since the last call."""
        names = {name for name, node in self.node_of.items() if node in self._restarted}
        self._restarted.clear()
        return names

    def _greet_again_later(self, node: int) -> None:
        times = self._failed.get(node, (0, 0.0))[0] + 1
        self._failed[node] = times, time.monotonic() + min(60.0, 0.5 * 2**times)
        self._greeted.pop(node, None)

    def _register_party(self, node: int, hello: Envelope, delivery: MessageDelivery) -> None:
        if delivery.envelope is None:
            # The node may have been about to stop, so it is greeted again, after a pause that doubles.
            self._greet_again_later(node)
            self.report("", f"a node did not answer the greeting: {delivery.error}")
            return
        try:
            header = verify_signed_reply(delivery.envelope, ("welcome", "refused"), hello, self.run, self.public_keys)
        except BadMessage as error:
            self.report("", f"a node's greeting was refused: {error}")
            return
        name = header["party"]
        if header["kind"] == "refused":
            if header["code"] in PASSING_REFUSALS:
                self._greet_again_later(node)
            self.refuse(name, f"does not take part: {describe_refusal(header['code'])}")
            return
        for field, wanted in self.required.items():
            if header[field] != wanted:
                shown = f"its {field} is {show_value(repr(header[field]))}, the run's is {show_value(repr(wanted))}"
                self.refuse_party(name, f"does not fit: {shown}", node)
                return
        problem = find_wrong_claim(name, header["units"], self.registered_units)
        problem = problem or self.ledgers.find_problem(name, header.get("ledger"))
        if problem:
            self.refuse_party(name, f"does not take part: {problem}", node)
            return
        if self.parties.get(name, PartyInfo(name, header["units"])).units != header["units"]:
            self.refuse_party(name, "does not fit: it now has another number of units than at the start", node)
            return
        if self.node_of.get(name, node) != node:
            self._restarted.add(node)  # started again without a key to be known by (--insecure)
        if name not in self.node_of:
            self.report(name, f"has joined, with {header['units']} {self.proposal['unit']}s")
        self.node_of[name], self.parties[name] = node, PartyInfo(name, header["units"])
        self.refusals.pop(name, None)
        self.heard[name] = time.monotonic()


def verify_signed_reply(
    reply: Envelope,
    kinds: tuple[str, ...],
    request: Envelope,
    run: str,
    public_keys: Mapping[str, ec.EllipticCurvePublicKey],
) -> dict[str, Any]:
    """The header of a reply that is fresh, for this request, and signed by the party it names."""
    header = read_message_header(reply, kinds)
    key = public_keys.get(header["party"])
    if key is None:
        raise BadMessage("it names a party that is not in the register.")
    if not keys.has_valid_signature(key, reply):
        raise BadMessage(f"it claims to be from {header['party']}, but the signature is not that party's.")
    sent = read_message_header(request, ("hello", "round", "manifest", "done", "notice"))
    if (header["run"], header["nonce"], header["request"]) != (run, sent["nonce"], request.digest):
        raise BadMessage("it answers another request than the one that was sent.")
    return header


def find_node_party(transport: Transport, node: int) -> str:
    """The party whose key a node has proved to hold; "" where the transport knows no keys."""
    look_up: Callable[[int], str] = getattr(transport, "party_of", lambda node: "")
    return look_up(node)


def describe_refusal(code: str) -> str:
    """The sentence for a refusal's code; the text of an unknown code is not repeated."""
    return REFUSAL_TEXTS.get(code, "it refused without a known reason")
