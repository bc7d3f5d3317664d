"""Several methods, epsilons and seeds on one data set: `fulcrum compare`.

Public data: jobs of a study, without a ledger, in processes or stacked on a GPU. Private data: every run is charged to
a ledger that is kept, one after the other, in a folder of its own; without a ledger it is refused. Either way each
finished run is a record (store.py), and the ranking is made from records alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.clipping import find_rule
from fulcrum.errors import BudgetError, ConfigError
from fulcrum.privacy.accounting import convert_rdp_to_epsilon, format_epsilon
from fulcrum.runs import folder as record
from fulcrum.settings.presets import METHODS
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.schema import Settings
from fulcrum.study.calibrate import calibrate_jobs
from fulcrum.study.job import StudyJob
from fulcrum.study.records import StudyScore, get_record_score, get_score_value
from fulcrum.study.run_job import JobOutcome, describe_machine, make_job_record, thin_curve
from fulcrum.study.selection import compute_trial_rdp
from fulcrum.study.stats import MeanInterval, compute_mean_interval
from fulcrum.study.store import RunRecord, ShardWriter

REQUEST_FILE = "compare.json"
"""What was asked for: the jobs of a comparison, for readers who want to know what is missing."""
SettingsMaker = Callable[[str, Mapping[str, Any]], Settings]
"""(method, settings by dotted name that take precedence) -> checked settings."""


def list_comparison_jobs(
    make: SettingsMaker, methods: Sequence[str], epsilons: Sequence[float], seeds: Sequence[int]
) -> list[StudyJob]:
    """A job per method, epsilon and seed; a method without privacy has one cell.

    No epsilons: that of the settings. Seeds are shared by all methods, so that differences are paired.
    """
    if not methods:
        raise ConfigError("--methods names no method; write for example --methods moo,dp-sgd.")
    for method in methods:
        if method not in METHODS:
            hint = suggest_nearest_names(method, METHODS)
            raise ConfigError(f"--methods: {method!r} is not known; {hint}")
    if not seeds:
        raise ConfigError("--seeds names no seed; write for example --seeds 3, or --seeds 0,7,8.")
    jobs = []
    for method in dict.fromkeys(methods):
        for epsilon in dict.fromkeys(epsilons) or (None,):
            for seed in dict.fromkeys(seeds):
                words: dict[str, Any] = {"run.seed": seed} | ({} if epsilon is None else {"privacy.epsilon": epsilon})
                settings = make(method, words)
                target = settings.privacy.epsilon
                if not find_rule(settings.clip.rule).private:
                    settings, target = settings.replace(privacy={"epsilon": None}), None
                elif target is None and settings.privacy.sigma is None:
                    raise ConfigError(
                        "how private? Give --epsilons, such as --epsilons 1,4, or a settings file with it."
                    )
                cell = "/".join([settings.data.source, "none" if target is None else f"{target:g}", method])
                jobs.append(StudyJob(settings, "compare", cell, settings.data.source, method, target))
    return list({job.id: job for job in jobs}.values())


def describe_request(jobs: Sequence[StudyJob], command: str, against: str) -> dict[str, Any]:
    """The content of compare.json."""
    wanted = [{"id": job.id, "row": job.row, "epsilon": job.epsilon, "seed": job.seed} for job in jobs]
    return {"command": command, "date": record.current_utc_time(), "against": against, "jobs": wanted}


# --- private data: charged --------------------------------------------------------------------------


def compute_total_epsilon(jobs: Sequence[StudyJob]) -> float:
    """The epsilon of all runs of a comparison together, at the first one's delta, by Renyi composition."""
    ready = calibrate_jobs(jobs)
    total = np.sum([compute_trial_rdp([job]) for job in ready], axis=0)
    return float(convert_rdp_to_epsilon(total, jobs[0].settings.privacy.delta))


def check_charges(jobs: Sequence[StudyJob], data: str) -> float:
    """What a comparison on private data costs in all; refuses it without a ledger, and above privacy.budget.

    data: the name of the data set, for the sentence.
    """
    first = jobs[0].settings
    plain = [job.row for job in jobs if not find_rule(job.settings.clip.rule).private]
    if plain:
        raise ConfigError(
            f"{data} is private, and method {plain[0]!r} adds no noise; leave it out, or say data.public = true if "
            "everybody may see the data."
        )
    unsound = [job.row for job in jobs if not find_rule(job.settings.clip.rule).sound]
    if unsound:
        raise ConfigError(
            f"{data} is private, and the epsilon of method {unsound[0]!r} does not hold; leave it out, or say "
            "data.public = true if everybody may see the data."
        )
    if not first.run.ledger:
        raise ConfigError(
            f"{data} is private, and a comparison trains on it {len(jobs)} times; give --ledger FILE, which every run "
            "is charged to, or say data.public = true if everybody may see the data."
        )
    total = compute_total_epsilon(jobs)
    budget = first.privacy.budget
    cost = f"these {len(jobs)} runs cost epsilon = {format_epsilon(total)} together"
    if budget is None:
        raise BudgetError(
            f"{cost}; allow that much for each party with --set privacy.budget={format_epsilon(total)}, or compare "
            "fewer methods, epsilons or seeds. Nothing was spent."
        )
    if total > budget:
        raise BudgetError(
            f"{cost}, more than privacy.budget = {format_epsilon(budget)}; compare fewer methods, epsilons "
            "or seeds. Nothing was spent."
        )
    return total


def run_charged_jobs(
    jobs: Sequence[StudyJob], out: Path, say: Callable[[str], None], on_done: Callable[[str], None]
) -> None:
    """Run the jobs one after the other (`iterate_charged_jobs`), and store the record of each."""
    machine = describe_machine()
    with ShardWriter(out, "runs-charged") as writer:
        for job, outcome in iterate_charged_jobs(jobs, out, say):
            writer.add(make_job_record(job, outcome, {**machine, "backend": "charged"}))
            on_done(job.id)


def iterate_charged_jobs(
    jobs: Sequence[StudyJob], out: Path, say: Callable[[str], None]
) -> Iterator[tuple[StudyJob, JobOutcome]]:
    """Each job and its outcome, run in out/runs/..., charged to the ledger of its settings.

    A run that stopped goes on where it was; one that is finished is read, not repeated.
    """
    for job in jobs:
        folder = out / "runs" / f"{job.row}-{job.epsilon:g}-seed-{job.seed}-{job.id[:6]}"
        say(f"{job.cell} seed {job.seed}")
        yield job, _outcome_of(_run_or_resume(job, folder), folder)


def _run_or_resume(job: StudyJob, folder: Path) -> Mapping[str, Any]:
    """summary.json of the job's run."""
    from fulcrum import runs as api

    if (folder / "summary.json").is_file():
        return record.load_summary(folder)
    if (folder / "run.json").is_file():
        return api.resume(folder).summary
    return api.execute(api.prepare(job.settings), folder).summary


def _outcome_of(summary: Mapping[str, Any], folder: Path) -> JobOutcome:
    score = get_record_score(summary)
    if summary.get("status", "finished") != "finished":  # fewer rounds than the others: not to be ranked beside them
        raise BudgetError(
            f"{folder} ended after {summary.get('rounds')} rounds ({summary['status']}), so it cannot be compared with "
            "whole runs; raise privacy.budget above what the ledger has already spent, or use a new ledger."
        )
    if score.name not in summary["metrics"]:
        raise ConfigError(
            f"{folder} has no {score.name}: there is nothing to compare by; add a test set, or hold records out with "
            "data.validation and privacy.evaluation_epsilon."
        )
    lines = record.load_metrics(folder)
    curve = [(line["round"], float(line["metrics"][score.name])) for line in lines if line["metrics"]]
    norms = [(line["round"], float(line["C"])) for line in lines]
    return JobOutcome(
        summary["metrics"], score, thin_curve(norms), thin_curve(curve), summary["seconds"], summary["parameters"]
    )


# --- the ranking ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedCell:
    """A method at an epsilon. values: score by seed. lead: by how much it is better than `against`, over common seeds;
    None for `against` itself and where there is no common seed. wanted: runs that it will have."""

    dataset: str
    epsilon: float | None
    row: str
    values: Mapping[int, float]
    score: StudyScore
    sound: bool = True
    unit: str = ""
    wanted: int = 0
    lead: MeanInterval | None = None
    records: Sequence[RunRecord] = field(default=(), repr=False, compare=False)

    @property
    def stats(self) -> MeanInterval:
        """Mean and 95% interval over the seeds."""
        return compute_mean_interval([self.values[seed] for seed in sorted(self.values)])

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the lead leaves out zero."""
        return self.lead is not None and (self.lead.low > 0 or self.lead.high < 0)


def make_compared_cells(
    records: Iterable[RunRecord], against: str = "", wanted: Mapping[tuple[str, float | None], int] | None = None
) -> list[ComparedCell]:
    """The cells of finished runs: data sets and epsilons in order, within them the best method first.

    against: the method with which the others are compared, seed by seed. wanted: runs per (method, epsilon).
    """
    groups: dict[tuple[str, float | None, str], list[RunRecord]] = {}
    for each in records:
        groups.setdefault((each["dataset"], each["epsilon"], each["row"]), []).append(each)
    cells = [_make_cell(key, own, groups, against, wanted or {}) for key, own in groups.items()]
    return sorted(cells, key=lambda cell: (cell.dataset, _order(cell.epsilon), -_goodness(cell)))


def _make_cell(
    key: tuple[str, float | None, str],
    own: Sequence[RunRecord],
    groups: Mapping[tuple[str, float | None, str], Sequence[RunRecord]],
    against: str,
    wanted: Mapping[tuple[str, float | None], int],
) -> ComparedCell:
    dataset, epsilon, row = key
    score = get_record_score(own[0])
    values = {int(each["seed"]): get_score_value(each) for each in own}
    lead = None
    if against and row != against:
        other = {int(each["seed"]): get_score_value(each) for each in groups.get((dataset, epsilon, against), ())}
        common = sorted(values.keys() & other.keys())
        lead = compute_mean_interval([score.compute_lead(values[seed], other[seed]) for seed in common])
    return ComparedCell(
        dataset=dataset,
        epsilon=epsilon,
        row=row,
        values=values,
        score=score,
        sound=bool(own[0].get("sound", True)),
        unit=str(own[0].get("unit", "")),
        wanted=max(wanted.get((row, epsilon), 0), len(values)),
        lead=lead if lead is not None and lead.n else None,
        records=tuple(own),
    )


def _order(epsilon: float | None) -> float:
    return float("inf") if epsilon is None else epsilon


def _goodness(cell: ComparedCell) -> float:
    return cell.stats.mean if cell.score.higher_is_better else -cell.stats.mean


def iterate_ranking_rows(cells: Sequence[ComparedCell]) -> Iterator[tuple[ComparedCell, int]]:
    """Each cell with its place among those of its data set and epsilon."""
    place, last = 0, None
    for cell in cells:
        place = place + 1 if (cell.dataset, cell.epsilon) == last else 1
        last = (cell.dataset, cell.epsilon)
        yield cell, place
