"""Settings, parties and a rule -> a `Plan`, or a sentence that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fulcrum.clipping.rule import ClipRule, Shape, no_share
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.client_level import make_terms
from fulcrum.privacy.plan.grouping import grouped
from fulcrum.privacy.plan.parties import Named, named, population_of, sizes_of, special
from fulcrum.privacy.plan.party_group import Group
from fulcrum.privacy.plan.value import Plan
from fulcrum.settings.schema import Settings


def make_plan(
    settings: Settings,
    names: Sequence[str] | Named | int,
    units: Any,
    rule: ClipRule,
    spent: Mapping[str, Spend] | None = None,
    population: str | None = None,
) -> Plan:
    """Plan a run. names: the parties' names, or their number (then party-0, party-1, ...). units [K]: n_k.

    With privacy.epsilon, sigma is the smallest that keeps each party within its budget over its cap on
    participations; with privacy.sigma, epsilon is what that costs. spent, by party, is what was
    released before this run and counts against the same budget; leave it out for "this run only".
    population says which data the parties hold, for the ledger; by default it is told from the settings.
    """
    privacy, train = settings.privacy, settings.train
    if rule.private and privacy.epsilon is None and privacy.sigma is None:
        raise ConfigError(
            f"rule {rule.name!r} is private and needs to know how private: give --epsilon (privacy.epsilon) "
            "or --sigma (privacy.sigma)."
        )
    count, name = named(names)
    sizes = sizes_of(units, count)
    groups, group_of = grouped(settings, rule, sizes, name, special(privacy.budgets, spent or {}, count, name))
    if privacy.aggregation == "ideal-secagg":
        _check_sharing(settings, rule, groups)
        groups = [replace(groups[0], shares=count)]
    central = make_terms(settings, sizes)
    if central:  # one noise for all, so the party that needs most sets it
        loudest = max(group.sigma for group in groups)
        groups = [replace(group, sigma=loudest) for group in groups]
    return Plan(
        name=name,
        sizes=sizes,
        group_of=group_of,
        groups=tuple(groups),
        rounds=train.rounds,
        delta=privacy.delta,
        accountant=privacy.accountant,
        unit=privacy.unit,
        population=population_of(settings) if population is None else population,
        private=rule.private,
        sound=rule.sound,
        C0=settings.clip.C0,
        participation=train.participation,
        weights=train.weights,
        total_budget=privacy.budget,
        central=central,
        schedule=privacy.noise_schedule if rule.private else "constant",
        aggregation=privacy.aggregation,
    )


def _check_sharing(settings: Settings, rule: ClipRule, groups: Sequence[Group]) -> None:
    """Refuse what one dose of noise over the parties' sum does not cover; `config.check` has looked at the settings."""
    view = rule.view(rule.init(settings.clip, Shape(2, (2,))), 0, settings.train.rounds)
    reasons = {
        "adds no noise, so there is none to share": not rule.private,
        "sets C from raw private values": not rule.sound,
        "keeps a C at each party, and shared noise needs a common one": rule.where != "server",
        "releases statistics beside the gradients": rule.share is not no_share,
        "clips in another basis and may reshape each party's own sum": view.transform is not None,
    }
    for reason, true in reasons.items():
        if true:
            raise ConfigError(
                f"clip.rule = {rule.name!r} {reason}; with privacy.aggregation = 'ideal-secagg' use moo or fixed."
            )
    if len(groups) > 1:
        raise ConfigError(
            "the parties have spent different amounts before, so each needs its own noise; privacy.aggregation = "
            "'ideal-secagg' shares one: use plain."
        )
