"""What a party agreed to, pinned in `terms.toml` on its own disk. The coordinator cannot change it later.

Numbers are limits: a request may ask for less (a smaller rate, fewer steps, more noise), never for
more. The clipping rule's settings are not in a request at all: the party takes them from here. The budget
is kept by the party's ledger, over all runs. `request_checks.py` compares requests with the terms.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from fulcrum.clipping import RULES, find_rule
from fulcrum.clipping.rule import ClipRule, resolve_rule_options
from fulcrum.clipping.testing import refuse_broken_rule
from fulcrum.errors import ConfigError
from fulcrum.flower.keys import check_party_name
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.rule_terms import RuleTerms
from fulcrum.flower.task_terms import training_settings
from fulcrum.privacy.accounting import ACCOUNTANTS, Spend, check_accounting_terms
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.plan.planning import check_masked_rule
from fulcrum.settings.checks import check_settings
from fulcrum.settings.schema import FORBID_EXTRA_FIELDS, Model, Privacy, Settings, TaskSettings, Train
from fulcrum.settings.toml import parse_toml

FINGERPRINT_PATTERN = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
"""A public key's fingerprint, as `ssh-keygen -l` prints it."""
MIN_SIGMA = 1e-3
"""The noise multiplier of terms is above this: below, accounting overflows, and nothing is protected."""
MAX_SIGMA = 1e6
"""The largest noise multiplier of a request: beyond it the noise may overflow."""
MAX_CLASSES = 10_000_000
"""The most classes, labels or tokens."""


@dataclass(frozen=True)
class PartyTerms:
    """What this party agreed to. Every number is a limit; the coordinator may ask for less, never for more."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    party: str
    """This party's name: that of its key, and of its account in the ledger."""
    budget: float
    """Epsilon of this party over all runs in its ledger. Nothing is released beyond it."""
    delta: float
    """The delta of that epsilon. Must be well below 1 / (number of units)."""
    rate: float
    """The largest Poisson sampling rate of a local step."""
    steps: int
    """The most local steps of a round."""
    sigma: float
    """The smallest noise multiplier."""
    rounds: int
    """The most rounds of a run."""
    rules: tuple[str, ...]
    """Clipping rules that may be used; each must be sound and private."""
    unit: str = "example"
    """What is protected: example, or person."""
    accountant: str = "rdp"
    """Which epsilon the budget means: rdp or pld."""
    groups: str = "flat"
    """flat, or layer (each layer clipped to its share)."""
    statistics_interval: int = 1
    """Every so many local steps, counted over all rounds, the clipping rule's own statistics may be released; a request
    may ask for a multiple of it. 1: every step."""
    C_min: float = 1e-3
    """The smallest clipping norm."""
    C_max: float = 1e3
    """The largest clipping norm."""
    lr: float = 1.0
    """The largest learning rate."""
    weight_decay: float = 0.0
    """The largest weight decay."""
    classes: int = 0
    """The number of the model's outputs (of classes, in a classification), from public knowledge. It is never counted
    in the labels; a label outside is an error that this party alone reads."""
    arithmetic: str = "auto"
    """How the bounds on contributions hold here: proven (float64, each step with a written bound), fast (float32 sums
    with measured margins), or auto (proven, except in simulations)."""
    run_delta: float = 0.0
    """The delta of one run, where runs add up by their own (epsilon, delta): accountant pld. 0: all of delta."""
    plan: tuple[tuple[float, float, int], ...] = ()
    """The steps of one run as proposed: rate, noise multiplier, and how many of them. Empty: every agreed step at the
    largest rate and the smallest multiplier."""
    coordinator: str = ""
    """Fingerprint of the key that signs the coordinator's requests, SHA256:... as ssh-keygen -l prints it; no other key
    is obeyed. Empty: the key of the server's certificate, which your CA vouches for."""
    aggregation: str = "plain"
    """plain: this party's own noise protects its update. pairwise: its messages are masked, the parties share the
    noise, and what is protected is their sum."""
    colluders: int = 0
    """With pairwise masks: the fewest colluding parties that a round must cover. Participants that are not among the
    peers count as colluders."""
    peers: dict[str, str] = field(default_factory=dict)
    """With pairwise masks: the other parties' names and the fingerprints of their signing keys (ssh-keygen -l), as they
    gave them to you themselves: not through the coordinator."""
    pinned: str = ""
    """When the peers were pinned, for the statement: a date such as 2026-11-16."""
    rehearsed: bool = False
    """Whether the coordinator chose learning rate, C0 and schedule by training on made-up records, before it asked: it
    saw declared numbers and shapes only, so that the choice costs no privacy."""
    clip: RuleTerms = field(default_factory=RuleTerms)
    """The clipping rules' settings. They hold here whatever the coordinator says; only C travels, and what else a rule
    learns from releases."""
    task: TaskSettings = field(default_factory=TaskSettings)
    """What is predicted, and its loss. Without a [task]: classification. Metrics are the coordinator's own matter."""
    model: Model = field(default_factory=Model)
    """The model, built by this party's own software: its parameters must be those of the requests."""

    @property
    def agreed_task(self) -> TaskSettings:
        """The task that this party trains on. Terms without a [task] mean a classification with `classes` classes."""
        return training_settings(self.task, self.classes if self.classes > 1 else 0)

    @property
    def planned_events(self) -> tuple[Event, ...]:
        """The most that one run releases: the plan of the terms, else every agreed step at the smallest sigma."""
        rows = self.plan or ((self.rate, self.sigma, self.steps * self.rounds),)
        return tuple(Gaussian(*row) for row in rows)

    def compute_planned_epsilon(self) -> float:
        """The most that one run can cost: every agreed step at the smallest sigma, with statistics in each of them."""
        events = (Gaussian(self.rate, self.sigma, self.steps * self.rounds),)
        return Spend.empty().add_events(events).epsilon(self.delta, self.accountant)


def validate_terms(terms: PartyTerms, look_up: bool = True) -> PartyTerms:
    """The terms, or a ConfigError naming the first field that is wrong.

    look_up: False leaves out rules that are not built in. A lookup imports code, and nobody may have agreed to it yet.
    """
    check_party_name(terms.party)
    if not look_up and terms.accountant not in ACCOUNTANTS:
        raise ConfigError("terms: the accountant of a proposal must be one that this Fulcrum has, such as rdp or pld.")
    check_accounting_terms(terms.delta, terms.accountant)
    if not terms.rules:
        raise ConfigError("terms: rules is empty; name at least one clipping rule, such as moo.")
    for name in terms.rules:
        if look_up or name in RULES:
            rule = find_rule_of_terms(terms, name)
            resolve_rule_options(rule, terms.clip.options)
            if name not in RULES:
                refuse_broken_rule(rule, terms.clip.to_clip(rule=name, C_min=terms.C_min, C_max=terms.C_max))
    limits: dict[str, tuple[float, float]] = {
        "budget": (0, math.inf),
        "rate": (0, 1),
        "sigma": (MIN_SIGMA, MAX_SIGMA),
        "lr": (0, math.inf),
        "C_min": (0, math.inf),
        "C_max": (0, math.inf),
        "steps": (0, math.inf),
        "rounds": (0, math.inf),
        "statistics_interval": (0, math.inf),
    }
    for name, (low, high) in limits.items():
        value = getattr(terms, name)
        if not (low < value <= high and math.isfinite(value)):
            top = f" and at most {high:g}" if high < math.inf else ""
            raise ConfigError(f"terms: {name} = {value!r} must be a finite number above {low:g}{top}.")
    if not (terms.weight_decay >= 0 and math.isfinite(terms.weight_decay) and terms.C_min <= terms.C_max):
        raise ConfigError("terms: weight_decay must be at least 0, and C_min at most C_max.")
    if terms.unit not in ("example", "person") or terms.groups not in ("flat", "layer"):
        raise ConfigError("terms: unit must be example or person, and groups flat or layer.")
    if terms.coordinator and not FINGERPRINT_PATTERN.fullmatch(terms.coordinator):
        raise ConfigError(
            "terms: coordinator must be a fingerprint as ssh-keygen -l prints it, SHA256: and 43 characters, or empty."
        )
    _check_masks(terms)
    if terms.arithmetic not in ARITHMETICS:
        raise ConfigError(f"terms: arithmetic = {terms.arithmetic!r} must be auto, proven or fast.")
    _check_plan(terms)
    if not 0 <= terms.agreed_task.classes <= MAX_CLASSES:
        raise ConfigError(f"terms: classes = {terms.agreed_task.classes} must be a number up to {MAX_CLASSES}.")
    check_settings(terms_to_settings(terms))  # the ranges of a run's settings, those of [clip] among them
    return terms


def _check_masks(terms: PartyTerms) -> None:
    """ConfigError where the terms of pairwise masks make no sense."""
    if terms.aggregation not in ("plain", "pairwise"):
        raise ConfigError(f"terms: aggregation = {terms.aggregation!r} must be plain or pairwise.")
    if not 0 <= terms.colluders < MAX_PEERS:
        raise ConfigError(f"terms: colluders = {terms.colluders} must be a number of parties, from 0 on.")
    if terms.aggregation == "pairwise" and terms.steps != 1:
        raise ConfigError(f"terms: steps = {terms.steps} with aggregation = 'pairwise'; only one local step is proved.")
    for name, pin in terms.peers.items():
        check_party_name(name)
        if name == terms.party:
            raise ConfigError(f"terms: peers names {name!r}, which is this party itself; name the others.")
        if not FINGERPRINT_PATTERN.fullmatch(pin):
            raise ConfigError(f"terms: peers.{name} must be a fingerprint as ssh-keygen -l prints it, SHA256:...")
    if len(set(terms.peers.values())) < len(terms.peers):
        raise ConfigError("terms: two peers have the same fingerprint; each party has a key of its own.")


MAX_PEERS = 10_000
"""The most parties that a party's messages are masked with."""


def _check_plan(terms: PartyTerms) -> None:
    """ConfigError where the plan of one run goes beyond the other terms."""
    steps = sum(count for _, _, count in terms.plan)
    if not 0 <= terms.run_delta <= terms.delta:
        raise ConfigError("terms: run_delta is a part of delta; it must be between 0 and delta.")
    for rate, sigma, count in terms.plan:
        if not (
            0 < rate <= terms.rate * (1 + ROUNDING_TOLERANCE)
            and terms.sigma * (1 - ROUNDING_TOLERANCE) <= sigma <= MAX_SIGMA
            and count >= 1
            and steps <= terms.steps * terms.rounds
        ):
            raise ConfigError("terms: plan goes beyond rate, sigma, or steps times rounds; take it out, or agree anew.")


ARITHMETICS = ("auto", "proven", "fast")
"""The choices of `arithmetic`."""


def find_allowed_rule(terms: PartyTerms, name: str) -> ClipRule:
    """The rule, if the terms name it and it is sound; looked up only then, since a lookup may import code."""
    if name not in terms.rules:
        raise TermsRefusal("rule")
    rule = find_rule(name)
    if not (rule.sound and rule.private):
        raise ConfigError(f"terms: rule {name!r} is not sound and private, so it protects nobody; take it out.")
    return rule


def find_rule_of_terms(terms: PartyTerms, name: str) -> ClipRule:
    """`find_allowed_rule`, and with pairwise masks ConfigError for a rule whose releases they would not hide.

    Whatever a coordinator proposes: masks hide the clipped sum and nothing else.
    """
    rule = find_allowed_rule(terms, name)
    if terms.aggregation == "pairwise":
        check_masked_rule(terms_to_settings(terms, name).replace(privacy={"aggregation": "pairwise"}), rule)
    return rule


ROUNDING_TOLERANCE = 1e-12
"""Relative tolerance for numbers that were computed twice."""


# --- the file -----------------------------------------------------------------------------------


def read_terms_file(path: Path) -> PartyTerms:
    """The terms of a file, every field checked; a ConfigError names the first that is wrong."""
    try:
        raw = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"terms {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"terms {path} is not TOML: {error}.") from None
    return validate_terms(read_terms_table(raw))


def terms_to_toml(terms: PartyTerms) -> str:
    """TOML with every term and what it means."""
    lines = ["# What this party agreed to. The coordinator cannot change it; edit it only if you mean it.", ""]
    docs = _read_field_docs()
    for each in dataclasses.fields(PartyTerms):
        if each.name not in TERMS_TABLES:
            lines += [f"# {docs[each.name]}", f"{each.name} = {_to_toml(getattr(terms, each.name))}", ""]
    for section in TERMS_TABLES:  # tables come last in TOML
        values = dataclasses.asdict(getattr(terms, section))
        lines += [f"# {docs[section]}", f"[{section}]"]
        lines += [f"{name} = {_to_toml(value)}" for name, value in values.items() if value is not None]
        lines += [""]
    return "\n".join(lines)


TERMS_TABLES = ("clip", "task", "model")
"""The terms that are tables of their own."""


def _to_toml(value: Any) -> str:
    """A value on one line: JSON's literals are those of TOML, except for tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {_to_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)


def read_terms_table(raw: Mapping[str, Any]) -> PartyTerms:
    """Strict types, through JSON as the settings do; unknown fields are refused, and numbers of any unusual size."""
    if not _has_ordinary_numbers(raw):
        raise ConfigError("terms: a number is not finite, or beyond 1e300.")
    try:
        return TypeAdapter(PartyTerms).validate_json(json.dumps(raw, allow_nan=False, default=_to_json), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"terms: {where}: {first['msg'][0].lower()}{first['msg'][1:]}.") from None
    except ValueError:
        raise ConfigError("terms: a number is not finite.") from None


def _to_json(value: Any) -> Any:
    """Tuples and sets as lists; dates, which TOML has, as text."""
    return list(value) if isinstance(value, tuple | set | frozenset) else str(value)


def _has_ordinary_numbers(value: Any, depth: int = 0) -> bool:
    """Whether all numbers in nested tables and lists are finite and of a size that arithmetic bears."""
    if isinstance(value, Mapping | list | tuple):
        inside = value.values() if isinstance(value, Mapping) else value
        return depth < 8 and all(_has_ordinary_numbers(each, depth + 1) for each in inside)
    return not isinstance(value, int | float) or -1e300 < value < 1e300


def _read_field_docs() -> dict[str, str]:
    """The docstring of each field of `PartyTerms`, from its source."""
    source = inspect.getsource(PartyTerms)
    found = {}
    for each in dataclasses.fields(PartyTerms):
        rest = source.split(f"    {each.name}: ", 1)[1].split('"""', 2)
        found[each.name] = " ".join(rest[1].split())
    return found


def terms_to_settings(terms: PartyTerms, rule: str = "", simulation: bool = False) -> Settings:
    """The terms as settings, for a party's own training and privacy statement.

    rule: the one that runs, by default the first of the terms. simulation: the randomness is that of a seed.
    """
    return Settings(
        method="terms",
        task=terms.agreed_task,
        model=terms.model,
        train=Train(rounds=terms.rounds, steps=terms.steps, rate=terms.rate, lr=terms.lr),
        clip=terms.clip.to_clip(
            rule=rule or terms.rules[0],
            groups=terms.groups,
            C_min=terms.C_min,
            C_max=terms.C_max,
            statistics_interval=terms.statistics_interval * terms.rate if terms.statistics_interval > 1 else 0.0,
        ),
        privacy=Privacy(
            sigma=terms.sigma,
            delta=terms.delta,
            unit=terms.unit,
            accountant=terms.accountant,
            budget=terms.budget,
            randomness="seeded" if simulation else "secure",
            arithmetic=terms.arithmetic,
        ),
    )
