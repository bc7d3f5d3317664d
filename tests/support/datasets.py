"""Public data sets that a test needs and this machine may not have."""

from __future__ import annotations

import os

import pytest

from fulcrum.data.sources.public import registry


def need(name: str) -> None:
    """Skip, saying why, unless FULCRUM_DATA (not the user's cache) holds the data set."""
    folders = [part for part in os.environ.get("FULCRUM_DATA", "").split(os.pathsep) if part]
    place, _ = registry.locate_dataset(registry.PUBLIC_DATASETS[name]) if folders else (None, [])
    if place is None:
        pytest.skip(f"FULCRUM_DATA has no {name}")
