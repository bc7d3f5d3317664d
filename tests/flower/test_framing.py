"""A request's bytes, put together without a copy of its body, are those that Flower's own code writes."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

from flwr.proto import fleet_pb2

from fulcrum.flower.flwr141 import wire
from fulcrum.flower.messages import Envelope
from fulcrum.flower.port.http import PortResponse, write_response


@pytest.mark.parametrize("size", [0, 1, 127, 128, 100_000, 3_000_000])
def test_the_frame_is_the_message(size):
    envelope = Envelope(b'{"kind":"round"}', bytes(range(256)) * (size // 256) + b"\7" * (size % 256), b"signed")
    facts = (2**61, 2**40 + 3, 60.0, "7", "ab" * 32)
    head, body = wire.frame_request(envelope, *facts)
    assert body is envelope.body
    found = fleet_pb2.PullMessagesResponse.FromString(head + body)
    made = wire.make_request_proto(envelope, *facts)
    found.messages_list[0].metadata.created_at = made.metadata.created_at
    assert found.messages_list[0].metadata == made.metadata
    assert wire.read_envelope(found.messages_list[0]) == wire.read_envelope(made) == envelope
    pieces = write_response(PortResponse(200, head, tail=body), "x")
    assert f"content-length: {len(head) + size}\r\n".encode() in pieces[0]
    assert b"".join(pieces).endswith(head + body)
