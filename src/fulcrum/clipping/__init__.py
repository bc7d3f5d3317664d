"""Clipping rules. A rule is a value (`ClipRule`); to add one, add a file and a line in `RULES`.

Use your own rule as `package.module:rule`, or by name through the entry point group `fulcrum.rules`
(docs/own-rule.md). This package exports the building blocks of the built-in rules.
"""

from __future__ import annotations

from fulcrum.clipping.dynamic import DYNAMIC
from fulcrum.clipping.fixed import FIXED, NONE, bound_C, clip_to_C, equal_shares, no_extra, plain_view, shrink
from fulcrum.clipping.histogram import DC_SGD
from fulcrum.clipping.hyfree import HYFREE
from fulcrum.clipping.macadam import MACADAM
from fulcrum.clipping.median import MEDIAN
from fulcrum.clipping.moo import MOO, MOO_C
from fulcrum.clipping.moo_paper import MOO_PAPER, MOO_PAPER_BATCH
from fulcrum.clipping.moo_scalar import MOO_CLIENT, MOO_SCALAR
from fulcrum.clipping.normalise import AUTO_S, PSAC, UNITS_OF_C
from fulcrum.clipping.oso import OSO
from fulcrum.clipping.quantile import QUANTILE
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.clipping.wav import WAV
from fulcrum.settings.registry import Registry

RULES_ENTRY_POINT = "fulcrum.rules"
"""Entry point group under which packages add rules by name: `my-rule = "package.module:RULE"`."""
RULES: Registry[ClipRule] = Registry("clip.rule", noun="rule", entry_points=RULES_ENTRY_POINT, kind=ClipRule)
"""The built-in rules by name."""
for _rule in (
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
    HYFREE,
    MACADAM,
):
    RULES.add(_rule.name, _rule)


def find_rule(name: str) -> ClipRule:
    """The rule of that name: built in, `package.module:rule`, or from an installed package."""
    return RULES.find(name)


__all__ = [
    "RULES",
    "ClipRule",
    "ModelFacts",
    "bound_C",
    "clip_to_C",
    "equal_shares",
    "find_rule",
    "no_extra",
    "plain_view",
    "shrink",
]
