"""Imports of the trackers' packages, with one sentence where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from fulcrum.errors import ConfigError


def import_tracker(module: str, package: str, name: str) -> Any:
    """The module of a tracker; ConfigError with what to install where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--observe = {name!r} needs {package}: pip install 'fulcrum-fl[track]' ({error})."
        ) from error
