"""Flower's fleet API, as SuperNodes speak it, over a mailbox: who may ask, and what each path answers.

A request's head says whose it is: a timestamp signed with a registered key, as Flower's SuperNodes send it. A node gets
its own messages and their parts, and sends replies to them; there is no way to send a message to another node.
"""

from __future__ import annotations

import asyncio
import binascii
import datetime
import hashlib
import json
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key
from google.protobuf.message import DecodeError

from fulcrum.flower.flwr141 import wire
from fulcrum.flower.flwr141.mailbox import Mailbox, Outgoing
from fulcrum.flower.messages import MESSAGE_VERSION, BadMessage, Envelope
from fulcrum.flower.port.http import PortResponse, RequestHead
from fulcrum.flower.port.presence import PartyPresence, PresenceBook
from fulcrum.flower.port.server import Admitted, Denied
from fulcrum.flower.registry import MessageDelivery

FLEET_PATHS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""The paths of the public port: those that a SuperNode with a registered key needs."""
CLOCK_TOLERANCE_SECONDS = 60.0
"""How far a node's clock may be from this machine's. TLS already keeps a request from being sent twice by others."""
LARGEST_BODY_BYTES = 1 << 33
"""Beyond this a request is none, whoever sends it: a model of a thousand million numbers has half of it."""
HOLD_SECONDS = 10.0
"""How long a node that asks for messages waits for one before it is told that there is none."""
VERSIONS_HEADER, LAST_HEADER, TIME_HEADER = "fulcrum-messages", "fulcrum-last", "fulcrum-time"
"""Headers of Fulcrum's own nodes: versions of the messages that it speaks; the last message that it has. And of every
answer: this machine's time."""


@dataclass(frozen=True)
class RegisteredNode:
    """A party's node: its id follows from its key, so that it stays the same after a restart of the coordinator."""

    party: str
    pem: bytes
    key: ec.EllipticCurvePublicKey
    id: int


def make_registered_node(party: str, pem: bytes) -> RegisteredNode:
    """The node of a party's public key (PEM)."""
    number = int.from_bytes(hashlib.sha256(b"fulcrum node" + pem).digest()[:7], "big")
    return RegisteredNode(party, pem, bytes_to_public_key(pem), number + 16)


@dataclass
class _Arriving:
    """A stock SuperNode's reply, of which parts are still missing."""

    request: Outgoing
    root: str
    wanted: set[str]
    parts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class FleetService:
    """Answers the public port's requests, and is the coordinator's transport at the same time."""

    def __init__(self, nodes: Mapping[str, bytes], run_id: int, bundle: bytes, body_bytes: int) -> None:
        """nodes: public key (PEM) of every party. body_bytes: the most bytes of a reply."""
        self.run_id, self.bundle, self.body_bytes = run_id, bundle, body_bytes
        self.mailbox = Mailbox()
        self.presence_book = PresenceBook(nodes)
        self._nodes = {pem: make_registered_node(party, pem) for party, pem in nodes.items()}
        self._by_id = {node.id: node for node in self._nodes.values()}
        self._revoked: dict[bytes, str] = {}
        self._active: set[int] = set()
        self._restarted: set[int] = set()
        self._wakes: dict[int, asyncio.Event] = {}
        self._verified: dict[int, tuple[str, bytes]] = {}  # the last signed time of each node that was right
        self._arriving: dict[tuple[int, str], _Arriving] = {}
        self.loop: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None
        self.port_counts: Callable[[], Mapping[str, int]] = dict  # of the port in front: connections, what was dropped
        self.count_port: Callable[[], dict[str, int]] = dict
        self.on_certificate: Callable[[], None] = lambda: None
        """Called when the port has read a renewed certificate."""
        self.limit_replies: Callable[[int], None] = lambda size: None
        """Called with the most bytes that an honest reply of this run has; larger ones are not read."""
        self._answers: dict[str, tuple[Any, Callable[..., Any]]] = {
            "activate-node": (fleet_pb2.ActivateNodeRequest, self._activate),
            "deactivate-node": (fleet_pb2.DeactivateNodeRequest, self._deactivate),
            "send-node-heartbeat": (heartbeat_pb2.SendNodeHeartbeatRequest, self._heartbeat),
            "push-messages": (fleet_pb2.PushMessagesRequest, self._push_messages),
            "get-run": (run_pb2.GetRunRequest, self._get_run),
            "get-fab": (fab_pb2.GetFabRequest, self._get_fab),
            "push-object": (message_pb2.PushObjectRequest, self._push_object),
            "pull-object": (message_pb2.PullObjectRequest, self._pull_object),
            "confirm-message-received": (message_pb2.ConfirmMessageReceivedRequest, self._confirm),
        }

    # --- the coordinator's transport --------------------------------------------------------------

    def online(self) -> set[int]:
        """Nodes of parties that are there now."""
        book = self.presence_book.look()
        return {id for id in tuple(self._active) if book[self._by_id[id].party].online}

    def restarted(self) -> set[int]:
        """Nodes that have started again since the last call."""
        back = set()
        while self._restarted:  # one by one: the port's thread may add another meanwhile, which must not be lost
            back.add(self._restarted.pop())
        return back

    def party_of(self, node: int) -> str:
        """The party whose key a node has proved to hold."""
        found = self._by_id.get(node)
        return found.party if found else ""

    def presence(self) -> dict[str, PartyPresence]:
        """Who is there, since when, and why not."""
        return self.presence_book.look()

    def take_notices(self) -> list[tuple[str, str]]:
        """Parties and what was wrong with them since the last call, such as a clock."""
        return self.presence_book.take_notices()

    def port_counters(self) -> dict[str, int]:
        """Numbers of the public port for an operator; {} while there is none."""
        return self.count_port()

    def send(self, node: int, envelope: Envelope, seconds: float, label: str) -> str:
        """Queue a request; a node that waits for one gets it at once."""
        made = self.mailbox.put(node, envelope, seconds, label)
        loop = self.loop()
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake, node)
        return made.id

    def collect(self, ids: set[str]) -> list[MessageDelivery]:
        """Replies that have arrived whole."""
        return self.mailbox.collect(ids)

    def wait(self, seconds: float) -> None:
        """Sleep until a reply arrives; at most so long."""
        self.mailbox.wait(seconds)

    def update_nodes(self, nodes: Mapping[str, bytes]) -> tuple[set[str], set[str]]:
        """Take over a changed register; returns the parties whose key is new, and those whose key was revoked."""
        before = {node.party: pem for pem, node in self._nodes.items()}
        gone = {party for party, pem in before.items() if nodes.get(party) != pem}
        new = {party for party, pem in nodes.items() if before.get(party) != pem}
        for party in gone:
            old = self._nodes[before[party]]
            self._revoked[old.pem] = party
            self._active.discard(old.id)
            self.mailbox.clear(old.id)
            self.presence_book.left(party, "revoked")
        for party in new:
            self.presence_book.add(party)
            self._revoked.pop(nodes[party], None)
        self._nodes = {
            **{pem: node for pem, node in self._nodes.items() if node.party not in gone},
            **{nodes[party]: make_registered_node(party, nodes[party]) for party in new},
        }
        self._by_id = {**self._by_id, **{node.id: node for node in self._nodes.values()}}
        return new, gone

    # --- who may ask ------------------------------------------------------------------------------

    def admit(self, head: RequestHead, address: str, body_bytes: int) -> Admitted:
        """Whose request this is, before its body is read."""
        path = head.path.removeprefix("/v1/fleet/")
        if head.method != "POST" or not head.path.startswith("/v1/fleet/") or path not in FLEET_PATHS:
            raise Denied(PortResponse(404, close=True), "denied_path")
        if head.length > LARGEST_BODY_BYTES:
            raise Denied(PortResponse(413, close=True), "denied_size")
        node, signed_at = self._authenticate(head)
        if head.length > body_bytes:
            words = f"it wants to send {head.length} bytes, and an honest reply has at most {body_bytes}"
            self.presence_book.note(node.party, "size", words)
            raise Denied(PortResponse(413, close=True), "denied_size")
        ahead = signed_at - time.time()
        if abs(ahead) > CLOCK_TOLERANCE_SECONDS:
            words = f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
            self.presence_book.left(node.party, "clock", words)
            raise _deny("clock")
        speaks = head.headers.get(VERSIONS_HEADER, "")
        if speaks and str(MESSAGE_VERSION) not in speaks.split(","):
            words = (
                f"it speaks version {speaks[:32]!r} of the messages and this coordinator {MESSAGE_VERSION}; install "
                "the same version of Fulcrum at both"
            )
            self.presence_book.left(node.party, "version", words)
            raise _deny("version", 426)
        return Admitted(node.party, head, address)

    def _authenticate(self, head: RequestHead) -> tuple[RegisteredNode, float]:
        try:
            pem = b64decode(head.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(head.headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            stamp = head.headers[TIMESTAMP_HEADER]
            signed_at = datetime.datetime.fromisoformat(stamp).timestamp()
        except (KeyError, ValueError, OverflowError, OSError, binascii.Error):
            raise _deny("key") from None
        node = self._nodes.get(pem)
        if node is None:
            raise _deny("revoked" if pem in self._revoked else "key")
        if self._verified.get(node.id) != (stamp, signature):  # a node signs a time once in a few seconds
            try:
                node.key.verify(signature, stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
            except InvalidSignature:
                raise _deny("signature") from None
            self._verified[node.id] = (stamp, signature)
        return node, signed_at

    # --- answers ----------------------------------------------------------------------------------

    async def answer(self, admitted: Admitted, body: bytes) -> PortResponse:
        """The answer of Flower's fleet API."""
        path = admitted.head.path.removeprefix("/v1/fleet/")
        node = self._nodes.get(b64decode(admitted.head.headers[FLEET_HTTP_PUBLIC_KEY_HEADER]))
        if node is None:  # revoked while its request was read
            return PortResponse(401, close=True)
        try:
            if path == "pull-messages":
                found = await self._pull_messages(admitted, node, fleet_pb2.PullMessagesRequest.FromString(body))
            else:
                kind, handle = self._answers[path]
                found = handle(node, kind.FromString(body), admitted)
        except (DecodeError, BadMessage):
            return PortResponse(400, close=True)
        if isinstance(found, PortResponse):
            return found
        if found is None:
            return PortResponse(403, json.dumps({"cause": "node"}).encode())
        if node.id in self._active:  # a look at the coordinator with a party's key is no presence
            self.presence_book.seen(node.party, admitted.address)
        return PortResponse(200, found.SerializeToString(), {TIME_HEADER: f"{time.time():.3f}"})

    def disconnected(self, party: str) -> None:
        """Its last connection has ended."""
        self.presence_book.connection_ended(party)

    def _wake(self, node: int) -> None:
        self._wakes.setdefault(node, asyncio.Event()).set()

    def _is_own(self, node: RegisteredNode, claimed: int) -> bool:
        return claimed == node.id and node.id in self._active

    def _activate(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        """Flower would refuse a node that was killed for a minute; whoever holds the key may come back at once."""
        if request.public_key != node.pem:
            return None
        if node.id in self._active:
            self._restarted.add(node.id)
            self.mailbox.clear(node.id)
        self._active.add(node.id)
        return fleet_pb2.ActivateNodeResponse(node_id=node.id)

    def _deactivate(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        if request.node_id != node.id:
            return None
        self._active.discard(node.id)
        self.presence_book.seen(node.party, admitted.address)
        self.presence_book.left(node.party)
        return PortResponse(200, fleet_pb2.DeactivateNodeResponse().SerializeToString(), close=True)

    def _heartbeat(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        return heartbeat_pb2.SendNodeHeartbeatResponse(success=self._is_own(node, request.node.node_id))

    async def _pull_messages(self, admitted: Admitted, node: RegisteredNode, request: Any) -> Any:
        """The next message, as soon as there is one; after a while, none."""
        if not self._is_own(node, request.node.node_id):
            return None
        inline = wire.INLINE_HEADER in admitted.head.headers
        last = admitted.head.headers.get(LAST_HEADER, "") if inline else None
        wake = self._wakes.setdefault(node.id, asyncio.Event())
        self.presence_book.seen(node.party, admitted.address)
        end = time.monotonic() + HOLD_SECONDS
        while (waiting := self.mailbox.next(node.id, last)) is None:
            left = end - time.monotonic()
            if left <= 0:
                return fleet_pb2.PullMessagesResponse()
            wake.clear()
            try:
                async with asyncio.timeout(left):
                    await wake.wait()
            except TimeoutError:
                continue
        facts = (self.run_id, node.id, waiting.seconds, waiting.label, waiting.id)
        if inline:
            head, body = wire.frame_request(waiting.envelope, *facts)
            return PortResponse(200, head, {TIME_HEADER: f"{time.time():.3f}"}, tail=body)
        parts = wire.take_apart(waiting.envelope, *facts)
        self.mailbox.rename(waiting, parts.tree.object_id, parts.objects)
        self.mailbox.took(waiting)
        return fleet_pb2.PullMessagesResponse(messages_list=[parts.proto], message_object_trees=[parts.tree])

    def _push_messages(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        """A reply to a message that this node was sent. Nothing else is taken, whatever it says of itself."""
        if not self._is_own(node, request.node.node_id) or len(request.messages_list) != 1:
            return None
        message = request.messages_list[0]
        facts = wire.read_facts(message)
        asked = self.mailbox.find(node.id, facts.reply_to)
        done = fleet_pb2.PushMessagesResponse(
            reconnect=fleet_pb2.Reconnect(reconnect=5), results={facts.id: 0}, session_id=facts.id[:64]
        )
        if asked is None or asked.answered:  # of a round that is over, or sent twice
            return done if facts.reply_to else None
        if wire.INLINE_HEADER in admitted.head.headers:
            self.mailbox.took(asked)
            self.mailbox.answer(asked, lambda: wire.read_envelope(message))
            return done
        if len(request.message_object_trees) != 1:
            return None
        tree = request.message_object_trees[0]
        wanted = set(wire.list_objects(tree))
        self._arriving = {  # one reply under way per node
            key: each for key, each in self._arriving.items() if key[0] != node.id
        }
        self._arriving[node.id, facts.id[:64]] = _Arriving(asked, tree.object_id, wanted)
        done.objects_to_push.extend(wanted)
        return done

    def _push_object(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        """A part of a reply that this node has announced."""
        if not self._is_own(node, request.node.node_id):
            return None
        coming = self._arriving.get((node.id, request.session_id))
        id, content = request.object_id, request.object_content
        fits = coming is not None and id in coming.wanted and hashlib.sha256(content).hexdigest() == id
        if coming is None or not fits:
            return message_pb2.PushObjectResponse(stored=False)
        coming.size += 0 if id in coming.parts else len(content)
        if coming.size > self.body_bytes:
            del self._arriving[node.id, request.session_id]
            return message_pb2.PushObjectResponse(stored=False)
        coming.parts[id] = content
        if coming.wanted <= set(coming.parts):
            del self._arriving[node.id, request.session_id]
            self.mailbox.answer(coming.request, lambda: wire.put_together(coming.root, coming.parts))
        return message_pb2.PushObjectResponse(stored=True)

    def _pull_object(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        content = self.mailbox.object_for(node.id, request.object_id)
        return message_pb2.PullObjectResponse(
            object_found=content is not None, object_available=content is not None, object_content=content or b""
        )

    def _confirm(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        asked = self.mailbox.find(node.id, request.message_object_id)
        if asked is not None:
            asked.objects = {}
        return message_pb2.ConfirmMessageReceivedResponse()

    def _get_run(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        """What a stock SuperNode wants to know of the run before it takes its first message."""
        if not self._is_own(node, request.node.node_id) or request.run_id != self.run_id:
            return None
        return run_pb2.GetRunResponse(
            run=run_pb2.Run(
                run_id=self.run_id,
                fab_id="fulcrum/federation",
                fab_version="1.0.0",
                fab_hash=hashlib.sha256(self.bundle).hexdigest(),
                status=run_pb2.RunStatus(status="running"),
                primary_task_type="flwr-serverapp",
                series_id=self.run_id,
            )
        )

    def _get_fab(self, node: RegisteredNode, request: Any, admitted: Admitted) -> Any:
        if not self._is_own(node, request.node.node_id):
            return None
        hash_str = hashlib.sha256(self.bundle).hexdigest()
        return fab_pb2.GetFabResponse(fab=fab_pb2.Fab(hash_str=hash_str, content=self.bundle))


def _deny(cause: str, status: int = 401) -> Denied:
    """A refusal that says its cause to a node that wants to know, and this machine's time."""
    body = {"detail": "Invalid SuperNode authentication", "cause": cause, "time": round(time.time(), 3)}
    if cause == "version":
        body["speaks"] = MESSAGE_VERSION
    return Denied(PortResponse(status, json.dumps(body).encode(), close=True), f"denied_{cause}")
