"""Attacks on simulated runs: what a curious server, or whoever has the final model, learns of single records.

membership.py      membership inference from settings to a table
pool.py            shadow federations: who is a member where
release_scores.py  the server's view: inner products of records' gradients with one party's releases
signals.py         the final model's view: confidence
shadows.py         trains the federations in stacks; cells.py  their stored scores; worker.py  where little is installed
calibrated.py      loss threshold, LiRA, RMIA
roc.py             ROC, AUC, TPR with intervals; limits.py  what (epsilon, delta) allows
"""

from __future__ import annotations

from fulcrum.analysis.attacks.cells import AttackCell, PoolScores, read_scores, write_scores
from fulcrum.analysis.attacks.limits import RocLimit, limit_by_accountant, limit_by_pair
from fulcrum.analysis.attacks.membership import (
    EPSILONS,
    AttackResult,
    CellReport,
    attack_membership,
    attack_pool,
    prepare_cell,
)
from fulcrum.analysis.attacks.pool import PoolSize
from fulcrum.analysis.attacks.roc import AttackRoc, Estimate, measure_roc

__all__ = [
    "EPSILONS",
    "AttackCell",
    "AttackResult",
    "AttackRoc",
    "CellReport",
    "Estimate",
    "PoolScores",
    "PoolSize",
    "RocLimit",
    "attack_membership",
    "attack_pool",
    "limit_by_accountant",
    "limit_by_pair",
    "measure_roc",
    "prepare_cell",
    "read_scores",
    "write_scores",
]
