"""Prints docs/settings.md from the settings' own words; `make docs` writes it, a test keeps it in step."""

from __future__ import annotations

import inspect
import json
import math

from fulcrum.runs.choices import SETTING_CHOICES
from fulcrum.settings.catalogue import list_setting_fields
from fulcrum.settings.checks import SETTING_RANGES
from fulcrum.settings.files import SECTION_CLASSES, SHORT_NAMES, SettingField

HEAD = """# Settings

Written by `make docs` from `src/fulcrum/settings/schema.py`; do not edit.

A settings file is TOML with the sections below; `fulcrum init` writes one with comments. Each setting can be given on
the command line as `--set section.name=value`, those with an option also as that. In Python all are keywords of
`fulcrum.train`: by the option's name (`data_dir="..."`), by the setting's name (`kappa=0.01`), or by section
(`train={"server": "adam"}`).

Later layers win: defaults, then the preset of the file's `method`, the file, the preset of `--method`, values on the
command line. `epsilon` and `sigma` are two ways to say one thing, and so are `steps` and `epochs`: giving one takes
back the other from the layers below.
"""


def page() -> str:
    """The whole page."""
    option = {path: f"`--{short.replace('_', '-')}`" for short, path in SHORT_NAMES.items()} | {"method": "`--method`"}
    lines, section = [HEAD], None
    for path, field in list_setting_fields().items():
        if field.section != section:
            section = field.section
            title = f"[{section}]" if section else "At the top"
            words = inspect.getdoc(SECTION_CLASSES[section]) if section else "One setting stands outside the sections."
            lines += [f"\n## {title}\n", f"{words}\n", "| setting | default | option | meaning |", "|---|---|---|---|"]
        default = "none" if field.default is None else f"`{json.dumps(field.default)}`"
        lines.append(f"| `{field.name}` | {default} | {option.get(path, '')} | {meaning(field)} |")
    return "\n".join(lines) + "\n"


def meaning(field: SettingField) -> str:
    """What a setting means, with its choices and its range."""
    parts = [field.words]
    choices = SETTING_CHOICES.get(field.path)
    if choices:
        parts.append(f"One of {', '.join(f'`{choice}`' for choice in choices)}.")
    if field.path in SETTING_RANGES:
        low, low_in, high, high_in = SETTING_RANGES[field.path]
        top = "" if high == math.inf else f" {'≤' if high_in else '<'} {high:g}"
        parts.append(f"Range: {'≥' if low_in else '>'} {low:g}{' and' if top else ''}{top}.")
    return " ".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
