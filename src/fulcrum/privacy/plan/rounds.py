"""The question the other way round: how many rounds fit into a budget, or into what a ledger has left."""

from __future__ import annotations

import math
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend, most
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan.grouping import round_terms
from fulcrum.privacy.plan.party_group import Group
from fulcrum.privacy.plan.value import Plan
from fulcrum.privacy.schedule import factors
from fulcrum.settings.schema import Settings


def rounds_for_budget(
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
    rate, steps = round_terms(settings)
    limit = 10**6 if privacy.noise_schedule == "constant" else train.rounds
    group = Group(
        rate=rate,
        steps=steps,
        participations=limit,
        budget=budget,
        spent=spent or Spend.none(),
        sigma=multiplier,
        factors=(1.0,) if privacy.noise_schedule == "constant" else factors(privacy, train.rounds),
    )
    return most(lambda rounds: group.epsilon(rounds, privacy.delta, privacy.accountant) <= budget, limit)


def affordable_rounds(plan: Plan, ledger: Ledger) -> dict[str, int]:
    """Rounds that each party of a kept ledger can still pay for, by name; those that can pay for all are left out."""
    accounts, spent = ledger.accounts(), ledger.spends()
    known: dict[tuple[Any, ...], int] = {}
    short: dict[str, int] = {}
    for k in range(plan.parties) if accounts else ():
        account = accounts.get(plan.name(k))
        if account is None or account.budget is None:
            continue
        past, budget, wanted = spent[account.name], account.budget, plan.participations(k)

        def fits(n: int, k: int = k, past: Spend = past, budget: float = budget) -> bool:
            return past.plus(plan.group(k).worst(n)).epsilon(plan.delta, plan.accountant) <= budget

        key = (int(plan.group_of[k]), past.key, budget)
        if key not in known:
            known[key] = most(fits, wanted)
        if known[key] < wanted:
            short[account.name] = known[key]
    return short
