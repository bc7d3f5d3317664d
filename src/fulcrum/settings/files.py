"""TOML and command-line values -> `Settings`, and back. Needs pydantic; schema.py does not.

catalogue.py   the list of settings and their meaning
reading.py     files, keywords and command-line values -> Settings, in layers
writing.py     Settings -> TOML, and the commented template of `fulcrum init`
"""

from __future__ import annotations

from fulcrum.settings.catalogue import SECTION_CLASSES, SHORT_NAMES, SettingField, list_setting_fields
from fulcrum.settings.reading import (
    parse_assignment_option,
    parse_settings,
    read_settings,
    read_settings_tables,
    settings_from_keywords,
)
from fulcrum.settings.writing import dump_settings, make_settings_template

__all__ = [
    "SECTION_CLASSES",
    "SHORT_NAMES",
    "SettingField",
    "dump_settings",
    "list_setting_fields",
    "make_settings_template",
    "parse_assignment_option",
    "parse_settings",
    "read_settings",
    "read_settings_tables",
    "settings_from_keywords",
]
