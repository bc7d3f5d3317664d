"""A stock SuperNode that polls for messages more often, and ends with its parent. `SupernodeExecutor` runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import SimpleNamespace

from fulcrum.flower.flwr141.pinned import shorten_poll_interval

POLL_SECONDS = 0.25
"""Polling interval of a SuperNode in seconds; Flower's default is 3."""


def main() -> None:
    """Runs a stock SuperNode that polls for messages more often, and ends with its parent."""
    with contextlib.suppress(OSError, AttributeError):  # Linux: a signal when the parent dies, however it dies
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    from flwr.supercore.app_utils import start_parent_process_monitor
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    start_parent_process_monitor(os.getppid())
    shorten_poll_interval()
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL_SECONDS)))  # type: ignore[assignment,attr-defined,unused-ignore]
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
