"""Single keys and values as TOML, without the package that writes whole files: the core needs torch and numpy alone."""

from __future__ import annotations

import json
import re
from typing import Any


def format_key(name: str) -> str:
    """A key: bare where TOML allows it, else in quotes."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else format_literal(name)


def format_literal(value: Any) -> str:
    """A value as TOML: its literals are those of JSON, but for a character that TOML wants written out."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
