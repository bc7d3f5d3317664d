"""Clipping rules. A rule is a value (`ClipRule`); adding one is a file and a line in `RULES`.

Your own comes by `package.module:rule`, or by name through the entry point group `fulcrum.rules`
(docs/own-rule.md). The building blocks of the built-in rules are here for it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata

from fulcrum.clipping.dynamic import DYNAMIC
from fulcrum.clipping.fixed import FIXED, NONE, bound_C, clip_to_C, equal_shares, no_extra, plain_view, shrink
from fulcrum.clipping.histogram import DC_SGD
from fulcrum.clipping.median import MEDIAN
from fulcrum.clipping.moo import MOO, MOO_C
from fulcrum.clipping.moo_paper import MOO_PAPER, MOO_PAPER_BATCH
from fulcrum.clipping.moo_scalar import MOO_CLIENT, MOO_SCALAR
from fulcrum.clipping.normalise import AUTO_S, PSAC, UNITS_OF_C
from fulcrum.clipping.oso import OSO
from fulcrum.clipping.quantile import QUANTILE
from fulcrum.clipping.rule import ClipRule, Shape
from fulcrum.clipping.wav import WAV
from fulcrum.errors import ConfigError

RULES: dict[str, ClipRule] = {
    rule.name: rule
    for rule in (
        NONE,
        FIXED,
        MOO,
        MOO_C,
        MOO_CLIENT,
        MOO_SCALAR,
        MOO_PAPER,
        MOO_PAPER_BATCH,
        QUANTILE,
        MEDIAN,
        DYNAMIC,
        WAV,
        AUTO_S,
        PSAC,
        UNITS_OF_C,
        OSO,
        DC_SGD,
    )
}

ENTRY_POINTS = "fulcrum.rules"
"""Packages offer rules by name under this group: `my-rule = "package.module:RULE"`."""


def find_rule(name: str) -> ClipRule:
    """The rule of that name: built in, `package.module:rule`, or what an installed package offers by that name."""
    if name in RULES:
        return RULES[name]
    if ":" in name:
        return _import_rule(name, name)
    offered = {
        point.name: f"{point.module}:{point.attr}" for point in importlib.metadata.entry_points(group=ENTRY_POINTS)
    }
    if name in offered:
        return _import_rule(offered[name], name)
    known = [*RULES, *offered]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"clip.rule = {name!r} is not known; choose one of {', '.join(known)}, or package.module:rule{hint}"
    )


def _import_rule(place: str, name: str) -> ClipRule:
    module_name, _, attribute = place.partition(":")
    try:
        rule = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"clip.rule = {name!r} cannot be imported: {error}.") from error
    if not isinstance(rule, ClipRule):
        raise ConfigError(f"clip.rule = {name!r} is a {type(rule).__name__}, not a fulcrum.clipping.ClipRule.")
    return rule


__all__ = [
    "RULES",
    "ClipRule",
    "Shape",
    "bound_C",
    "clip_to_C",
    "equal_shares",
    "find_rule",
    "no_extra",
    "plain_view",
    "shrink",
]
