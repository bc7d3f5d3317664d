"""What a person at a party reads before agreeing to a coordinator's proposal."""

from __future__ import annotations

import dataclasses

from fulcrum.flower.display import show_value
from fulcrum.flower.rule_terms import RuleTerms
from fulcrum.flower.terms import PartyTerms
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.plan.text import warn_about_masks
from fulcrum.settings.schema import Model, TaskSettings

REHEARSED_LINE = (
    "  learning rate and rule's settings were chosen beforehand by training on made-up records: from declared numbers "
    "and shapes, before any record was read, so the choice costs no privacy"
)


def make_consent_text(terms: PartyTerms, units: int | None) -> str:
    """The terms in sentences, with what they cost; units: the party's number of units n_k, None where not counted."""
    # Every word of a proposal is somebody else's: it is shown escaped and cut, and only numbers stand as they are.
    unit, groups, arithmetic = (show_value(text) for text in (terms.unit, terms.groups, terms.arithmetic))
    rules = show_value(", ".join(terms.rules))
    holds = f"{units} {unit}s" if units else f"{unit}s that are counted once the task's code may run"
    much = units is not None and terms.delta >= 1 / units
    warning = f" WARNING: not below 1/{units}, so the guarantee means little." if much else ""
    interval, privacy = terms.statistics_interval, f"at delta {terms.delta:g} ({show_value(terms.accountant)})"
    lines = [
        f"The coordinator proposes, for party {terms.party} with {holds}:",
        f"  up to {terms.rounds} rounds of {terms.steps} step(s), each on a {terms.rate:g} sample of the {unit}s",
        f"  noise multiplier of at least {terms.sigma:.5g}, clipping rule {rules} ({groups})",
        *(f"  {words}" for words in describe_mask_terms(terms)),
        *([f"  the clipping rule's own statistics at most every {interval} steps"] if interval > 1 else []),
        f"  clipping norm within {terms.C_min:g} to {terms.C_max:g}, learning rate up to {terms.lr:g}",
        f"  the rule's settings {rule_text(terms)}; arithmetic {arithmetic}",
        *([REHEARSED_LINE] if terms.rehearsed else []),
        f"  task {task_text(terms)}",
        f"  model {model_text(terms)}, built by this party's own software",
        *([f"  CODE that runs here if you agree: {', '.join(code)}"] if (code := list_proposed_code(terms)) else []),
        f"  epsilon of at most {format_epsilon(terms.budget)} {privacy}, over all runs.{warning}",
    ]
    return "\n".join(lines)


SHARED_NOISE_TEXT = (
    "SHARED NOISE (aggregation pairwise): that noise is on the sum of the honest parties; this party adds a share of "
    "it, and masks hide its message. Covered are the server and up to {colluders} colluding parties"
)
NO_PEERS_TEXT = (
    "NO other party's key is pinned here, so each counts as a colluder, and rounds with more than {colluders} of them "
    "are refused; get the others' NAME.pub from themselves and pin them (fulcrum terms --peers FOLDER)"
)


def describe_mask_terms(terms: PartyTerms) -> list[str]:
    """What pairwise masks ask of a party and leave open; nothing where its own noise protects its update."""
    if terms.aggregation != "pairwise":
        return []
    found = [SHARED_NOISE_TEXT.format(colluders=terms.colluders)]
    found += [f"WARNING: {words}" for words in warn_about_masks(terms.colluders)]
    return found if terms.peers else [*found, NO_PEERS_TEXT.format(colluders=terms.colluders)]


def rule_text(terms: PartyTerms) -> str:
    """C0, and every setting of the clipping rules that is not the default: "C0 1, stability 0.1"."""
    default = dataclasses.asdict(RuleTerms())
    chosen = {name: value for name, value in dataclasses.asdict(terms.clip).items() if value != default[name]}
    return ", ".join(f"{name} {show_value(value)}" for name, value in {"C0": terms.clip.C0, **chosen}.items())


def model_text(terms: PartyTerms) -> str:
    """The model's name and every setting of it that is not the default."""
    default = dataclasses.asdict(Model())
    chosen = {name: value for name, value in dataclasses.asdict(terms.model).items() if value != default[name]}
    chosen.pop("name", None)
    words = ", ".join(f"{name} {show_value(value)}" for name, value in chosen.items())
    return f"{show_value(terms.model.name)} ({words})" if words else show_value(terms.model.name)


def list_proposed_code(terms: PartyTerms) -> list[str]:
    """What of the terms names code by its place (package.module:name): it is imported only after consent."""
    names = (*terms.rules, terms.task.name, terms.task.loss, terms.model.name)
    return [show_value(name) for name in dict.fromkeys(names) if ":" in name]


def task_text(terms: PartyTerms) -> str:
    """The task's name and every setting of it that is not the default: "regression: loss huber, low 0, high 40"."""
    task, default = terms.agreed_task, dataclasses.asdict(TaskSettings())
    chosen = {field: value for field, value in dataclasses.asdict(task).items() if value != default[field]}
    chosen.pop("name", None)
    words = ", ".join(
        f"{field} {show_value(list(value) if isinstance(value, tuple) else value)}" for field, value in chosen.items()
    )
    return f"{show_value(task.name)}: {words}" if words else show_value(task.name)
