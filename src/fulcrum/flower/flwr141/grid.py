"""Messages to and from SuperNodes, through the link's state in this process instead of a port."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers


class _LocalRuntimeClient:
    """The runtime API's calls, made on the link's state directly, without a port."""

    def __init__(self, state: Any, task: Any) -> None:
        self._state, self._task = state, task

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        handler = getattr(runtime_handlers, _RUNTIME_HANDLERS[name])
        return lambda request: handler(request, self._state, self._task)


_RUNTIME_HANDLERS = {
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
        self._state, self._local = state, _LocalRuntimeClient(state, task)

    @property
    def _runtime_client(self) -> Any:
        return self._local

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have arrived completely: a slow or endless upload does not delay other replies."""
        ready = [sent for sent in message_ids if not self._is_reply_arriving(sent)]
        return super().pull_messages(ready) if ready else []

    def _is_reply_arriving(self, sent: str) -> bool:
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
