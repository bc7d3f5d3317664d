"""The party's side: a node of Flower's fleet API in the party's own process, that never gives up and says why it waits.

It only calls out: to one address, never through a redirect, with answers of a bounded size that are not decompressed.
What it answers is up to the party's own code; the app that a server distributes is never even fetched.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import random
import ssl
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto import fleet_pb2, heartbeat_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from google.protobuf.message import DecodeError

from fulcrum.errors import ConfigError
from fulcrum.flower import keys
from fulcrum.flower.flwr141 import wire
from fulcrum.flower.flwr141.fleet import LAST_HEADER, VERSIONS_HEADER
from fulcrum.flower.flwr141.pinned import HEARTBEAT_SECONDS, check_flower_version
from fulcrum.flower.flwr141.troubles import Trouble, hide_password, name_refusal, name_trouble
from fulcrum.flower.messages import MESSAGE_VERSION, BadMessage, Envelope

SIGNED_SECONDS = 5.0
"""How long a signed time is sent again before a new one is signed."""
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
"""Seconds without any byte after which a request is given up; the coordinator answers within ten."""
CONNECTIONS = httpx.Limits(max_connections=4, max_keepalive_connections=2, keepalive_expiry=60.0)
"""A connection is kept between two heartbeats: a handshake costs both sides more than a request."""
LONGEST_PAUSE = 20.0
"""Seconds: the longest pause between two tries. A party is back that long after its cause has ended, at most."""
SAY_AGAIN_SECONDS = 600.0
"""Seconds after which a trouble that lasts is said again."""
SMALL_ANSWER_BYTES = 1 << 20
"""The most bytes of an answer other than a message."""


@dataclass(frozen=True)
class NodeHealth:
    """How a party's connection stands; for an operator. since: seconds since 1970."""

    connected: bool
    since: float
    cause: str = ""
    words: str = ""
    clock_ahead: float = 0.0
    """Seconds by which this machine's clock is ahead of the coordinator's, as far as known."""


class FleetNode:
    """`run(stop)` fetches requests, answers them with the party's own code, and sends the answers, until `stop()`.

    answer: takes an envelope, and whether it has expired; returns the reply. limit: the most bytes that a request may
    have now. certificate: called with the server's certificate (DER) before anything that it sent is used.
    """

    def __init__(
        self,
        server: str,
        answer: Callable[[Envelope, bool], Envelope],
        key: ec.EllipticCurvePrivateKey,
        *,
        ca: Path | None,
        insecure: bool = False,
        say: Callable[[str], None] = print,
        limit: Callable[[], int] = lambda: 1 << 30,
        certificate: Callable[[bytes], object] = lambda der: None,
    ) -> None:
        """ca: the CA's certificate; None trusts the system's. insecure: plaintext, for tests on one machine."""
        check_flower_version()
        self.server, self.answer, self.say, self.limit, self.certificate = server, answer, say, limit, certificate
        self._key, self._pem = key, keys.public_key_to_pem(key.public_key())
        self._insecure, self._ca = insecure, ca
        self.proxy = None if is_loopback(server) else find_proxy(server, insecure)
        self.health = NodeHealth(False, time.time(), "away", "has not tried yet")
        self._client: httpx.Client | None = None
        self._node = 0
        self._last = ""
        self._ahead = 0.0
        self._signed = (
            -math.inf,
            -math.inf,
            "",
            "",
        )  # when on both clocks (monotonic, signed time), time and signature
        self._told: tuple[str, float] = ("", 0.0)
        self._ever = False
        self._lock = threading.Lock()

    # --- the loop ---------------------------------------------------------------------------------

    def run(self, stop: Callable[[], bool]) -> None:
        """Take part until `stop` returns True; a connection that fails is made anew, with a longer pause each time."""
        failures = 0
        try:
            while not stop():
                try:
                    self._take_part(stop)
                    failures = 0
                except Trouble as trouble:
                    failures = 0 if self.health.connected else failures + 1
                    self._note(trouble)
                    self._close_client()
                    self._pause(failures, stop)
        finally:
            self.close()

    def close(self) -> None:
        """Sign off, so that the coordinator knows at once."""
        if self._node and self.health.connected:
            with contextlib.suppress(Trouble):
                self._call("deactivate-node", fleet_pb2.DeactivateNodeRequest(node_id=self._node), timeout=2.0)
        self._close_client()

    def _take_part(self, stop: Callable[[], bool]) -> None:
        """One request, if there is one within ten seconds."""
        if not self._node:
            request = fleet_pb2.ActivateNodeRequest(public_key=self._pem, heartbeat_interval=HEARTBEAT_SECONDS)
            self._node = self._call("activate-node", request, fleet_pb2.ActivateNodeResponse).node_id
            self._last = ""
            self._note_success()
        asked = fleet_pb2.PullMessagesRequest(node=Node(node_id=self._node))
        size = self.limit()
        found = self._call("pull-messages", asked, fleet_pb2.PullMessagesResponse, limit=size, last=self._last)
        self._note_success()
        for message in found.messages_list[:1]:
            if stop():
                return
            self._answer_message(message)

    def _answer_message(self, message: Any) -> None:
        facts = wire.read_facts(message)
        try:
            request = wire.read_envelope(message)
        except BadMessage:
            request = Envelope(b"")
        del message.content.items[:]
        expired = facts.created_at + facts.ttl < time.time() - self._ahead
        ended = threading.Event()
        threading.Thread(target=self._beat, args=(ended,), name="heartbeat", daemon=True).start()
        try:
            reply = self.answer(request, expired)
        finally:
            ended.set()
        self._last = facts.id
        proto = wire.make_reply_proto(reply, facts)
        push = fleet_pb2.PushMessagesRequest(node=Node(node_id=self._node), messages_list=[proto])
        self._push(push, facts.created_at + facts.ttl)

    def _push(self, push: Any, ends: float) -> None:
        """Send an answer; what a broken connection swallowed is sent again while the coordinator may still want it."""
        while True:
            try:
                self._call("push-messages", push, fleet_pb2.PushMessagesResponse)
                return
            except Trouble as trouble:
                if trouble.cause != "away" or time.time() - self._ahead > ends:
                    raise
                self._note(trouble)
                self._close_client()
                time.sleep(0.5)

    def _beat(self, ended: threading.Event) -> None:
        """Say that this party lives, while it computes."""
        request = heartbeat_pb2.SendNodeHeartbeatRequest(
            node=Node(node_id=self._node), heartbeat_interval=HEARTBEAT_SECONDS
        )
        while not ended.wait(HEARTBEAT_SECONDS / 2):
            with contextlib.suppress(Trouble):
                self._call("send-node-heartbeat", request)

    def look_again(self) -> None:
        """Make a new connection, to see the certificate that the coordinator has now."""
        self._close_client()
        request = heartbeat_pb2.SendNodeHeartbeatRequest(
            node=Node(node_id=self._node), heartbeat_interval=HEARTBEAT_SECONDS
        )
        with contextlib.suppress(Trouble):
            self._call("send-node-heartbeat", request)

    # --- requests ---------------------------------------------------------------------------------

    def _call(
        self,
        path: str,
        request: Any,
        kind: Any = None,
        *,
        limit: int = SMALL_ANSWER_BYTES,
        last: str = "",
        timeout: float | None = None,
    ) -> Any:
        """One request; a Trouble names what was wrong. A wrong clock is corrected once, by the coordinator's."""
        content = request.SerializeToString()
        for attempt in range(2):
            status, _headers, body = self._post(path, content, limit, last, timeout)
            if status == 200:
                break
            if path != "activate-node" and status == 403:  # the coordinator has started again, and knows no nodes
                self._node = 0
                raise Trouble("restarted", "the coordinator was started again")
            trouble = name_refusal(status, body, self.server, MESSAGE_VERSION)
            if trouble.cause == "clock" and attempt == 0 and self._correct_clock(body):
                continue
            raise trouble
        if kind is None:
            return None
        try:
            return kind.FromString(body)
        except DecodeError:
            raise Trouble("answer", f"{self.server} answers with something else than Flower's messages") from None

    def _post(
        self, path: str, content: bytes, limit: int, last: str, timeout: float | None
    ) -> tuple[int, httpx.Headers, bytes]:
        client = self._open_client()
        scheme = "http" if self._insecure else "https"
        try:
            with client.stream(
                "POST",
                f"{scheme}://{self.server}/v1/fleet/{path}",
                content=content,
                headers=self._make_headers(last),
                timeout=TIMEOUT if timeout is None else timeout,
            ) as response:
                self._look_at_certificate(response)
                return response.status_code, response.headers, self._read(response, limit)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed by another thread meanwhile
            raise name_trouble(error, self.server, self.proxy) from error
        except httpx.InvalidURL as error:
            raise Trouble("address", f"--server {self.server} is not HOST:PORT ({error})") from error

    def _read(self, response: httpx.Response, limit: int) -> bytes:
        """The answer's bytes as they travel. Nothing is decompressed: three megabytes can be made of six thousand."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise Trouble("answer", f"{self.server} sent a compressed answer, which was not asked for; it was not read")
        content = bytearray()
        for piece in response.iter_raw():
            content += piece
            if len(content) > limit:
                raise Trouble("answer", f"{self.server} sent more than {limit} bytes, beyond any honest message")
        return bytes(content)

    def _look_at_certificate(self, response: httpx.Response) -> None:
        stream = response.extensions.get("network_stream")
        tls = stream.get_extra_info("ssl_object") if stream is not None else None
        if tls is not None:
            der = tls.getpeercert(True)
            if der:
                self.certificate(der)

    def _make_headers(self, last: str) -> dict[str, str]:
        stamp, signature = self._sign_time()
        return {
            "content-type": PROTOBUF_MEDIA_TYPE,
            "accept": PROTOBUF_MEDIA_TYPE,
            "accept-encoding": "identity",
            "user-agent": "fulcrum",
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self._pem).decode("ascii"),
            TIMESTAMP_HEADER: stamp,
            FLEET_HTTP_SIGNATURE_HEADER: signature,
            wire.INLINE_HEADER: "1",
            VERSIONS_HEADER: str(MESSAGE_VERSION),
            **({LAST_HEADER: last} if last else {}),
        }

    def _sign_time(self) -> tuple[str, str]:
        """The time and its signature: one for the requests of a few seconds, which the coordinator allows."""
        now, there = time.monotonic(), time.time() - self._ahead
        made, said, stamp, signature = self._signed
        # Both clocks: the monotonic one stands still while a machine sleeps, and the other one is set now and then.
        if now - made > SIGNED_SECONDS or abs(there - said) > SIGNED_SECONDS:
            stamp = datetime.fromtimestamp(there, UTC).isoformat()
            signature = b64encode(self._key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))).decode("ascii")
            self._signed = (now, there, stamp, signature)
        return stamp, signature

    def _open_client(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                verify: Any = False
                if not self._insecure:
                    verify = make_client_context(self._ca)
                self._client = httpx.Client(
                    verify=verify,
                    timeout=TIMEOUT,
                    limits=CONNECTIONS,
                    follow_redirects=False,
                    trust_env=False,
                    proxy=self.proxy,
                )
            return self._client

    def _close_client(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    # --- what is said -----------------------------------------------------------------------------

    def _correct_clock(self, body: bytes) -> bool:
        """Use the coordinator's time from now on; it only says when a request was made."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            theirs = float(json.loads(body)["time"])
            ahead = time.time() - theirs
            if abs(ahead) < 10 * 366 * 86400:
                self._ahead = ahead
                words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
                self.say(
                    f"this machine's clock is {words} the coordinator's; this party takes part by the coordinator's "
                    "time, but set the clock (NTP): certificates and logs go by it"
                )
                return True
        return False

    def _note_success(self) -> None:
        if not self.health.connected:
            away = time.time() - self.health.since
            self.say(
                f"connected to {self.server}"
                + (f"{' again' if self._ever else ''} after {away:.0f} s" if self._told[0] else "")
                + (f", through the proxy {hide_password(self.proxy)}" if self.proxy else "")
            )
            self._told, self._ever = ("", 0.0), True
            self.health = NodeHealth(True, time.time(), clock_ahead=self._ahead)

    def _note(self, trouble: Trouble) -> None:
        """Say a trouble once, and again when it lasts; what has gone on for a moment only is no news."""
        now = time.monotonic()
        since = time.time() if self.health.connected else self.health.since
        self.health = NodeHealth(False, since, trouble.cause, trouble.words, self._ahead)
        cause, at = self._told
        if cause != trouble.cause or now - at > SAY_AGAIN_SECONDS:
            self.say(f"not connected ({trouble.cause}): {trouble.words}; trying again")
            self._told = (trouble.cause, now)

    def _pause(self, failures: int, stop: Callable[[], bool]) -> None:
        """Longer after each failure, and never the same for all parties: they should not come back as one crowd."""
        end = time.monotonic() + min(LONGEST_PAUSE, 0.25 * 2 ** min(failures, 8)) * random.uniform(0.6, 1.0)
        while time.monotonic() < end and not stop():
            time.sleep(0.05)


def make_client_context(ca: Path | None) -> ssl.SSLContext:
    """Trust in a CA's certificate, or in the system's CAs."""
    try:
        return ssl.create_default_context(cafile=str(ca) if ca else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca {ca} cannot be read as a CA's certificate (PEM): {error.strerror or error}.") from None


def is_loopback(server: str) -> bool:
    """Whether HOST:PORT is this machine itself; no proxy is between."""
    host = server.rpartition(":")[0].strip("[]").lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def find_proxy(server: str, insecure: bool) -> str | None:
    """The proxy for this server by HTTPS_PROXY (HTTP_PROXY without TLS), ALL_PROXY and NO_PROXY; None: directly."""
    found = urllib.request.getproxies_environment()
    bypass: Callable[..., bool] = getattr(urllib.request, "proxy_bypass_environment", lambda host, proxies: False)
    if bypass(server, found):
        return None
    proxy = found.get("http" if insecure else "https") or found.get("all")
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    return proxy
