"""What (epsilon, delta) allows an attacker: a bound on the ROC curve of every membership attack.

    TPR <= e^epsilon FPR + delta    and    TPR <= 1 - e^-epsilon (1 - delta - FPR)

for one pair (epsilon, delta); and, tighter, for all pairs of the accountant's curve at once. The relation is add or
remove: the record is in the data or is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fulcrum.analysis.attacks.roc import RATES, ROC_GRID, AttackRoc
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Event

FloatArray = npt.NDArray[np.float64]
DELTAS: tuple[float, ...] = tuple(
    float(x) for x in np.concatenate([np.logspace(-9, -1, 33), np.arange(0.15, 1.0, 0.05)])
)
"""Where the accountant's curve is read."""
ERRORS_ABOVE = 4.0
"""Standard errors by which a measured rate must pass the bound to count as a violation."""


@dataclass(frozen=True)
class RocLimit:
    """A bound on ROC curves, from pairs (epsilon, delta) that all hold."""

    pairs: tuple[tuple[float, float], ...]

    def tpr(self, fpr: FloatArray) -> FloatArray:
        """The most that the true-positive rate can be at each false-positive rate."""
        found = np.ones_like(fpr)
        for epsilon, delta in self.pairs:
            if np.isfinite(epsilon):
                found = np.minimum(found, np.exp(min(epsilon, 700.0)) * fpr + delta)
                found = np.minimum(found, 1 - np.exp(-epsilon) * (1 - delta - fpr))
        return found.clip(0.0, 1.0)

    @property
    def auc(self) -> float:
        """The most that the area under the curve can be."""
        fpr = np.linspace(0, 1, 20001)
        tpr = self.tpr(fpr)
        return float(np.sum(np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2))

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "auc": float(f"{self.auc:.4g}"),
            "tpr": {
                f"{rate:g}": float(f"{value:.4g}") for rate, value in zip(RATES, self.tpr(np.array(RATES)), strict=True)
            },
            "curve": [float(f"{value:.4g}") for value in self.tpr(ROC_GRID)],
        }

    def find_violations(self, roc: AttackRoc) -> list[str]:
        """Where a measured curve lies above the bound by more than `ERRORS_ABOVE` standard errors; empty: nowhere."""
        found = []
        if roc.auc.value - ERRORS_ABOVE * roc.auc.error > self.auc:
            found.append(f"AUC {roc.auc.value:.4f} above {self.auc:.4f}")
        for rate, allowed in zip(RATES, self.tpr(np.array(RATES)), strict=True):
            seen = roc.tpr[rate]
            if seen.value - ERRORS_ABOVE * seen.error > allowed:
                found.append(f"TPR {seen.value:.4f} at FPR {rate:g} above {allowed:.4f}")
        return found


def limit_by_pair(epsilon: float, delta: float) -> RocLimit:
    """The bound of a single (epsilon, delta)."""
    return RocLimit(((epsilon, delta),))


def limit_by_accountant(events: Iterable[Event], accountant: str = "pld", deltas: Sequence[float] = DELTAS) -> RocLimit:
    """The bound of everything that was released, from the accountant's epsilon at many deltas."""
    released = tuple(events)
    return RocLimit(tuple((compute_epsilon(released, delta, accountant), delta) for delta in deltas))
