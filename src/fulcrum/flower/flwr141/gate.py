"""Filter of the public port: paths that a SuperNode needs pass, everything else is 404."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
ANONYMOUS_FLEET_PATHS = ("register-node", "unregister-node")
"""Further paths for anonymous SuperNodes, served only without TLS."""
MAX_REQUEST_BYTES = 64 << 20
"""Bytes of the largest request that the public port reads."""


class FleetGate:
    """Filter of the public port: known fleet paths pass, everything else is 404. Counts bytes both ways."""

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
        if not declared.isdigit() or int(declared) > MAX_REQUEST_BYTES:
            await _answer(send, 413)
            return
        seen = 0

        async def count_in() -> Any:
            nonlocal seen
            event = await receive()
            seen += len(event.get("body", b""))
            self.received += len(event.get("body", b""))
            # A chunked request declares no length; beyond the limit it is treated as disconnected.
            return {"type": "http.disconnect"} if seen > MAX_REQUEST_BYTES else event

        async def count_out(event: Any) -> None:
            self.sent += len(event.get("body", b""))
            await send(event)

        await self.app(scope, count_in, count_out)


async def _answer(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
