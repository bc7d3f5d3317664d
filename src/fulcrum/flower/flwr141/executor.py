"""The party's side: a SuperNode as a child process, and its tasks answered with the party's own code."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from fulcrum.flower import FLOWER_ENVIRONMENT
from fulcrum.flower.flwr141.pinned import HEARTBEAT_SECONDS, check_flower_version, shorten_poll_interval


def find_free_port() -> int:
    """A port on loopback that is free now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SupernodeExecutor:
    """A SuperNode as a child process, and the loop that answers its tasks with the party's own code.

    The child runs Flower's SuperNode in `--isolation process`: it fetches messages and waits for a process to
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
        check_flower_version()
        shorten_poll_interval()
        self.server, self.home, self.ca, self.key = server, home, ca, key
        self.answer, self.say = answer, say
        home.mkdir(parents=True, exist_ok=True)
        self._child: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._failures = 0

    def run(self, stop: Callable[[], bool]) -> None:
        """Answer until `stop` returns True. A SuperNode that ends is restarted, with a longer pause each time."""
        quiet, idle = False, 0
        try:
            while not stop():
                if self._child is None or self._child.poll() is not None:
                    self._restart_supernode(stop)
                    continue
                try:
                    idle = 0 if self._answer_one_task() else idle + 1
                    if idle:  # poll less often when idle
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

    def _restart_supernode(self, stop: Callable[[], bool]) -> None:
        if self._child is not None:
            self._pause_before_restart(self._child, stop)
        if not stop():
            self._start()

    def _pause_before_restart(self, ended: subprocess.Popen[bytes], stop: Callable[[], bool]) -> None:
        """Wait before a restart, longer after each start that lasted less than a minute."""
        lasted = time.monotonic() - self._started
        self._failures = 0 if lasted > 60 else self._failures + 1
        if ended.returncode == 1 and self._failures > 1:
            self.say(f"the coordinator turned this party away, or is not there (see {self.home / 'supernode.log'})")
        end = time.monotonic() + min(30.0, 0.5 * 2**self._failures)
        while time.monotonic() < end and not stop():
            time.sleep(0.1)

    def _start(self) -> None:
        """Starts a new SuperNode, with its own secret and port."""
        secret = secrets.token_bytes(32)
        secret_file = self.home / "secret"
        secret_file.unlink(missing_ok=True)
        with os.fdopen(os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
        port = find_free_port()
        command = [sys.executable, "-m", "fulcrum.flower.flwr141.supernode", "--superlink", self.server]
        command += ["--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--superexec-auth-secret-file", str(secret_file)]
        command += ["--root-certificates", str(self.ca)] if self.ca else ["--insecure"]
        command += ["--auth-supernode-private-key", str(self.key)] if self.key else []
        environment = {**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(self.home)}
        with (self.home / "supernode.log").open("ab") as log:
            self._child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._started = time.monotonic()
        self._address = f"127.0.0.1:{port}"
        self._claims = self._make_runtime_client(
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            )
        )

    def _make_runtime_client(self, interceptor: Any) -> RuntimeHttpClient:
        # No retry invoker: Flower's sends SIGINT to its own process when it is refused.
        return RuntimeHttpClient.from_server_address(
            self._address, True, None, [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), interceptor]
        )

    def _answer_one_task(self) -> bool:
        """Take a task if there is one, answer it, push the answer."""
        claim = self._claims.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not (claim.HasField("task") and claim.token):
            return False
        with contextlib.closing(self._make_runtime_client(RuntimeTokenHttpInterceptor(claim.token))) as client:
            beating = threading.Event()
            threading.Thread(target=_send_heartbeats, args=(client, beating), daemon=True).start()
            try:
                # The task's bundle is not used: this party runs its own code.
                message, context, _, _ = pull_task_input(client)
                push_message(client, self.answer(message), context)
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
            finally:
                beating.set()
        return True


def _send_heartbeats(client: RuntimeHttpClient, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT_SECONDS / 2):
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
