"""What a finished (or stopped) run hands back, and the summary.json, model and privacy statement that it leaves."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fulcrum.models.whitening import folded
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs.active_run import Underway, state_privacy
from fulcrum.settings.schema import Settings
from fulcrum.training.snapshot import Snapshot


@dataclass(frozen=True)
class Result:
    """A finished (or stopped) run.

    accuracy (a fraction) and loss are on public test data. epsilon is the largest over the parties,
    epsilons each party's, delta theirs all; where `sound` is False epsilon is nominal, and where
    `summary["aggregation"]` is "ideal-secagg" it assumes a secure aggregation that is simulated. C lists the
    clipping norm of every round. model is an ordinary nn.Module with the trained weights. summary is
    what summary.json holds; folder is where it lies, None where nothing was kept.
    """

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


def sum_up(run: Underway, snapshot: Snapshot | None, lines: Sequence[Mapping[str, Any]]) -> Result:
    """Write what a reader needs of a finished run, and hand it back. lines: those of metrics.jsonl."""
    settings, problem = run.federation.settings, run.federation.problem
    privacy = state_privacy(run, len(lines), finished=len(lines) == settings.train.rounds)
    model = copy.deepcopy(problem.model)
    if snapshot is not None:
        problem.layout.write(model, snapshot.averaged)
    summary = _summary(run, lines, privacy)
    if run.folder:
        trained = snapshot.averaged if snapshot else problem.layout.flatten(model)
        run.folder.write_model(folded(model, problem.layout.unflatten(trained)))  # a plain network, whatever trained it
        run.folder.write_json("summary.json", summary)
    return Result(
        accuracy=summary["accuracy"] if summary["accuracy"] is not None else math.nan,
        loss=summary["loss"] if summary["loss"] is not None else math.nan,
        epsilon=float(summary["epsilon"]),
        epsilons=tuple(map(float, lines[-1].get("epsilons", ()) if lines else ())),
        delta=settings.privacy.delta,
        sound=problem.rule.sound,
        C=tuple(summary["C"]),
        model=model,
        settings=settings,
        summary=summary,
        folder=run.folder.path if run.folder else None,
    )


def _summary(run: Underway, lines: Sequence[Mapping[str, Any]], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json holds."""
    settings, problem, plan = run.federation.settings, run.federation.problem, run.federation.plan
    finished = len(lines) == settings.train.rounds
    evaluated = [line for line in lines if line["accuracy"] is not None]
    last = evaluated[-1] if evaluated else {"accuracy": None, "loss": None}
    summary: dict[str, Any] = {
        "status": "finished" if finished else "stopped: too few parties have budget left",
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "evaluated_on": "a held-out part of the training data" if settings.data.validation else "public test data",
        "epsilon": lines[-1]["epsilon"] if lines else 0.0,
        "epsilon_pld": _worst_pld(run.ledger, run.id, settings.privacy.delta),
        "epsilon_scope": privacy["epsilon"],
        "delta": settings.privacy.delta,
        "unit": privacy["unit"],
        "aggregation": privacy["aggregation"],
        "accountant": settings.privacy.accountant,
        "sound": problem.rule.sound,
        "private": problem.rule.private,
        "method": settings.method,
        "rule": problem.rule.name,
        "rounds": len(lines),
        "C": [line["C"] for line in lines],
        "parties": problem.partition.parties,
        "parameters": problem.layout.dim,
        "seconds": sum(line["seconds"] for line in lines),
        "warnings": [*problem.dataset.warnings, *plan.warnings],
        "run": run.id,
        "settings": dataclasses.asdict(settings),
    }
    if lines and "epsilons" in lines[-1]:
        summary["epsilons"] = dict(zip(map(plan.name, range(plan.parties)), lines[-1]["epsilons"], strict=True))
    return summary


def _worst_pld(ledger: Ledger, run: str, delta: float) -> float:
    """The largest epsilon of any party in this run, by PLD."""
    distinct = {spend.key: spend for spend in ledger.spends(run).values()}  # the same past costs the same
    return max((spend.epsilon(delta, "pld") for spend in distinct.values()), default=0.0)
