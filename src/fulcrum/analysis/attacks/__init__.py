"""Attacks on simulated runs: what a curious server, or whoever has the final model, learns of single records.

membership.py      membership inference from settings to a table
pool.py            shadow federations: who is a member where
release_scores.py  the server's view: inner products of records' gradients with one party's releases
signals.py         the final model's view: confidence
shadows.py         trains the federations in stacks; cells.py  their stored scores; worker.py  where little is installed
calibrated.py      loss threshold, LiRA, RMIA
roc.py             ROC, AUC, TPR with intervals; limits.py  what (epsilon, delta) allows
pages.py           tables, curves and files of membership attacks

inversion.py       gradient inversion from settings to a table; server_view.py  a first round's release
gradient_matching.py  dlg, cosine; first_layer.py  ratio, imprint; tokens.py  tokens from embeddings
image_quality.py   PSNR, SSIM; pictures.py  reconstructions beside the originals
"""

from __future__ import annotations

from fulcrum.analysis.attacks.cells import AttackCell, PoolScores, read_scores, write_scores
from fulcrum.analysis.attacks.inversion import (
    INVERSIONS,
    InversionRow,
    InversionSize,
    TokensRow,
    attack_inversion,
    attack_tokens,
)
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
    "INVERSIONS",
    "AttackCell",
    "AttackResult",
    "AttackRoc",
    "CellReport",
    "Estimate",
    "InversionRow",
    "InversionSize",
    "PoolScores",
    "PoolSize",
    "RocLimit",
    "TokensRow",
    "attack_inversion",
    "attack_membership",
    "attack_pool",
    "attack_tokens",
    "limit_by_accountant",
    "limit_by_pair",
    "measure_roc",
    "prepare_cell",
    "read_scores",
    "write_scores",
]
