"""Runs one job: data cached between jobs, rounds without a ledger, and the recorded outcome.

A study spends no party's budget: its runs are simulations on public data, and their noise was
calibrated beforehand. So there is no ledger, and epsilon is not composed per round. Private data is refused.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import fulcrum
from fulcrum import runs as api
from fulcrum.clipping import find_rule
from fulcrum.data import Dataset, compute_features, holdout, load
from fulcrum.data.declared import refuse_without_ledger
from fulcrum.data.features import feature_signature
from fulcrum.data.withdrawn import leave_out_withdrawn
from fulcrum.errors import ConfigError, DataError
from fulcrum.runs import folder as record
from fulcrum.runs.preparation import PLANNED_SETTINGS, derive_planned_federation
from fulcrum.settings.derived import DERIVABLE_SETTINGS, get_planned_unit
from fulcrum.settings.schema import Settings, TaskSettings
from fulcrum.study.job import SECTION_FACTORIES, StudyJob
from fulcrum.study.provenance import MadeBy
from fulcrum.study.records import StudyScore, make_score_entries
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate

NUM_CURVE_POINTS = 20
"""Approximate number of values of C and of the score stored per run."""
JobProgressFn = Callable[[int, int], None]
"""Called with (rounds done, rounds); may raise `TimeBudgetExceeded`."""


class TimeBudgetExceeded(Exception):
    """The time budget is spent; active runs are not finished."""


@dataclass(frozen=True)
class JobOutcome:
    """The recorded outcome of a finished run.

    metrics are those after the last round, by name. score: the metric for choices and tables. C and curve (of
    the score) are lists of (round, value), evenly thinned. seconds is wall time; of a run in a stack, its share.
    rehearsed: what a rehearsal chose ({mode, C, step}); empty where nothing was rehearsed.
    """

    metrics: Mapping[str, float]
    score: StudyScore
    C: list[tuple[int, float]]
    curve: list[tuple[int, float]]
    seconds: float
    parameters: int
    notes: tuple[str, ...] = ()
    rehearsed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The value of the score after the last round."""
        return self.metrics[self.score.name]


@dataclass
class DatasetCache:
    """Data sets by name, loaded once; also with a part held out, or as features: a stack must share one copy."""

    folder: str = ""
    _whole: dict[Hashable, Dataset] = field(default_factory=dict)
    _held: dict[Hashable, Dataset] = field(default_factory=dict)
    _made: dict[Hashable, Dataset] = field(default_factory=dict)
    prepared: dict[Hashable, Federation] = field(default_factory=dict)
    """Federations that others are derived from, see `prepare_job`."""

    def get(self, settings: Settings, device: str = "auto") -> Dataset:
        """The data that these settings train and evaluate on; features are computed on the device."""
        records, data = self._load_records(settings), settings.data
        if data.features == "none":
            return records
        key = (records.fingerprint, feature_signature(data))
        if key not in self._made:
            self._made.clear()  # gigabytes; studies use one data set after the other
            self._made[key] = compute_features(records, data, api.find_device(device))
        return self._made[key]

    def _load_records(self, settings: Settings) -> Dataset:
        part, data = settings.data.validation, settings.data
        records = (data.source, data.public, data.withdrawn, settings.task, settings.table, settings.images)
        if records not in self._whole:
            self._whole[records] = leave_out_withdrawn(self._load(settings), data.withdrawn)
            refuse_without_ledger(self._whole[records])
        if part == 0:
            return self._whole[records]
        key = (*records, part, settings.run.seed)
        if key not in self._held:
            self._held.clear()  # a copy of the whole data; studies use one split after the other
            self._held[key] = holdout(self._whole[records], part, settings.run.seed)
        return self._held[key]

    def _load(self, settings: Settings) -> Dataset:
        data = settings.data
        return load(
            data.source,
            self.folder or data.dir,
            task=settings.task,
            public=data.public,
            table=settings.table,
            images=settings.images,
        )


def load_study_data(settings: Settings) -> Dataset:
    """The records that these settings name, to see whether they are public; nothing is trained."""
    data = settings.data
    return load(
        data.source, data.dir, task=settings.task, public=data.public, table=settings.table, images=settings.images
    )


def write_digits_npz(folder: Path) -> Path:
    """Write the digits to digits.npz, for other programs than Fulcrum; the bits are the same."""
    data = load("digits")
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: getattr(data, name).numpy() for name in ("x", "y", "x_test", "y_test")}
    np.savez_compressed(folder / "digits.npz", **parts)
    return folder / "digits.npz"


def prepare_job(job: StudyJob, datasets: DatasetCache, device: str = "auto", precision: str = "") -> Federation:
    """The job ready to run: data from the cache, evaluated every fifth round or less often, or as the job says."""
    if not job.is_calibrated:
        raise ConfigError(f"job {job.id} ({job.cell}) has no sigma yet; prepare it with fulcrum study prepare.")
    settings = job.settings
    every = settings.run.evaluate_every
    if every == 0:  # not set
        every = min(max(5, settings.train.rounds // NUM_CURVE_POINTS), settings.train.rounds)
    # The held-out part and the features come from the cache: `prepare` must not hold out another tenth of the rest.
    run = {"device": device, "evaluate_every": every, "ledger": "", "engine": "auto"}
    if precision:
        run["precision"] = precision
    ready = settings.replace(
        data={"validation": 0.0, "features": "none"}, privacy={"unit": get_planned_unit(settings.privacy)}, run=run
    )
    key = make_federation_cache_key(settings, device, precision)
    base = datasets.prepared.get(key)
    if base is not None:
        return api.apply_rehearsal(api.derive_federation(base, ready))
    alike = make_federation_cache_key(settings, device, precision, PLANNED_SETTINGS)
    base = datasets.prepared.get(alike)
    if base is not None:
        return api.apply_rehearsal(derive_planned_federation(base, ready))
    dataset = datasets.get(settings, device)
    if dataset.test is None:
        raise DataError(f"{dataset.name} has no test set (x_test, y_test), and a study compares results on one.")
    # The data has its task already; another check would make a copy of it for each run of a stack.
    federation = api.prepare_unrehearsed(replace(ready, task=TaskSettings()), dataset)
    if len(datasets.prepared) >= MAX_PREPARED:
        datasets.prepared.clear()
    datasets.prepared[key] = datasets.prepared[alike] = federation
    return api.apply_rehearsal(federation)


MAX_PREPARED = 64
"""Federations that are kept to derive others from."""


def make_federation_cache_key(
    settings: Settings, device: str, precision: str, without: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Hashable:
    """Equal for jobs that differ only in settings which change neither data, split, model nor plan.

    without: further fields, by section, in which they may differ.
    """
    sections = {name: asdict(getattr(settings, name)) for name in SECTION_FACTORIES}
    for left_out in (DERIVABLE_SETTINGS, without):
        for name, free in left_out.items():
            sections[name] = {key: value for key, value in sections[name].items() if key not in free}
    return json.dumps(sections, sort_keys=True, default=str), device, precision


def get_federation_score(federation: Federation) -> StudyScore:
    """The score of a federation's task: the metric by which a study compares its runs."""
    task = federation.problem.task
    return StudyScore(task.score, task.higher_is_better)


def iterate_rounds(federation: Federation) -> Iterator[tuple[int, float, Mapping[str, float] | None]]:
    """(round, C, metrics) of every round; None where it was not evaluated. No ledger, no accountant."""
    for result, _ in federate(federation):
        yield result.round, record.compute_total_C(result.C), result.metrics or None


def train_to_end(federation: Federation, on_round: JobProgressFn | None = None) -> JobOutcome:
    """Train to the end."""
    began, total = time.perf_counter(), federation.settings.train.rounds
    Cs: list[tuple[int, float]] = []
    curve: list[tuple[int, float]] = []
    last: Mapping[str, float] = {}
    score = get_federation_score(federation)
    for t, C, metrics in iterate_rounds(federation):
        Cs.append((t, C))
        if metrics is not None:
            curve.append((t, metrics[score.name]))
            last = metrics
        if on_round:
            on_round(t, total)
    return make_job_outcome(federation, Cs, curve, last, time.perf_counter() - began)


def make_job_outcome(
    federation: Federation,
    C: list[tuple[int, float]],
    curve: list[tuple[int, float]],
    metrics: Mapping[str, float],
    seconds: float,
) -> JobOutcome:
    """Sum up a run from all its rounds."""
    return JobOutcome(
        metrics=dict(metrics),
        score=get_federation_score(federation),
        C=[(t, float(f"{value:.4g}")) for t, value in thin_curve(C)],
        curve=[(t, round(value, 5)) for t, value in thin_curve(curve)],
        seconds=round(seconds, 3),
        parameters=federation.problem.layout.dim,
        notes=federation.problem.dataset.warnings,
        rehearsed=federation.rehearsed.get("candidate", {}),
    )


def thin_curve(series: Sequence[tuple[int, float]], most: int = NUM_CURVE_POINTS + 1) -> list[tuple[int, float]]:
    """About `most` of the points, evenly spaced, with the first and the last."""
    if len(series) <= most:
        return list(series)
    return [series[round(i * (len(series) - 1) / (most - 1))] for i in range(most)]


def make_job_record(
    job: StudyJob, result: JobOutcome, machine: dict[str, Any], made_by: MadeBy | None = None
) -> dict[str, Any]:
    """The stored record of a finished job."""
    made_by = made_by or MadeBy()
    rule = find_rule(job.settings.clip.rule)
    return {
        **job.to_json(),
        "seed": job.seed,
        "method": job.settings.method,
        "rule": rule.name,
        "sound": rule.sound,
        "private": rule.private,
        "unit": get_planned_unit(job.settings.privacy) if rule.private else "",
        "aggregation": job.settings.privacy.aggregation,
        "parties": job.settings.data.parties,
        "rounds": job.settings.train.rounds,
        "evaluated_on": "held-out training data" if job.settings.data.validation else "test data",
        **make_score_entries(result.metrics, result.score),
        "C": result.C,
        "curve": result.curve,
        "seconds": result.seconds,
        "parameters": result.parameters,
        "notes": list(result.notes),
        **({"rehearsed": dict(result.rehearsed)} if result.rehearsed else {}),
        "machine": machine,
        "version": fulcrum.__version__,
        "commit": made_by.commit,
        "command": made_by.command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe_machine(device: str = "auto") -> dict[str, Any]:
    """A short description of the machine."""
    facts = record.describe_environment(api.find_device(device))
    return {name: facts[name] for name in ("device", "processor", "cores", "python", "torch")}
