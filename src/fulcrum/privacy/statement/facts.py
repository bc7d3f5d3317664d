"""privacy.json: the statement as facts for programs. The page for people is made from them, and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fulcrum.clipping.rule import ClipRule
from fulcrum.privacy.accounting import Spend, epsilons, software
from fulcrum.privacy.plan import Plan
from fulcrum.privacy.plan.listing import plain
from fulcrum.privacy.statement.releases import releases, schedule
from fulcrum.privacy.statement.units import words_for
from fulcrum.privacy.statement.words import RANDOMNESS, SCOPES, adds_up, guarantee, level, warnings
from fulcrum.settings.schema import Settings


def statement(
    settings: Settings,
    plan: Plan,
    rule: ClipRule,
    spent: Mapping[str, Spend],
    *,
    run_id: str,
    scope: str,
    randomness_mode: str,
    dataset_name: str,
    dataset_warnings: tuple[str, ...] = (),
    finished: bool,
    rounds_done: int,
    version: str,
    date: str,
    run_spent: Mapping[str, Spend] | None = None,
) -> dict[str, Any]:
    """What privacy.json holds. All values are plain; an infinite epsilon is the string "inf".

    spent: what each party has released within the scope ("run" or "ledger"), by name; a party that is
    missing has released nothing. run_spent: the part of this run, where the scope is a ledger.

    Keys, stable from version to version:

    epsilon, epsilon_pld    largest over the parties, by RDP and by PLD, spent so far in the scope
    delta, unit, relation, adversary
    accountant              {enforced, beside, software}
    private, sound, nominal private: noise was added at all; nominal: epsilon is not a guarantee
    guarantee               "yes", "assumed", "nominal" or "none", and `guarantee_text`, the sentence to read; assumed:
                            it rests on a secure aggregation that is simulated (see aggregation)
    aggregation             "plain", or "ideal-secagg": the server is taken to see nothing but sums
    target                  {epsilon, budgets, sigma}: what was asked for; null where it was not
    planned                 {epsilon, epsilon_pld}: the most this run was planned to reach
    schedule                {name, sigma_min, sigma_max}: how the noise moves over the rounds, over all parties
    randomness              {mode, text}
    scope                   {kind, text}; with kind "ledger" also run_epsilon, that of this run alone
    run                     {id, date, version, finished, rounds_done, rounds, method, rule, dataset}
    releases                [{kind, times, text}]: every kind of thing that left a party or the server
    groups_of_records       [{records, epsilon, delta}]: what holds for m units of one person (client: m parties)
    adds_up                 sentences on how parties and records add up
    not_covered, warnings   sentences
    parties                 [{name, units, rate, sigma, releases, epsilon_rdp, epsilon_pld, budget}]
    """
    names = [plan.name(k) for k in range(plan.parties)]
    spends = _of_each(names, spent)
    by_rdp, by_pld = (_epsilons(spends, plan.delta, how) for how in ("rdp", "pld"))
    worth = level(plan, rule)
    words = words_for(plan.unit, plan.aggregation)
    result: dict[str, Any] = {
        "epsilon": plain(max(by_rdp)),
        "epsilon_pld": plain(max(by_pld)),
        "delta": plan.delta,
        "unit": plan.unit,
        "relation": words.relation,
        "adversary": words.adversary,
        "aggregation": plan.aggregation,
        "accountant": {
            "enforced": plan.accountant,
            "beside": "pld" if plan.accountant == "rdp" else "rdp",
            "software": software(),
        },
        "private": rule.private,
        "sound": rule.sound,
        "nominal": worth == "nominal",
        "guarantee": worth,
        "guarantee_text": guarantee(plan, rule, max(by_rdp), max(by_pld), randomness_mode),
        "target": {
            "epsilon": settings.privacy.epsilon,
            "budgets": dict(settings.privacy.budgets),
            "sigma": settings.privacy.sigma,
        },
        "planned": {
            "epsilon": plain(max(rdp for rdp, _ in plan.ends)),
            "epsilon_pld": plain(max(pld for _, pld in plan.ends)),
        },
        "schedule": schedule(plan),
        "randomness": {"mode": randomness_mode, "text": RANDOMNESS[randomness_mode]},
        "scope": {"kind": scope, "text": SCOPES[scope]},
        "run": {
            "id": run_id,
            "date": date,
            "version": version,
            "finished": finished,
            "rounds_done": rounds_done,
            "rounds": plan.rounds,
            "method": settings.method,
            "rule": rule.name,
            "dataset": dataset_name,
        },
        "releases": releases(settings, plan, rule, spends, rounds_done),
        "groups_of_records": _groups(max(by_rdp), plan.delta),
        "adds_up": adds_up(plan, rule),
        "not_covered": list(words.not_covered),
        "warnings": warnings(settings, plan, rule, randomness_mode, finished) + list(dataset_warnings),
        "parties": [
            {
                "name": name,
                "units": plan.units(k),
                "rate": plan.group(k).rate,
                "sigma": plan.group(k).sigma,
                "releases": spends[k].releases,
                "epsilon_rdp": plain(by_rdp[k]),
                "epsilon_pld": plain(by_pld[k]),
                "budget": plan.group(k).budget,
            }
            for k, name in enumerate(names)
        ],
    }
    if scope == "ledger" and run_spent is not None:
        own = _of_each(names, run_spent)
        result["scope"]["run_epsilon"] = plain(max(_epsilons(own, plan.delta, "rdp")))
    return result


def _of_each(names: Sequence[str], spent: Mapping[str, Spend]) -> list[Spend]:
    return [spent.get(name) or Spend.none() for name in names]


def _epsilons(spends: list[Spend], delta: float, accountant: str) -> list[float]:
    """Epsilon of each; those with the same past are computed once."""
    unique = {spend.key: spend for spend in spends}
    costs = dict(zip(unique, epsilons(list(unique.values()), delta, accountant).tolist(), strict=True))
    return [costs[spend.key] for spend in spends]


def _groups(epsilon: float, delta: float) -> list[dict[str, Any]]:
    """What (epsilon, delta) for one unit means for m of them: m epsilon, and m exp((m-1) epsilon) delta."""
    rows = []
    for m in (2, 5, 10):
        log_delta = math.log(m) + (m - 1) * epsilon + math.log(delta)
        grown = math.exp(log_delta) if log_delta < 0 else 1.0
        rows.append({"records": m, "epsilon": plain(m * epsilon), "delta": grown})
    return rows
