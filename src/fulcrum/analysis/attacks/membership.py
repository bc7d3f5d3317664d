"""Membership inference, from settings to a table: prepare cells, train their pools, attack, compare with the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.analysis.attacks.calibrated import ATTACKS, RELEASE_ATTACKS
from fulcrum.analysis.attacks.cells import MODEL, AttackCell, PoolScores, name_epsilon
from fulcrum.analysis.attacks.limits import RocLimit, limit_by_accountant, limit_by_pair
from fulcrum.analysis.attacks.pool import PoolSize, take_pool_records
from fulcrum.analysis.attacks.release_scores import STATISTICS
from fulcrum.analysis.attacks.roc import DRAWS, AttackRoc, measure_roc
from fulcrum.analysis.attacks.shadows import RoundFn, run_cell
from fulcrum.clipping import find_rule
from fulcrum.data import Dataset
from fulcrum.errors import ConfigError
from fulcrum.runs import prepare
from fulcrum.settings.schema import Settings
from fulcrum.study.calibrate import calibrate_noise, plan_without_data
from fulcrum.study.run_job import DatasetCache

EPSILONS: tuple[float | None, ...] = (None, 1.64, 3.61, 6.38)
"""Cells by default: no privacy, and the paper's three budgets."""
PRIVATE_STATISTIC, PLAIN_STATISTIC = "centred", "centred-cosine"
JOINT_STATISTIC = "joint"
"""The statistic of releases that is reported, fixed beforehand: with noise the products, without it their cosines."""


def load_attack_data(settings: Settings, folder: str = "") -> Dataset:
    """The records that the settings name; DataError where they are private."""
    return DatasetCache(folder).get(settings)


def prepare_cell(
    settings: Settings, epsilon: float | None, size: PoolSize, dataset: Dataset, plain: Mapping[str, Any] | None = None
) -> AttackCell:
    """A cell ready to run anywhere: rehearsed where the settings ask for it, and its noise calibrated.

    epsilon None: the same federation without clipping and noise. plain: values of [train] that it has then, such as
    {"lr": 0.2}: without clipping another learning rate may be right.
    """
    seed = settings.run.seed
    name = f"{Path(settings.data.source).stem}-{name_epsilon(epsilon)}"
    if epsilon is None:
        settings = settings.replace(
            clip={"rule": "none", "rehearse": False},
            privacy={"epsilon": None, "sigma": None},
            train=dict(plain or {}),
        )
        return AttackCell(name, replace(settings, method="none"), size, None, None, seed)
    settings = settings.replace(privacy={"epsilon": epsilon, "sigma": None})
    if not find_rule(settings.clip.rule).private:
        raise ConfigError(
            f"clip.rule = {settings.clip.rule!r} is not private, so epsilon = {name_epsilon(epsilon)} says nothing."
        )
    if settings.clip.rehearse:
        found = prepare(settings, take_pool_records(dataset, settings, size, seed)).settings
        settings = replace(found, data=settings.data).replace(clip={"rehearse": False})
    sigma, cost = calibrate_noise(settings)
    return AttackCell(name, settings.replace(privacy={"epsilon": None, "sigma": sigma}), size, epsilon, cost, seed)


# --- the attacks on a finished pool ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttackResult:
    """One attack on one view. roc: on candidates; control: the same attack on records that were never members.

    violations: where it passes what the accountant allows; empty without privacy.
    """

    view: str
    attack: str
    roc: AttackRoc
    control: AttackRoc
    violations: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "view": self.view,
            "attack": self.attack,
            **self.roc.to_json(),
            "control_auc": self.control.auc.to_json(),
            "violations": list(self.violations),
        }


@dataclass(frozen=True, eq=False)
class CellReport:
    """All attacks on a cell. limit: what the accountant's curve allows; pair: what its (epsilon, delta) alone does."""

    cell: AttackCell
    results: tuple[AttackResult, ...]
    limit: RocLimit | None
    pair: RocLimit | None
    shadows: int
    records: int
    controls: int
    metrics: Mapping[str, float]
    facts: Mapping[str, Any]

    def best(self, view: str) -> AttackResult:
        """The attack with the largest AUC on a view, as "model" or "releases"; of AUCs equal in the file the first."""
        return max((r for r in self.results if r.view == view), key=lambda r: r.roc.auc.to_json()["value"])

    @property
    def violations(self) -> tuple[str, ...]:
        """All points at which an attack passed the bound, in words."""
        return tuple(f"{r.view}, {r.attack}: {words}" for r in self.results for words in r.violations)

    def to_json(self) -> dict[str, Any]:
        """Plain values: a cell of results/attacks/*.json."""
        settings = self.cell.settings
        return {
            "cell": self.cell.name,
            "epsilon": self.cell.epsilon,
            "accounted": self.cell.accounted,
            "delta": settings.privacy.delta if self.cell.epsilon is not None else None,
            "sigma": settings.privacy.sigma,
            "shadows": self.shadows,
            "records": self.records,
            "controls": self.controls,
            "metrics": {name: float(f"{value:.4g}") for name, value in self.metrics.items()},
            "attacks": [result.to_json() for result in self.results],
            "limit": self.limit.to_json() if self.limit else None,
            "pair_limit": self.pair.to_json() if self.pair else None,
            "settings": self.cell.to_json()["settings"],
            "size": self.cell.to_json()["size"],
            "facts": dict(self.facts),
        }


def attack_pool(
    scores: PoolScores, epsilon: float | None = None, draws: int = DRAWS, every_statistic: bool = False
) -> CellReport:
    """Attack a finished pool. epsilon: of the claim to compare with; None: the cell's own.

    every_statistic: also the statistics of releases that are not the one fixed beforehand.
    """
    cell, control = scores.cell, scores.control
    claimed = epsilon if epsilon is not None else cell.epsilon
    limit, pair = (None, None) if claimed is None else _find_limits(cell, claimed)
    chosen = PLAIN_STATISTIC if cell.epsilon is None else PRIVATE_STATISTIC
    views = [(MODEL, MODEL), ("releases", chosen), ("releases-joint", JOINT_STATISTIC)]
    others = [name for name in STATISTICS if name in scores.scores and name not in (chosen, JOINT_STATISTIC)]
    views += [(f"releases ({name})", name) for name in others if every_statistic]
    results = []
    for view, name in views:
        values = scores.scores[name].astype(np.float64)
        logits = name == MODEL and scores.facts.get("confidence", "logit") == "logit"
        for attack, calibrate in (ATTACKS if logits else RELEASE_ATTACKS).items():
            found = calibrate(values, scores.coins, control)
            roc = measure_roc(found[:, ~control], scores.coins[:, ~control], draws=draws)
            twins = measure_roc(found[:, control], scores.coins[:, control], draws=draws)
            passed = tuple(limit.find_violations(roc)) if limit else ()
            results.append(AttackResult(view, attack, roc, twins, passed))
    metrics = {name: float(np.nanmean(values)) for name, values in scores.metrics.items()}
    return CellReport(
        cell,
        tuple(results),
        limit,
        pair,
        scores.shadows,
        int((~control).sum()),
        int(control.sum()),
        metrics,
        scores.facts,
    )


def _find_limits(cell: AttackCell, epsilon: float) -> tuple[RocLimit, RocLimit]:
    """By the accountant's curve of what was released, or of one claimed epsilon; and by one pair alone."""
    delta = cell.settings.privacy.delta
    pair = limit_by_pair(epsilon, delta)
    if cell.epsilon is None or cell.settings.privacy.sigma is None:
        return pair, pair
    plan = plan_without_data(cell.settings)
    return limit_by_accountant(plan.groups[0].worst(plan.rounds)), pair


# --- all of it ------------------------------------------------------------------------------------


def attack_membership(
    settings: Settings,
    epsilons: Sequence[float | None] = EPSILONS,
    size: PoolSize | None = None,
    *,
    plain: Mapping[str, Any] | None = None,
    out: Path | None = None,
    stack: int = 64,
    draws: int = DRAWS,
    on_cell: Any = None,
    every_statistic: bool = False,
) -> list[CellReport]:
    """Train a pool of shadow federations per epsilon (None: no privacy) and attack it.

        from fulcrum import attacks
        for report in attacks.attack_membership(settings, (None, 1.64), attacks.PoolSize(shadows=16)):
            print(report.cell.name, report.best("releases").roc.auc.value)

    settings: of a run on public data; parties, model, rounds and rate are theirs. out: a folder that keeps each pool's
    scores, and from which the same call goes on. on_cell: called with the cell's name, and returns a function of
    (rounds done, rounds) or None.
    """
    size = size or PoolSize()
    dataset = load_attack_data(settings)
    cells = [prepare_cell(settings, epsilon, size, dataset, plain) for epsilon in epsilons]
    reports = []
    for cell in cells:
        tell: RoundFn | None = on_cell(cell.name) if on_cell else None
        path = None if out is None else out / f"{cell.name}.npz"
        scores = run_cell(cell, dataset, path, stack, settings.run.device, tell)
        assert scores is not None
        reports.append(attack_pool(scores, draws=draws, every_statistic=every_statistic))
    return reports


__all__ = ["AttackResult", "CellReport", "attack_membership", "attack_pool", "prepare_cell"]
