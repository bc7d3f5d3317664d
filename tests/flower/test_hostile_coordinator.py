"""A coordinator, or whoever stands in its place, that redirects, inflates, stalls or breaks off: a party names it.

Each trial is a real server on loopback and a party's node with real TLS.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

from flwr.proto import fleet_pb2

from fulcrum.errors import ConfigError
from fulcrum.flower import certs, keys
from fulcrum.flower.flwr141 import FleetNode, LocalSuperlink, TlsFiles, find_free_port
from fulcrum.flower.flwr141.node import find_proxy, is_loopback
from fulcrum.flower.flwr141.troubles import hide_password
from fulcrum.flower.messages import Envelope

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    certs.make_certificate_authority(made, ["127.0.0.1"])
    certs.make_certificate_authority(made / "other", ["127.0.0.1"])
    certs.make_certificate_authority(made / "elsewhere", ["hospital.example"])
    keys.make_key_pair(made, "a")
    return made


@contextlib.contextmanager
def hostile(folder: Path, answer: Callable[[Any], None], tls: bool = True) -> Iterator[int]:
    """A server that answers every POST with `answer(handler)`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer(self)

        def log_message(self, *given: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *given: None  # type: ignore[method-assign]
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def party(folder: Path, port: int, **options: Any) -> Iterator[tuple[FleetNode, list[str]]]:
    said: list[str] = []
    stopped = threading.Event()
    options = {"ca": folder / "ca.crt", "say": said.append, **options}
    node = FleetNode(
        f"127.0.0.1:{port}", lambda request, expired: Envelope(b"{}"), keys.load_private_key(folder / "a"), **options
    )
    thread = threading.Thread(target=node.run, args=(stopped.is_set,), daemon=True)
    thread.start()
    try:
        yield node, said
    finally:
        stopped.set()
        thread.join(10)


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def reply(handler: Any, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_into_the_hospital_is_not_followed(folder: Path, status: int) -> None:
    """Finding 7: a 307 made a party POST to an address inside its own network."""
    inside: list[str] = []
    with (
        hostile(folder, lambda handler: inside.append(handler.path), tls=False) as secret,
        hostile(
            folder, lambda handler: reply(handler, status, location=f"http://127.0.0.1:{secret}/admin/delete")
        ) as port,
        party(folder, port) as (node, said),
    ):
        wait_for(lambda: node.health.cause == "redirect")
        time.sleep(0.5)
        assert inside == []
        assert "redirects are not followed" in said[0]


def test_an_answer_is_not_decompressed(folder: Path) -> None:
    """Finding 8: three megabytes of gzip became six gigabytes at a party."""
    bomb = gzip.compress(bytes(200 << 20), 9)
    assert len(bomb) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        hostile(folder, lambda handler: reply(handler, 200, bomb, content_encoding="gzip")) as port,
        party(folder, port) as (node, said),
    ):
        wait_for(lambda: node.health.cause == "answer")
        time.sleep(1.0)
        assert "compressed answer" in said[0]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 60, f"grew by {grown:.0f} MB"


def test_an_endless_answer_is_cut_off(folder: Path) -> None:
    def pour(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(1 << 40))
        handler.end_headers()
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(bytes(1 << 16))

    with hostile(folder, pour) as port, party(folder, port) as (node, said):
        wait_for(lambda: node.health.cause == "answer")
        assert "beyond any honest message" in said[0]


def test_a_message_larger_than_the_terms_allow_is_cut_off(folder: Path) -> None:
    def answer(handler: Any) -> None:
        if handler.path.endswith("activate-node"):
            reply(handler, 200, fleet_pb2.ActivateNodeResponse(node_id=77).SerializeToString())
        else:
            reply(handler, 200, bytes(70_000))

    with hostile(folder, answer) as port, party(folder, port, limit=lambda: 60_000) as (node, said):
        wait_for(lambda: node.health.cause == "answer")
        assert any("60000 bytes" in words for words in said)


@pytest.mark.parametrize("body", [b"\xff" * 50, b"<html>hello</html>", b""])
def test_a_server_that_is_no_coordinator_is_named(folder: Path, body: bytes) -> None:
    with hostile(folder, lambda handler: reply(handler, 404, body)) as port, party(folder, port) as (node, said):
        wait_for(lambda: node.health.cause == "answer")
        assert "no Fulcrum coordinator" in said[0]


def test_wrong_certificates_are_named(folder: Path) -> None:
    def nothing(handler: Any) -> None:
        reply(handler, 404)

    with (
        hostile(folder, nothing) as port,
        party(folder, port, ca=folder / "other" / "ca.crt") as (node, said),
    ):
        wait_for(lambda: node.health.cause == "certificate")
        assert "not signed by the CA of --ca" in said[0]
    with (
        hostile(folder / "elsewhere", nothing) as port,
        party(folder, port, ca=folder / "elsewhere" / "ca.crt") as (node, said),
    ):
        wait_for(lambda: node.health.cause == "certificate")
        assert "another address than 127.0.0.1" in said[0]
    with pytest.raises(ConfigError, match="cannot be read as a CA's certificate"):
        FleetNode(
            "x:1", lambda *given: Envelope(b""), keys.load_private_key(folder / "a"), ca=folder / "a"
        )._open_client()


def test_broken_handshakes_are_outlived(folder: Path) -> None:
    """Finding 1: one broken TLS handshake, and a party stayed away for good while its process lived."""
    port = find_free_port()
    broken: list[int] = []
    listener = socket.create_server(("127.0.0.1", port))
    stop = threading.Event()

    def break_off() -> None:
        listener.settimeout(0.1)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                line, _ = listener.accept()
                with line:
                    line.recv(100)
                    broken.append(1)
                    if len(broken) % 2:  # in turns: an end in the middle of the handshake, and nonsense
                        line.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")

    thread = threading.Thread(target=break_off)
    thread.start()
    known = {"a": keys.public_key_to_pem(keys.load_public_key(folder / "a.pub"))}
    with party(folder, port) as (node, said):
        wait_for(lambda: len(broken) >= 3)
        stop.set()
        thread.join()
        listener.close()
        assert not node.health.connected
        with LocalSuperlink("127.0.0.1", port, TlsFiles(folder / "server.crt", folder / "server.key"), known) as link:
            wait_for(lambda: node.health.connected, 25)
            wait_for(link.transport.online)
    assert any("TLS handshake" in words or "broke off" in words for words in said)
    assert any(words.startswith("connected to") and " after " in words for words in said)


@pytest.mark.parametrize("server", ["127.0.0.1:1", "localhost:9", "[::1]:5", "127.9.9.9:1", "a.localhost:2"])
def test_no_proxy_stands_between_a_party_and_its_own_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    """Finding 12: HTTP_PROXY cut a party off from what runs beside it."""
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    assert is_loopback(server)
    node = FleetNode(server, lambda *given: Envelope(b""), keys.load_private_key(folder / "a"), ca=None)
    assert node.proxy is None
    assert not is_loopback("192.168.0.1:9")
    assert not is_loopback("localhost.example:9")


def test_a_proxy_is_taken_from_the_environment_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{find_free_port()}")
    monkeypatch.setenv("NO_PROXY", "inside.example")
    assert find_proxy("inside.example:9092", False) is None
    assert find_proxy("outside.example:9092", True) is None
    assert hide_password(str(find_proxy("outside.example:9092", False))).startswith("http://127.0.0.1:")
    said: list[str] = []
    node = FleetNode(
        "coordinator.example:9092",
        lambda *given: Envelope(b""),
        keys.load_private_key(folder / "a"),
        ca=folder / "ca.crt",
        say=said.append,
    )
    end = time.monotonic() + 1.5
    node.run(lambda: time.monotonic() > end)
    assert node.health.cause == "proxy"
    assert "proxy" in said[0]
    assert "secret" not in said[0]
