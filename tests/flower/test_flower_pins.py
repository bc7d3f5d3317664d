"""What Fulcrum takes from the insides of Flower 1.41.0, one test per pin; docs/flower-upgrade.md says what for."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

import flwr
from flwr.app.message import Message, make_message
from flwr.app.metadata import Metadata
from flwr.common import constant
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.common.serde_utils import metadata_to_proto
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, recorddict_pb2, run_pb2
from flwr.supercore import constant as core_constant
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, sign_message
from flwr.supercore.protobuf import constants as protobuf_constants
from flwr.superlink.routers.fleet import node_auth
from flwr.supernode import fleet_http_client, fleet_http_connection, node_auth_http_interceptor, start_client_internal

from fulcrum.errors import ConfigError
from fulcrum.flower import flwr141 as inside
from fulcrum.flower import keys
from fulcrum.flower.flwr141 import fleet

PINS = {
    "version": lambda: flwr.__version__ == "1.41.0",
    "header with the public key": lambda: core_constant.FLEET_HTTP_PUBLIC_KEY_HEADER == "flwr-public-key",
    "header with the signature": lambda: core_constant.FLEET_HTTP_SIGNATURE_HEADER == "flwr-signature",
    "header with the time": lambda: constant.TIMESTAMP_HEADER == "flwr-timestamp",
    "form of a body": lambda: protobuf_constants.PROTOBUF_MEDIA_TYPE == "application/protobuf",
    "number of the SuperLink's node": lambda: constant.SUPERLINK_NODE_ID == 1,
    "heartbeats of 20 s are allowed": lambda: constant.HEARTBEAT_MIN_INTERVAL <= inside.pinned.HEARTBEAT_SECONDS,
    "pieces of an array": lambda: constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE >= 1 << 20,
    "what is signed: the time, with SHA-256": lambda: (
        'timestamp.encode("ascii")' in inspect.getsource(node_auth_http_interceptor)
        and "hashes.SHA256()" in inspect.getsource(sign_message)
    ),
    "a node's own check of what the server checks": lambda: (
        "protobuf_request.public_key != public_key" in inspect.getsource(node_auth)
    ),
    "keys travel as PEM": lambda: "Encoding.PEM" in inspect.getsource(public_key_to_bytes),
    "a stock node wants content": lambda: (
        "make_message(metadata=message.metadata, content=RecordDict())" in inspect.getsource(inspect.getmodule(Message))  # type: ignore[arg-type]
    ),
    "a message's id is its object's": lambda: 'proto_metadata.message_id = ""' in inspect.getsource(Message.deflate),
    "objects are named by SHA-256": lambda: "sha256" in inspect.getsource(inflatable_object.get_object_id),
    "a stock node asks for the run and its bundle": lambda: (
        "get_run(run_id)" in inspect.getsource(start_client_internal)
        and "get_fab(run_info.fab_hash, run_id)" in inspect.getsource(start_client_internal)
    ),
    "a stock node follows redirects, ours does not": lambda: (
        "follow_redirects=True" in inspect.getsource(inspect.getmodule(fleet_http_client.ProtobufClient))  # type: ignore[arg-type]
    ),
    "a stock node gives up for good at 401": lambda: (
        "os.kill(os.getpid(), signal.SIGINT)" in inspect.getsource(fleet_http_connection)
    ),
}
"""What is relied on, and whether it is so."""


@pytest.mark.parametrize("pin", PINS)
def test_the_pin_holds(pin: str) -> None:
    assert PINS[pin](), f"Flower has changed: {pin}; see docs/flower-upgrade.md"


def test_any_other_version_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.check_flower_version()
    monkeypatch.setattr(flwr, "__version__", "1.42.0")
    with pytest.raises(ConfigError, match=r"flwr==1\.41\.0"):
        inside.check_flower_version()


FIELDS = {
    fleet_pb2.ActivateNodeRequest: {"public_key", "heartbeat_interval"},
    fleet_pb2.ActivateNodeResponse: {"node_id"},
    fleet_pb2.DeactivateNodeRequest: {"node_id"},
    fleet_pb2.DeactivateNodeResponse: set(),
    fleet_pb2.PullMessagesRequest: {"node"},
    fleet_pb2.PullMessagesResponse: {"messages_list", "message_object_trees"},
    fleet_pb2.PushMessagesRequest: {"node", "messages_list", "message_object_trees"},
    fleet_pb2.PushMessagesResponse: {"reconnect", "results", "objects_to_push", "session_id"},
    heartbeat_pb2.SendNodeHeartbeatRequest: {"node", "heartbeat_interval"},
    heartbeat_pb2.SendNodeHeartbeatResponse: {"success"},
    message_pb2.Message: {"metadata", "content"},
    message_pb2.ObjectTree: {"object_id", "children"},
    message_pb2.PushObjectRequest: {"node", "run_id", "object_id", "object_content", "session_id"},
    message_pb2.PushObjectResponse: {"stored"},
    message_pb2.PullObjectRequest: {"node", "run_id", "object_id"},
    message_pb2.PullObjectResponse: {"object_found", "object_available", "object_content"},
    message_pb2.ConfirmMessageReceivedRequest: {"node", "run_id", "message_object_id"},
    run_pb2.Run: {"run_id", "fab_id", "fab_version", "fab_hash", "status", "primary_task_type", "series_id"},
    run_pb2.RunStatus: {"status"},
    fab_pb2.GetFabRequest: {"hash_str", "run_id", "node"},
    fab_pb2.Fab: {"hash_str", "content"},
    node_pb2.Node: {"node_id"},
    recorddict_pb2.Array: {"dtype", "shape", "stype", "data"},
}


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_a_message_of_the_fleet_api_has_the_fields_that_are_used(kind: type) -> None:
    assert FIELDS[kind] <= set(kind.DESCRIPTOR.fields_by_name)  # type: ignore[attr-defined]


def test_stock_nodes_call_the_paths_that_are_served_and_no_others() -> None:
    source = inspect.getsource(fleet_http_client)
    called = {line.split("/v1/fleet/")[1].split('"')[0] for line in source.splitlines() if "/v1/fleet/" in line}
    assert called == {*fleet.FLEET_PATHS, "register-node", "unregister-node"}, "the last two are for nodes without keys"


def test_functions_take_what_they_are_given() -> None:
    for function, names in (
        (make_message, {"metadata", "content"}),
        (recorddict_to_proto, {"recorddict"}),
        (recorddict_from_proto, {"recorddict_proto"}),
        (metadata_to_proto, {"metadata"}),
        (inflatable_object.get_all_nested_objects, {"obj"}),
        (inflatable_object.get_object_tree, {"obj"}),
        (inflatable_object.iterate_object_tree, {"tree"}),
        (inflatable_utils.inflate_object_from_contents, {"object_id", "object_contents"}),
        (bytes_to_public_key, {"public_key_bytes"}),
        (Metadata.__init__, {"run_id", "message_id", "src_node_id", "dst_node_id", "created_at", "ttl"}),
    ):
        assert names <= set(inspect.signature(function).parameters), function.__name__


def test_a_key_of_ours_is_a_key_of_flowers(tmp_path) -> None:  # type: ignore[no-untyped-def]
    keys.make_key_pair(tmp_path, "a")
    own = keys.load_private_key(tmp_path / "a")
    assert public_key_to_bytes(own.public_key()) == keys.public_key_to_pem(own.public_key())
