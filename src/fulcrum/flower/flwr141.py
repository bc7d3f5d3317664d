"""Everything that is internal to Flower 1.41.0, in one file; tests/test_flower_link.py notices when it moves.

`Link` is a SuperLink inside this process. Its public port serves the fleet API and nothing else: no
control API (registering keys, starting runs) and no runtime API (taking tasks) listen anywhere, since
the coordinator talks to the link's state directly. `supernode` starts a stock SuperNode beside a party,
and `Executor` takes its tasks and answers them with the party's own code; the app that the server
distributes is never installed, loaded or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr
import httpx
import uvicorn
from flwr.app import Message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.main import create_app
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from fulcrum.errors import ConfigError
from fulcrum.flower import QUIET

PINNED = "1.41.0"
FLEET = (
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
"""All that the public port answers: what a SuperNode with a registered key needs."""
OPEN_FLEET = ("register-node", "unregister-node")
"""What anonymous SuperNodes need beside it, served only without TLS."""
BODY_LIMIT = 64 << 20
"""Bytes of the largest request that the public port reads."""
HEARTBEAT = 20.0
PARTS_SECONDS = 1.0
"""How long the coordinator looks for the parts of a reply that was said to be whole."""


def check_version() -> None:
    """Flower's insides move between releases; refuse any other than the one this file was written for."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # it tells of every request, also of strangers'
    if flwr.__version__ != PINNED:
        raise ConfigError(f"flwr {flwr.__version__} is installed, and this needs {PINNED}: pip install flwr=={PINNED}.")


def hasten(most: float | None = None) -> None:
    """Look for the parts of a message every few hundredths of a second, not every second or more.

    most: seconds to wait for all of them.
    """
    for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults = pull.__kwdefaults__
        assert defaults is not None
        defaults["initial_backoff"], defaults["backoff_cap"] = 0.03, 0.5
        if most is not None:
            defaults["max_time"], defaults["max_tries_per_object"] = most, None


# --- the coordinator's side ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tls:
    """Server certificate and key, PEM files."""

    certificate: Path
    key: Path


class Gate:
    """The public port's front door: known fleet paths pass, everything else is 404. Counts bytes both ways."""

    def __init__(self, app: Any, paths: Iterable[str]) -> None:
        self.app = app
        self.paths = frozenset(f"/v1/fleet/{path}" for path in paths)
        self.received = self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http" or scope["path"] not in self.paths or scope["method"] != "POST":
            await _answer(send, 404)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > BODY_LIMIT:
            await _answer(send, 413)
            return
        seen = 0

        async def count_in() -> Any:
            nonlocal seen
            event = await receive()
            seen += len(event.get("body", b""))
            self.received += len(event.get("body", b""))
            # A chunked request declares no length; beyond the limit it is treated as broken off.
            return {"type": "http.disconnect"} if seen > BODY_LIMIT else event

        async def count_out(event: Any) -> None:
            self.sent += len(event.get("body", b""))
            await send(event)

        await self.app(scope, count_in, count_out)


async def _answer(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


class Link:
    """A SuperLink in this process: `with Link(...) as link:` then `link.grid` sends and receives."""

    def __init__(self, host: str, port: int, tls: Tls | None, nodes: Mapping[str, bytes], app: bytes | None = None):
        """nodes: the public key (PEM) of every party, by name; with TLS only these are let in.

        app: the Flower app bundle that SuperNodes are offered; a placeholder unless given, since no party runs it.
        """
        check_version()
        hasten(PARTS_SECONDS)
        self.host, self.port = host, port
        self._app = create_app()
        self._app.state.enable_supernode_auth = tls is not None
        self.gate = Gate(self._app, FLEET if tls else FLEET + OPEN_FLEET)
        self.state = self._app.state.linkstate_factory.state()
        if tls is not None:
            for key in nodes.values():
                self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT)
        self._back: set[int] = set()
        self._active: set[int] = set()
        self.grid = self._start_run(app or bundle())
        fleet_handlers.activate_node = self._activate
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.gate,
                host=host,
                port=port,
                log_level="error",
                access_log=False,
                ws="none",
                ssl_certfile=str(tls.certificate) if tls else None,
                ssl_keyfile=str(tls.key) if tls else None,
            )
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._server.run, name="superlink", daemon=True)

    def __enter__(self) -> Link:
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error.strerror}.") from None
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.02)
        if not self._server.started:
            raise ConfigError(f"the server on {self.host}:{self.port} did not start; check the certificate and key.")
        threading.Thread(target=self._beat, name="superlink-heartbeat", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._server.should_exit = True
        self._thread.join(timeout=5)

    def returned(self) -> set[int]:
        """Nodes that were activated again since this was last asked."""
        back, self._back = self._back, set()
        return back

    def _activate(self, request: Any, state: Any) -> Any:
        """As Flower's own, but a node that was killed may come back at once.

        Flower would turn it away for a minute, until its last heartbeat is old. The request is signed with
        the node's key by now (the middleware before this has checked), so it is the node itself.
        """
        node = state.get_node_id_by_public_key(request.public_key)
        if node is not None and node in self._active:
            state.deactivate_node(node)
            self._back.add(node)
        response = _ACTIVATE(request, state)
        self._active.add(response.node_id)
        return response

    def _start_run(self, content: bytes) -> LocalGrid:
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        self.state.store_fab(fab)
        run_id = self.state.create_run(
            "fulcrum/federation",
            "1.0.0",
            fab.hash_str,
            {},
            NOOP_FEDERATION_ID,
            None,
            NOOP_FLWR_AID,
            TaskType.SERVER_APP,
        )
        run = self.state.get_run_info(run_ids=[run_id])[0]
        self.state.claim_task(run.primary_task_id)
        self.state.activate_task(run.primary_task_id)
        TaskIdentity.run_id, TaskIdentity.task_id = run_id, run.primary_task_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self.task_id = run.primary_task_id
        grid = LocalGrid(self.state, SimpleNamespace(run_id=run_id, task_id=run.primary_task_id))
        grid.set_run(run)
        return grid

    def _beat(self) -> None:
        """Flower ends a run whose task is silent for a minute."""
        while not self._stop.wait(HEARTBEAT / 2):
            self.state.acknowledge_task_heartbeat(self.task_id)


_ACTIVATE = fleet_handlers.activate_node


class _Runtime:
    """The runtime API's calls, made on the link's state directly: there is no port that a stranger could find."""

    def __init__(self, state: Any, task: Any) -> None:
        self._state, self._task = state, task

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        handler = getattr(runtime_handlers, _HANDLERS[name])
        return lambda request: handler(request, self._state, self._task)


_HANDLERS = {
    "PushMessages": "push_messages",
    "PullMessages": "pull_messages",
    "PushObject": "push_object",
    "PullObject": "pull_object",
    "ConfirmMessageReceived": "confirm_message_received",
    "GetNodes": "get_nodes",
}


class LocalGrid(HttpGrid):  # type: ignore[misc,unused-ignore]
    """Flower's own grid over the calls above."""

    def __init__(self, state: Any, task: Any) -> None:
        super().__init__(token="in this process")
        self._state, self._local = state, _Runtime(state, task)

    @property
    def _runtime_client(self) -> Any:
        return self._local

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have arrived whole: a slow upload, or one that never ends, keeps nobody else waiting."""
        ready = [sent for sent in message_ids if not self._arriving(sent)]
        return super().pull_messages(ready) if ready else []

    def _arriving(self, sent: str) -> bool:
        """Whether a reply has been announced whose parts are not all here."""
        reply = self._state.message_ins_id_to_message_res_id.get(sent)
        if reply is None:
            return False
        store = self._state.object_store
        try:
            parts = [part.object_id for part in iterate_object_tree(store.get_object_tree(reply))]
        except NoObjectInStoreError:
            return False
        return any(store.get(part) == b"" for part in parts)


def bundle(files: Mapping[str, str] | None = None) -> bytes:
    """A Flower app bundle. SuperNodes insist on downloading one; Fulcrum's parties never run it."""
    project = """[project]
name = "federation"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fulcrum"

[tool.flwr.app.components]
serverapp = "pushed:app"
clientapp = "pushed:app"
"""
    content = {"pyproject.toml": project, **(files or {})}
    sums = [f"{name},{hashlib.sha256(text.encode()).hexdigest()},{8 * len(text)}" for name, text in content.items()]
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, text in {**content, ".info/CONTENT": "\n".join(sums)}.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return held.getvalue()


# --- the party's side ---------------------------------------------------------------------------


def free_port() -> int:
    """A port on loopback that is free now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Executor:
    """A SuperNode as a child process, and the loop that answers its tasks with the party's own code.

    The child runs Flower's SuperNode in `--isolation process`: it fetches messages and waits for somebody to
    take them. The runtime port is on loopback and asks for a secret that only this process knows.
    """

    def __init__(
        self,
        server: str,
        home: Path,
        answer: Callable[[Message], Message],
        *,
        ca: Path | None,
        key: Path | None,
        say: Callable[[str], None] = print,
    ) -> None:
        """ca and key: None for plaintext without node keys. home: a folder for Flower's own files and logs."""
        check_version()
        hasten()
        self.server, self.home, self.ca, self.key = server, home, ca, key
        self.answer, self.say = answer, say
        home.mkdir(parents=True, exist_ok=True)
        self._child: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._failures = 0

    def run(self, stop: Callable[[], bool]) -> None:
        """Answer until `stop` says so. A SuperNode that ends is started again, later each time."""
        quiet, idle = False, 0
        try:
            while not stop():
                if self._child is None or self._child.poll() is not None:
                    self._restart(stop)
                    continue
                try:
                    idle = 0 if self._take_one() else idle + 1
                    if idle:  # a round is seconds apart from the next, an idle hour is long
                        time.sleep(0.05 if idle < 40 else 0.25)
                    quiet = False
                except (httpx.HTTPError, RuntimeError, ValueError) as error:
                    if not quiet and time.monotonic() - self._started > 60:
                        self.say(f"the SuperNode beside this party does not answer ({type(error).__name__})")
                        quiet = True
                    time.sleep(0.3)
        finally:
            self.close()

    def close(self) -> None:
        """End the SuperNode and whatever it started."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._child.kill()
        self._child = None

    def _restart(self, stop: Callable[[], bool]) -> None:
        if self._child is not None:
            lasted = time.monotonic() - self._started
            self._failures = 0 if lasted > 60 else self._failures + 1
            if self._child.returncode == 1 and self._failures > 1:
                self.say(f"the coordinator turned this party away, or is not there (see {self.home / 'supernode.log'})")
            pause = min(30.0, 0.5 * 2**self._failures)
            end = time.monotonic() + pause
            while time.monotonic() < end and not stop():
                time.sleep(0.1)
        if stop():
            return
        secret = secrets.token_bytes(32)
        secret_file = self.home / "secret"
        secret_file.unlink(missing_ok=True)
        with os.fdopen(os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
        port = free_port()
        command = [sys.executable, "-m", "fulcrum.flower.flwr141", "--superlink", self.server]
        command += ["--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--superexec-auth-secret-file", str(secret_file)]
        command += ["--root-certificates", str(self.ca)] if self.ca else ["--insecure"]
        command += ["--auth-supernode-private-key", str(self.key)] if self.key else []
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.home)}
        with (self.home / "supernode.log").open("ab") as log:
            self._child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._started = time.monotonic()
        self._address = f"127.0.0.1:{port}"
        self._claims = self._client(
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            )
        )

    def _client(self, interceptor: Any) -> RuntimeHttpClient:
        # No retry invoker: Flower's sends SIGINT to its own process when it is turned away.
        return RuntimeHttpClient.from_server_address(
            self._address, True, None, [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), interceptor]
        )

    def _take_one(self) -> bool:
        """Take a task if there is one, answer it, push the answer."""
        claim = self._claims.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not (claim.HasField("task") and claim.token):
            return False
        with contextlib.closing(self._client(RuntimeTokenHttpInterceptor(claim.token))) as client:
            beating = threading.Event()
            threading.Thread(target=_keep_alive, args=(client, beating), daemon=True).start()
            try:
                # The bundle that comes with the task is left where it is: this party runs its own code.
                message, context, _, _ = pull_task_input(client)
                push_message(client, self.answer(message), context)
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
            finally:
                beating.set()
        return True


def _keep_alive(client: RuntimeHttpClient, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT / 2):
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


POLL = 0.25
"""Seconds between a SuperNode's looks for mail; Flower's own are 3."""


def main() -> None:
    """A stock SuperNode that looks for mail more often, and ends with its parent."""
    with contextlib.suppress(OSError, AttributeError):  # Linux: a signal when the parent dies, however it dies
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    start_parent_process_monitor(os.getppid())
    hasten()
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL)))  # type: ignore[assignment,attr-defined,unused-ignore]
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()


__all__ = ["Executor", "Gate", "Link", "LocalGrid", "Tls", "bundle", "check_version", "free_port"]
