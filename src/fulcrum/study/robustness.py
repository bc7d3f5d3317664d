"""Does a rule need its C0 and its learning rate tuned? Runs every rule from every start of a grid, and summarises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.settings.presets import METHODS
from fulcrum.study.experiment import find_study_folder, make_run_settings, merge_sections
from fulcrum.study.job import StudyJob
from fulcrum.study.records import StudyScore, get_common_score, get_score_value
from fulcrum.study.search import read_toml_file
from fulcrum.study.store import RunRecord


@dataclass(frozen=True)
class RobustnessGrid:
    """robustness.toml, or another study of that form: starts C0 x learning rates, by rule, data set and epsilon.

    name: that of the file, and of its runs in results/. seeds: of all data sets but those in own_seeds, which have
    their own.
    """

    C0: tuple[float, ...]
    lr: tuple[float, ...]
    default_lr: float
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    rules: tuple[str, ...]
    fixed: str
    default: str
    datasets: tuple[str, ...]
    settings: Mapping[str, Any]
    by_dataset: Mapping[str, Mapping[str, Any]]
    revisions: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    own_seeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    name: str = "robustness"
    methods: Mapping[str, str] = field(default_factory=dict)

    def list_dataset_seeds(self, dataset: str) -> tuple[int, ...]:
        """The seeds that a data set's runs have."""
        return self.own_seeds.get(dataset, self.seeds)


def read_robustness_grid(
    given: Path | None = None,
    datasets: Sequence[str] = (),
    rules: Sequence[str] = (),
    epsilons: Sequence[float] = (),
    seeds: int = 0,
    name: str = "robustness",
) -> RobustnessGrid:
    """The grid as NAME.toml has it, or a part of it (empty: all)."""
    raw = read_toml_file(find_study_folder(given, name) / f"{name}.toml")
    for what, wanted, known in (
        ("dataset", datasets, raw["datasets"]),
        ("method", rules, raw["rules"]),
        ("epsilon", epsilons, raw["epsilons"]),
    ):
        lost = [value for value in wanted if value not in known]
        if lost:
            raise ConfigError(f"{what} {lost[0]!r} is not in the grid; choose from {', '.join(map(str, known))}.")
    if raw["default_lr"] not in raw["lr"]:
        raise ConfigError(f"default_lr = {raw['default_lr']} must be one of the grid's learning rates.")
    chosen = [rule for rule in raw["rules"] if not rules or rule in rules or rule == raw["fixed"]]
    return RobustnessGrid(
        C0=tuple(map(float, raw["C0"])),
        lr=tuple(map(float, raw["lr"])),
        default_lr=float(raw["default_lr"]),
        epsilons=tuple(e for e in map(float, raw["epsilons"]) if not epsilons or e in epsilons),
        seeds=tuple(raw["seeds"])[: seeds or None],
        rules=tuple(rule for rule in chosen if rule in METHODS),
        fixed=raw["fixed"],
        default=raw["default"],
        datasets=tuple(name for name in raw["datasets"] if not datasets or name in datasets),
        settings=raw["settings"],
        by_dataset={name: {n: v for n, v in own.items() if n != "seeds"} for name, own in raw["datasets"].items()},
        revisions=raw.get("revisions", {}),
        unknown=tuple(rule for rule in chosen if rule not in METHODS),
        own_seeds={n: tuple(own["seeds"])[: seeds or None] for n, own in raw["datasets"].items() if "seeds" in own},
        name=name,
        methods=raw.get("methods", {}),
    )


def list_robustness_jobs(grid: RobustnessGrid) -> list[StudyJob]:
    """One job per rule, start, learning rate, epsilon, data set and seed."""
    return [
        make_grid_job(grid, dataset, epsilon, rule, C0, lr, seed)
        for dataset in grid.datasets
        for epsilon in grid.epsilons
        for rule in grid.rules
        for C0 in grid.C0
        for lr in grid.lr
        for seed in grid.list_dataset_seeds(dataset)
    ]


def make_grid_job(
    grid: RobustnessGrid, dataset: str, epsilon: float, rule: str, C0: float, lr: float, seed: int
) -> StudyJob:
    """One run of the grid. rule is the method whose preset is used, unless the grid's `methods` name another one."""
    base, method = merge_sections(grid.settings, grid.by_dataset.get(dataset, {})), grid.methods.get(rule, rule)
    settings = make_run_settings(base, dataset, method, epsilon, {"clip.C0": C0, "train.lr": lr, "run.seed": seed})
    cell = f"{dataset}/{epsilon:g}/{rule}/C0={C0:g},lr={lr:g}"
    return StudyJob(
        settings, grid.name, cell, dataset, rule, epsilon, revision=grid.revisions.get(settings.clip.rule, 0)
    )


# --- what it shows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreMap:
    """Score of one rule over the grid: values[i][j] at C0[i] and lr[j], the mean over seeds; NaN: not run.

    Values are from `StudyScore.to_table_scale`: fractions in %.
    """

    dataset: str
    epsilon: float
    rule: str
    values: tuple[tuple[float, ...], ...]
    score: StudyScore = field(default_factory=StudyScore)

    @property
    def flat(self) -> list[float]:
        """All cells."""
        return [value for row in self.values for value in row]

    @property
    def is_complete(self) -> bool:
        """Whether every cell has been run."""
        return not any(math.isnan(value) for value in self.flat)


def make_score_maps(grid: RobustnessGrid, done: Mapping[str, RunRecord]) -> list[ScoreMap]:
    """The maps of all rules with at least one result."""
    scores = {
        dataset: get_common_score(
            done[job.id] for job in list_robustness_jobs(grid) if job.dataset == dataset and job.id in done
        )
        for dataset in grid.datasets
    }

    def mean(dataset: str, epsilon: float, rule: str, C0: float, lr: float) -> float:
        ids = [
            make_grid_job(grid, dataset, epsilon, rule, C0, lr, seed).id for seed in grid.list_dataset_seeds(dataset)
        ]
        found = [scores[dataset].to_table_scale(get_score_value(done[i])) for i in ids if i in done]
        return sum(found) / len(found) if len(found) == len(ids) else math.nan

    made = [
        ScoreMap(
            dataset,
            epsilon,
            rule,
            tuple(tuple(mean(dataset, epsilon, rule, C0, lr) for lr in grid.lr) for C0 in grid.C0),
            scores[dataset],
        )
        for dataset in grid.datasets
        for epsilon in grid.epsilons
        for rule in grid.rules
    ]
    return [one for one in made if not all(map(math.isnan, one.flat))]


@dataclass(frozen=True)
class RobustnessFinding:
    """One rule at one data set and epsilon, in points of the score.

    best_fixed: the best fixed (C, learning rate) of the grid. The gaps are best_fixed minus the rule's
    worst cell: over every C0 at the default learning rate, and over the whole grid.
    """

    dataset: str
    epsilon: float
    rule: str
    worst_gap_default_lr: float
    worst_gap_grid: float
    best_fixed: float
    worst: float
    mean: float
    best: float
    score: StudyScore = field(default_factory=StudyScore)

    def to_json(self) -> dict[str, Any]:
        """The entry of summary.json."""
        names = ("dataset", "epsilon", "rule", "worst_gap_default_lr", "worst_gap_grid", "best_fixed")
        return {n: self.score.rounded(v) if isinstance(v := getattr(self, n), float) else v for n in names}


def summarise_maps(grid: RobustnessGrid, found: Iterable[ScoreMap]) -> list[RobustnessFinding]:
    """Findings from the complete maps; a rule is left out if its map or the fixed rule's is incomplete."""
    complete = [one for one in found if one.is_complete]
    fixed = {(one.dataset, one.epsilon): one.score.best(one.flat) for one in complete if one.rule == grid.fixed}
    at = grid.lr.index(grid.default_lr)
    result = []
    for one in complete:
        if (one.dataset, one.epsilon) not in fixed:
            continue
        best, score = fixed[one.dataset, one.epsilon], one.score
        result.append(
            RobustnessFinding(
                dataset=one.dataset,
                epsilon=one.epsilon,
                rule=one.rule,
                worst_gap_default_lr=score.compute_lead(best, score.worst(row[at] for row in one.values)),
                worst_gap_grid=score.compute_lead(best, score.worst(one.flat)),
                best_fixed=best,
                worst=score.worst(one.flat),
                mean=sum(one.flat) / len(one.flat),
                best=score.best(one.flat),
                score=score,
            )
        )
    return result
