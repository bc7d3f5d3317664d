"""The only supported version of Flower."""

from __future__ import annotations

import contextlib
import logging
import socket

import flwr

from fulcrum.errors import ConfigError

PINNED_FLOWER_VERSION = "1.41.0"
HEARTBEAT_SECONDS = 20.0
"""Heartbeat interval of nodes in seconds; while a party computes it sends one twice as often."""


def check_flower_version() -> None:
    """Refuse any other version of Flower: its internals change between releases."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    if flwr.__version__ != PINNED_FLOWER_VERSION:
        raise ConfigError(
            f"flwr {flwr.__version__} is installed, and this needs {PINNED_FLOWER_VERSION}: "
            f"pip install flwr=={PINNED_FLOWER_VERSION}."
        )


def find_free_port() -> int:
    """A port on loopback that is free now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
