"""One look at the coordinator from a party's machine: way, certificate, clock, key, version; nothing is joined."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum.flower.operations.checks import FINE, check_expiry


@dataclass(frozen=True)
class CoordinatorLook:
    """What was found. clock_ahead: seconds by which this machine's clock is ahead of the coordinator's."""

    reached: bool
    words: str
    clock_ahead: float = 0.0


def look_at_coordinator(
    server: str, key: ec.EllipticCurvePrivateKey, ca: Path | None, insecure: bool
) -> CoordinatorLook:
    """Ask the coordinator one harmless question with this party's key: for messages to a node that nobody knows.

    Its refusal of the node (and not of the key) says that the key is registered. The party does not appear as online.
    """
    from flwr.proto import fleet_pb2
    from flwr.proto.node_pb2 import Node

    from fulcrum.flower.flwr141.node import FleetNode
    from fulcrum.flower.flwr141.troubles import Trouble, hide_password
    from fulcrum.flower.messages import Envelope

    seen: list[bytes] = []

    def never(request: Envelope, expired: bool) -> Envelope:
        raise AssertionError("a check answers no request")

    said: list[str] = []
    node = FleetNode(server, never, key, ca=ca, insecure=insecure, say=said.append, certificate=seen.append)
    way = f", through the proxy {hide_password(node.proxy)}" if node.proxy else ""
    try:
        node._call("pull-messages", fleet_pb2.PullMessagesRequest(node=Node(node_id=0)), timeout=10.0)
    except Trouble as trouble:
        if trouble.cause != "restarted":  # what a registered key that has not joined is told
            return CoordinatorLook(False, f"{trouble.cause}: {trouble.words}{way}")
    finally:
        node._close_client()
    words = f"{server} is reached{way} and knows this party's key"
    if seen:
        expiry = check_expiry([x509.load_der_x509_certificate(seen[0])], "certificate")
        words += (
            f"; its certificate is {expiry.words}" if expiry.level == FINE else f"; ITS CERTIFICATE: {expiry.words}"
        )
    return CoordinatorLook(True, words, getattr(node, "_ahead", 0.0))
