"""Everything that is internal to Flower 1.41.0, in one folder; tests/test_flower_link.py fails when it changes.

`LocalSuperlink` is a SuperLink inside this process. Its public port serves the fleet API and nothing else: no
control API (registering keys, starting runs) and no runtime API (taking tasks) listen anywhere, since
the coordinator talks to the link's state directly. `SupernodeExecutor` starts a stock SuperNode for a party,
takes its tasks and answers them with the party's own code; the app that the server distributes is
never installed, loaded or run.

pinned.py     the supported version of Flower, with shorter waits
link.py       the coordinator's side: the SuperLink
gate.py       the filter of its public port
grid.py       its messages, sent and received without a port
bundles.py    the app bundle that SuperNodes require
executor.py   the party's side: tasks taken and answered
supernode.py  the child process beside it: python -m fulcrum.flower.flwr141.supernode
"""

from __future__ import annotations

from fulcrum.flower.flwr141.bundles import make_app_bundle
from fulcrum.flower.flwr141.executor import SupernodeExecutor, find_free_port
from fulcrum.flower.flwr141.gate import FLEET_PATHS, FleetGate
from fulcrum.flower.flwr141.grid import LocalGrid
from fulcrum.flower.flwr141.link import LocalSuperlink, TlsFiles
from fulcrum.flower.flwr141.pinned import check_flower_version

__all__ = [
    "FLEET_PATHS",
    "FleetGate",
    "LocalGrid",
    "LocalSuperlink",
    "SupernodeExecutor",
    "TlsFiles",
    "check_flower_version",
    "find_free_port",
    "make_app_bundle",
]
