"""The runs of the suite: each scenario's grid, its default, its other starts, its rivals."""

from __future__ import annotations

from functools import lru_cache

from fulcrum.settings.schema import Settings
from fulcrum.study.experiment import make_run_settings
from fulcrum.study.job import StudyJob
from fulcrum.study.suite import models
from fulcrum.study.suite.paid import PAID_TUNING, calibrate_trial, draw_trials
from fulcrum.study.suite.scenarios import DEFAULT_START, Scenario, Suite
from fulcrum.study.suite.sources import get_source_name

Start = tuple[float, float]
"""(C0, learning rate)"""


def list_suite_jobs(suite: Suite) -> list[StudyJob]:
    """All runs of the suite, scenario by scenario."""
    return [job for scenario in suite.scenarios for job in list_scenario_jobs(suite, scenario)]


def list_scenario_jobs(suite: Suite, scenario: Scenario) -> list[StudyJob]:
    """The grid of the fixed rule, the default from all starts, the rivals from the default start."""
    methods = [name for name in (suite.fixed, suite.default, *suite.rivals) if name != PAID_TUNING]
    jobs = [
        make_suite_job(suite, scenario, method, start, seed)
        for method in methods
        for start in list_starts(suite, method)
        for seed in suite.list_method_seeds(scenario, method)
    ]
    if PAID_TUNING in suite.rivals:
        seeds = suite.list_method_seeds(scenario, PAID_TUNING)
        jobs += [job for seed in seeds for job in list_paid_jobs(suite, scenario, seed)]
    return jobs


def list_paid_jobs(suite: Suite, scenario: Scenario, seed: int) -> list[StudyJob]:
    """The trials of `PAID_TUNING` with one seed, each cell once. Their noise is known: no calibration is left to do."""
    delta = make_scenario_settings(scenario, suite.fixed).privacy.delta
    sigma = calibrate_trial(scenario.rate, scenario.rounds * scenario.steps, scenario.epsilon, delta)
    jobs = []
    for C0, lr in dict.fromkeys(draw_trials(suite, scenario, seed)):
        settings = make_scenario_settings(scenario, suite.fixed, (C0, lr), seed)
        settings = settings.replace(privacy={"epsilon": None, "sigma": sigma})
        cell = f"{scenario.name}/{PAID_TUNING}/C0={C0:g},lr={lr:g}"
        revision = suite.revisions.get(settings.clip.rule, 0)
        jobs.append(StudyJob(settings, suite.name, cell, scenario.name, PAID_TUNING, None, revision=revision))
    return jobs


def list_starts(suite: Suite, method: str) -> list[Start]:
    """The starts of a method: the grid for the fixed rule, all starts for the default, the first one for rivals."""
    if method == suite.fixed:
        return [(C0, lr) for C0 in suite.C0 for lr in suite.lr]
    return [DEFAULT_START, *(suite.starts if method == suite.default else ())]


def make_suite_job(suite: Suite, scenario: Scenario, method: str, start: Start, seed: int) -> StudyJob:
    """One run."""
    settings = make_scenario_settings(scenario, method, start, seed)
    cell = f"{scenario.name}/{method}/C0={start[0]:g},lr={start[1]:g}"
    revision = suite.revisions.get(settings.clip.rule, 0)
    return StudyJob(settings, suite.name, cell, scenario.name, method, scenario.epsilon, revision=revision)


def make_scenario_settings(scenario: Scenario, method: str, start: Start = DEFAULT_START, seed: int = 0) -> Settings:
    """The settings of a run in a scenario."""
    base = _parse_scenario(scenario, method)
    return base.replace(clip={"C0": start[0]}, train={"lr": start[1]}, run={"seed": seed})


@lru_cache(maxsize=1024)
def _parse_scenario(scenario: Scenario, method: str) -> Settings:
    """The settings of a scenario from the default start, checked once: a suite has thousands of runs."""
    own = getattr(models, scenario.model, None)
    base = {
        "data": {"parties": scenario.parties, "partition": scenario.partition, "alpha": scenario.alpha},
        "model": {
            "name": f"{models.__name__}:{scenario.model}" if own else scenario.model,
            "activation": scenario.activation,
            "hidden": scenario.hidden,
        },
        "train": {
            "rounds": scenario.rounds,
            "steps": scenario.steps,
            "rate": scenario.rate,
            "participation": scenario.participation,
            "server": scenario.server,
        },
    }
    words = {"clip.C0": DEFAULT_START[0], "train.lr": DEFAULT_START[1], "run.evaluate_every": scenario.rounds}
    return make_run_settings(base, get_source_name(scenario.data), method, scenario.epsilon, words)
