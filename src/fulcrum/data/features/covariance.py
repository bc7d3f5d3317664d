"""Powers of a covariance matrix, to mix features by."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-4
"""Variances below this part of the largest count as that much, so that M stays well conditioned."""


def compute_whitening_matrix(covariance: Tensor, power: float = 0.5, floor: float = VARIANCE_FLOOR) -> Tensor:
    """The symmetric matrix s cov^-power [n, n] as float32, with s such that the sum of all variances stays.

    0.5 makes all directions vary alike, less goes part of the way. Smaller variances than `floor` of the largest count
    as that.
    """
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(floor * float(values.max()))
    found = vectors @ torch.diag((values / values.mean()) ** -power) @ vectors.T
    scale = (torch.trace(covariance) / torch.trace(found @ covariance @ found)).sqrt()
    found = found * scale
    even: Tensor = (found + found.T) / 2
    return even.float()
