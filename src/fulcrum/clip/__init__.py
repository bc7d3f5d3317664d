"""Clipping rules. A rule is a value (`ClipRule`); adding one is a file and a line in `RULES`."""

from __future__ import annotations

import difflib
import importlib

from fulcrum.clip.fixed import FIXED, NONE
from fulcrum.clip.median import MEDIAN
from fulcrum.clip.moo import MOO, MOO_C
from fulcrum.clip.rule import ClipRule, Shape
from fulcrum.errors import ConfigError

RULES: dict[str, ClipRule] = {rule.name: rule for rule in (NONE, FIXED, MOO, MOO_C, MEDIAN)}


def find_rule(name: str) -> ClipRule:
    """The rule of that name: built in, or `package.module:rule` (an importable `ClipRule`)."""
    if name in RULES:
        return RULES[name]
    if ":" in name:
        return _import_rule(name)
    near = difflib.get_close_matches(name, RULES, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"clip.rule = {name!r} is not known; choose one of {', '.join(RULES)}, or package.module:rule{hint}"
    )


def _import_rule(name: str) -> ClipRule:
    module_name, _, attribute = name.partition(":")
    try:
        rule = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"clip.rule = {name!r} cannot be imported: {error}.") from error
    if not isinstance(rule, ClipRule):
        raise ConfigError(f"clip.rule = {name!r} is a {type(rule).__name__}, not a fulcrum.clip.ClipRule.")
    return rule


__all__ = ["RULES", "ClipRule", "Shape", "find_rule"]
