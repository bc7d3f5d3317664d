"""`Settings` -> TOML that reruns them, and the commented template of `fulcrum init`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
from collections.abc import Mapping
from typing import Any

import tomli_w

from fulcrum.settings.catalogue import SECTION_CLASSES, list_setting_fields
from fulcrum.settings.schema import Settings

TEMPLATE_VALUES: dict[str, Any] = {
    "method": "moo",
    "data.source": "digits",
    "data.parties": 5,
    "train.rounds": 200,
    "privacy.epsilon": 4.0,
}
"""Settings that the template sets; all except epsilon have their default."""

EXAMPLE_NUMBER = 1.0
"""Example values in the template for numbers without a default."""


def dump_settings(settings: Settings) -> str:
    """TOML that `parse_settings` reads as equal settings. Omits values that are None."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(settings)))


def make_settings_template() -> str:
    """A commented settings file: a few active lines, the others as `#name = default`."""
    lines = [
        "# Settings of a Fulcrum run; start it with:  fulcrum run config.toml",
        "# A # right before a name shows the default, or an example where there is none; take the # away to change it.",
    ]
    section = ""
    for path, field in list_setting_fields().items():
        if field.section != section:
            section = field.section
            lines += ["", "", f"[{section}]", *_comment_lines(inspect.getdoc(SECTION_CLASSES[section]) or "")]
        mark = "" if path in TEMPLATE_VALUES else "#"
        value = TEMPLATE_VALUES.get(path, EXAMPLE_NUMBER if field.default is None else field.default)
        # JSON, because its literals are valid TOML, and lists stay on one line.
        lines += ["", *_comment_lines(field.words), f"{mark}{field.name} = {json.dumps(value)}"]
    return "\n".join(lines) + "\n"


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
        if value is not None
    }
