"""What a party agreed to, pinned in `terms.toml` on its own disk. The coordinator cannot change it later.

Numbers are limits: a request may ask for less (a smaller rate, fewer steps, more noise), never for
more. The clipping rule's settings are not in a request at all: the party takes them from here. The budget
is kept by the party's ledger, over all runs. Whatever is refused is answered with one of the fixed
sentences of `REFUSAL_TEXTS`, so that an answer never carries anything about the data.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import TypeAdapter, ValidationError

from fulcrum.clipping import RULES, find_rule
from fulcrum.clipping.rule import ClipRule, resolve_rule_options
from fulcrum.clipping.testing import refuse_broken_rule
from fulcrum.errors import ConfigError, FulcrumError
from fulcrum.flower.keys import check_party_name
from fulcrum.flower.rule_terms import RuleTerms, are_others_within, is_C_within
from fulcrum.flower.task_terms import check_declared, same_task, training_settings
from fulcrum.privacy.accounting import Spend, check_accounting_terms
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.plan import make_plan
from fulcrum.settings.checks import check_settings
from fulcrum.settings.derived import compute_local_steps, get_planned_unit
from fulcrum.settings.schema import FORBID_EXTRA_FIELDS, Model, Privacy, Settings, TaskSettings, Train
from fulcrum.training.problem import uses_proven_arithmetic
from fulcrum.types import Assignment, RuleState

REFUSAL_TEXTS: dict[str, str] = {
    "message": "the message could not be read",
    "version": "the message is of another version of Fulcrum; install the same version at coordinator and parties",
    "party": "the request is for another party",
    "expired": "the request has expired",
    "no-terms": "this party has agreed to no terms yet",
    "consent": "this party did not agree to the proposed terms",
    "rule": "the clipping rule is not one this party agreed to, or is not sound",
    "clip": "the clipping rule's settings are not the agreed ones",
    "arithmetic": "the run asks for proven arithmetic, and this party agreed to fast",
    "unit": "the unit of privacy is not the agreed one",
    "groups": "the grouping of parameters is not the agreed one",
    "model": "the model or its parameters are not the agreed ones",
    "params": "the weights are not finite or beyond any honest ones",
    "task": "the task (its loss, classes or ranges) is not the agreed one",
    "data": "the party's records do not fit the agreed task; its own log says why",
    "rate": "the sampling rate is above the agreed one, or beyond any honest one",
    "steps": "the local steps are more than agreed, or none",
    "sigma": "the noise multiplier is below the agreed one, or beyond any honest one",
    "rounds": "the round is beyond the agreed number of rounds",
    "C": "the clipping norm is not finite or outside the agreed range",
    "state": "the clipping state holds numbers beyond any honest ones",
    "lr": "the learning rate or weight decay is outside the agreed range",
    "interval": "the clipping rule's statistics are asked for in steps that were not agreed",
    "shared-noise": "the noise is to be shared with other parties, and this party's own noise must protect it",
    "field": "the request asks for something that the terms do not cover",
    "seed": "a seed was asked for, and this party draws its own randomness",
    "no-seed": "this party simulates, and no seed was given",
    "seen-seed": "another run in this party's ledger had the seed of this simulation",
    "run": "this run's id stands for another run in this party's ledger",
    "repeated": "this round was answered before, to a different request",
    "lost": "this round was answered before, and the stored answer is gone",
    "budget": "the party's privacy budget is spent",
    "internal": "the party failed; its own log says why",
}
"""Everything that a party can answer beside an update: code -> words, known to both sides."""

MAX_WEIGHT = 1e6
"""The largest weight, in absolute value, of a model that a request may send: beyond it gradients may overflow."""
MIN_SIGMA = 1e-3
"""The noise multiplier of terms is above this: below, accounting overflows, and nothing is protected."""
MAX_SIGMA = 1e6
"""The largest noise multiplier of a request: beyond it the noise may overflow."""
MAX_CLASSES = 10_000_000
"""The most classes, labels or tokens."""
MIN_RATE = 1e-9
"""The smallest sampling rate of a request: below it the mean over an expected batch may overflow."""


class TermsRefusal(FulcrumError):
    """A party refuses. `code` is all that the coordinator gets to know."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{REFUSAL_TEXTS[code]}{f' ({detail})' if detail else ''}.")
        self.code = code


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
    check_accounting_terms(terms.delta, terms.accountant)
    if not terms.rules:
        raise ConfigError("terms: rules is empty; name at least one clipping rule, such as moo.")
    for name in terms.rules:
        if look_up or name in RULES:
            rule = find_allowed_rule(terms, name)
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
    if terms.arithmetic not in ARITHMETICS:
        raise ConfigError(f"terms: arithmetic = {terms.arithmetic!r} must be auto, proven or fast.")
    _check_plan(terms)
    if not 0 <= terms.agreed_task.classes <= MAX_CLASSES:
        raise ConfigError(f"terms: classes = {terms.agreed_task.classes} must be a number up to {MAX_CLASSES}.")
    check_settings(terms_to_settings(terms))  # the ranges of a run's settings, those of [clip] among them
    return terms


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


MAX_PARTIES = 1_000_000
"""A party's number in a run must be below this: its own memory grows with the number."""

ROUNDING_TOLERANCE = 1e-12
"""Relative tolerance for numbers that were computed twice."""

ASSIGNMENT_LIMITS: dict[str, tuple[str, Callable[[PartyTerms, Any], bool]]] = {
    "client": ("party", lambda terms, value: 0 <= value < MAX_PARTIES),
    "rate": ("rate", lambda terms, value: MIN_RATE <= value <= terms.rate * (1 + ROUNDING_TOLERANCE)),
    "sigma": ("sigma", lambda terms, value: terms.sigma * (1 - ROUNDING_TOLERANCE) <= value <= MAX_SIGMA),
    "steps": ("steps", lambda terms, value: 1 <= value <= terms.steps),
    "lr": ("lr", lambda terms, value: 0 < value <= terms.lr * (1 + ROUNDING_TOLERANCE)),
    # A multiple, so that the steps are among the agreed ones: any other larger number could name other steps each time.
    "statistics_interval": (
        "interval",
        lambda terms, value: value >= 1 and value % terms.statistics_interval == 0,
    ),
    "noise_parties": ("shared-noise", lambda terms, value: value == 1),
}
"""Field of an `Assignment` -> the code of its refusal, and whether the terms allow a value."""


def check_assignment(terms: PartyTerms, task: Assignment) -> None:
    """Refuse an assignment that goes beyond the terms. A field that has no limit must keep its default."""
    for each in dataclasses.fields(task):
        value = getattr(task, each.name)
        if each.name in ASSIGNMENT_LIMITS:
            code, allows = ASSIGNMENT_LIMITS[each.name]
            fine = allows(terms, value)
        else:
            code, fine = "field", value == each.default
        if not fine:
            raise TermsRefusal(code)


def check_round_request(
    terms: PartyTerms, header: Mapping[str, Any], assignment: Assignment, model: str, task: str, simulation: bool
) -> None:
    """Refuse a round that goes beyond the terms. model, task: fingerprints of this party's own model and task."""
    checks: tuple[tuple[str, bool], ...] = (
        ("party", header["party"] == terms.party),
        ("unit", header["unit"] == terms.unit),
        ("groups", header["groups"] == terms.groups),
        ("model", header["model"] == model),
        ("task", header["task"] == task),
        ("rounds", header["round"] < header["rounds"] <= terms.rounds),
        ("lr", 0 <= header["weight_decay"] <= terms.weight_decay * (1 + ROUNDING_TOLERANCE)),
        ("seed", simulation or not header["simulation"]),
        ("no-seed", not simulation or bool(header["simulation"])),
    )
    for code, fine in checks:
        if not fine:
            raise TermsRefusal(code)
    check_assignment(terms, assignment)
    find_allowed_rule(terms, header["rule"])


def check_params(params: torch.Tensor) -> None:
    """Refuse weights that are not finite or so large that gradients would overflow.

    Whether a record's gradient overflows depends on the record.
    """
    if params.numel() and not float(params.abs().max()) <= MAX_WEIGHT:  # NaN is not
        raise TermsRefusal("params")


def check_clipping_state(terms: PartyTerms, state: RuleState, moved: Mapping[str, torch.Tensor]) -> None:
    """Refuse a C that is not finite, not positive or outside the agreed range, and other numbers of unusual size.

    state: the whole state, as this party made it. moved: what of it was received.
    """
    if not is_C_within(state["C"], terms.C_min, terms.C_max):
        raise TermsRefusal("C")
    if not are_others_within(moved):
        raise TermsRefusal("state")


# --- proposals ----------------------------------------------------------------------------------


PROPOSAL_UNIT_COUNTS = tuple(10**n for n in range(10))
"""Numbers of units from one to a thousand million: a proposal is made before the parties' sizes are known."""


def make_proposal(settings: Settings, classes: int = 0, task: TaskSettings | None = None) -> dict[str, Any]:
    """What a run's settings ask of every party, as plain values: a coordinator sends it, `fulcrum terms` prints it.

    classes: the model's outputs, or the number of classes (public), where known. task: the task as public data declare
    it; None: as the settings do. sigma is the smallest of all rounds, and of parties of any
    size and budget: a party may be asked for more noise, never for less. budget is what one run costs, the noise
    schedule and the statistics interval included.
    """
    check_settings(settings)
    privacy = settings.privacy
    if privacy.epsilon is not None:
        most = max([privacy.epsilon, *privacy.budgets.values()])
        privacy = dataclasses.replace(privacy, epsilon=most, budgets={})
    train = settings.train
    rule = find_rule(settings.clip.rule)
    plan = make_plan(
        dataclasses.replace(settings, privacy=privacy), len(PROPOSAL_UNIT_COUNTS), PROPOSAL_UNIT_COUNTS, rule
    )
    agreed = training_settings(task or settings.task, classes if classes > 1 else 0)
    proposal = {
        "delta": settings.privacy.budget_delta or settings.privacy.delta,
        "run_delta": settings.privacy.delta if settings.privacy.budget_delta else 0.0,
        "rate": train.rate,
        "steps": compute_local_steps(train),
        "sigma": float(min(group.sigma * min(group.factors) for group in plan.groups)),
        "rounds": train.rounds,
        "rules": [settings.clip.rule],
        "classes": classes,
        "arithmetic": settings.privacy.arithmetic,
        "clip": dataclasses.asdict(RuleTerms.of(settings.clip)),
        "unit": get_planned_unit(settings.privacy),
        "accountant": settings.privacy.accountant,
        "groups": settings.clip.groups,
        "statistics_interval": plan.groups[0].statistics_interval,
        "C_min": settings.clip.C_min,
        "C_max": settings.clip.C_max,
        "lr": train.lr,
        "weight_decay": train.weight_decay,
        "model": dataclasses.asdict(settings.model),
        "task": dataclasses.asdict(agreed),
    }
    # Of parties of any size, those that pay the most: the others release the same steps with no less noise.
    costs = [group.epsilon(train.rounds, plan.delta, plan.accountant) for group in plan.groups]
    if not math.isfinite(max(costs)):
        return proposal
    events = plan.groups[costs.index(max(costs))].worst(train.rounds)
    rows = [(event.rate, event.sigma, event.count) for event in events if isinstance(event, Gaussian)]
    return {**proposal, "plan": shorten_plan(rows), "budget": max(costs)}


MAX_PLAN_ROWS = 300
"""Rows of the plan in a proposal: it must fit into a message's header."""


def shorten_plan(rows: Sequence[tuple[float, float, int]]) -> list[list[float | int]]:
    """A plan of at most `MAX_PLAN_ROWS` rows (rate, sigma, count) that costs no less: neighbours get the less noise."""
    ordered = sorted(rows)
    size = -(-len(ordered) // MAX_PLAN_ROWS)
    if len({rate for rate, _, _ in ordered}) > 1:
        size = 1  # rates are those of the settings: there is one
    parts = [ordered[at : at + size] for at in range(0, len(ordered), size)] if ordered else []
    return [[part[0][0], part[0][1], sum(count for _, _, count in part)] for part in parts]


def accept_proposal(
    party: str, proposal: Mapping[str, Any], budget: float | None = None, look_up: bool = True
) -> PartyTerms:
    """A proposal as terms. budget: None takes what one run of the proposal costs, and no more.

    look_up: False before somebody has agreed; see `validate_terms`.
    """
    terms = validate_terms(_validate_terms_types({"budget": 1.0, **proposal, "party": party}), look_up)
    check_declared(terms.agreed_task)
    if budget is None:
        cost = Spend.empty().add_events(terms.planned_events)
        # Rounded up a little: the same sum, reached round by round, may differ in the last digits.
        budget = math.ceil(cost.epsilon(terms.run_delta or terms.delta, terms.accountant) * 1e4) / 1e4
    return validate_terms(dataclasses.replace(terms, budget=budget), look_up)


def _is_proven(terms: PartyTerms, simulation: bool) -> bool:
    randomness = "seeded" if simulation else "secure"
    return uses_proven_arithmetic(Settings(privacy=Privacy(randomness=randomness, arithmetic=terms.arithmetic)))


def check_proposal(terms: PartyTerms, proposal: Mapping[str, Any], simulation: bool = False) -> None:
    """Refuse a proposal that goes beyond the terms, before a run starts; each round is checked again."""
    try:
        asked = _validate_terms_types({**proposal, "party": terms.party, "budget": terms.budget})
    except ConfigError as error:
        raise TermsRefusal("message") from error
    known = asked.arithmetic in ARITHMETICS
    checks: tuple[tuple[str, bool], ...] = (
        ("unit", asked.unit == terms.unit),
        ("groups", asked.groups == terms.groups),
        ("model", asked.model == terms.model),
        ("task", same_task(asked.agreed_task, terms.agreed_task)),
        ("rate", asked.rate <= terms.rate * (1 + ROUNDING_TOLERANCE)),
        ("steps", asked.steps <= terms.steps),
        ("sigma", asked.sigma >= terms.sigma * (1 - ROUNDING_TOLERANCE)),
        ("rounds", asked.rounds <= terms.rounds),
        ("interval", asked.statistics_interval >= 1 and asked.statistics_interval % terms.statistics_interval == 0),
        (
            "lr",
            asked.lr <= terms.lr * (1 + ROUNDING_TOLERANCE)
            and asked.weight_decay <= terms.weight_decay * (1 + ROUNDING_TOLERANCE),
        ),
        ("rule", set(asked.rules) <= set(terms.rules)),
        ("clip", asked.clip == terms.clip),
        ("arithmetic", _is_proven(terms, simulation) or (known and not _is_proven(asked, simulation))),
    )
    for code, fine in checks:
        if not fine:
            raise TermsRefusal(code)


# --- the file -----------------------------------------------------------------------------------


def read_terms_file(path: Path) -> PartyTerms:
    """The terms of a file, every field checked; a ConfigError names the first that is wrong."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"terms {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"terms {path} is not TOML: {error}.") from None
    return validate_terms(_validate_terms_types(raw))


def terms_to_toml(terms: PartyTerms) -> str:
    """TOML with every term and what it means."""
    lines = ["# What this party agreed to. The coordinator cannot change it; edit it only if you mean it.", ""]
    docs = _read_field_docs()
    for each in dataclasses.fields(PartyTerms):
        if each.name not in TERMS_TABLES:
            lines += [f"# {docs[each.name]}", f"{each.name} = {json.dumps(getattr(terms, each.name))}", ""]
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


def _validate_terms_types(raw: Mapping[str, Any]) -> PartyTerms:
    """Strict types, through JSON as the settings do; unknown fields are refused, and numbers of any unusual size."""
    if not _has_ordinary_numbers(raw):
        raise ConfigError("terms: a number is not finite, or beyond 1e300.")
    try:
        return TypeAdapter(PartyTerms).validate_json(json.dumps(raw, allow_nan=False, default=list), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"terms: {where}: {first['msg'][0].lower()}{first['msg'][1:]}.") from None
    except ValueError:
        raise ConfigError("terms: a number is not finite.") from None


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
