"""The privacy statement of a run: privacy.json for programs, PRIVACY.md for whoever signs it."""

from __future__ import annotations

from fulcrum.statement.facts import statement, to_markdown

__all__ = ["statement", "to_markdown"]
