"""Everything that is internal to Flower 1.41.0, in one folder; tests/flower/test_flower_pins.py fails when it changes.

Coordinator and parties speak Flower's fleet API, so that stock SuperNodes can take part too. `LocalSuperlink` serves it
from this process, over a mailbox that only the coordinator fills; `FleetNode` is a party's node. What is used of Flower
is the form of its messages and the way its nodes prove their key. No control API (registering keys, starting runs) and
no runtime API (taking tasks) exists anywhere, and a party never fetches the app that a server offers.

pinned.py     the supported version of Flower
wire.py       envelopes as Flower's protobuf messages
mailbox.py    requests that wait, replies that came back
fleet.py      the fleet API: who may ask, and what each path answers
link.py       the coordinator's side: the fleet API behind the hardened port
bundles.py    the app bundle that stock SuperNodes require
node.py       the party's side: requests fetched and answered
troubles.py   why a connection fails, in words
"""

from __future__ import annotations

from fulcrum.flower.flwr141.bundles import make_app_bundle
from fulcrum.flower.flwr141.fleet import FLEET_PATHS, FleetService
from fulcrum.flower.flwr141.link import LocalSuperlink, TlsFiles
from fulcrum.flower.flwr141.node import FleetNode, NodeHealth
from fulcrum.flower.flwr141.pinned import check_flower_version, find_free_port

__all__ = [
    "FLEET_PATHS",
    "FleetNode",
    "FleetService",
    "LocalSuperlink",
    "NodeHealth",
    "TlsFiles",
    "check_flower_version",
    "find_free_port",
    "make_app_bundle",
]
