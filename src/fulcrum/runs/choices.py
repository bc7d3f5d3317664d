"""Valid names of settings, taken from the implementations: no list of names is written a second time.

Settings are checked in two steps. `fulcrum.settings.check_settings` checks ranges and fields that must agree, without
the implementations. `check_choices` checks names and imports all implementations.
"""

from __future__ import annotations

from collections.abc import Collection

from fulcrum.clipping import RULES, ClipRule, ModelFacts, find_rule
from fulcrum.clipping.moo import ALIGNMENT_FUNCTIONS
from fulcrum.clipping.moo_paper import PAPER_READINGS
from fulcrum.clipping.rule import CLIP_GROUPINGS, resolve_rule_options
from fulcrum.data.features import FEATURE_MAPS
from fulcrum.data.partition import PARTITIONS
from fulcrum.data.tasks.balance import IMBALANCE_CHOICES
from fulcrum.data.tasks.losses import REGRESSION_LOSSES
from fulcrum.engines import ENGINES
from fulcrum.errors import ConfigError
from fulcrum.gradients.stacked.passes import PRECISIONS
from fulcrum.models.builtin import ACTIVATIONS
from fulcrum.models.norms import NORM_CHOICES
from fulcrum.models.whitening import COORDINATE_CHOICES
from fulcrum.privacy.accounting import ACCOUNTANTS
from fulcrum.privacy.client_level import ESTIMATORS
from fulcrum.privacy.plan.plan import AGGREGATIONS
from fulcrum.privacy.schedule import SCHEDULES
from fulcrum.privacy.scores import THRESHOLD_METRICS
from fulcrum.privacy.statement.units import UNIT_TEXTS
from fulcrum.rng import RANDOMNESS
from fulcrum.settings.checks import get_setting
from fulcrum.settings.derived import LR_SCHEDULES, WEIGHT_POWERS
from fulcrum.settings.registry import Registry, find_nearest_name
from fulcrum.settings.schema import Settings
from fulcrum.training.server import SERVERS

SETTING_CHOICES: dict[str, Collection[str]] = {
    "data.partition": PARTITIONS,
    "data.features": ("none", *FEATURE_MAPS),
    "task.loss": REGRESSION_LOSSES,
    "task.imbalance": IMBALANCE_CHOICES,
    "task.choose_threshold": ("none", *THRESHOLD_METRICS),
    "model.activation": ACTIVATIONS,
    "model.coordinates": COORDINATE_CHOICES,
    "model.norm": NORM_CHOICES,
    "train.schedule": LR_SCHEDULES,
    "train.weights": WEIGHT_POWERS,
    "train.server": SERVERS,
    "clip.rule": RULES,
    "clip.groups": CLIP_GROUPINGS,
    "clip.phi": ALIGNMENT_FUNCTIONS,
    "clip.reading": PAPER_READINGS,
    "privacy.unit": ("auto", *UNIT_TEXTS),
    "privacy.accountant": ACCOUNTANTS,
    "privacy.randomness": ("auto", *RANDOMNESS),
    "privacy.arithmetic": ("auto", "proven", "fast"),
    "privacy.aggregation": AGGREGATIONS,
    "privacy.noise_schedule": SCHEDULES,
    "client_level.estimator": ESTIMATORS,
    "run.engine": ("auto", *ENGINES),
    "run.precision": PRECISIONS,
}
"""Dotted path of a setting -> its valid names. A `Registry` also accepts names of installed packages, and most
accept package.module:name."""


def list_choices(path: str) -> tuple[str, ...]:
    """The valid names of a setting, including those of installed packages."""
    names = SETTING_CHOICES[path]
    return names.names() if isinstance(names, Registry) else tuple(names)


def check_choices(settings: Settings) -> Settings:
    """Return the settings, or raise ConfigError naming the first name that nothing implements, and the nearest."""
    for path, names in SETTING_CHOICES.items():
        _check_choice(path, get_setting(settings, path), names)
    rule = find_rule(settings.clip.rule)
    resolve_rule_options(rule, settings.clip.options)
    _check_rule_fits(settings, rule)
    return settings


def _check_rule_fits(settings: Settings, rule: ClipRule) -> None:
    """Refuse a rule with a unit or a server optimiser that cannot give it, or know of it, what it needs."""
    view = rule.view(rule.init(settings.clip, ModelFacts(2, (2,))), 0, settings.train.rounds)
    if view.probes is not None and settings.privacy.unit == "client":
        raise ConfigError(
            f"clip.rule = {rule.name!r} asks the parties for losses of their records, which privacy.unit = 'client' "
            "does not release; use the unit example or person."
        )
    if SERVERS.find(settings.train.server).corrects and (rule.where != "server" or view.needs_gradients):
        raise ConfigError(
            f"train.server = {settings.train.server!r} needs one noise for all coordinates and parties, which "
            f"clip.rule = {rule.name!r} does not have; use the server optimiser adam, or the rule fixed."
        )


def _check_choice(path: str, name: str, names: Collection[str]) -> None:
    if name in names:
        return
    if isinstance(names, Registry):
        names.find(name)  # raises its own error for an unknown name
        return
    near = find_nearest_name(name, names)
    hint = f"; did you mean {near!r}?" if near else "."
    raise ConfigError(f"{path} = {name!r} is not known; choose one of {', '.join(names)}{hint}")
