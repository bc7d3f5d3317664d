"""One job, played: data kept between jobs, rounds without a ledger, and what is remembered of them.

A study spends nobody's budget: its runs are simulations on public data, and their noise was
calibrated beforehand. So no ledger is asked and no epsilon is composed round by round.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fulcrum
from fulcrum import runs as api
from fulcrum.clipping import find_rule
from fulcrum.data import Dataset, featured, from_arrays, holdout, load
from fulcrum.data.features import recipe
from fulcrum.errors import ConfigError, DataError
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Settings
from fulcrum.study.job import Job
from fulcrum.training.evaluate import evaluate
from fulcrum.training.federation import Federation
from fulcrum.training.loop import invite
from fulcrum.training.round import play_client_round, play_round
from fulcrum.training.snapshot import first_snapshot

POINTS = 20
"""About how many values of C and of accuracy are kept of a run."""
OnRound = Callable[[int, int], None]
"""Called with (rounds done, rounds); may raise `Stopped`."""


class Stopped(Exception):
    """The time is up; what was under way is left undone."""


@dataclass(frozen=True)
class Outcome:
    """What is remembered of a finished run.

    accuracy (a fraction) and loss are those after the last round. C and curve are lists of (round,
    value), evenly thinned. seconds is wall time; of a run in a stack, its share.
    """

    accuracy: float
    loss: float
    C: list[tuple[int, float]]
    curve: list[tuple[int, float]]
    seconds: float
    parameters: int
    notes: tuple[str, ...] = ()


@dataclass
class Datasets:
    """Data sets by name, loaded once; also with a part held out, or as features: a stack must share one copy."""

    folder: str = ""
    _whole: dict[str, Dataset] = field(default_factory=dict)
    _held: dict[tuple[str, float, int], Dataset] = field(default_factory=dict)
    _made: dict[Hashable, Dataset] = field(default_factory=dict)

    def get(self, settings: Settings, device: str = "auto") -> Dataset:
        """The data that these settings train and evaluate on; features are computed on the device."""
        records, data = self._records(settings), settings.data
        if data.features == "none":
            return records
        key = (records.fingerprint, recipe(data))
        if key not in self._made:
            self._made.clear()  # gigabytes; studies come one data set after the other
            self._made[key] = featured(records, data, api.find_device(device))
        return self._made[key]

    def _records(self, settings: Settings) -> Dataset:
        source, part = settings.data.source, settings.data.validation
        if source not in self._whole:
            self._whole[source] = self._load(source, settings.data.dir)
        if part == 0:
            return self._whole[source]
        key = (source, part, settings.run.seed)
        if key not in self._held:
            self._held.clear()  # a copy of the whole data; studies come one split after the other
            self._held[key] = holdout(self._whole[source], part, settings.run.seed)
        return self._held[key]

    def _load(self, source: str, folder: str) -> Dataset:
        packed = Path(self.folder) / "digits.npz"
        try:
            return load(source, self.folder or folder)
        except DataError:
            # Where scikit-learn is missing, its digits may have been brought along (see `pack_digits`).
            if source != "digits" or not packed.is_file():
                raise
        with np.load(packed) as arrays:
            parts = [torch.from_numpy(arrays[name]) for name in ("x", "y", "x_test", "y_test")]
        return from_arrays(*parts, name="digits", classes=10)


def pack_digits(folder: Path) -> Path:
    """Write the digits to digits.npz, for machines without scikit-learn; the bits are the same."""
    data = load("digits")
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: getattr(data, name).numpy() for name in ("x", "y", "x_test", "y_test")}
    np.savez_compressed(folder / "digits.npz", **parts)
    return folder / "digits.npz"


def make(job: Job, datasets: Datasets, device: str = "auto", precision: str = "") -> Federation:
    """The job ready to run: data from the cache, evaluated every fifth round or more rarely."""
    if not job.calibrated:
        raise ConfigError(f"job {job.id} ({job.cell}) has no sigma yet; prepare it with fulcrum study prepare.")
    settings = job.settings
    every = min(max(5, settings.train.rounds // POINTS), settings.train.rounds)
    # The held-out part and the features come from the cache: `prepare` must not hold out another tenth of the rest.
    run = {"device": device, "evaluate_every": every, "ledger": "", "engine": "auto"}
    if precision:
        run["precision"] = precision
    ready = settings.replace(data={"validation": 0.0, "features": "none"}, run=run)
    return api.prepare(ready, datasets.get(settings, device))


def rounds(federation: Federation) -> Iterator[tuple[int, float, float | None, float | None]]:
    """(round, C, accuracy, loss) of every round; None where it was not evaluated. No ledger, no accountant."""
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    # Where the unit is the client everybody may be drawn, and the server draws in secret.
    step = play_client_round if plan.central else play_round
    snapshot = first_snapshot(federation)
    for t in range(settings.train.rounds):
        asked = range(plan.parties) if plan.central else invite(settings, plan.parties, t)
        here = [k for k in asked if int(snapshot.participations[k]) < plan.participations(k)]
        snapshot, _, C = step(federation, snapshot, here, t)
        accuracy, loss = None, None
        if (t + 1) % settings.run.evaluate_every == 0 or t + 1 == settings.train.rounds:
            found = evaluate(problem, snapshot.averaged)
            accuracy, loss = found.get("accuracy"), found.get("loss")
        yield t + 1, record.total_C(C), accuracy, loss


def play(federation: Federation, on_round: OnRound | None = None) -> Outcome:
    """Train to the end."""
    began, total = time.perf_counter(), federation.settings.train.rounds
    Cs: list[tuple[int, float]] = []
    curve: list[tuple[int, float]] = []
    last = math.nan
    for t, C, accuracy, loss in rounds(federation):
        Cs.append((t, C))
        if accuracy is not None and loss is not None:
            curve.append((t, accuracy))
            last = loss
        if on_round:
            on_round(t, total)
    return outcome(federation, Cs, curve, last, time.perf_counter() - began)


def outcome(
    federation: Federation, C: list[tuple[int, float]], curve: list[tuple[int, float]], loss: float, seconds: float
) -> Outcome:
    """Sum up a run from all its rounds."""
    return Outcome(
        accuracy=curve[-1][1],
        loss=loss,
        C=[(t, float(f"{value:.4g}")) for t, value in thin(C)],
        curve=[(t, round(value, 5)) for t, value in thin(curve)],
        seconds=round(seconds, 3),
        parameters=federation.problem.layout.dim,
        notes=federation.problem.dataset.warnings,
    )


def thin(series: Sequence[tuple[int, float]], most: int = POINTS + 1) -> list[tuple[int, float]]:
    """About `most` of the points, evenly spaced, with the first and the last."""
    if len(series) <= most:
        return list(series)
    return [series[round(i * (len(series) - 1) / (most - 1))] for i in range(most)]


def to_record(job: Job, result: Outcome, machine: dict[str, Any]) -> dict[str, Any]:
    """The line that is kept of a finished job."""
    rule = find_rule(job.settings.clip.rule)
    return {
        **job.to_json(),
        "seed": job.seed,
        "method": job.settings.method,
        "rule": rule.name,
        "sound": rule.sound,
        "private": rule.private,
        "unit": job.settings.privacy.unit if rule.private else "",
        "aggregation": job.settings.privacy.aggregation,
        "parties": job.settings.data.parties,
        "rounds": job.settings.train.rounds,
        "evaluated_on": "held-out training data" if job.settings.data.validation else "test data",
        "accuracy": result.accuracy,
        "loss": result.loss,
        "C": result.C,
        "curve": result.curve,
        "seconds": result.seconds,
        "parameters": result.parameters,
        "notes": list(result.notes),
        "machine": machine,
        "version": fulcrum.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine(device: str = "auto") -> dict[str, Any]:
    """What the runs run on, in a few words."""
    facts = record.environment(api.find_device(device))
    return {name: facts[name] for name in ("device", "processor", "cores", "python", "torch")}
