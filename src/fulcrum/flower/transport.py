"""Envelopes in Flower's messages, with Flower's public API only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fulcrum.flower.messages import MAX_HEADER_BYTES, BadMessage, Envelope
from fulcrum.flower.registry import MessageDelivery
from fulcrum.flower.signing import MAX_SEALED_BYTES

SERIALIZATION_TYPE = "safetensors"
FLOWER_ERROR_TEXTS = {
    1: "its client could not be loaded",
    2: "its client failed",
    3: "no whole reply arrived in time",
    4: "no whole reply arrived in time",
    5: "it has gone away",
    8: "its client died",
}
"""Flower's error codes in words. The reasons that come with them are a party's own text and are not repeated."""


def envelope_to_record(envelope: Envelope) -> RecordDict:
    """An envelope as the content of a Flower message: bytes in, the same bytes out."""
    head = ConfigRecord({"header": envelope.header, "signature": envelope.signature})
    body = Array(dtype="uint8", shape=(len(envelope.body),), stype=SERIALIZATION_TYPE, data=envelope.body)
    return RecordDict({"head": head, "arrays": ArrayRecord({"body": body})})


def record_to_envelope(content: RecordDict) -> Envelope:
    """The envelope in a message's content. The bytes are taken as they are; nothing in them is decoded here."""
    try:
        head, arrays = content["head"], content["arrays"]
        if not (isinstance(head, ConfigRecord) and isinstance(arrays, ArrayRecord)):
            raise TypeError
        parts: list[object] = [head["header"], arrays["body"].data, head["signature"]]
    except (KeyError, TypeError, AttributeError):
        raise BadMessage("it does not hold what was agreed.") from None
    header, body, signature = (part if isinstance(part, bytes) else b"" for part in parts)
    if not 0 < len(header) <= MAX_HEADER_BYTES or len(signature) > MAX_SEALED_BYTES:
        raise BadMessage("its header is missing or too long.")
    return Envelope(header, body, signature)


class GridTransport:
    """A `registry.Transport` over a Flower Grid."""

    def __init__(self, grid: Grid, returned: Callable[[], Iterable[int]] = tuple) -> None:
        self.grid, self._returned = grid, returned

    def online(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def restarted(self) -> set[int]:
        return set(self._returned())

    def send(self, node: int, envelope: Envelope, seconds: float, label: str) -> str:
        message = Message(envelope_to_record(envelope), node, MessageType.TRAIN, ttl=seconds, group_id=label)
        return next(iter(self.grid.push_messages([message])), "") or ""

    def collect(self, ids: set[str]) -> list[MessageDelivery]:
        found = []
        for sent, message in ((each, message) for each in ids for message in self._pull_reply(each)):
            if message is None:
                found.append(MessageDelivery(sent, None, "its reply could not be read"))
                continue
            if message.has_error():
                words = FLOWER_ERROR_TEXTS.get(message.error.code, f"Flower reports error {message.error.code}")
                found.append(MessageDelivery(sent, None, words))
                continue
            try:
                found.append(MessageDelivery(sent, record_to_envelope(message.content)))
            except BadMessage as error:
                found.append(MessageDelivery(sent, None, f"its reply was refused: {error}"))
        return found

    def _pull_reply(self, sent: str) -> list[Message | None]:
        """The reply to one message, alone, so that a malformed one spoils no other; None if it cannot be read."""
        try:
            return list(self.grid.pull_messages([sent]))
        except Exception:  # Flower decodes a party's bytes here, and may fail in any way
            return [None]
