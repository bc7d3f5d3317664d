"""Settings, parties and a rule -> a `Plan`; and the inverse: the number of rounds that fit into a budget."""

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
from fulcrum.privacy.pairwise.shares import count_colluders
from fulcrum.privacy.plan.party_group import PartyGroup, compute_round_terms, group_parties
from fulcrum.privacy.plan.plan import Plan
from fulcrum.privacy.schedule import SCHEDULES, compute_noise_factors
from fulcrum.settings.derived import get_planned_unit
from fulcrum.settings.schema import Settings


def check_privacy_names(settings: Settings) -> None:
    """Raise ConfigError if the settings name an unknown accountant, noise schedule or estimator."""
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

    With privacy.epsilon, sigma is the smallest one that keeps each party within its budget over its cap on
    participations; with privacy.sigma, epsilon is the resulting cost. spent, by party: releases before this
    run, which count against the same budget; omit it for "this run only". population: identifies the parties'
    data, for the ledger; by default derived from the settings.
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
    masked = privacy.aggregation == "pairwise"
    if masked:
        check_masked_rule(settings, rule)
    central = make_client_level_terms(settings, sizes)
    if central:  # one noise for all parties, so the party that needs the most noise sets it
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
        unit=get_planned_unit(privacy),
        population=identify_population(settings) if population is None else population,
        private=rule.private,
        sound=rule.sound,
        C0=settings.clip.C0,
        participation=train.participation,
        weights=train.weights,
        total_budget=privacy.budget,
        account_delta=_get_account_delta(settings),
        central=central,
        schedule=privacy.noise_schedule if rule.private else "constant",
        aggregation=privacy.aggregation,
        colluders=count_colluders(privacy.colluders, count) if masked else 0,
    )


def _get_account_delta(settings: Settings) -> float | None:
    """Delta over all runs of a kept ledger, where it is not the run's; ConfigError where it makes no sense."""
    privacy = settings.privacy
    if privacy.budget_delta is None:
        return None
    if privacy.accountant == "rdp":
        raise ConfigError(
            "privacy.budget_delta is set with accountant rdp, where all runs share one delta; leave it out, or use "
            "accountant pld."
        )
    if privacy.budget_delta < privacy.delta:
        raise ConfigError(
            f"privacy.budget_delta = {privacy.budget_delta:g} is less than the run's delta = {privacy.delta:g}; it is "
            "the sum of the deltas of all runs."
        )
    return privacy.budget_delta


def check_masked_rule(settings: Settings, rule: ClipRule) -> None:
    """Refuse a rule under which a party's state or message would follow from its own sum: only the total is noised."""
    view = rule.view(rule.init(settings.clip, ModelFacts(2, (2,))), 0, settings.train.rounds)
    reasons = {
        "adds no noise, so there is none to share": not rule.private,
        "sets C from raw private values": not rule.sound,
        "keeps a C at each party, which follows from the party's own sum before it is masked": rule.where != "server",
        "releases statistics beside the gradients": rule.share is not no_statistics_share,
        "clips in another basis and may reshape each party's own sum": view.needs_gradients,
    }
    for reason, true in reasons.items():
        if true:
            raise ConfigError(
                f"clip.rule = {rule.name!r} {reason}; with privacy.aggregation = {settings.privacy.aggregation!r} use "
                "moo or fixed."
            )


def _check_shared_noise(settings: Settings, rule: ClipRule, groups: Sequence[PartyGroup]) -> None:
    """Refuse what one shared noise vector does not cover; `check_settings` has checked the settings before."""
    check_masked_rule(settings, rule)
    if len(groups) > 1:
        raise ConfigError(
            "the parties have spent different amounts before, so each needs its own noise; privacy.aggregation = "
            "'ideal-secagg' shares one: use plain."
        )


# --- parties ------------------------------------------------------------------------------------

MAX_NAMES_SEARCHED = 1000
"""The largest number of names that are searched for the nearest match of a misspelt name."""


class NamedParties(Protocol):
    """Parties with their number and names, such as a `data.Partition`."""

    @property
    def parties(self) -> int: ...

    def name(self, k: int) -> str: ...


def resolve_party_names(names: Sequence[str] | NamedParties | int) -> tuple[int, Callable[[int], str]]:
    """The number of parties, and a function from a party's number to its name."""
    if isinstance(names, int):
        return names, "party-{}".format
    if isinstance(names, Sequence):
        if len(set(names)) < len(names):
            raise ConfigError("two parties have the same name; each needs its own, since budgets are kept by name.")
        return len(names), names.__getitem__
    return names.parties, names.name


def check_unit_counts(units: Any, count: int) -> npt.NDArray[np.int64]:
    """Number of units n_k of each party [K], at least 1."""
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
    """(budget, past spend) of parties with their own budget or past, by party number; None for a shared value."""
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
    """An identifier of the parties' data: equal only for the same source, split and seed."""
    data = settings.data
    if data.partition == "given":
        split = "given parties"
    elif data.partition == "hashed":  # the same people at each party, whatever the seed
        split = f"hashed over {data.parties}, floor {data.min_examples}"
    else:
        method = "dirichlet" if data.partition == "auto" else data.partition  # the meaning of "auto" for classes
        split = f"{method} over {data.parties}, alpha {data.alpha:g}, shards {data.shards}"
        split += f", floor {data.min_examples}, seed {settings.run.seed}"
    held = f", {data.validation:g} held out" if data.validation else ""
    return f"{data.source}, {split}{held}"


# --- budget -> rounds ---------------------------------------------------------------------------


def compute_rounds_for_budget(
    settings: Settings, epsilon: float | None = None, sigma: float | None = None, spent: Spend | None = None
) -> int:
    """The number of rounds, with these settings' rate and steps, that fit into epsilon at sigma; 0 if none fits.

    epsilon and sigma are privacy.epsilon and privacy.sigma unless given here. spent: what a party released
    before. The result is at most a million. With a noise schedule other than constant it is the number of the
    schedule's train.rounds rounds that fit, from the first one.
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
    """Rounds that each party can still pay for from a kept ledger, by name; omits parties that can pay for all."""
    accounts = ledger.accounts()
    known: dict[tuple[Any, ...], int] = {}
    short: dict[str, int] = {}
    for k in range(plan.parties) if accounts else ():
        account = accounts.get(plan.name(k))
        if account is None:
            continue
        wanted = plan.participations(k)
        key = (int(plan.group_of[k]), account.budget, account.delta, ledger.identify_past(account.name))
        if key not in known:
            known[key] = find_affordable_rounds(plan, k, ledger, "", account.name)
        if known[key] < wanted:
            short[account.name] = known[key]
    return short


def find_affordable_rounds(plan: Plan, k: int, ledger: Ledger, run: str, party: str) -> int:
    """The rounds of a plan, at most its cap on participations, that party k's account in a ledger has room for.

    Rounds of `run` that are reserved already are part of the plan.
    """
    wanted = plan.participations(k)
    if ledger.fits(party, run, plan.make_run_plan(k)):
        return wanted
    return find_largest_count(lambda n: ledger.fits(party, run, plan.make_run_plan(k, n)), wanted)
