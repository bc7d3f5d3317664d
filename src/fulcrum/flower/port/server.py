"""The public port's server: TLS, then a request's head, then its signature, and only then its body.

It owns one thread with an event loop. Whatever a stranger does ends in a dropped connection; what a party may do is
bounded by `PortLimits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulcrum.errors import ConfigError
from fulcrum.flower.port.http import BadHead, PortResponse, RequestHead, read_head, write_response
from fulcrum.flower.port.limits import PortLimits
from fulcrum.flower.port.tokens import TokenBucket
from fulcrum.flower.port.visitors import SHAKING, SPEAKING, Visitor, Visitors

READ_BYTES = 64 * 1024
"""Bytes of a body that are read at once, and kept unread at most twice over."""
WRITE_BYTES = 256 * 1024
"""Bytes of an answer that are handed to the connection at once."""
TLS_HANDSHAKE = b"\x16"
"""The first byte of every TLS connection."""
CHECK_SECONDS = 5.0
"""Seconds between two looks at the certificate's files and at the register."""
SUMMARY_SECONDS = 60.0
"""Seconds between two sentences on what strangers did."""


@dataclass(frozen=True)
class TlsFiles:
    """Server certificate and key, PEM files."""

    certificate: Path
    key: Path

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does."""
        found = [path.stat() for path in (self.certificate, self.key)]
        return tuple(each for stat in found for each in (stat.st_mtime_ns, stat.st_size, stat.st_ino))

    def make_context(self) -> ssl.SSLContext:
        """A context for the server's side; ConfigError where the files do not fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_SINGLE_ECDH_USE
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"certificate {self.certificate} and key {self.key} cannot be used: {error.strerror or error}; give a "
                "PEM certificate and its own key, without a passphrase."
            ) from None
        return context


@dataclass(frozen=True)
class Admitted:
    """A request that may be read: whose it is, its head, and the most bytes of its body."""

    party: str
    head: RequestHead
    address: str


class Denied(Exception):
    """A request that is answered without reading its body. counter: what it is counted as."""

    def __init__(self, response: PortResponse, counter: str) -> None:
        super().__init__(counter)
        self.response, self.counter = response, counter


class PortApp(Protocol):
    """What answers requests."""

    def admit(self, head: RequestHead, address: str, body_bytes: int) -> Admitted:
        """Whose request this is, by its head alone; raises `Denied`."""
        ...

    async def answer(self, admitted: Admitted, body: bytes) -> PortResponse:
        """The answer to a party's request. It may wait; it is cancelled when the connection ends."""
        ...

    def disconnected(self, party: str) -> None:
        """A party has no connection left."""
        ...


class _Gone(Exception):
    """The connection has ended or taken too long."""


class _StreamProtocol(asyncio.StreamReaderProtocol):
    """Says when the other side has gone, also while nothing is being read."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.gone, self.writable = asyncio.Event(), asyncio.Event()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def eof_received(self) -> bool | None:
        super().eof_received()
        self.gone.set()
        return False  # whoever has finished speaking is not answered

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        self.writable.set()
        super().connection_lost(exc)


class _Line:
    """One connection's socket, and what is built on it; `close` frees all of it at once."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = asyncio.StreamReader(limit=READ_BYTES)
        self.protocol = _StreamProtocol(self.reader)
        self.plain: asyncio.Transport | None = None
        self.transport: asyncio.Transport | None = None

    def close(self) -> None:
        if self.transport is None:
            self.sock.close()
        for each in (self.transport, self.plain):  # the socket is theirs by now
            if each is not None:
                each.abort()


class _PausedProtocol(asyncio.Protocol):
    """Takes a connection over without reading from it: the first bytes are the handshake's."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()


class HardenedServer:
    """`start()` listens in a thread of its own until `stop()`."""

    def __init__(
        self,
        host: str,
        port: int,
        app: PortApp,
        limits: PortLimits,
        tls: TlsFiles | None,
        *,
        content_type: str = "application/octet-stream",
        report: Callable[[str], None] = lambda words: None,
        watch: Callable[[], None] = lambda: None,
        on_certificate: Callable[[], None] = lambda: None,
    ) -> None:
        """tls: None for plaintext. watch: called every few seconds, to look whether the register has changed.

        on_certificate: called when a renewed certificate is in use.
        """
        self.host, self.port, self.app, self.limits, self.tls = host, port, app, limits, tls
        self.counters: Counter[str] = Counter()
        self._content_type, self._report, self._watch = content_type, report, watch
        self._on_certificate = on_certificate
        self._visitors = Visitors(limits)
        self._context = tls.make_context() if tls else None
        self._stamp = tls.stamp() if tls else ()
        self._rates: dict[str, TokenBucket] = defaultdict(
            lambda: TokenBucket(limits.requests_per_second, 4 * limits.requests_per_second)
        )
        self._reading = 0
        self._told: Counter[str] = Counter()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    # --- start and stop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Listen; ConfigError where the address is taken."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error.strerror}.") from None
        listener.setblocking(False)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name="public-port", daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Drop every connection and close the port."""
        loop, stop = self.loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        if self._thread is not None:
            self._thread.join(timeout=5)

    def count(self) -> dict[str, int]:
        """Numbers for an operator: connections now, and what was dropped so far and why."""
        strangers, parties = self._visitors.count()
        now = {"strangers": strangers, "party_connections": parties, "accepted": 0, "bytes_in": 0, "bytes_out": 0}
        return {**now, **self.counters}

    def drop_party(self, party: str) -> None:
        """End every connection of a party, such as one whose key was revoked; from any thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._drop_party, party)

    def _drop_party(self, party: str) -> None:
        for each in self._visitors.of_party(party):
            each.drop()

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        asyncio.run(self._serve(listener, ready))

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.loop.set_exception_handler(lambda loop, context: None)  # broken connections are counted, not logged
        self._shakes = TokenBucket(self.limits.handshakes_per_second, 3 * self.limits.handshakes_per_second)
        jobs = [asyncio.create_task(self._accept(listener)), asyncio.create_task(self._look_after())]
        ready.set()
        await self._stop.wait()
        everyone = self._visitors.everyone()
        for each in everyone:
            each.drop()
        for job in jobs:
            job.cancel()
        listener.close()
        tasks = [each.task for each in everyone if each.task is not None]
        await asyncio.gather(*jobs, *tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets are closed in a callback of their tasks

    async def _look_after(self) -> None:
        """Certificates and the register are read again when they change; what strangers did is said."""
        waited = 0.0
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            waited += CHECK_SECONDS
            with contextlib.suppress(Exception):  # whatever is wrong with a file, the port stays up
                self._watch()
            self._reload_certificate()
            if waited >= SUMMARY_SECONDS:
                waited = 0.0
                self._say_summary()

    def _reload_certificate(self) -> None:
        if self.tls is None:
            return
        try:
            stamp = self.tls.stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._context = self.tls.make_context()
            self._on_certificate()
        except (OSError, ConfigError) as error:
            self._report(f"the certificate was not read again, and the one before stays in use: {error}")
            return
        self._report(f"read the certificate {self.tls.certificate} again; new connections use it")

    def _say_summary(self) -> None:
        new = {name: count - self._told[name] for name, count in self.counters.items() if count > self._told[name]}
        self._told = Counter(self.counters)
        shown = [f"{new[name]} {words}" for name, words in DROP_WORDS.items() if name in new]
        if sum(new.get(name, 0) for name in DROP_WORDS) > NOISE:
            self._report(f"strangers in the last minute: {', '.join(shown)}; all were dropped")

    # --- connections ------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        rate = self.limits.accepts_per_second
        bucket = TokenBucket(rate, 2 * rate)
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # out of files, or the other side has gone already
                self.counters["accept_failed"] += 1
                await asyncio.sleep(0.05)
                continue
            self.counters["accepted"] += 1
            visitor, dropped = self._visitors.enter(str(address[0]))
            for each in dropped:
                self.counters["crowded_out"] += 1
                each.drop()
            line = _Line(sock)
            visitor.task = asyncio.create_task(self._look_after_connection(visitor, line))
            # Not in the task itself: one that is dropped before its first step never gets to its end.
            visitor.task.add_done_callback(functools.partial(self._end, visitor, line))
            wait = bucket.take()
            if wait:
                self.counters["accepts_delayed"] += 1
                await asyncio.sleep(wait)

    def _end(self, visitor: Visitor, line: _Line, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # looked at, so that nobody logs it
        line.close()
        self._visitors.leave(visitor)
        if visitor.party and not self._visitors.of_party(visitor.party):
            self.app.disconnected(visitor.party)

    async def _look_after_connection(self, visitor: Visitor, line: _Line) -> None:
        try:
            line.sock.setblocking(False)
            _keep_alive(line.sock)
            async with asyncio.timeout(self.limits.head_seconds):
                await self._shake_hands(visitor, line)
                visitor.stage = SPEAKING
                head = await self._read_head(line.reader)
                admitted = self._admit(head, visitor)
            await self._talk(visitor, admitted, line)
        except Denied as error:
            self.counters[error.counter] += 1
            await _answer_and_close(line.transport, error.response)
        except BadHead as error:
            self.counters["garbage"] += 1
            await _answer_and_close(line.transport, PortResponse(error.status, close=True))
        except TimeoutError:
            counter = "timed_out" if visitor.party else ("silent", "slow_handshake", "slow_head")[visitor.stage]
            self.counters[counter] += 1
        except (_Gone, OSError, ssl.SSLError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self.counters["ended" if visitor.party else "broken"] += 1

    async def _shake_hands(self, visitor: Visitor, line: _Line) -> None:
        """Wait for the first byte, which costs nothing but the open file; then, with TLS, the handshake."""
        loop, context = asyncio.get_running_loop(), self._context
        await _wait_until_readable(loop, line.sock)
        first = line.sock.recv(1, socket.MSG_PEEK)
        if not first:
            raise _Gone
        if context is not None and first != TLS_HANDSHAKE:
            raise BadHead(400)
        visitor.stage = SHAKING
        if context is not None and (wait := self._shakes.take()):
            await asyncio.sleep(wait)
        plain, _ = await loop.connect_accepted_socket(_PausedProtocol, line.sock)
        line.transport = line.plain = plain
        if context is not None:
            seconds = self.limits.head_seconds
            made = await loop.start_tls(
                plain, line.protocol, context, server_side=True, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=1.0
            )
            if made is None:  # it went away in the handshake
                raise _Gone
            line.transport = made
            line.protocol.connection_made(made)
        else:
            plain.set_protocol(line.protocol)
            line.protocol.connection_made(plain)
            plain.resume_reading()

    async def _read_head(self, reader: asyncio.StreamReader) -> RequestHead:
        text = await reader.readuntil(b"\r\n\r\n")
        if len(text) > self.limits.head_bytes:
            raise BadHead(400)
        return read_head(text)

    def _admit(self, head: RequestHead, visitor: Visitor) -> Admitted:
        """Whose request it is; a connection that has shown one party's key stays that party's."""
        admitted = self.app.admit(head, visitor.address, self.limits.body_bytes)
        if visitor.party != admitted.party:
            for each in self._visitors.promote(visitor, admitted.party):
                self.counters["too_many_of_a_party"] += 1
                each.drop()
        return admitted

    async def _talk(self, visitor: Visitor, admitted: Admitted, line: _Line) -> None:
        """Answer a party's requests, one after the other, until the connection ends."""
        assert line.transport is not None
        reader, protocol = line.reader, line.protocol
        while True:
            if wait := self._rates[admitted.party].take():
                self.counters["slowed_down"] += 1
                await asyncio.sleep(min(wait, self.limits.idle_seconds))
            body = await self._read_body(reader, admitted.head.length)
            response = await self._answer(admitted, body, protocol)
            del body
            await self._write(line.transport, protocol, response)
            if response.close or admitted.head.headers.get("connection", "").lower() == "close":
                return
            del response
            async with asyncio.timeout(self.limits.idle_seconds):
                head = await self._read_head(reader)
            admitted = self._admit(head, visitor)

    async def _read_body(self, reader: asyncio.StreamReader, length: int) -> bytes:
        """A body whose length was allowed; all bodies under way share one allowance of memory."""
        if self._reading and self._reading + length > self.limits.bodies_bytes:
            raise Denied(PortResponse(503, close=True, headers={"retry-after": "1"}), "memory_full")
        self._reading += length
        try:
            content = bytearray()
            async with asyncio.timeout(self.limits.body_seconds(length)):
                while len(content) < length:
                    piece = await reader.read(min(READ_BYTES, length - len(content)))
                    if not piece:
                        raise _Gone
                    content += piece
            self.counters["bytes_in"] += length
            return bytes(content)
        finally:
            self._reading -= length

    async def _answer(self, admitted: Admitted, body: bytes, protocol: _StreamProtocol) -> PortResponse:
        """The app's answer, given up when the other side has gone."""
        answering = asyncio.ensure_future(self.app.answer(admitted, body))
        leaving = asyncio.ensure_future(protocol.gone.wait())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise _Gone
            return answering.result()
        except (_Gone, Denied, OSError):
            raise
        except Exception:  # of one request; the port stays up
            self.counters["failed"] += 1
            return PortResponse(500, close=True)
        finally:
            answering.cancel()
            leaving.cancel()

    async def _write(self, transport: asyncio.Transport, protocol: _StreamProtocol, response: PortResponse) -> None:
        pieces = write_response(response, self._content_type)
        size = sum(map(len, pieces))
        async with asyncio.timeout(self.limits.body_seconds(size)):
            for piece in pieces:
                for at in range(0, len(piece), WRITE_BYTES):  # in pieces, so that nobody makes this process hold more
                    transport.write(memoryview(piece)[at : at + WRITE_BYTES])
                    await protocol.writable.wait()
                    if protocol.gone.is_set():
                        raise _Gone
        self.counters["bytes_out"] += size


async def _answer_and_close(transport: asyncio.Transport | None, response: PortResponse) -> None:
    """A short answer to somebody whose body is not read."""
    if transport is None or transport.is_closing():
        return
    with contextlib.suppress(OSError, TimeoutError):
        for piece in write_response(response, "application/json"):
            transport.write(piece)
        async with asyncio.timeout(1.0):
            while transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # what is still arriving would make the kernel throw the answer away


DROP_WORDS = {
    "silent": "silent connections",
    "broken": "broken connections or handshakes",
    "slow_handshake": "unfinished handshakes",
    "slow_head": "unfinished heads",
    "garbage": "requests that were none",
    "crowded_out": "connections beyond the places for strangers",
    "denied_key": "unknown keys",
    "denied_signature": "wrong signatures",
    "denied_path": "other paths",
    "denied_size": "requests that were too large",
}
"""Counters that speak of strangers, in words."""
NOISE = 20
"""Up to so many dropped connections per minute nothing is said: scanners are everywhere."""


async def _wait_until_readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = loop.create_future()
    number = sock.fileno()
    loop.add_reader(number, _set_done, ready)
    try:
        await ready
    finally:
        loop.remove_reader(number)


def _set_done(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _keep_alive(sock: socket.socket) -> None:
    """Half-open connections end: the kernel asks, and gives up on bytes that nobody acknowledges."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_NODELAY", 1)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
