"""The coordinator's side: a SuperLink in this process."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.main import create_app
from flwr.superlink.servicer.fleet import fleet_handlers

from fulcrum.errors import ConfigError
from fulcrum.flower.flwr141.bundles import make_app_bundle
from fulcrum.flower.flwr141.gate import ANONYMOUS_FLEET_PATHS, FLEET_PATHS, FleetGate
from fulcrum.flower.flwr141.grid import LocalGrid
from fulcrum.flower.flwr141.pinned import HEARTBEAT_SECONDS, check_flower_version, shorten_poll_interval

REPLY_PARTS_TIMEOUT = 1.0
"""Seconds that the coordinator waits for the parts of a reply that was announced as complete."""
_FLOWER_ACTIVATE_NODE = fleet_handlers.activate_node


@dataclass(frozen=True)
class TlsFiles:
    """Server certificate and key, PEM files."""

    certificate: Path
    key: Path


class LocalSuperlink:
    """A SuperLink in this process: `with LocalSuperlink(...) as link:` then `link.grid` sends and receives."""

    def __init__(
        self, host: str, port: int, tls: TlsFiles | None, nodes: Mapping[str, bytes], app: bytes | None = None
    ):
        """nodes: the public key (PEM) of every party, by name; with TLS only these are let in.

        app: the Flower app bundle that SuperNodes are offered; a placeholder unless given, since no party runs it.
        """
        check_flower_version()
        shorten_poll_interval(REPLY_PARTS_TIMEOUT)
        self.host, self.port = host, port
        self._app = create_app()
        self._app.state.enable_supernode_auth = tls is not None
        self.gate = FleetGate(self._app, FLEET_PATHS if tls else FLEET_PATHS + ANONYMOUS_FLEET_PATHS)
        self.state = self._app.state.linkstate_factory.state()
        if tls is not None:
            for key in nodes.values():
                self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_SECONDS)
        self._back: set[int] = set()
        self._active: set[int] = set()
        self.grid = self._start_flower_run(app or make_app_bundle())
        fleet_handlers.activate_node = self._activate_node
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

    def __enter__(self) -> LocalSuperlink:
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
        threading.Thread(target=self._send_heartbeats, name="superlink-heartbeat", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._server.should_exit = True
        self._thread.join(timeout=5)

    def restarted(self) -> set[int]:
        """Nodes that were activated again since the last call."""
        back, self._back = self._back, set()
        return back

    def _activate_node(self, request: Any, state: Any) -> Any:
        """As Flower's own, but a node that was killed may come back at once.

        Flower would refuse it for a minute, until its last heartbeat is old. The request is signed with
        the node's key by now (the middleware before this has checked), so it is the node itself.
        """
        node = state.get_node_id_by_public_key(request.public_key)
        if node is not None and node in self._active:
            state.deactivate_node(node)
            self._back.add(node)
        response = _FLOWER_ACTIVATE_NODE(request, state)
        self._active.add(response.node_id)
        return response

    def _start_flower_run(self, content: bytes) -> LocalGrid:
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

    def _send_heartbeats(self) -> None:
        """Sends heartbeats: Flower ends a run whose task sends none for a minute."""
        while not self._stop.wait(HEARTBEAT_SECONDS / 2):
            self.state.acknowledge_task_heartbeat(self.task_id)
