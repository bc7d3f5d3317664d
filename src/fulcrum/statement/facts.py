"""The privacy statement of a run: privacy.json for programs, PRIVACY.md for whoever signs it.

It says what is promised, to whom, against whom, at what price so far, and what is not promised.
Every number comes from the accountant; every sentence from the settings that produced the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fulcrum.accounting import Spend, epsilons, software
from fulcrum.central import Terms
from fulcrum.clip.rule import ClipRule, no_share
from fulcrum.config import Settings
from fulcrum.plan import Plan
from fulcrum.priors import PAINTED
from fulcrum.units import words_for

LISTED = 1000
"""PRIVACY.md lists parties one by one up to this many, and sums up beyond."""

RANDOMNESS = {
    "secure": (
        "Sampling and noise come from the operating system's entropy; nothing can be replayed. The guarantee relies "
        "on that entropy."
    ),
    "seeded": (
        "Sampling and noise come from a seed. Whoever knows the seed can subtract the noise: epsilon holds only while "
        "the seed is secret. A run whose settings and seed are published is a simulation and protects nobody."
    ),
    "recorded": "Sampling and noise were replayed from a recording: this is a test and protects nobody.",
}
SCOPES = {
    "run": "This run only. Whatever else was released about the same data, before or after, adds to it.",
    "ledger": (
        "All runs on record in this ledger, this one included; a guarantee only if each of them used a sound rule. "
        "Whatever was released outside the ledger adds to it."
    ),
}


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
    spends = [spent.get(name) or Spend.none() for name in names]
    by_rdp, by_pld = (_unique_epsilons(spends, plan.delta, how) for how in ("rdp", "pld"))
    nominal = rule.private and not rule.sound
    words = words_for(plan.unit, plan.aggregation)
    result: dict[str, Any] = {
        "epsilon": _plain(max(by_rdp)),
        "epsilon_pld": _plain(max(by_pld)),
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
        "nominal": nominal,
        "guarantee": "none" if not rule.private else "nominal" if nominal else "assumed" if plan.shared else "yes",
        "guarantee_text": _guarantee(plan, rule, max(by_rdp), max(by_pld), randomness_mode),
        "target": {
            "epsilon": settings.privacy.epsilon,
            "budgets": dict(settings.privacy.budgets),
            "sigma": settings.privacy.sigma,
        },
        "planned": {
            "epsilon": _plain(max(rdp for rdp, _ in plan.ends)),
            "epsilon_pld": _plain(max(pld for _, pld in plan.ends)),
        },
        "schedule": _schedule(plan),
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
        "releases": _releases(settings, plan, rule, spends, rounds_done),
        "groups_of_records": _groups(max(by_rdp), plan.delta),
        "adds_up": _adds_up(plan, rule),
        "not_covered": list(words.not_covered),
        "warnings": _warnings(settings, plan, rule, randomness_mode, finished) + list(dataset_warnings),
        "parties": [
            {
                "name": name,
                "units": plan.units(k),
                "rate": plan.group(k).rate,
                "sigma": plan.group(k).sigma,
                "releases": spends[k].releases,
                "epsilon_rdp": _plain(by_rdp[k]),
                "epsilon_pld": _plain(by_pld[k]),
                "budget": plan.group(k).budget,
            }
            for k, name in enumerate(names)
        ],
    }
    if scope == "ledger" and run_spent is not None:
        own = [run_spent.get(name) or Spend.none() for name in names]
        result["scope"]["run_epsilon"] = _plain(max(_unique_epsilons(own, plan.delta, "rdp")))
    return result


def _schedule(plan: Plan) -> dict[str, Any]:
    ends = [g.sigma * factor for g in plan.groups for factor in (min(g.factors), max(g.factors))]
    return {"name": plan.schedule, "sigma_min": min(ends), "sigma_max": max(ends)}


def _unique_epsilons(spends: list[Spend], delta: float, accountant: str) -> list[float]:
    """Epsilon of each; those with the same past are computed once."""
    unique = {spend.key: spend for spend in spends}
    costs = dict(zip(unique, epsilons(list(unique.values()), delta, accountant).tolist(), strict=True))
    return [costs[spend.key] for spend in spends]


def _plain(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def _guarantee(plan: Plan, rule: ClipRule, rdp: float, pld: float, mode: str) -> str:
    if not rule.private:
        return "There is no privacy guarantee: the updates left the parties without noise."
    numbers = f"epsilon = {rdp:.4g} (RDP; {pld:.4g} by PLD), delta = {plan.delta:g}"
    if not rule.sound:
        return (
            f"NOT A GUARANTEE. The rule {rule.name!r} sets the clipping norm from raw private values, so {numbers} is "
            "nominal: it is what the noise would give if C were public, and what was released may reveal more."
        )
    short = words_for(plan.unit).short
    if plan.shared:
        return (
            f"UNDER AN ASSUMPTION ONLY: if the server saw nothing but the sum of all {plan.parties} parties' "
            f"updates, and no party colluded, each {short} would have {numbers}, while the seed is secret. That "
            "secure aggregation is SIMULATED: it is not implemented, and each single update is under-noised and not "
            "private by itself."
        )
    if mode != "secure":
        return f"Each {short} has {numbers}, only while the seed is secret (see Randomness)."
    return f"Each {short} has {numbers}."


def _releases(
    settings: Settings, plan: Plan, rule: ClipRule, spends: list[Spend], rounds_done: int
) -> list[dict[str, Any]]:
    counts = [spend.releases for spend in spends]
    group = plan.groups[0]
    kinds = (
        f"noised sums of clipped gradients, Poisson-sampled at rate {group.rate:g}"
        if rule.private
        else "sums of gradients without noise"
    )
    low, high = (_schedule(plan)[end] for end in ("sigma_min", "sigma_max"))
    spread = f"{low:.5g}" if low == high else f"{low:.5g} to {high:.5g}"
    moving = "" if plan.schedule == "constant" else f", moving over the rounds by the public schedule {plan.schedule!r}"
    noise = f", noise multiplier sigma = {spread}{moving}" if rule.private else ""
    moved = (
        "computed from what was released before, so they reveal nothing more"
        if rule.sound
        else "computed from raw private values: THEY REVEAL MORE than the epsilon says"
    )
    released, participation = (
        _server_releases(plan.central, rule, noise)
        if plan.central
        else (
            f"The weighted sum over all {plan.parties} parties of each round's updates, one step each: "
            f"{kinds}{noise} on the sum; each party adds 1/{plan.parties} of the variance, sigma / "
            f"sqrt({plan.parties}) times C to its own sum. Single updates are NOT released and must not be seen by "
            "anybody: the epsilon relies on it.",
            "All parties take part in every round; that is public, and the noise relies on it.",
        )
        if plan.shared
        else (
            f"Each party's update of each round it takes part in, the total of {group.steps} step(s): {kinds}{noise}. "
            f"Between {min(counts)} and {max(counts)} such sums a party so far.",
            "Who takes part in each round. Public; it depends on no private data. Sampling parties lowers no epsilon "
            "here: a party pays for every round it takes part in.",
        )
    )
    what = "means" if plan.central else "sums" if plan.shared else "updates"
    found: list[dict[str, Any]] = [
        {"kind": what, "times": max(counts), "text": released},
        {
            "kind": "C",
            "times": rounds_done,
            "text": f"The clipping norm of each round (rule {rule.name!r}), {moved}.",
        },
        {
            "kind": "models",
            "times": rounds_done,
            "text": f"The model after each round, its moving average and the final model: computed from the {what}.",
        },
        {"kind": "participation", "times": 0 if plan.central else rounds_done, "text": participation},
    ]
    if rule.private and rule.share is not no_share:
        asked = sum(group.assignment(0, t, 1.0).asked(t) for t in range(rounds_done))
        every = "each sum" if group.every == 1 else f"the sum of every {group.every}th step"
        found.insert(
            1,
            {
                "kind": "statistics",
                "times": min(asked, max(counts)),
                "text": f"Statistics that the rule {rule.name!r} releases beside {every}: noised together with it, at "
                "the joint multiplier sigma, so their cost is within the epsilon.",
            },
        )
    if settings.run.diagnostics:
        found.append(
            {
                "kind": "diagnostics",
                "times": rounds_done,
                "text": "Non-private diagnostics (clip fractions, norms, losses) were recorded. They are NOT covered "
                "by epsilon and must not leave a party; they are for simulations on public data.",
            }
        )
    return found


def _server_releases(terms: Terms, rule: ClipRule, noise: str) -> tuple[str, str]:
    """What a trusted server releases, and what it keeps to itself."""
    divisor = {
        "fixed": f"divided by the expected weight q_c W = {terms.rate * terms.total:.6g}",
        "clipped": f"divided by the weight that took part, at least q_c W_min = {terms.floor:.6g}",
    }[terms.estimator]
    if rule.private:
        divisor += f"; one party moves it by at most {terms.sensitivity:.5g} times C"
    return (
        f"The server's mean update of each round: the clipped updates of the parties that joined (each of "
        f"{terms.clients} with probability q_c = {terms.rate:g}), {divisor}{noise}. Released in every round, also in "
        "one that nobody joined.",
        "Who joins a round is NOT released and must not be published: the epsilon relies on it. Neither are single "
        "updates, nor how many joined.",
    )


def _groups(epsilon: float, delta: float) -> list[dict[str, Any]]:
    """What (epsilon, delta) for one unit means for m of them: m epsilon, and m exp((m-1) epsilon) delta."""
    rows = []
    for m in (2, 5, 10):
        log_delta = math.log(m) + (m - 1) * epsilon + math.log(delta)
        grown = math.exp(log_delta) if log_delta < 0 else 1.0
        rows.append({"records": m, "epsilon": _plain(m * epsilon), "delta": grown})
    return rows


def _adds_up(plan: Plan, rule: ClipRule) -> list[str]:
    if not rule.private:
        return ["Nothing adds up: there is no guarantee for any record."]
    return list(words_for(plan.unit, plan.aggregation).adds_up)


def _warnings(settings: Settings, plan: Plan, rule: ClipRule, mode: str, finished: bool) -> list[str]:
    found = list(plan.warnings)
    if not finished:
        found.append("The run is not finished: this statement covers what has been reserved so far.")
    if mode != "secure" and rule.private:
        found.append(f"The randomness is {mode}: for real data use privacy.randomness = secure.")
    if settings.model.init not in ("random", PAINTED):
        what = "weights" if settings.model.coordinates == "plain" else "weights and facts about layers"
        found.append(
            f"Training starts from the {what} in {settings.model.init}, which are taken to be public. If private data "
            "went into them, what that training cost adds to this epsilon."
        )
    if settings.run.precision != "float32" and settings.run.engine in ("auto", "stacked"):
        found.append(
            f"run.precision = {settings.run.precision} rounds matrix products: clipping keeps a margin that held in "
            "every test, but the bound on a contribution is proved for float32 only. For simulations."
        )
    if settings.run.diagnostics:
        found.append("Non-private diagnostics were on: keep them inside the party, or turn run.diagnostics off.")
    return found


# --- PRIVACY.md ---------------------------------------------------------------------------------


def to_markdown(facts: Mapping[str, Any]) -> str:
    """The statement as a page that a data-protection officer can read and sign."""
    run, accountant, target = facts["run"], facts["accountant"], facts["target"]
    asked = (
        f"epsilon = {_short(target['epsilon'])} for each party"
        + (f", {len(target['budgets'])} with a budget of their own" if target["budgets"] else "")
        if target["epsilon"] is not None
        else f"noise multiplier sigma = {_short(target['sigma'])}"
    )
    banner = {
        "yes": [],
        "nominal": [
            "> **WARNING: the clipping rule of this run is not sound. Its epsilon is NOMINAL, not a guarantee.**",
            "",
        ],
        "assumed": [
            "> **WARNING: SIMULATED SECURE AGGREGATION. The epsilon of this run is against a server that sees only "
            "SUMS over all parties, which nothing here enforces. Single updates are under-noised and NOT private.**",
            "",
        ],
        "none": ["> **WARNING: this run is NOT PRIVATE. Nothing below protects anybody.**", ""],
    }[facts["guarantee"]]
    lines = [
        "# Privacy statement",
        "",
        *banner,
        f"**{facts['guarantee_text']}**",
        "",
        *_table(
            ("", ""),
            [
                ("run", f"`{run['id']}`"),
                ("date", run["date"]),
                ("software", f"Fulcrum {run['version']}, {accountant['software']}"),
                ("data", run["dataset"]),
                ("method, rule", f"{run['method']}, {run['rule']}"),
                ("rounds", f"{run['rounds_done']} of {run['rounds']}{'' if run['finished'] else ' (not finished)'}"),
                ("asked for", asked if facts["private"] else "no privacy"),
                ("planned at most", f"epsilon = {_short(facts['planned']['epsilon'])}"),
                (
                    "spent",
                    f"epsilon = {_short(facts['epsilon'])} (RDP), {_short(facts['epsilon_pld'])} (PLD)"
                    + (", seen in sums only (assumed)" if facts["guarantee"] == "assumed" else ""),
                ),
                ("delta", _short(facts["delta"])),
            ],
        ),
    ]
    if facts["warnings"]:
        lines += ["## Warnings", "", *_bullets(facts["warnings"])]
    enforced, beside = accountant["enforced"].upper(), accountant["beside"].upper()
    unit = words_for(facts["unit"], facts["aggregation"])
    lines += [
        *_section("What is protected", f"{unit.protected} Neighbouring relation: {facts['relation']}"),
        *_section("Against whom", facts["adversary"]),
        *_section(
            "How it is counted",
            f"By {accountant['software']}: {enforced} is enforced, {beside} is shown beside it; both are upper bounds. "
            + unit.counted,
        ),
        *_section("Scope", _scope(facts["scope"])),
        *_section("Randomness", facts["randomness"]["text"]),
        "## What was released",
        "",
        *_bullets(f"{item['kind']} ({item['times']}): {item['text']}" for item in facts["releases"]),
        "## Parties",
        "",
        *_parties(facts),
        "## How parties and records add up",
        "",
        *_bullets(facts["adds_up"]),
    ]
    if facts["private"] and unit.several:
        rows = [(str(g["records"]), _short(g["epsilon"]), _group_delta(g["delta"])) for g in facts["groups_of_records"]]
        lines += _table((unit.several, "epsilon", "delta"), rows)
    lines += [
        "## What is not covered",
        "",
        *_bullets(facts["not_covered"]),
        "## Signatures",
        "",
        *_table(
            ("role", "name", "date", "signature"),
            [("responsible for the run", "", "", ""), ("data-protection officer", "", "", "")],
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _parties(facts: Mapping[str, Any]) -> list[str]:
    parties = facts["parties"]
    if facts["unit"] == "client":
        return _alike(parties)
    sigma = "sigma" if facts["schedule"]["name"] == "constant" else "sigma (first round)"
    sigma += " of the sum" if facts["aggregation"] == "ideal-secagg" else ""
    header = ("party", f"{facts['unit']}s", "rate", sigma, "releases", "epsilon (RDP)", "epsilon (PLD)", "budget")
    shown = parties
    lines: list[str] = []
    if len(parties) > LISTED:
        units = [p["units"] for p in parties]
        lines = [
            f"{len(parties)} parties with {min(units)} to {max(units)} {facts['unit']}s each; every one is listed in "
            "privacy.json. The ten with the largest epsilon:",
            "",
        ]
        shown = sorted(parties, key=lambda p: (-float(p["epsilon_rdp"]), p["units"]))[:10]
    keys = ("units", "rate", "sigma", "releases", "epsilon_rdp", "epsilon_pld", "budget")
    return lines + _table(header, [(_cell(p["name"]), *(_short(p[key]) for key in keys)) for p in shown])


def _alike(parties: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where everyone is charged every round most parties have the same line: one for all of them."""
    keys = ("rate", "sigma", "releases", "epsilon_rdp", "epsilon_pld", "budget")
    lines: dict[tuple[str, ...], list[str]] = {}
    for party in parties:
        lines.setdefault(tuple(_short(party[key]) for key in keys), []).append(party["name"])
    header = ("parties", "rate q_c", "sigma z", "releases", "epsilon (RDP)", "epsilon (PLD)", "budget")
    who = {values: names[0] if len(names) == 1 else f"{len(names)} parties" for values, names in lines.items()}
    return _table(header, [(_cell(who[values]), *values) for values in lines])


def _scope(scope: Mapping[str, Any]) -> str:
    own = f" This run alone: epsilon = {_short(scope['run_epsilon'])} (RDP)." if "run_epsilon" in scope else ""
    return f"{scope['text']}{own}"


def _group_delta(delta: float) -> str:
    return _short(delta) if delta < 1 else "1 (no guarantee)"


def _short(value: float | str | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return "infinite" if value == "inf" else value
    return f"{value:d}" if isinstance(value, int) else f"{value:.5g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", "", text, ""]


def _bullets(items: Iterable[str]) -> list[str]:
    return [*(f"- {item}" for item in items), ""]


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    rule = "|".join("---" for _ in header)
    return [f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows), ""]
