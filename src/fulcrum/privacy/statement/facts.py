"""privacy.json: the statement as facts for programs. PRIVACY.md is made from these facts alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulcrum.clipping.rule import ClipRule, no_statistics_share
from fulcrum.models.checkpoints import WeightOrigin
from fulcrum.privacy.accounting import (
    ACCOUNTANTS,
    Accountant,
    Spend,
    compute_epsilons,
    describe_software,
    format_epsilon,
    reported_accountants,
)
from fulcrum.privacy.client_level import ClientLevelTerms
from fulcrum.privacy.meaning import make_promise
from fulcrum.privacy.plan import Plan
from fulcrum.privacy.plan.text import infinity_to_text, make_epsilon_keys, make_headline_keys
from fulcrum.privacy.statement.colluders import describe_masked_sums, describe_pairwise
from fulcrum.privacy.statement.coverage import Coverage, CoveredRun
from fulcrum.privacy.statement.meaning import find_watcher, make_meaning
from fulcrum.privacy.statement.text import (
    EVALUATION_TEXTS,
    FLOATING_POINT_NOTES,
    NOISE_TEXT,
    RANDOM_NUMBER_SOURCES,
    SCOPE_TEXTS,
    TEST_DATA_NOTE,
    collect_warnings,
    composition_sentence,
    describe_arithmetic,
    describe_randomness,
    describe_rehearsal,
    describe_start,
    format_numbers,
    guarantee_sentence,
    is_rehearsed,
)
from fulcrum.privacy.statement.units import find_unit_texts
from fulcrum.settings.schema import Settings


@dataclass(frozen=True)
class EvaluationData:
    """The records that the model was scored on.

    kind: "none", "public" (handed over apart from the training records), "public, held-out" (a part of public data) or
    "held-out" (private). times: number of evaluations. paid: whether metrics of held-out records come from noised
    releases that their account paid for; epsilon and delta: of a held-out unit, within the scope.
    """

    kind: str = "none"
    records: int = 0
    times: int = 0
    paid: bool = False
    epsilon: float = 0.0
    delta: float = 0.0

    @property
    def protected(self) -> bool:
        """Whether no private record was scored in the clear."""
        return self.kind != "held-out" or self.paid

    @property
    def text(self) -> str:
        """What was scored, and whether it is protected."""
        if self.kind == "held-out" and self.paid:
            return f"{EVALUATION_TEXTS['held-out, paid']} {self.held_out_sentence}"
        return EVALUATION_TEXTS[self.kind]

    @property
    def held_out_sentence(self) -> str:
        """What holds for private records that were held out; "" where there are none."""
        if self.kind != "held-out":
            return ""
        if self.paid:
            return f"Each held-out unit has epsilon = {format_epsilon(self.epsilon)}, delta = {self.delta:g}."
        return "The held-out records have no protection: they were scored without noise (see Evaluation)."


@dataclass(frozen=True)
class AccountedRun:
    """The input of a run's privacy statement.

    spent: what each party has released within the scope ("run" or "ledger"), by name; a missing party has
    released nothing. costs: each party's epsilon within the scope as its ledger says; None: that of `spent` by the
    enforced accountant. run_costs: of this run alone, where the scope is a ledger.
    randomness_mode: "secure", "seeded" or "recorded"; arithmetic: "proven" or "fast"; both of this run. others: the
    other runs within the scope. version: of Fulcrum. notes: further warnings about this run. composition: how the
    ledger adds runs up. scope_delta: the sum of deltas within the scope, where the ledger adds them up. start: the run
    whose model the initial weights are; start_in_scope: whether the scope's ledger has that run's spend already.
    start_public: the initial weights are those of a run on public data, which cost nobody anything. rounds_in_scope:
    the rounds of all runs within the scope, 0: rounds_done. per_run: rounds and epsilon of single runs, by their ids.
    """

    settings: Settings
    plan: Plan
    rule: ClipRule
    spent: Mapping[str, Spend]
    run_id: str
    scope: str
    randomness_mode: str
    dataset_name: str
    finished: bool
    rounds_done: int
    version: str
    date: str
    dataset_warnings: tuple[str, ...] = ()
    costs: Mapping[str, float] | None = None
    run_costs: Mapping[str, float] | None = None
    arithmetic: str = "fast"
    simulation: bool = False
    others: tuple[CoveredRun, ...] = ()
    evaluation: EvaluationData = EvaluationData()
    composition: str = ""
    notes: tuple[str, ...] = ()
    scope_delta: float = 0.0
    start: WeightOrigin | None = None
    start_in_scope: bool = False
    start_public: bool = False
    rounds_in_scope: int = 0
    per_run: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peer_keys: tuple[Mapping[str, Any], ...] = ()
    across_machines: bool = False

    @property
    def added_start(self) -> WeightOrigin | None:
        """The run behind the initial weights where its spend must be added: none of the scope's runs is that one."""
        return None if self.start is None or self.start_in_scope else self.start

    @property
    def coverage(self) -> Coverage:
        """All runs within the scope, this one last; what the ledger has on record of it counts."""
        made = CoveredRun(
            id=self.run_id,
            rule=self.rule.name,
            sound=self.rule.sound,
            private=self.rule.private,
            randomness=self.randomness_mode,
            arithmetic=self.arithmetic,
            simulation=self.simulation or self.randomness_mode != "secure",
        )
        own = next((run for run in self.others if run.id == self.run_id), made)
        others = (*list_start_runs(self.added_start), *(run for run in self.others if run.id != self.run_id))
        return Coverage((*{run.id: run for run in others}.values(), own))


def make_statement(run: AccountedRun) -> dict[str, Any]:
    """The content of privacy.json. All values are plain; an infinite epsilon is the string "inf".

    Keys, stable from version to version:

    epsilon, epsilon_pld    largest over the parties, by the enforced accountant as the ledger says, and by PLD, spent
                            so far in the scope (epsilon_rdp too where RDP is not the enforced one). Over several runs
                            only the ledger's value is a bound, and epsilon_pld repeats it
    delta, unit, relation, adversary
    accountant              {enforced, beside, software}
    private, sound, nominal of the worst run within the scope. private: noise was added at all; nominal: epsilon is not
                            a guarantee
    guarantee               "yes", "simulation", "assumed", "unknown", "nominal" or "none", and `guarantee_text`, the
                            sentence to read. simulation: the random numbers follow from a seed; assumed: it rests on
                            a secure aggregation that is simulated (see aggregation); unknown: a row of an earlier
                            version does not say what its run was
    aggregation             "plain", or "ideal-secagg": the server is assumed to see only sums; "pairwise": it does,
                            since messages are masked
    pairwise                with pairwise masks: {colluders, parties, sigma_eff, table, two_parties, keys, text}. table:
                            [{colluders, sigma_eff, epsilon}] with c, c + 1, ..., all other parties colluding, at the
                            planned end; keys: [{party, fingerprint, pinned}], empty where one process played all
    target                  {epsilon, budgets, sigma}: the settings; null where not given
    planned                 {epsilon, epsilon_pld}: the largest epsilon that the plan allows
    schedule                {name, sigma_min, sigma_max}: the noise schedule and the range of sigma over all parties
    randomness              {mode, text}: of the worst run
    random_numbers          {cipher, key, text}: what they are, and where the cipher's key came from
    arithmetic              {mode, text, noise}: "proven", "fast" or "unknown", of the worst run
    simulation              whether a run within the scope is one: its numbers protect nobody once the seed is known
    evaluation              {kind, records, times, protected, text}: what the model was scored on
    runs_covered            [{id, rule, sound, private, randomness, arithmetic}]: each run within the scope; null:
                            not on record. A party's own statement adds rounds and epsilon of each run alone
    scope                   {kind, text}; with kind "ledger" also run_epsilon, of this run alone
    rehearsal               where settings were chosen on made-up data: why that costs nothing; else missing
    total                   {runs, rounds, budget} of all runs within the scope; in a party's own statement only
    run                     {id, date, version, finished, rounds_done, rounds, method, rule, dataset}
    releases                [{kind, times, text}]: every kind of release of a party or the server
    meaning                 {holds, attacker, source, text, exception, beliefs, tests, guess, roc}: what epsilon lets an
                            attacker learn at most; see `make_meaning`. holds: whether the numbers do
    groups_of_records       [{records, epsilon, delta}]: group privacy for m units of one person (client: m parties)
    adds_up                 sentences on how parties and records add up
    not_covered, warnings   sentences
    start                   {run, epsilon, delta, unit, added, text}: the run whose model the initial weights are;
                            added: its spend is part of epsilon and delta above, which the parties' own are not
    parties                 [{name, units, rate, sigma, releases, epsilon_rdp, epsilon_pld, budget}]
    """
    settings, plan, rule = run.settings, run.plan, run.rule
    names = [plan.name(k) for k in range(plan.parties)]
    spends = _spends_by_party(names, run.spent)
    coverage = run.coverage
    reported = list_shown_accountants(plan.accountant, len(coverage.runs))
    enforced = reported[0].name
    by_name = {accountant.name: _compute_unique_epsilons(spends, plan.delta, accountant) for accountant in reported[1:]}
    by_name = {enforced: _list_costs(run, names, spends, reported[0]), **by_name}
    start = run.added_start  # what was spent on the initial weights: epsilons and deltas of two runs add up
    before = 0.0 if start is None else start.epsilon
    largest = {name: max(costs) + before for name, costs in by_name.items()}
    headline = largest[enforced]
    worth = coverage.level(plan.shares_noise)
    words = find_unit_texts(plan.unit, plan.aggregation, plan.colluders)
    delta = max(plan.delta, run.scope_delta)  # deltas of runs add up where the ledger adds (epsilon, delta) slices
    delta += 0.0 if start is None else start.delta
    numbers = format_numbers({name: format_epsilon(value) for name, value in largest.items()}, delta)
    cipher, key = RANDOM_NUMBER_SOURCES[coverage.randomness]
    result: dict[str, Any] = {
        **_add_pld_key(make_headline_keys(largest)),
        "delta": delta,
        "unit": plan.unit,
        "relation": words.relation,
        "adversary": words.adversary,
        "aggregation": plan.aggregation,
        "accountant": {
            "enforced": enforced,
            "beside": ", ".join(accountant.name for accountant in reported if accountant.name != enforced),
            "software": describe_software(reported),
        },
        "private": coverage.private,
        "sound": coverage.sound,
        "nominal": worth == "nominal",
        "simulation": coverage.simulation,
        "guarantee": worth,
        "guarantee_text": guarantee_sentence(plan, coverage, run.run_id, numbers, run.evaluation.held_out_sentence),
        "target": {
            "epsilon": settings.privacy.epsilon,
            "budgets": dict(settings.privacy.budgets),
            "sigma": settings.privacy.sigma,
        },
        "planned": _add_pld_key(
            make_headline_keys({enforced: plan.largest_final_epsilons[enforced], **plan.largest_final_epsilons})
        ),
        "schedule": _describe_schedule(plan),
        "randomness": {"mode": coverage.randomness, "text": describe_randomness(coverage)},
        "random_numbers": {"cipher": cipher, "key": key, "text": describe_randomness(coverage)},
        "arithmetic": {"mode": coverage.arithmetic, "text": describe_arithmetic(coverage), "noise": NOISE_TEXT},
        "evaluation": {
            "kind": run.evaluation.kind,
            "records": run.evaluation.records,
            "times": run.evaluation.times,
            "protected": run.evaluation.protected,
            **({"epsilon": run.evaluation.epsilon, "delta": run.evaluation.delta} if run.evaluation.paid else {}),
            "text": run.evaluation.text,
        },
        "runs_covered": [
            {name: getattr(each, name) for name in ("id", "rule", "sound", "private", "randomness", "arithmetic")}
            | dict(run.per_run.get(each.id, {}))
            for each in coverage.runs
        ],
        "scope": {"kind": run.scope, "text": SCOPE_TEXTS[run.scope]},
        "run": {
            "id": run.run_id,
            "date": run.date,
            "version": run.version,
            "finished": run.finished,
            "rounds_done": run.rounds_done,
            "rounds": plan.rounds,
            "method": settings.method,
            "rule": rule.name,
            "dataset": run.dataset_name,
        },
        "releases": _list_releases(run, spends),
        "groups_of_records": _make_group_privacy_rows(headline, delta),
        "adds_up": composition_sentence(plan, coverage.private, run.composition),
        "not_covered": [*words.not_covered, FLOATING_POINT_NOTES[coverage.arithmetic], TEST_DATA_NOTE],
        "warnings": [
            *collect_warnings(
                settings, plan, coverage, run.run_id, run.finished, run.start is not None or run.start_public
            ),
            *run.notes,
            *run.dataset_warnings,
        ],
        "parties": [
            {
                "name": name,
                "units": plan.units(k),
                "rate": plan.group(k).rate,
                "sigma": plan.group(k).sigma,
                "releases": spends[k].releases,
                **make_epsilon_keys({accountant: costs[k] for accountant, costs in by_name.items()}),
                "budget": plan.group(k).budget,
            }
            for k, name in enumerate(names)
        ],
    }
    # Only what one finished run released was fixed in advance, so that the accountant's whole curve holds.
    fixed = run.finished and len(coverage.runs) == 1 and run.start is None
    watcher = find_watcher(plan.unit, plan.aggregation, plan.colluders)
    promise = make_promise(headline, min(delta, 1.0), spends if fixed else ())
    result["meaning"] = make_meaning(promise, watcher, plan.unit, worth)
    if plan.is_pairwise and plan.private:
        result["pairwise"] = describe_pairwise(plan, headline, delta, run.peer_keys, run.across_machines)
    if is_rehearsed(settings):
        result["rehearsal"] = describe_rehearsal(settings)
    if run.start is not None:
        result["start"] = {
            "run": run.start.run,
            "epsilon": infinity_to_text(run.start.epsilon),
            "delta": run.start.delta,
            "unit": run.start.unit,
            "added": start is not None,
            "text": describe_start(run.start, start is not None),
        }
    if run.scope == "ledger" and run.run_costs is not None:
        own = run.run_costs
        result["scope"]["run_epsilon"] = infinity_to_text(max(own.get(name, 0.0) for name in names))
    return result


def list_start_runs(start: WeightOrigin | None) -> tuple[CoveredRun, ...]:
    """The runs that were spent on initial weights."""
    if start is None:
        return ()
    names = ("id", "rule", "sound", "private", "randomness", "arithmetic", "simulation")
    return tuple(CoveredRun(**{name: each[name] for name in names if name in each}) for each in start.runs)


def list_shown_accountants(enforced: str, runs: int) -> tuple[Accountant, ...]:
    """The enforced accountant, then those shown beside it; over several runs none.

    A later run may have been chosen after seeing an earlier one, and then other accountants' values of the pooled
    releases are no bounds; the ledger's sum is one.
    """
    chosen = ACCOUNTANTS.find(enforced)
    others = tuple(each for each in reported_accountants(enforced) if each.name != chosen.name)
    return (chosen, *others) if runs == 1 else (chosen,)


def _list_costs(run: AccountedRun, names: Sequence[str], spends: list[Spend], enforced: Accountant) -> list[float]:
    """The epsilon of each party within the scope: what the ledger says, where it was asked."""
    if run.costs is None:
        return _compute_unique_epsilons(spends, run.plan.delta, enforced)
    return [run.costs.get(name, 0.0) for name in names]


def _add_pld_key(keys: dict[str, float | str]) -> dict[str, float | str]:
    """The headline keys, always with `epsilon_pld`: the enforced value where there is no other one."""
    return {"epsilon_pld": keys["epsilon"], **keys}


def _spends_by_party(names: Sequence[str], spent: Mapping[str, Spend]) -> list[Spend]:
    return [spent.get(name) or Spend.empty() for name in names]


def _compute_unique_epsilons(spends: list[Spend], delta: float, accountant: Accountant) -> list[float]:
    """Epsilon of each spend; equal spends are computed once."""
    unique = {spend.key: spend for spend in spends}
    costs = dict(zip(unique, compute_epsilons(list(unique.values()), delta, accountant).tolist(), strict=True))
    return [costs[spend.key] for spend in spends]


def _make_group_privacy_rows(epsilon: float, delta: float) -> list[dict[str, Any]]:
    """Group privacy: (epsilon, delta) for one unit gives m units (m epsilon, m exp((m-1) epsilon) delta)."""
    rows = []
    for m in (2, 5, 10):
        log_delta = math.log(m) + (m - 1) * epsilon + math.log(delta)
        grown = math.exp(log_delta) if log_delta < 0 else 1.0
        rows.append({"records": m, "epsilon": infinity_to_text(m * epsilon), "delta": grown})
    return rows


# --- releases: kind, number and form ------------------------------------------------------------


def _describe_schedule(plan: Plan) -> dict[str, Any]:
    """The noise schedule's name, and the smallest and largest sigma of any party."""
    ends = [g.sigma * factor for g in plan.groups for factor in (min(g.factors), max(g.factors))]
    return {"name": plan.schedule, "sigma_min": min(ends), "sigma_max": max(ends)}


def _list_releases(run: AccountedRun, spends: Sequence[Spend]) -> list[dict[str, Any]]:
    """[{kind, times, text}]. spends: what each party has released [K]."""
    plan, rule, rounds_done = run.plan, run.rule, run.rounds_in_scope or run.rounds_done
    counts = [spend.releases for spend in spends]
    what, text, participation = _describe_main_release(plan, rule, counts)
    moved = (
        "computed from what was released before, so they reveal nothing more"
        if rule.sound
        else "computed from raw private values: THEY REVEAL MORE than the epsilon says"
    )
    found = [_make_release_row(what, max(counts), text)]
    if rule.private and rule.share is not no_statistics_share:
        group = plan.groups[0]
        asked = sum(group.assignment(0, t, 1.0).asked(t) for t in range(rounds_done))
        every = "each sum" if group.statistics_interval == 1 else f"the sum of every {group.statistics_interval}th step"
        text = (
            f"Statistics that the rule {rule.name!r} releases beside {every}: noised together with it, at "
            "the joint multiplier sigma, so their cost is within the epsilon."
        )
        found.append(_make_release_row("statistics", min(asked, max(counts)), text))
    found += [
        _make_release_row("C", rounds_done, f"The clipping norm of each round (rule {rule.name!r}), {moved}."),
        _make_release_row(
            "models",
            rounds_done,
            f"The model after each round, its moving average and the final model: computed from the {what}.",
        ),
        _make_release_row("participation", 0 if plan.has_trusted_server else rounds_done, participation),
    ]
    if run.evaluation.kind != "none":
        found.append(_make_release_row("evaluation", run.evaluation.times, run.evaluation.text))
    if run.settings.run.diagnostics:
        text = (
            "Non-private diagnostics (clip fractions, norms, losses) were recorded. They are NOT covered "
            "by epsilon and must not leave a party; they are for simulations on public data."
        )
        found.append(_make_release_row("diagnostics", rounds_done, text))
    return found


def _make_release_row(kind: str, times: int, text: str) -> dict[str, Any]:
    return {"kind": kind, "times": times, "text": text}


def _describe_main_release(plan: Plan, rule: ClipRule, counts: Sequence[int]) -> tuple[str, str, str]:
    """The release of training: its kind, a description, and what it reveals about participation."""
    noise = _describe_noise(plan) if rule.private else ""
    if plan.has_trusted_server:
        return "means", *_describe_server_means(plan.get_server_terms, rule, noise)
    sums = (
        f"noised sums of clipped gradients, Poisson-sampled at rate {plan.groups[0].rate:g}"
        if rule.private
        else "sums of gradients without noise"
    )
    if plan.shares_noise:
        return "sums", *_describe_party_sums(plan.parties, f"{sums}{noise}")
    if plan.is_pairwise:
        return "sums", *describe_masked_sums(f"{sums}{noise}")
    return "updates", *_describe_party_updates(plan.groups[0].steps, counts, f"{sums}{noise}")


def _describe_noise(plan: Plan) -> str:
    low, high = (_describe_schedule(plan)[end] for end in ("sigma_min", "sigma_max"))
    spread = f"{low:.5g}" if low == high else f"{low:.5g} to {high:.5g}"
    moving = "" if plan.schedule == "constant" else f", moving over the rounds by the public schedule {plan.schedule!r}"
    return f", noise multiplier sigma = {spread}{moving}"


def _describe_party_updates(steps: int, counts: Sequence[int], sums: str) -> tuple[str, str]:
    """The server sees every update."""
    return (
        f"Each party's update of each round it takes part in, the total of {steps} step(s): {sums}. "
        f"Between {min(counts)} and {max(counts)} such sums a party so far.",
        "Who takes part in each round. Public; it depends on no private data. Sampling parties lowers no epsilon "
        "here: a party pays for every round it takes part in.",
    )


def _describe_party_sums(parties: int, sums: str) -> tuple[str, str]:
    """The server is assumed to see only the parties' sum."""
    return (
        f"The weighted sum over all {parties} parties of each round's updates, one step each: "
        f"{sums} on the sum; each party adds 1/{parties} of the variance, sigma / "
        f"sqrt({parties}) times C to its own sum. Single updates are NOT released and must not be seen by "
        "anybody: the epsilon relies on it.",
        "All parties take part in every round; that is public, and the noise relies on it.",
    )


def _describe_server_means(terms: ClientLevelTerms, rule: ClipRule, noise: str) -> tuple[str, str]:
    """What a trusted server releases, and what it keeps secret."""
    divisor = terms.describe_divisor
    if rule.private:
        divisor += f"; one party moves it by at most {terms.sensitivity:.5g} times C"
    return (
        f"The server's mean update of each round: the clipped updates of the parties that joined (each of "
        f"{terms.clients} with probability q_c = {terms.rate:g}), {divisor}{noise}. Released in every round, also in "
        "one that nobody joined.",
        "Who joins a round is NOT released and must not be published: the epsilon relies on it. Neither are single "
        "updates, nor how many joined.",
    )
