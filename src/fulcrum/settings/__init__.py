"""Settings of a run: their schema, checks and derived values; reading and writing them as files; presets.

`schema`, `checks` and `derived` need only the standard library; `reading` and `files` need pydantic.
"""

from __future__ import annotations

from fulcrum.settings.checks import check_settings
from fulcrum.settings.schema import Settings

__all__ = ["Settings", "check_settings"]
