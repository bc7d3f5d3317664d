"""Powers of a covariance matrix, to whiten features."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-4
"""Minimum variance relative to the largest, so that M is well conditioned."""


def compute_whitening_matrix(covariance: Tensor, power: float = 0.5, floor: float = VARIANCE_FLOOR) -> Tensor:
    """The symmetric matrix s cov^-power [n, n] as float32, with s such that the sum of all variances is unchanged.

    power 0.5 gives all directions equal variance, a smaller power goes part of the way. floor: minimum variance
    relative to the largest.
    """
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(floor * float(values.max()))
    found = vectors @ torch.diag((values / values.mean()) ** -power) @ vectors.T
    scale = (torch.trace(covariance) / torch.trace(found @ covariance @ found)).sqrt()
    found = found * scale
    even: Tensor = (found + found.T) / 2
    return even.float()
