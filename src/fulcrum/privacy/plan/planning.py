"""Settings, parties and a rule -> a `Plan`; and the other way round, how many rounds fit into a budget."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fulcrum.clipping.rule import ClipRule, ModelFacts, no_statistics_share
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import ACCOUNTANTS, Spend, find_largest_count
from fulcrum.privacy.client_level import ESTIMATORS, make_client_level_terms
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan.party_group import PartyGroup, compute_round_terms, group_parties
from fulcrum.privacy.plan.plan import Plan
from fulcrum.privacy.schedule import SCHEDULES, compute_noise_factors
from fulcrum.settings.schema import Settings


def check_privacy_names(settings: Settings) -> None:
    """ConfigError where the accountant, the noise schedule or the estimator that the settings name is not known."""
    ACCOUNTANTS.find(settings.privacy.accountant)
    SCHEDULES.find(settings.privacy.noise_schedule)
    ESTIMATORS.find(settings.client_level.estimator)


def make_plan(
    settings: Settings,
    names: Sequence[str] | NamedParties | int,
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
    check_privacy_names(settings)
    count, name = resolve_party_names(names)
    sizes = check_unit_counts(units, count)
    groups, group_of = group_parties(
        settings, rule, sizes, name, find_special_parties(privacy.budgets, spent or {}, count, name)
    )
    if privacy.aggregation == "ideal-secagg":
        _check_shared_noise(settings, rule, groups)
        groups = [replace(groups[0], noise_parties=count)]
    central = make_client_level_terms(settings, sizes)
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
        population=identify_population(settings) if population is None else population,
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


def _check_shared_noise(settings: Settings, rule: ClipRule, groups: Sequence[PartyGroup]) -> None:
    """Refuse what one dose of noise over the parties' sum does not cover; `config.check` has looked at the settings."""
    view = rule.view(rule.init(settings.clip, ModelFacts(2, (2,))), 0, settings.train.rounds)
    reasons = {
        "adds no noise, so there is none to share": not rule.private,
        "sets C from raw private values": not rule.sound,
        "keeps a C at each party, and shared noise needs a common one": rule.where != "server",
        "releases statistics beside the gradients": rule.share is not no_statistics_share,
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


# --- who the parties are ------------------------------------------------------------------------

MAX_NAMES_SEARCHED = 1000
"""The most names that are searched for one that a misspelt name may have meant."""


class NamedParties(Protocol):
    """Parties that know their number and names, such as a `data.Partition`."""

    @property
    def parties(self) -> int: ...

    def name(self, k: int) -> str: ...


def resolve_party_names(names: Sequence[str] | NamedParties | int) -> tuple[int, Callable[[int], str]]:
    """How many parties there are, and the name of each by its number."""
    if isinstance(names, int):
        return names, "party-{}".format
    if isinstance(names, Sequence):
        if len(set(names)) < len(names):
            raise ConfigError("two parties have the same name; each needs its own, since budgets are kept by name.")
        return len(names), names.__getitem__
    return names.parties, names.name


def check_unit_counts(units: Any, count: int) -> npt.NDArray[np.int64]:
    """n_k of each party [K], at least 1."""
    sizes = np.asarray(units)
    if sizes.shape != (count,) or count == 0:
        raise ConfigError(f"units has shape {sizes.shape}; it must hold one number for each of {count} parties.")
    whole = sizes.astype(np.int64)
    if (whole != sizes).any() or (whole < 1).any():
        raise ConfigError("units holds a number that is not a whole number of at least 1; every party needs data.")
    return whole


def find_special_parties(
    budgets: Mapping[str, float], spent: Mapping[str, Spend], count: int, name: Callable[[int], str]
) -> dict[int, tuple[float | None, Spend | None]]:
    """(budget, past) of the parties that have one or the other of their own, by number; None for what they share."""
    past = {party: spend for party, spend in spent.items() if spend.releases}
    if not budgets and not past:
        return {}
    number = {name(k): k for k in range(count)}
    for party in budgets:
        if party not in number:
            near = difflib.get_close_matches(party, list(number)[:MAX_NAMES_SEARCHED], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the parties are {name(0)!r} to {name(count - 1)!r}."
            raise ConfigError(f"privacy.budgets names party {party!r}, which is not there; {hint}")
    return {number[p]: (budgets.get(p), past.get(p)) for p in {**budgets, **past} if p in number}


def identify_population(settings: Settings) -> str:
    """Which data a party of that name holds: the same only for the same source, split and seed."""
    data = settings.data
    if data.partition == "given":
        split = "given parties"
    else:
        method = "dirichlet" if data.partition == "auto" else data.partition  # what "auto" means for classes
        split = f"{method} over {data.parties}, alpha {data.alpha:g}, shards {data.shards}"
        split += f", floor {data.min_examples}, seed {settings.run.seed}"
    held = f", {data.validation:g} held out" if data.validation else ""
    return f"{data.source}, {split}{held}"


# --- the other way round ------------------------------------------------------------------------


def compute_rounds_for_budget(
    settings: Settings, epsilon: float | None = None, sigma: float | None = None, spent: Spend | None = None
) -> int:
    """How many rounds of these settings' rate and steps fit into epsilon at sigma; 0 if not even one.

    epsilon and sigma are privacy.epsilon and privacy.sigma unless given here. A party may have spent
    something before. At most a million rounds are counted. Under a noise schedule other than constant the
    question is how many of its train.rounds rounds fit, from the first on.
    """
    privacy, train = settings.privacy, settings.train
    budget = privacy.epsilon if epsilon is None else epsilon
    multiplier = privacy.sigma if sigma is None else sigma
    if budget is None or multiplier is None:
        raise ConfigError("how many rounds fit depends on both: give an epsilon as budget and a sigma.")
    if not 0 < budget < math.inf:
        raise ConfigError(f"epsilon = {budget!r} is out of range; it must be a finite number greater than 0.")
    rate, steps = compute_round_terms(settings)
    limit = 10**6 if privacy.noise_schedule == "constant" else train.rounds
    group = PartyGroup(
        rate=rate,
        steps=steps,
        participations=limit,
        budget=budget,
        spent=spent or Spend.empty(),
        sigma=multiplier,
        factors=(1.0,) if privacy.noise_schedule == "constant" else compute_noise_factors(privacy, train.rounds),
    )
    return find_largest_count(lambda rounds: group.epsilon(rounds, privacy.delta, privacy.accountant) <= budget, limit)


def compute_affordable_rounds(plan: Plan, ledger: Ledger) -> dict[str, int]:
    """Rounds that each party of a kept ledger can still pay for, by name; those that can pay for all are left out."""
    accounts, spent = ledger.accounts(), ledger.get_spends()
    known: dict[tuple[Any, ...], int] = {}
    short: dict[str, int] = {}
    for k in range(plan.parties) if accounts else ():
        account = accounts.get(plan.name(k))
        if account is None or account.budget is None:
            continue
        past, budget, wanted = spent[account.name], account.budget, plan.participations(k)

        def fits(n: int, k: int = k, past: Spend = past, budget: float = budget) -> bool:
            return past.add_events(plan.group(k).worst(n)).epsilon(plan.delta, plan.accountant) <= budget

        key = (int(plan.group_of[k]), past.key, budget)
        if key not in known:
            known[key] = find_largest_count(fits, wanted)
        if known[key] < wanted:
            short[account.name] = known[key]
    return short
