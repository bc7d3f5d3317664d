"""Runs that stop midway, as after kill -9 (a copy of the folder taken between two rounds) or an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fulcrum
from fulcrum.data import Dataset
from fulcrum.errors import RunError
from fulcrum.runs import Observer, Result
from fulcrum.runs import folder as record
from support.federations import toy_data

TERMS: dict[str, Any] = {"parties": 2, "partition": "iid", "rounds": 8, "rate": 0.5, "epsilon": 4.0, "model": "linear"}


class StopAfter(Observer):
    """Fails after a round, so that the run stops and can be resumed."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round(self, result: fulcrum.RoundResult) -> None:
        if result.round == self.rounds:
            raise ZeroDivisionError("stop")


class CopyAfter(Observer):
    """Copies the run's folder after a round, as a process that is killed there leaves it."""

    def __init__(self, rounds: int, source: Path, target: Path) -> None:
        self.rounds, self.source, self.target = rounds, source, target

    def round(self, result: fulcrum.RoundResult) -> None:
        if result.round == self.rounds:
            shutil.copytree(self.source, self.target)


def stop_run(folder: Path, rounds: int = 5, data: Dataset | None = None, **names: Any) -> Path:
    """The folder of a run that was stopped after so many rounds."""
    with pytest.raises(RunError, match="can be continued"):
        fulcrum.train(data or toy_data(), out=folder, observers=[StopAfter(rounds)], **{**TERMS, **names})
    return folder


def kill_run(folder: Path, *rounds: int, **names: Any) -> list[Path]:
    """Folders of one run as it was after each of these rounds, killed without time to write anything."""
    whole = folder.with_name(folder.name + "-whole")
    targets = {t: folder.with_name(f"{folder.name}-{t}") for t in rounds}
    watching = [CopyAfter(t, whole, target) for t, target in targets.items()]
    fulcrum.train(toy_data(), out=whole, observers=watching, **{**TERMS, **names})
    return list(targets.values())


def resume(folder: Path, **more: Any) -> Result:
    """Resume with the same data."""
    return fulcrum.resume(folder, dataset=toy_data(), **more)


def told_epsilons(folder: Path, result: Result | None = None) -> set[float]:
    """The epsilon of this run as each of its files says it; one value where they agree to the last bit."""
    privacy = json.loads((folder / "privacy.json").read_text())
    found = {float(privacy["scope"].get("run_epsilon", privacy["epsilon"]))}
    found |= {float(line["epsilon"]) for line in record.load_metrics(folder)[-1:]}
    summary = record.load_summary(folder)
    found |= {float(summary["epsilon"]), max(map(float, summary["epsilons"].values()))}
    if result is not None:
        found |= {result.epsilon, max(result.epsilons)}
    return found
