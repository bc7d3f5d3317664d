"""A run in progress, and its current privacy statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fulcrum
from fulcrum.privacy.ledger import Ledger, RunRecord
from fulcrum.privacy.plan import Plan
from fulcrum.privacy.statement import AccountedRun, CoveredRun, EvaluationData, make_statement, statement_to_markdown
from fulcrum.runs import folder as record
from fulcrum.runs.binding import head_to_json
from fulcrum.runs.folder import RunFolder
from fulcrum.training.federation import Federation
from fulcrum.training.loop import is_evaluation_round

MAX_PARTIES_COMPARED = 100
"""The statement says how runs add up for so many parties at most; parties of a run differ rarely."""


@dataclass(frozen=True)
class ActiveRun:
    """A run with its outputs. id: its name in the ledger. folder: None where nothing is stored.

    notes: warnings about this run that its outputs show, such as rounds that are paid a second time.
    """

    federation: Federation
    folder: RunFolder | None
    ledger: Ledger
    id: str
    notes: tuple[str, ...] = ()


def write_privacy_statement(run: ActiveRun, rounds_done: int, finished: bool) -> dict[str, Any]:
    """The privacy statement after `rounds_done` rounds; also written to the folder.

    Every number comes from the ledger, and what is said of them from all runs within the scope.
    """
    settings, problem = run.federation.settings, run.federation.problem
    own, kept, origin = run.ledger.get_spends(run.id), bool(settings.run.ledger), run.federation.origin
    words = make_statement(
        AccountedRun(
            settings=settings,
            plan=run.federation.plan,
            rule=problem.rule,
            spent=run.ledger.get_spends() if kept else own,
            costs=run.ledger.epsilons() if kept else run.ledger.epsilons(run.id),
            run_costs=run.ledger.epsilons(run.id),
            run_id=run.id,
            scope="ledger" if kept else "run",
            randomness_mode=problem.randomness.mode,
            dataset_name=problem.dataset.name,
            dataset_warnings=problem.dataset.warnings,
            finished=finished,
            rounds_done=rounds_done,
            version=fulcrum.__version__,
            date=record.current_utc_time(),
            arithmetic="proven" if problem.proven else "fast",
            others=list_released_runs(run.ledger) if kept else (),
            evaluation=describe_evaluation(run, rounds_done),
            composition=describe_composition(run),
            notes=run.notes,
            scope_delta=find_largest_delta(run, list_party_names(run.federation.plan)),
            start=origin if origin is not None and not origin.public else None,
            start_in_scope=kept and origin is not None,  # `find_weight_origin` refuses other ledgers
            start_public=origin is not None and origin.public,
            across_machines=run.federation.engine.remote,
        )
    )
    words["scope"]["ledger"] = head_to_json(run.ledger.head())
    if run.folder:
        run.folder.write_json("privacy.json", words)
        run.folder.write_text("PRIVACY.md", statement_to_markdown(words))
    return words


def list_party_names(plan: Plan) -> list[str]:
    """The names of the plan's parties, in their order."""
    return [plan.name(k) for k in range(plan.parties)]


def find_largest_delta(run: ActiveRun, accounts: Sequence[str]) -> float:
    """The largest sum of deltas of these accounts within the scope; 0 where none of them released anything."""
    costs = run.ledger.costs(None if run.federation.settings.run.ledger else run.id)
    return max((costs[name].delta for name in accounts if name in costs), default=0.0)


def read_run_epsilons(run: ActiveRun) -> dict[str, float]:
    """The epsilon of each of the plan's parties in this run alone, by name, as the ledger says."""
    plan, costs = run.federation.plan, run.ledger.epsilons(run.id)
    return {name: costs.get(name, 0.0) for name in map(plan.name, range(plan.parties))}


def list_released_runs(ledger: Ledger) -> tuple[CoveredRun, ...]:
    """The runs of a ledger that released anything; a run that was registered and refused concerns nobody."""
    return tuple(
        describe_covered_run(each)
        for each in ledger.runs().values()
        if any(spend.releases for spend in ledger.get_spends(each.id).values())
    )


def describe_covered_run(record: RunRecord) -> CoveredRun:
    """A run of the ledger as the statement needs it. Runs that nobody registered are unknown, not good."""
    if not record.is_known:
        return CoveredRun(record.id)
    return CoveredRun(
        id=record.id,
        rule=record.rule,
        sound=record.sound,
        private=record.private,
        randomness=record.randomness,
        arithmetic=record.arithmetic,
        simulation=record.simulation,
    )


def describe_evaluation(run: ActiveRun, rounds_done: int) -> EvaluationData:
    """The records that the model was scored on in the first `rounds_done` rounds, and what that cost them."""
    federation = run.federation
    dataset, plan = federation.problem.dataset, federation.evaluation
    times = sum(is_evaluation_round(federation.settings, t) for t in range(rounds_done))
    if plan is not None:
        costs = run.ledger.epsilons(None if federation.settings.run.ledger else run.id)
        spent = max((costs.get(account.name, 0.0) for account in plan.accounts), default=0.0)
        records = sum(len(account.rows) for account in plan.accounts)
        delta = max(plan.delta, find_largest_delta(run, [account.name for account in plan.accounts]))
        return EvaluationData("held-out", records, times, paid=True, epsilon=spent, delta=delta)
    if dataset.test is None or not len(dataset.test):
        return EvaluationData()
    kind = "public"
    if federation.settings.data.validation:
        kind = "public, held-out" if dataset.public else "held-out"
    return EvaluationData(kind, len(dataset.test), times)


def describe_composition(run: ActiveRun) -> str:
    """How the ledger adds up runs, for each different way that a party's account has."""
    plan, accounts = run.federation.plan, run.ledger.accounts()
    names = [plan.name(k) for k in range(min(plan.parties, MAX_PARTIES_COMPARED))]
    found = dict.fromkeys(run.ledger.describe_composition(name) for name in names if name in accounts)
    return " ".join(words for words in found if words)
