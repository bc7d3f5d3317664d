"""The result of a finished (or stopped) run, and its summary.json, model and privacy statement."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fulcrum.models.checkpoints import WeightOrigin
from fulcrum.models.plain import list_complete_weights, make_plain_model
from fulcrum.privacy.evaluation import is_held_out_account
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs.active_run import ActiveRun, read_run_epsilons, write_privacy_statement
from fulcrum.runs.folder import MAX_PARTIES_PER_LINE, to_json_value
from fulcrum.runs.model_card import make_model_card
from fulcrum.runs.notebook import lines_to_frame, result_to_html
from fulcrum.runs.stored_model import CARD_FILE, describe_model, write_stored_model
from fulcrum.settings.schema import Settings
from fulcrum.training.loop import MAX_PARTIES_WITH_EPSILON
from fulcrum.training.snapshot import Snapshot
from fulcrum.types import ScoreFacts, make_short_repr


@dataclass(frozen=True)
class Result:
    """A finished (or stopped) run.

    metrics are those of the last evaluation on public test data, by name; accuracy (a fraction) and loss are two of
    them, NaN where there is none. Where test records name their party, party_metrics are those on each party's records,
    by its name (up to 100 parties), and mean_over_parties their mean with equal weights. facts says what the metrics
    mean: the same metrics of the best constant prediction, the confusion. reference are the metrics of the same run
    without privacy, where run.reference asked for it. epsilon is the largest
    over the parties, epsilons has one per party, delta is common; where `sound` is False epsilon is nominal, and
    where `summary["aggregation"]` is "ideal-secagg" it assumes a secure aggregation that is simulated. C lists the
    clipping norm of every round. model is an ordinary nn.Module with the trained weights, on the CPU and in eval mode:
    plain coordinates, adapters merged, complete with frozen weights and buffers. summary is
    the content of summary.json; folder is its folder, None where nothing was stored. lines: those of metrics.jsonl.
    """

    __repr__ = make_short_repr

    accuracy: float
    loss: float
    epsilon: float
    epsilons: tuple[float, ...]
    delta: float
    sound: bool
    C: tuple[float, ...]
    model: nn.Module
    settings: Settings
    summary: dict[str, Any]
    folder: Path | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    party_metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    mean_over_parties: Mapping[str, float] = field(default_factory=dict)
    facts: ScoreFacts = field(default_factory=ScoreFacts)
    reference: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    @property
    def baseline(self) -> Mapping[str, float]:
        """The metrics of the best constant prediction on the same records: the more frequent class, or the mean."""
        return self.facts.baseline

    def to_frame(self) -> Any:
        """The rounds as a pandas DataFrame, one row per round: epsilon, C, metrics and how the round went."""
        return lines_to_frame(self.lines)

    def _repr_html_(self) -> str:
        """What a notebook shows of the run."""
        return result_to_html(self.summary, self.folder)


def finish_run(
    run: ActiveRun,
    snapshot: Snapshot | None,
    lines: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Any] | None = None,
) -> Result:
    """Write the files of a finished run, and return its result. lines: of metrics.jsonl. reference: without privacy.

    All epsilons are the ledger's. The last line gets them too: where rounds were paid twice, those after it count.
    """
    settings, problem = run.federation.settings, run.federation.problem
    costs = read_run_epsilons(run)
    lines = _put_ledger_epsilons(run, lines, costs)
    privacy = write_privacy_statement(run, len(lines), finished=len(lines) == settings.train.rounds)
    model = copy.deepcopy(problem.model)
    if snapshot is not None:
        problem.layout.write(model, snapshot.averaged)
    model = make_plain_model(model)  # whatever coordinates it was trained in
    summary = _make_summary(run, lines, privacy, costs)
    if reference:
        summary["reference"] = dict(reference)
    if run.folder:
        summary["model_sha256"] = _store_model(run, model, privacy, summary)
        run.folder.write_json("summary.json", summary)
    return Result(
        accuracy=float(summary["metrics"].get("accuracy", math.nan)),
        loss=float(summary["metrics"].get("loss", math.nan)),
        epsilon=float(summary["epsilon"]),
        epsilons=tuple(costs.values()) if len(costs) <= MAX_PARTIES_WITH_EPSILON else (),
        delta=settings.privacy.delta,
        sound=problem.rule.sound,
        C=tuple(summary["C"]),
        model=model,
        settings=settings,
        summary=summary,
        folder=run.folder.path if run.folder else None,
        metrics=summary["metrics"],
        party_metrics=summary.get("party_metrics", {}),
        mean_over_parties=summary.get("mean_over_parties", {}),
        facts=ScoreFacts(
            summary.get("baseline", {}),
            summary.get("party_baselines", {}),
            summary.get("confusion", ()),
            summary.get("party_confusion", {}),
            summary.get("threshold", {}),
        ),
        reference=summary.get("reference", {}),
        lines=tuple(lines),
    )


def _store_model(run: ActiveRun, model: nn.Module, privacy: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Write the model, what is needed to build it again, and its card into the run's folder; returns its hash."""
    assert run.folder is not None
    federation, folder = run.federation, run.folder.path
    problem, settings = federation.problem, federation.settings
    origin = WeightOrigin(
        run=run.id,
        epsilon=float(privacy["epsilon"]),
        delta=float(privacy["delta"]),
        unit=str(privacy["unit"]),
        ledger=run.ledger.identity,
        # A coordinator has public test records; its parties' records are their own.
        public=problem.dataset.public
        and problem.dataset.train is not None
        and (federation.origin is None or federation.origin.public),
        runs=tuple({**each, "simulation": privacy["simulation"]} for each in privacy["runs_covered"]),
    )
    weights = list_complete_weights(model)
    facts = describe_model(model, weights, settings, problem.dataset, problem.layout.dim, federation.model_given)
    write_stored_model(folder, model, facts, origin, settings)
    run.folder.write_text(CARD_FILE, make_model_card(model, facts, privacy, summary))
    return str(facts["sha256"])


def _put_ledger_epsilons(
    run: ActiveRun, lines: Sequence[Mapping[str, Any]], costs: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, the last one with the ledger's epsilons; the file is written again if they differ."""
    found = [dict(line) for line in lines]
    if not found:
        return found
    last = found[-1]
    now: dict[str, Any] = {"epsilon": max(costs.values(), default=0.0)}
    now |= {"epsilons": list(costs.values())} if "epsilons" in last else {}
    if {name: last.get(name) for name in now} != to_json_value(now):
        last |= to_json_value(now)
        if run.folder:
            run.folder.write_metrics(found)
    return found


def _make_summary(
    run: ActiveRun, lines: Sequence[Mapping[str, Any]], privacy: Mapping[str, Any], costs: Mapping[str, float]
) -> dict[str, Any]:
    """The content of summary.json. costs: each party's epsilon of this run, from the ledger."""
    settings, problem, plan = run.federation.settings, run.federation.problem, run.federation.plan
    finished = len(lines) == settings.train.rounds
    last = last_evaluated(lines)
    metrics = _numbers(last["metrics"])
    summary: dict[str, Any] = {
        "status": "finished" if finished else describe_early_end(settings),
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "score": problem.task.score,
        "higher_is_better": problem.task.higher_is_better,
        "metrics": metrics,
        "evaluated_on": _describe_evaluation_data(run),
        "epsilon": max(costs.values(), default=0.0),
        "epsilon_pld": _compute_worst_pld_epsilon(run.ledger, run.id, settings.privacy.delta),
        "epsilon_scope": privacy["epsilon"],
        "delta": settings.privacy.delta,
        "unit": privacy["unit"],
        "aggregation": privacy["aggregation"],
        "accountant": settings.privacy.accountant,
        "sound": problem.rule.sound,
        "private": problem.rule.private,
        "guarantee": privacy["guarantee"],
        "simulation": problem.randomness.mode != "secure",
        "randomness": problem.randomness.mode,
        "arithmetic": "proven" if problem.proven else "fast",
        "method": settings.method,
        "rule": problem.rule.name,
        "rounds": len(lines),
        "C": [line["C"] for line in lines],
        "parties": problem.partition.parties,
        "parameters": problem.layout.dim,
        "seconds": sum(line["seconds"] for line in lines),
        "warnings": [*problem.dataset.warnings, *plan.warnings, *run.notes],
        "run": run.id,
        "ledger": {"path": str(run.ledger.path), **privacy["scope"]["ledger"]},
        "settings": dataclasses.asdict(settings),
    }
    if "start" in privacy:
        summary["start"] = privacy["start"]
    if len(costs) <= MAX_PARTIES_PER_LINE:
        summary["epsilons"] = dict(costs)
    if "mean_over_parties" in last:
        summary["mean_over_parties"] = _numbers(last["mean_over_parties"])
    if "party_metrics" in last:
        summary["party_metrics"] = {name: _numbers(values) for name, values in last["party_metrics"].items()}
    summary |= _copy_facts(last)
    return summary


def _copy_facts(last: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside the metrics in the last evaluated line, as numbers."""
    found: dict[str, Any] = {name: _numbers(last[name]) for name in ("baseline", "mean_baseline") if name in last}
    if "party_baselines" in last:
        found["party_baselines"] = {name: _numbers(values) for name, values in last["party_baselines"].items()}
    return found | {name: last[name] for name in ("confusion", "party_confusion", "threshold") if name in last}


def describe_early_end(settings: Settings) -> str:
    """Why a run ended before its last round, for summary.json and the terminal."""
    words = "stopped: too few parties have budget left"
    if settings.privacy.unit == "person" and settings.run.ledger:
        words += " (whoever has records at several parties pays at each of them)"
    return words


def _describe_evaluation_data(run: ActiveRun) -> str:
    """The records on which the metrics were computed."""
    if run.federation.evaluation is not None:
        return "held-out private records, with noise"
    if run.federation.problem.dataset.test is None:
        return "nothing: there is no test set"
    return "a held-out part of the training data" if run.federation.settings.data.validation else "public test data"


def last_evaluated(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last line of metrics.jsonl whose round was evaluated; its `metrics` are empty where there is none.

    Lines of the first versions have only accuracy and loss.
    """
    for line in reversed(lines):
        former = {name: line[name] for name in ("accuracy", "loss") if line.get(name) is not None}
        metrics = line.get("metrics", former)
        if metrics:
            return {**line, "metrics": metrics}
    return {"metrics": {}}


def _numbers(metrics: Mapping[str, float | str | None]) -> dict[str, float]:
    """Metrics as numbers: our JSON has null for NaN and "inf" for infinity."""
    return {name: math.nan if value is None else float(value) for name, value in metrics.items()}


def _compute_worst_pld_epsilon(ledger: Ledger, run: str, delta: float) -> float:
    """The largest epsilon of any party in this run, by PLD."""
    spends = (each for name, each in ledger.get_spends(run).items() if not is_held_out_account(name))
    distinct = {spend.key: spend for spend in spends}  # equal spends have equal epsilons
    return max((spend.epsilon(delta, "pld") for spend in distinct.values()), default=0.0)
