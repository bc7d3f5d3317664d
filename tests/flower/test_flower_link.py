"""The coordinator's link: what a stranger, a registered node and a stock SuperNode's own code can do with it."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")


import httpx
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fulcrum.flower import certs, keys
from fulcrum.flower import flwr141 as inside
from fulcrum.flower.flwr141 import fleet, wire
from fulcrum.flower.messages import BadMessage, Envelope, pack_envelope
from fulcrum.flower.request_gate import RequestGate
from fulcrum.flower.signing import load_request_signer
from fulcrum.flower.transport import envelope_to_record, record_to_envelope

# Flower 1.41 uses what httpx calls old.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EVERYTHING = (
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/control/list-runs",
    "/v1/runtime/acquire-task",
    "/v1/runtime/push-messages",
    "/v1/runtime/pull-task-input",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet//pull-messages",
    "//v1/runtime/acquire-task",
    "/docs",
    "/openapi.json",
    "/health",
    "/",
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """A node that asks for messages is answered after a second, so that it notices when it should stop."""
    monkeypatch.setattr("fulcrum.flower.flwr141.fleet.HOLD_SECONDS", 1.0)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A link with TLS that knows the parties a and c, not b."""
    folder = tmp_path_factory.mktemp("link")
    certs.make_certificate_authority(folder, ["127.0.0.1"])
    for name in ("a", "b", "c"):
        keys.make_key_pair(folder, name)
    port = inside.find_free_port()
    known = {name: keys.public_key_to_pem(keys.load_public_key(folder / f"{name}.pub")) for name in ("a", "c")}
    with inside.LocalSuperlink(
        "127.0.0.1", port, inside.TlsFiles(folder / "server.crt", folder / "server.key"), known
    ) as link:
        yield folder, port, link


def connect(folder, port, name):
    """A SuperNode's connection with party `name`'s key."""
    key = keys.load_private_key(folder / name)
    return http_request_response(
        f"127.0.0.1:{port}", False, str(folder / "ca.crt"), (key, key.public_key()), max_retries=0
    )


def spoken(federation, *requests: str) -> list[bytes]:
    """The first line of the answer to each request, sent by hand: an HTTP client would tidy it up."""
    folder, port, _ = federation
    trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    found = []
    for request in requests:
        plain = socket.create_connection(("127.0.0.1", port))
        with trust.wrap_socket(plain, server_hostname="127.0.0.1") as line:
            line.sendall(request.encode())
            found.append(line.recv(4096).split(b"\r\n")[0])
    return found


@pytest.mark.parametrize("path", EVERYTHING)
def test_the_public_port_serves_the_fleet_and_nothing_else(federation, path):
    ask = "{} {} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for line in spoken(federation, ask.format("POST", path), ask.format("GET", path)):
        assert line.startswith(b"HTTP/1.1 404")


def test_a_request_that_declares_a_petabyte_is_not_read(federation):
    ask = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
    assert spoken(federation, ask.format(1 << 50)) == [b"HTTP/1.1 413 Request Entity Too Large"]


def test_a_fleet_call_without_a_known_key_is_turned_away(federation):
    folder, port, _ = federation
    with httpx.Client(verify=ssl.create_default_context(cafile=str(folder / "ca.crt"))) as client:
        headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        for path in inside.FLEET_PATHS:
            answer = client.post(f"https://127.0.0.1:{port}/v1/fleet/{path}", content=b"", headers=headers)
            assert answer.status_code == 401, path


def call(folder, port, name):
    """Flower's own client of the fleet API with party `name`'s key; turned away, it raises."""
    key = keys.load_private_key(folder / name)
    return FleetHttpClient.from_server_address(
        f"127.0.0.1:{port}", False, str(folder / "ca.crt"), [NodeAuthHttpInterceptor(key, key.public_key())]
    )


def test_an_unknown_key_is_not_let_in_and_a_known_one_is_also_after_a_kill(federation):
    folder, port, link = federation
    own = keys.public_key_to_pem(keys.load_public_key(folder / "b.pub"))
    known = keys.public_key_to_pem(keys.load_public_key(folder / "a.pub"))
    with call(folder, port, "b") as stranger:
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            stranger.ActivateNode(ActivateNodeRequest(public_key=own, heartbeat_interval=30))
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            stranger.RegisterNode(RegisterNodeFleetRequest(public_key=own))
        with pytest.raises(httpx.HTTPStatusError, match="401"):  # another's key, signed with its own
            stranger.ActivateNode(ActivateNodeRequest(public_key=known, heartbeat_interval=30))
    with call(folder, port, "c") as other, pytest.raises(httpx.HTTPStatusError, match="403"):
        other.ActivateNode(ActivateNodeRequest(public_key=known, heartbeat_interval=30))
    with connect(folder, port, "a") as first:
        node = first[0]
        assert link.transport.restarted() == set()
        assert link.transport.online() == {node}
        assert link.transport.party_of(node) == "a"
        with connect(folder, port, "a") as second:  # as if the first had been killed and started again
            assert second[0] == node
            assert link.transport.restarted() == {node}
    assert link.transport.online() == set(), "it has signed off"
    assert link.transport.presence()["a"].cause == "left"


def test_a_stock_node_fetches_a_request_and_its_reply_arrives(federation):
    """Flower's own connection and its own messages, object by object."""
    folder, port, link = federation
    envelope = Envelope(pack_envelope({"kind": "done"}).header, bytes(range(256)) * 50_000, b"signed")
    with connect(folder, port, "a") as (node, receive, send, get_run, get_fab, pull_object, push_object, confirm):
        sent = link.transport.send(node, envelope, 60.0, "1")
        message, tree = receive()
        assert message.metadata.group_id == "1"
        run = get_run(message.metadata.run_id)
        assert get_fab(run.fab_hash, run.run_id).content
        parts = {id: pull_object(run.run_id, id) for id in wire.list_objects(tree)}
        assert wire.put_together(tree.object_id, parts) == envelope
        confirm(run.run_id, message.metadata.message_id)
        answer = Envelope(b"{}", b"x" * 7_000_000, b"s")
        reply = Message(envelope_to_record(answer), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        assert link.transport.collect({sent}) == []
        wanted, session = send(reply, get_object_tree(reply), 0.0)
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        for id, each in get_all_nested_objects(reply).items():
            assert id in wanted
            assert link.transport.collect({sent}) == []
            push_object(run.run_id, session, id, each.deflate())
        (delivery,) = link.transport.collect({sent})
        assert delivery.envelope == answer
        assert link.transport.collect({sent}) == [], "each is delivered once"


def test_a_registered_node_can_neither_order_nor_overhear_another(federation):
    """Finding 3: the port took messages from one node to another. Now a node's only way to speak is to reply."""
    folder, port, link = federation
    with connect(folder, port, "a") as (node, receive, *_), call(folder, port, "c") as other:
        own = other.ActivateNode(
            ActivateNodeRequest(
                public_key=keys.public_key_to_pem(keys.load_public_key(folder / "c.pub")), heartbeat_interval=30
            )
        ).node_id
        sent = link.transport.send(node, pack_envelope({"kind": "done"}), 60.0, "1")
        message, tree = receive()
        order = wire.make_request_proto(pack_envelope({"kind": "round"}), message.metadata.run_id, node, 60.0, "1", "m")
        for source in (own, node, 1):
            order.metadata.src_node_id = source
            for who in (own, node):
                with pytest.raises(httpx.HTTPStatusError, match="403"):
                    other.PushMessages(PushMessagesRequest(node=Node(node_id=who), messages_list=[order]))
        forged = message_to_proto(Message(envelope_to_record(Envelope(b"{}", b"", b"")), reply_to=message))
        other.PushMessages(PushMessagesRequest(node=Node(node_id=own), messages_list=[forged]))
        assert link.transport.collect({sent}) == [], "a reply to another's message is nobody's reply"
        for id in wire.list_objects(tree):
            found = other.PullObject(PullObjectRequest(node=Node(node_id=own), run_id=1, object_id=id))
            assert not found.object_found
        assert link.transport.mailbox.next(node, None) is None


def test_a_waiting_message_expires(federation):
    folder, port, link = federation
    with connect(folder, port, "a") as (node, *_):
        sent = link.transport.send(node, pack_envelope({"kind": "done"}), 0.2, "1")
        time.sleep(0.4)
        (delivery,) = link.transport.collect({sent})
        assert (delivery.envelope, delivery.error) == (None, "no whole reply arrived in time")


# --- Fulcrum's own node --------------------------------------------------------------------------


class Party:
    """A node in a thread that answers with what it got."""

    def __init__(self, folder, port, name="a", **options):
        self.said: list[str] = []
        self.got: list[tuple[Envelope, bool]] = []
        self.stopped = False
        options = {"ca": folder / "ca.crt", "say": self.said.append, **options}
        self.node = inside.FleetNode(f"127.0.0.1:{port}", self.answer, keys.load_private_key(folder / name), **options)
        self.thread = threading.Thread(target=self.node.run, args=(lambda: self.stopped,), daemon=True)

    def answer(self, request, expired):
        self.got.append((request, expired))
        return Envelope(request.header, request.body[::-1], b"s")

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stopped = True
        self.thread.join(15)


def wait_for(what, seconds=15.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_our_node_answers_at_once_and_again_after_the_coordinator_was_restarted(tmp_path):
    certs.make_certificate_authority(tmp_path, ["127.0.0.1"])
    keys.make_key_pair(tmp_path, "a")
    port, known = inside.find_free_port(), {"a": keys.public_key_to_pem(keys.load_public_key(tmp_path / "a.pub"))}
    tls = inside.TlsFiles(tmp_path / "server.crt", tmp_path / "server.key")
    seen: list[bytes] = []
    with Party(tmp_path, port, certificate=seen.append) as party:
        wait_for(lambda: any("nobody answers" in words for words in party.said))
        for time_around in range(2):
            with inside.LocalSuperlink("127.0.0.1", port, tls, known) as link:
                (node,) = wait_for(link.transport.online)
                began = time.monotonic()
                for number in range(20):
                    sent = link.transport.send(node, Envelope(b"{}", b"ab" * 100_000 + bytes([number])), 30.0, "1")
                    (delivery,) = wait_for(lambda sent=sent, link=link: link.transport.collect({sent}))
                    assert delivery.envelope.body[0] == number
                assert time.monotonic() - began < 10
                assert link.transport.presence()["a"].online
                assert link.server.count()["party_connections"] >= 1
            assert len(party.got) == 20 * (time_around + 1)
        assert seen
        assert party.node.health.cause or party.node.health.connected
    assert sum("connected to" in words for words in party.said) >= 2


def test_a_clock_that_is_wrong_is_said_at_both_sides_and_the_party_joins(federation, monkeypatch):
    folder, port, link = federation
    real = time.time
    # In this process both sides have one clock: the node's is moved when it signs, and the answer moves it back.
    with Party(folder, port) as party:
        wait_for(lambda: party.node.health.connected)
        party.node._ahead = -600.0
        party.node._close_client()
        wait_for(lambda: any("clock is" in words for words in party.said))
        wait_for(lambda: abs(party.node._ahead) < 5.0)
        wait_for(lambda: link.transport.presence()["a"].online)
    assert link.server.counters["denied_clock"] >= 1
    assert real() > 0


def test_the_coordinator_names_a_wrong_clock_key_and_version(federation):
    folder, port, link = federation
    head = fleet.RequestHead
    node = inside.FleetNode(
        f"127.0.0.1:{port}", lambda request, expired: request, keys.load_private_key(folder / "a"), ca=folder / "ca.crt"
    )
    node._ahead = -3600.0
    headers = {name.lower(): value for name, value in node._make_headers("").items()}
    with pytest.raises(fleet.Denied) as denied:
        link.transport.admit(head("POST", "/v1/fleet/pull-messages", headers, 0), "x", 1)
    assert b'"clock"' in denied.value.response.body
    assert "3600 s ahead" in link.transport.presence()["a"].words
    node._ahead = 0.0
    headers = {name.lower(): value for name, value in node._make_headers("").items()}
    with pytest.raises(fleet.Denied) as denied:
        link.transport.admit(head("POST", "/v1/fleet/pull-messages", {**headers, "fulcrum-messages": "4"}, 0), "x", 1)
    assert denied.value.response.status == 426
    assert "install the same version" in link.transport.presence()["a"].words
    link.transport.admit(head("POST", "/v1/fleet/pull-messages", headers, 0), "x", 1)


def test_a_signed_time_is_sent_for_a_few_seconds_and_nobody_elses_passes_for_it(federation, monkeypatch):
    folder, port, link = federation
    nodes = {
        name: inside.FleetNode(
            f"127.0.0.1:{port}", lambda request, _: request, keys.load_private_key(folder / name), ca=folder / "ca.crt"
        )
        for name in ("a", "c")
    }
    stamp, signature = nodes["a"]._sign_time()
    assert nodes["a"]._sign_time() == (stamp, signature)

    def admit(headers: dict[str, str]) -> None:
        lower = {name.lower(): value for name, value in headers.items()}
        link.transport.admit(fleet.RequestHead("POST", "/v1/fleet/pull-messages", lower, 0), "x", 1)

    mine, other = nodes["a"]._make_headers(""), nodes["c"]._make_headers("")
    admit(mine)
    admit(mine)
    for wrong in (
        {**mine, fleet.TIMESTAMP_HEADER: other[fleet.TIMESTAMP_HEADER]},  # another time under a right signature
        {**mine, fleet.FLEET_HTTP_SIGNATURE_HEADER: other[fleet.FLEET_HTTP_SIGNATURE_HEADER]},
        {**other, **{name: mine[name] for name in (fleet.TIMESTAMP_HEADER, fleet.FLEET_HTTP_SIGNATURE_HEADER)}},
    ):
        with pytest.raises(fleet.Denied) as denied:
            admit(wrong)
        assert b'"signature"' in denied.value.response.body
    later = time.monotonic() + 6
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        again = nodes["a"]._sign_time()[0]
    assert again != stamp
    # A machine that slept, or whose clock was set: the monotonic clock has hardly moved, and the old time is of no use.
    for step in (120.0, -120.0):
        there = time.time() + step
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda there=there: there)
            patch.setattr(time, "monotonic", lambda: later)
            found = datetime.fromisoformat(nodes["a"]._sign_time()[0]).timestamp()
        assert abs(found - there) < 1.0


def test_waiting_for_a_reply_ends_when_it_arrives():
    from fulcrum.flower.flwr141.mailbox import Mailbox

    mailbox = Mailbox()
    asked = mailbox.put(1, Envelope(b"x"), 60.0, "1")
    threading.Timer(0.2, lambda: mailbox.answer(asked, lambda: Envelope(b"y"))).start()
    began = time.monotonic()
    mailbox.wait(30.0)
    assert time.monotonic() - began < 20.0
    assert [delivery.id for delivery in mailbox.collect({asked.id})] == [asked.id]
    began = time.monotonic()
    mailbox.wait(0.1)  # what was waited for does not end the next wait
    assert time.monotonic() - began >= 0.09


def test_a_renewed_certificate_with_a_new_key_is_followed_by_signatures_and_parties(tmp_path, monkeypatch):
    """Neither side is restarted: the port shows it, requests are signed with its key, and the gate agrees."""
    monkeypatch.setattr("fulcrum.flower.port.server.CHECK_SECONDS", 0.05)
    certs.make_certificate_authority(tmp_path, ["127.0.0.1"])
    keys.make_key_pair(tmp_path, "a")
    port, known = inside.find_free_port(), {"a": keys.public_key_to_pem(keys.load_public_key(tmp_path / "a.pub"))}
    tls = inside.TlsFiles(tmp_path / "server.crt", tmp_path / "server.key")
    signer, gate = load_request_signer(tls.key), RequestGate("a")
    former = signer.fingerprint
    header = {"kind": "done", "party": "a"}
    with (
        inside.LocalSuperlink("127.0.0.1", port, tls, known) as link,
        Party(tmp_path, port, certificate=gate.note_certificate) as party,
    ):
        link.transport.on_certificate = signer.reload
        (node,) = wait_for(link.transport.online)
        gate.check(signer.sign(pack_envelope(header)), header)
        renew_certificate(tmp_path)
        wait_for(lambda: signer.fingerprint != former)
        request = signer.sign(pack_envelope(header))
        assert not gate.knows_signer(request), "its connection is older than the certificate"
        party.node.look_again()
        gate.check(request, header)
        assert link.transport.online() == {node}


def renew_certificate(folder):
    """A certificate with a new key from the same CA, put in the place of the old one."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    ca_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    old = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    new = ec.generate_private_key(ec.SECP384R1())
    builder = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        new.public_key(),
        x509.random_serial_number(),
        old.not_valid_before_utc,
        old.not_valid_after_utc,
    )
    for extension in old.extensions:
        if not isinstance(extension.value, x509.SubjectKeyIdentifier):
            builder = builder.add_extension(extension.value, extension.critical)
    pem = serialization.Encoding.PEM
    (folder / "server.key").write_bytes(
        new.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "server.crt").write_bytes(builder.sign(ca_key, hashes.SHA384()).public_bytes(pem))


def test_a_reply_that_is_too_large_is_not_read_and_its_party_is_named(federation):
    folder, port, link = federation
    before, own = link.server.limits, link.transport.body_bytes
    sent_before = link.server.count()["bytes_in"]
    try:
        link.transport.limit_replies(100_000)
        assert link.server.limits.body_bytes == link.transport.body_bytes == 100_000 + (1 << 20)
        big = Envelope(b"{}", bytes(2 << 20), b"s")
        with Party(folder, port) as party:
            party.answer = None
            party.node.answer = lambda request, expired: big
            (node,) = wait_for(link.transport.online)
            link.transport.send(node, pack_envelope({"kind": "done"}), 20.0, "1")
            wait_for(lambda: any("bytes, and an honest reply" in words for _, words in link.transport.take_notices()))
            assert party.node.health.cause in ("answer", "")
        assert link.server.count()["bytes_in"] - sent_before < 1 << 20
    finally:
        link.server.limits, link.transport.body_bytes = before, own


def test_keys_are_added_and_revoked_without_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr("fulcrum.flower.port.server.CHECK_SECONDS", 0.05)
    certs.make_certificate_authority(tmp_path, ["127.0.0.1"])
    register = tmp_path / "register"
    for name in ("a", "c"):
        keys.make_key_pair(tmp_path, name)
    register.mkdir()
    (register / "a.pub").write_bytes((tmp_path / "a.pub").read_bytes())
    known, port = keys.KeyRegister(register), inside.find_free_port()

    def pems():
        return {name: keys.public_key_to_pem(key) for name, key in known.items()}

    reported: list[tuple[str, str]] = []
    with (
        inside.LocalSuperlink(
            "127.0.0.1",
            port,
            inside.TlsFiles(tmp_path / "server.crt", tmp_path / "server.key"),
            pems(),
            report=lambda party, words: reported.append((party, words)),
            read_register=lambda: pems() if known.refresh() else None,
        ) as link,
        Party(tmp_path, port) as first,
        Party(tmp_path, port, "c") as second,
    ):
        wait_for(lambda: first.node.health.connected)
        wait_for(lambda: second.node.health.cause == "key")
        (register / "c.pub").write_bytes((tmp_path / "c.pub").read_bytes())
        wait_for(lambda: second.node.health.connected, 30)
        assert "c" in known
        (register / "a.pub").unlink()
        wait_for(lambda: first.node.health.cause == "key", 30)
        assert any("revoked" in words for words in first.said)
        assert link.transport.presence()["a"].cause == "revoked"
        assert second.node.health.connected
        assert ("a", "its key was taken from the register: it is not let in any more") in reported


def test_an_envelope_survives_flowers_records():
    envelope = Envelope(b"{}", b"\0\1\2", b"sig")
    assert record_to_envelope(envelope_to_record(envelope)) == envelope
    record = envelope_to_record(envelope)
    del record["arrays"]
    with pytest.raises(BadMessage):
        record_to_envelope(record)


def test_telemetry_and_update_checks_are_off():
    """In a process of its own: in this one another test's file may have imported flwr before Fulcrum could say so."""
    program = (
        "import fulcrum.flower, os; from flwr.supercore import telemetry; "
        "print(telemetry.FLWR_TELEMETRY_ENABLED, os.environ['FLWR_DISABLE_UPDATE_CHECK'])"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    found = subprocess.run([sys.executable, "-c", program], env=bare, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "1"]
