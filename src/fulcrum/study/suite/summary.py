"""What the suite shows: the best fixed cell, chosen and scored on different seeds, and how far the default is from it.

The seeds are two halves. The cell that is best on one half is scored on the other, and the other way round, so that
every seed scores a cell that it did not choose: a maximum over noisy cells is not taken for a score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulcrum.study.records import StudyScore, get_record_score, get_score_value
from fulcrum.study.stats import MeanInterval, compute_mean_interval
from fulcrum.study.store import RunRecord
from fulcrum.study.suite.jobs import Start, list_paid_jobs, list_starts, make_suite_job
from fulcrum.study.suite.paid import PAID_TUNING
from fulcrum.study.suite.scenarios import DEFAULT_START, Scenario, Suite

Scores = dict[int, float]
"""Score by seed, in percent."""


@dataclass(frozen=True)
class MethodScores:
    """A rival in one scenario from the default start, in percent: means over its seeds. regret: points below the best
    fixed cell on the same seeds."""

    method: str
    seeds: int
    score: float
    regret: float


@dataclass(frozen=True)
class ScenarioFinding:
    """One scenario, in percent. interval: 95% half-width of best_fixed - default over the seeds."""

    scenario: Scenario
    set_aside: bool
    seeds: int
    best_fixed: float
    default: float
    worst_start: float
    interval: float
    cells: tuple[Start, ...]
    rivals: tuple[MethodScores, ...] = ()
    grid: Mapping[str, float] = field(default_factory=dict)

    @property
    def regret(self) -> float:
        """Points of the default below the best fixed cell."""
        return self.best_fixed - self.default

    @property
    def start_regret(self) -> float:
        """Points of the worst start below the best fixed cell."""
        return self.best_fixed - min(self.worst_start, self.default)

    def to_json(self) -> dict[str, Any]:
        """The entry of summary.json."""
        numbers = {name: round(getattr(self, name), 3) for name in ("best_fixed", "default", "worst_start", "interval")}
        return {"scenario": self.scenario.name, "set_aside": self.set_aside, "seeds": self.seeds, **numbers}


def collect_scores(
    suite: Suite, scenario: Scenario, method: str, start: Start, done: Mapping[str, RunRecord]
) -> Scores | None:
    """Scores by seed; None where a run is missing. A run that ended without a number scores 0."""
    found: Scores = {}
    for seed in suite.list_method_seeds(scenario, method):
        record = done.get(make_suite_job(suite, scenario, method, start, seed).id)
        if record is None:
            return None
        found[seed] = _read_score(record)
    return found


def _read_score(record: RunRecord) -> float:
    """The score of a run in percent, 0 where it ended without a number."""
    score: StudyScore = get_record_score(record)
    value = score.to_table_scale(get_score_value(record))
    return value if math.isfinite(value) else 0.0


def _collect_paid(suite: Suite, scenario: Scenario, done: Mapping[str, RunRecord]) -> Scores | None:
    """The best trial of each seed, 0 where a seed has none."""
    found: Scores = {}
    for seed in suite.list_method_seeds(scenario, PAID_TUNING):
        records = [done.get(job.id) for job in list_paid_jobs(suite, scenario, seed)]
        known = [_read_score(record) for record in records if record is not None]
        if len(known) < len(records):
            return None
        found[seed] = max(known, default=0.0)
    return found


def score_best_cell(grid: Mapping[Start, Scores]) -> tuple[Scores, tuple[Start, Start]]:
    """Score by seed of the cell that is best on the other half of the seeds, and the two cells."""
    seeds = sorted(next(iter(grid.values())))
    halves = (seeds[::2], seeds[1::2] or seeds)
    cells = tuple(max(grid, key=lambda cell: _mean(grid[cell], half)) for half in halves)
    scored = {seed: grid[cells[1]][seed] for seed in halves[0]} | {seed: grid[cells[0]][seed] for seed in halves[1]}
    return scored, (cells[0], cells[1])


def _mean(scores: Scores, seeds: Sequence[int]) -> float:
    return sum(scores[seed] for seed in seeds) / len(seeds)


def find_scenario(suite: Suite, scenario: Scenario, done: Mapping[str, RunRecord]) -> ScenarioFinding | None:
    """The finding of a scenario; None until its grid, default and starts are finished."""
    grid: dict[Start, Scores] = {}
    for start in list_starts(suite, suite.fixed):
        scores = collect_scores(suite, scenario, suite.fixed, start, done)
        if scores is None:
            return None
        grid[start] = scores
    starts = [
        collect_scores(suite, scenario, suite.default, start, done) for start in list_starts(suite, suite.default)
    ]
    known = [scores for scores in starts if scores is not None]
    if len(known) < len(starts):
        return None
    default, means = known[0], [_mean(scores, sorted(scores)) for scores in known]
    fixed, cells = score_best_cell(grid)
    gap: MeanInterval = compute_mean_interval([fixed[seed] - default[seed] for seed in sorted(fixed)])
    rivals = [_compare_rival(suite, scenario, name, fixed, done) for name in suite.rivals]
    return ScenarioFinding(
        scenario=scenario,
        set_aside=scenario.name in suite.set_aside,
        seeds=len(fixed),
        best_fixed=sum(fixed.values()) / len(fixed),
        default=means[0],
        worst_start=min(means[1:], default=means[0]),
        interval=gap.half,
        cells=cells,
        rivals=tuple(rival for rival in rivals if rival is not None),
        grid={f"C={C:g},lr={lr:g}": round(_mean(own, sorted(own)), 3) for (C, lr), own in grid.items()},
    )


def _compare_rival(
    suite: Suite, scenario: Scenario, method: str, fixed: Scores, done: Mapping[str, RunRecord]
) -> MethodScores | None:
    """A rival beside the best fixed cell on its own seeds; None where runs are missing."""
    scores = (
        _collect_paid(suite, scenario, done)
        if method == PAID_TUNING
        else collect_scores(suite, scenario, method, DEFAULT_START, done)
    )
    if not scores:
        return None
    seeds = sorted(scores)
    return MethodScores(method, len(seeds), _mean(scores, seeds), _mean(fixed, seeds) - _mean(scores, seeds))


def find_all(suite: Suite, done: Mapping[str, RunRecord]) -> list[ScenarioFinding]:
    """The findings of all finished scenarios."""
    found = (find_scenario(suite, scenario, done) for scenario in suite.scenarios)
    return [finding for finding in found if finding is not None]


@dataclass(frozen=True)
class Verdict:
    """Of a half, beyond the interval: how many are within 1.5 and 3 points, and from any start within 5."""

    count: int
    within_1_5: int
    within_3: int
    starts_within_5: int
    mean_regret: float
    largest_regret: float


def judge(findings: Sequence[ScenarioFinding]) -> Verdict:
    """The verdict over some findings; a regret counts as beyond a limit by more than its interval."""

    def beyond(regret: float, finding: ScenarioFinding) -> float:
        return regret - (finding.interval if math.isfinite(finding.interval) else 0.0)

    regrets = [finding.regret for finding in findings]
    return Verdict(
        count=len(findings),
        within_1_5=sum(beyond(f.regret, f) <= 1.5 for f in findings),
        within_3=sum(beyond(f.regret, f) <= 3.0 for f in findings),
        starts_within_5=sum(beyond(f.start_regret, f) <= 5.0 for f in findings),
        mean_regret=sum(regrets) / len(regrets) if regrets else math.nan,
        largest_regret=max(regrets, default=math.nan),
    )
