"""Proposals: what a run's settings ask of every party, and how they become a party's terms or are refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum.clipping import find_rule
from fulcrum.errors import ConfigError
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.rule_terms import RuleTerms
from fulcrum.flower.task_terms import check_declared, same_task, training_settings
from fulcrum.flower.terms import ARITHMETICS, ROUNDING_TOLERANCE, PartyTerms, read_terms_table, validate_terms
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.pairwise.shares import count_colluders
from fulcrum.privacy.plan import make_plan
from fulcrum.privacy.statement.text import is_rehearsed
from fulcrum.settings.checks import check_settings
from fulcrum.settings.derived import compute_local_steps, get_planned_unit
from fulcrum.settings.schema import Privacy, Settings, TaskSettings
from fulcrum.training.problem import uses_proven_arithmetic

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
    # The events of a party do not depend on who shares the noise, and the sizes below are of no real parties.
    privacy = dataclasses.replace(privacy, aggregation="plain")
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
        **_propose_masks(settings),
        "clip": dataclasses.asdict(RuleTerms.of(settings.clip)),
        "unit": get_planned_unit(settings.privacy),
        "accountant": settings.privacy.accountant,
        "groups": settings.clip.groups,
        "statistics_interval": plan.groups[0].statistics_interval,
        "C_min": settings.clip.C_min,
        "C_max": settings.clip.C_max,
        "lr": train.lr,
        "weight_decay": train.weight_decay,
        "rehearsed": is_rehearsed(settings),
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


def _propose_masks(settings: Settings) -> dict[str, Any]:
    """The terms of pairwise masks; nothing without them, so that a proposal is what it was."""
    if settings.privacy.aggregation != "pairwise":
        return {}
    count = count_colluders(settings.privacy.colluders, settings.data.parties)
    return {"aggregation": "pairwise", "colluders": count}


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


OWN_TERMS = ("coordinator", "peers", "pinned")
"""Terms that no proposal may hold: a coordinator that pins the peers' keys could pin its own in their place."""


def accept_proposal(
    party: str, proposal: Mapping[str, Any], budget: float | None = None, look_up: bool = True
) -> PartyTerms:
    """A proposal as terms. budget: None takes what one run of the proposal costs, and no more.

    look_up: False before somebody has agreed; see `validate_terms`. Whose keys count is no coordinator's to propose.
    """
    for name in OWN_TERMS:
        if proposal.get(name):
            raise ConfigError(f"terms: a proposal says {name}; whose keys count is for the party alone to say.")
    terms = validate_terms(read_terms_table({"budget": 1.0, **proposal, "party": party}), look_up)
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
        asked = read_terms_table({**proposal, "party": terms.party, "budget": terms.budget})
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
        ("aggregation", asked.aggregation == terms.aggregation and asked.colluders >= terms.colluders),
        ("clip", asked.clip == terms.clip),
        ("arithmetic", _is_proven(terms, simulation) or (known and not _is_proven(asked, simulation))),
    )
    for code, fine in checks:
        if not fine:
            raise TermsRefusal(code)
