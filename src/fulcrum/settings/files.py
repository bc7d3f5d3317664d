"""TOML and words -> `Settings`, and back. The edge where pydantic lives; config.py needs none of it.

catalogue.py   which settings there are, and what each means
reading.py     files, keywords and command-line words -> Settings, in layers
writing.py     Settings -> TOML, and the commented template of `fulcrum init`
"""

from __future__ import annotations

from fulcrum.settings.catalogue import SECTIONS, SHORT, Field, catalogue
from fulcrum.settings.reading import from_names, parse, read, read_raw, read_word
from fulcrum.settings.writing import dump, template

__all__ = [
    "SECTIONS",
    "SHORT",
    "Field",
    "catalogue",
    "dump",
    "from_names",
    "parse",
    "read",
    "read_raw",
    "read_word",
    "template",
]
