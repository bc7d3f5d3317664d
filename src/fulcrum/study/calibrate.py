"""Sigma for every job, computed once for all jobs that share it. Only this step needs the accountant."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from fulcrum.clipping import find_rule
from fulcrum.errors import BudgetError
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.plan import Plan, make_plan
from fulcrum.settings.derived import COST_FREE_SETTINGS
from fulcrum.settings.schema import Settings
from fulcrum.study.job import StudyJob


def calibrate_jobs(jobs: Iterable[StudyJob]) -> list[StudyJob]:
    """The same jobs with privacy.sigma set and the epsilon that it costs; the target stays in the job's tags."""
    known: dict[str, tuple[float, float]] = {}
    done = []
    for job in jobs:
        if job.settings.privacy.epsilon is None:
            done.append(job)
            continue
        key = make_calibration_key(job.settings)
        if key not in known:
            known[key] = calibrate_noise(job.settings)
        sigma, cost = known[key]
        settings = job.settings.replace(privacy={"epsilon": None, "sigma": sigma})
        done.append(dataclasses.replace(job, settings=settings, accounted=cost))
    return done


def make_calibration_key(settings: Settings) -> str:
    """Equal for settings that need the same sigma."""
    parts = {
        name: {
            k: v
            for k, v in dataclasses.asdict(getattr(settings, name)).items()
            if k not in COST_FREE_SETTINGS.get(name, ())
        }
        for name in ("train", "clip", "privacy")
    }
    return json.dumps(parts, sort_keys=True)


def plan_without_data(settings: Settings) -> Plan:
    """A plan without the data: the cost of a release does not depend on a party's number of examples."""
    parties = settings.data.parties
    return make_plan(settings, parties, [1000] * parties, find_rule(settings.clip.rule))


def calibrate_noise(settings: Settings) -> tuple[float, float]:
    """(sigma that meets privacy.epsilon, the epsilon it costs)."""
    plan = plan_without_data(settings)
    sigma = plan.groups[0].sigma
    with_sigma = plan_without_data(settings.replace(privacy={"epsilon": None, "sigma": sigma}))
    cost = with_sigma.compute_epsilon_at(settings.train.rounds, 0)
    target = settings.privacy.epsilon
    if target is not None and cost > target * (1 + 1e-9):
        raise BudgetError(
            f"sigma = {sigma:g} costs epsilon = {format_epsilon(cost, 6)}, above the target "
            f"{format_epsilon(target, 6)}: nothing is run."
        )
    return sigma, cost
