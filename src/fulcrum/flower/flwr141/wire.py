"""Envelopes as Flower's protobuf messages, whole or as the tree of objects that a stock SuperNode takes apart."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import MessageType
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.common.serde_utils import metadata_to_proto
from flwr.proto import fleet_pb2
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fulcrum.flower.messages import BadMessage, Envelope
from fulcrum.flower.transport import SERIALIZATION_TYPE, envelope_to_record, record_to_envelope

INLINE_HEADER = "fulcrum-inline"
"""A request header of Fulcrum's own nodes: messages travel whole, not object by object."""
MAX_OBJECTS = 4096
"""The most objects of one reply of a stock SuperNode."""


@dataclass(frozen=True)
class MessageFacts:
    """What of a message's metadata matters here. Times in seconds since 1970 and in seconds."""

    id: str
    run_id: int
    source: int
    destination: int
    reply_to: str
    created_at: float
    ttl: float


def read_facts(proto: Any) -> MessageFacts:
    """The facts of a protobuf message."""
    data = proto.metadata
    return MessageFacts(
        data.message_id,
        data.run_id,
        data.src_node_id,
        data.dst_node_id,
        data.reply_to_message_id,
        data.created_at,
        data.ttl,
    )


def make_request_proto(envelope: Envelope, run_id: int, node: int, seconds: float, label: str, id: str) -> Any:
    """A request as one protobuf message with its content."""
    proto = ProtoMessage(content=recorddict_to_proto(envelope_to_record(envelope)))
    data = proto.metadata
    data.run_id, data.message_id = run_id, id
    data.src_node_id, data.dst_node_id = SUPERLINK_NODE_ID, node
    data.group_id, data.message_type = label, MessageType.TRAIN
    data.created_at, data.ttl = time.time(), seconds
    return proto


def frame_request(
    envelope: Envelope, run_id: int, node: int, seconds: float, label: str, id: str
) -> tuple[bytes, bytes]:
    """A PullMessagesResponse with this request as bytes: all before the envelope's body, and the body as it is.

    The body stands at the end of every message that it is in, so it goes to all parties without a copy for each.
    """
    proto = make_request_proto(replace(envelope, body=b""), run_id, node, seconds, label, id)
    kept = [item for item in proto.content.items if item.key != "arrays"]
    metadata = ProtoMessage(metadata=proto.metadata).SerializeToString()
    content = RecordDict(items=kept).SerializeToString()
    size = len(envelope.body)
    array = Array(dtype="uint8", shape=[size], stype=SERIALIZATION_TYPE).SerializeToString()
    array += _tag(Array, "data") + _varint(size)
    inner = _tag(ArrayRecord.Item, "key") + _text("body") + _open(ArrayRecord.Item, "value", array, size)
    record = _open(ArrayRecord, "items", inner, size)
    item = _tag(RecordDict.Item, "key") + _text("arrays") + _open(RecordDict.Item, "array_record", record, size)
    content += _open(RecordDict, "items", item, size)
    message = metadata + _open(ProtoMessage, "content", content, size)
    return _open(fleet_pb2.PullMessagesResponse, "messages_list", message, size), envelope.body


def _open(kind: Any, name: str, start: bytes, rest: int) -> bytes:
    """A field that holds a message: `start`, and `rest` bytes that follow."""
    return _tag(kind, name) + _varint(len(start) + rest) + start


def _tag(kind: Any, name: str) -> bytes:
    """The tag of a field that has a length."""
    return _varint(kind.DESCRIPTOR.fields_by_name[name].number << 3 | 2)


def _text(text: str) -> bytes:
    return _varint(len(text)) + text.encode("ascii")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def make_reply_proto(envelope: Envelope, request: MessageFacts) -> Any:
    """A reply as one protobuf message with its content."""
    proto = ProtoMessage(content=recorddict_to_proto(envelope_to_record(envelope)))
    data = proto.metadata
    data.run_id, data.message_id = request.run_id, secrets.token_hex(32)
    data.src_node_id, data.dst_node_id = request.destination, request.source
    data.reply_to_message_id, data.message_type = request.id, MessageType.TRAIN
    data.created_at, data.ttl = time.time(), request.ttl
    return proto


def read_envelope(proto: Any) -> Envelope:
    """The envelope in a protobuf message with content; BadMessage where it is none."""
    try:
        return record_to_envelope(recorddict_from_proto(proto.content))
    except BadMessage:
        raise
    except Exception as error:  # Flower decodes the other side's bytes here, and may fail in any way
        raise BadMessage("it cannot be read.") from error


@dataclass(frozen=True)
class TakenApart:
    """A request for a stock SuperNode: the message without content, the tree of its objects, and their bytes."""

    proto: Any
    tree: Any
    objects: dict[str, bytes]


def take_apart(envelope: Envelope, run_id: int, node: int, seconds: float, label: str, id: str) -> TakenApart:
    """As Flower's grid would store it. The message's id is that of its object, which Flower's SuperNode relies on."""
    with no_object_id_recompute():
        metadata = Metadata(
            run_id=run_id,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=node,
            reply_to_message_id="",
            group_id=label,
            created_at=time.time(),
            ttl=seconds,
            message_type=MessageType.TRAIN,
        )
        message = make_message(metadata=metadata, content=envelope_to_record(envelope))
        tree = get_object_tree(message)
        objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    data = metadata_to_proto(metadata)
    data.message_id = tree.object_id
    empty = RecordDict()  # a SuperNode takes no message without content
    return TakenApart(ProtoMessage(metadata=data, content=empty), tree, objects)


def list_objects(tree: Any) -> list[str]:
    """The ids of a tree's objects; BadMessage where there are too many."""
    found = []
    for each in iterate_object_tree(tree):
        found.append(each.object_id)
        if len(found) > MAX_OBJECTS:
            raise BadMessage("it has too many parts.")
    return found


def put_together(object_id: str, objects: dict[str, bytes]) -> Envelope:
    """The envelope of a stock SuperNode's reply, from its objects; BadMessage where they do not fit."""
    try:
        message = inflate_object_from_contents(object_id, dict(objects))
        return record_to_envelope(message.content)
    except BadMessage:
        raise
    except Exception as error:
        raise BadMessage("it cannot be read.") from error
