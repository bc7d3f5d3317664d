"""The list of settings: one source for the template, the docs, the options' help and the error messages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import typing
from dataclasses import dataclass
from typing import Any

from fulcrum.settings import schema as config
from fulcrum.settings.schema import Settings

SECTION_CLASSES: dict[str, type] = {
    field.name: typing.cast(type, field.default_factory)
    for field in dataclasses.fields(Settings)
    if field.default_factory is not dataclasses.MISSING
}

SHORT_NAMES: dict[str, str] = {
    "data": "data.source",
    "data_dir": "data.dir",
    "public": "data.public",
    "schema": "table.schema",
    "withdrawn": "data.withdrawn",
    "task": "task.name",
    "model": "model.name",
    "epsilon": "privacy.epsilon",
    "sigma": "privacy.sigma",
    "delta": "privacy.delta",
    "parties": "data.parties",
    "partition": "data.partition",
    "alpha": "data.alpha",
    "rounds": "train.rounds",
    "steps": "train.steps",
    "rate": "train.rate",
    "lr": "train.lr",
    "seed": "run.seed",
    "private_seed": "privacy.seed",
    "unit": "privacy.unit",
    "randomness": "privacy.randomness",
    "arithmetic": "privacy.arithmetic",
    "engine": "run.engine",
    "device": "run.device",
    "ledger": "run.ledger",
    "reference": "run.reference",
}
"""Short names of the settings people change most: options of the command line, keywords in Python."""

# Texts of the fields that have no docstring in schema.py.
FIELD_TEXTS: dict[str, str] = {
    "model.temper_scale": "s of the tempered sigmoid s sigmoid(T x) - o.",
    "model.temper_temperature": "T of the tempered sigmoid.",
    "model.temper_offset": "o of the tempered sigmoid.",
    "train.decay": 'What schedule = "step" multiplies the learning rate by.',
    "train.server_lr": "Learning rate of the server optimiser.",
    "train.server_momentum": "Momentum of the server (first moment of adam).",
    "train.server_beta2": "Second moment of adam.",
    "train.server_eps": "Keeps adam from dividing by zero.",
    "clip.C_min": "C never goes below this.",
    "clip.C_max": "C never goes above this.",
    "privacy.epsilon": "Target for each party over the whole run; the noise is calibrated to it.",
    "privacy.sigma": "Noise multiplier, in place of epsilon; the epsilon is then reported.",
    "privacy.delta": "The chance that the guarantee fails; keep it well below 1 / (units of a party; client: parties).",
    "run.engine": "How a round is computed: auto, reference (a plain loop), parallel (CPU cores) or stacked (GPU).",
    "run.evaluate_every": (
        "Rounds between evaluations; the last round is always evaluated. 0: every round, or where private held-out "
        "records pay for their scores the last one alone."
    ),
    "run.checkpoint_every": "Rounds between checkpoints that a run can be resumed from.",
}


@dataclass(frozen=True)
class SettingField:
    """One setting: dotted path, section ("" at the top), name, type, default, and what it means."""

    path: str
    section: str
    name: str
    kind: Any
    default: Any
    words: str


@functools.cache
def list_setting_fields() -> dict[str, SettingField]:
    """Every setting by dotted path, in the order of schema.py, with its docstring there."""
    words = FIELD_TEXTS | _read_field_docstrings()
    found: dict[str, SettingField] = {}
    for section, owner in {"": Settings, **SECTION_CLASSES}.items():
        kinds, defaults = typing.get_type_hints(owner), owner()
        for name in (field.name for field in dataclasses.fields(owner)):
            if section or name not in SECTION_CLASSES:
                path = f"{section}.{name}".lstrip(".")
                found[path] = SettingField(
                    path, section, name, kinds[name], getattr(defaults, name), words.get(path, "")
                )
    return found


def find_setting_paths(name: str) -> list[str]:
    """Dotted paths that a bare name may mean: that of the short name, then each section's field of that name."""
    short = [SHORT_NAMES[name]] if name in SHORT_NAMES else []
    return short + [path for path, field in list_setting_fields().items() if field.name == name and path not in short]


def _read_field_docstrings() -> dict[str, str]:
    """The docstring after each field in schema.py, read from the source since Python does not keep it."""
    sections = {owner.__name__: f"{name}." for name, owner in SECTION_CLASSES.items()} | {"Settings": ""}
    found: dict[str, str] = {}
    for owner in ast.parse(inspect.getsource(config)).body:
        if isinstance(owner, ast.ClassDef) and owner.name in sections:
            for pair in zip(owner.body, owner.body[1:], strict=False):
                match pair:
                    case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words)))):
                        found[sections[owner.name] + name] = " ".join(words.split())
    return found
