"""The only supported version of Flower, with shorter waits."""

from __future__ import annotations

import logging

import flwr
from flwr.supercore.inflatable import inflatable_utils

from fulcrum.errors import ConfigError

PINNED_FLOWER_VERSION = "1.41.0"
HEARTBEAT_SECONDS = 20.0
"""Heartbeat interval of nodes in seconds; running tasks send heartbeats twice as often."""


def check_flower_version() -> None:
    """Refuse any other version of Flower: its internals change between releases."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # it logs every request, also from unknown clients
    if flwr.__version__ != PINNED_FLOWER_VERSION:
        raise ConfigError(
            f"flwr {flwr.__version__} is installed, and this needs {PINNED_FLOWER_VERSION}: "
            f"pip install flwr=={PINNED_FLOWER_VERSION}."
        )


def shorten_poll_interval(most: float | None = None) -> None:
    """Look for the parts of a message every few hundredths of a second, not every second or more.

    most: seconds to wait for all of them.
    """
    for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults = pull.__kwdefaults__
        assert defaults is not None
        defaults["initial_backoff"], defaults["backoff_cap"] = 0.03, 0.5
        if most is not None:
            defaults["max_time"], defaults["max_tries_per_object"] = most, None
