"""The one version of Flower that this folder was written for, and its waits shortened."""

from __future__ import annotations

import logging

import flwr
from flwr.supercore.inflatable import inflatable_utils

from fulcrum.errors import ConfigError

PINNED_FLOWER_VERSION = "1.41.0"
HEARTBEAT_SECONDS = 20.0
"""Seconds between the signs of life that nodes register with; running tasks give them twice as often."""


def check_flower_version() -> None:
    """Flower's insides move between releases; refuse any other than the one this was written for."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # it tells of every request, also of strangers'
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
