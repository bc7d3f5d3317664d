"""What Fulcrum uses of Flower's insides is still there and does what it did: the smoke test of flwr141/."""

from __future__ import annotations

import inspect
import os
import socket
import ssl
import time

import pytest

import fulcrum.flower

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")


import flwr
import httpx
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.routers.fleet import router
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fulcrum.errors import ConfigError
from fulcrum.flower import certs, keys
from fulcrum.flower import flwr141 as inside
from fulcrum.flower.messages import BadMessage, Envelope, pack_envelope
from fulcrum.flower.transport import GridTransport, envelope_to_record, record_to_envelope

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


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A link with TLS that knows party a, not party b."""
    folder = tmp_path_factory.mktemp("link")
    certs.make_certificate_authority(folder, ["127.0.0.1"])
    for name in ("a", "b"):
        keys.make_key_pair(folder, name)
    port = inside.find_free_port()
    known = {"a": keys.public_key_to_pem(keys.load_public_key(folder / "a.pub"))}
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


def test_flower_is_the_version_that_the_insides_were_written_for(monkeypatch):
    inside.check_flower_version()
    monkeypatch.setattr(flwr, "__version__", "1.42.0")
    with pytest.raises(ConfigError, match=r"flwr==1\.41\.0"):
        inside.check_flower_version()


def test_what_is_changed_in_flower_is_where_it_was():
    source = inspect.getsource(start_client_internal)
    assert "time.sleep(3)" in source
    assert {line.strip().split("(")[0] for line in source.splitlines() if line.strip().startswith("time.")} == {
        "time.sleep"
    }
    assert "fleet_handlers.activate_node(" in inspect.getsource(router), (
        "called through its module, so it can be wrapped"
    )
    for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        assert {"initial_backoff", "backoff_cap", "max_time", "max_tries_per_object"} <= set(pull.__kwdefaults__)
    assert "os.kill(os.getpid(), signal.SIGINT)" in inspect.getsource(fleet_http_connection)


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


def test_an_unknown_key_is_not_let_in_and_a_known_one_is_also_after_a_kill(federation):
    folder, port, link = federation
    # Not through `connect`: when it is turned away, Flower ends the whole process five seconds later.
    key = keys.load_private_key(folder / "b")
    with FleetHttpClient.from_server_address(
        f"127.0.0.1:{port}", False, str(folder / "ca.crt"), [NodeAuthHttpInterceptor(key, key.public_key())]
    ) as stranger:
        own = keys.public_key_to_pem(key.public_key())
        with pytest.raises(httpx.HTTPStatusError):
            stranger.ActivateNode(ActivateNodeRequest(public_key=own, heartbeat_interval=30))
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            stranger.RegisterNode(RegisterNodeFleetRequest(public_key=own))
        known = keys.public_key_to_pem(keys.load_public_key(folder / "a.pub"))
        with pytest.raises(httpx.HTTPStatusError, match="401"):  # another's key, signed with its own
            stranger.ActivateNode(ActivateNodeRequest(public_key=known, heartbeat_interval=30))
    with connect(folder, port, "a") as first:
        node, receive, *_ = first
        assert link.restarted() == set()
        assert receive() is None
        assert set(link.grid.get_node_ids()) == {node}
        with connect(folder, port, "a") as second:  # as if the first had been killed and started again
            assert second[0] == node
            assert link.restarted() == {node}


def test_an_envelope_reaches_a_node_and_its_waiting_message_expires(federation):
    folder, port, link = federation
    post = GridTransport(link.grid, link.restarted)
    envelope = Envelope(pack_envelope({"kind": "done"}).header, b"\1\2\3", b"")
    with connect(folder, port, "a") as (node, receive, *_):
        sent = post.send(node, envelope, 1.0, "1")
        assert sent
        assert post.collect({sent}) == []
        message, _ = receive()
        assert message.metadata.group_id == "1"
        time.sleep(1.2)
        (delivery,) = post.collect({sent})
        assert delivery.envelope is None
        assert delivery.error


def test_an_envelope_survives_flowers_records():
    envelope = Envelope(b"{}", b"\0\1\2", b"sig")
    assert record_to_envelope(envelope_to_record(envelope)) == envelope
    record = envelope_to_record(envelope)
    del record["arrays"]
    with pytest.raises(BadMessage):
        record_to_envelope(record)


def test_telemetry_and_update_checks_are_off():
    from flwr.supercore import telemetry

    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
    assert (
        fulcrum.flower.FLOWER_ENVIRONMENT["FLWR_DISABLE_UPDATE_CHECK"] == os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    )
