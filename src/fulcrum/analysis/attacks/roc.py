"""ROC curves of membership scores with intervals.

Trials are (target federation, record) pairs: S targets times N records. They are not independent, since a record's
trials share its difficulty and a target's trials share its model, so intervals come from a bootstrap that draws targets
and records anew, both with replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fulcrum.errors import ConfigError
from fulcrum.rng import numpy_generator

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
RATES = (0.001, 0.01, 0.1)
"""False-positive rates at which the true-positive rate is reported."""
ROC_GRID: FloatArray = np.concatenate([[0.0], np.logspace(-4, 0, 81)])
"""False-positive rates of stored curves."""
DRAWS = 200


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval and standard error, from a bootstrap."""

    value: float
    low: float
    high: float
    error: float

    def to_json(self) -> dict[str, float]:
        """Four digits."""
        named = {"value": self.value, "low": self.low, "high": self.high, "error": self.error}
        return {name: float(f"{number:.4g}") for name, number in named.items()}


@dataclass(frozen=True, eq=False)
class AttackRoc:
    """AUC and true-positive rates, and the curve on `ROC_GRID`."""

    auc: Estimate
    tpr: Mapping[float, Estimate]
    curve: FloatArray
    trials: int

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "auc": self.auc.to_json(),
            "tpr": {f"{rate:g}": found.to_json() for rate, found in self.tpr.items()},
            "trials": self.trials,
            "curve": [float(f"{value:.4g}") for value in self.curve],
        }


@dataclass(frozen=True, eq=False)
class _SortedTrials:
    """Trials from the largest score to the smallest; ends: the last place of each group of equal scores."""

    target: npt.NDArray[np.int64]
    record: npt.NDArray[np.int64]
    member: BoolArray
    ends: npt.NDArray[np.int64]

    def curve(self, weights: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
        """(FPR, TPR) at every threshold, from (0, 0) to (1, 1); between two points a coin decides."""
        inside = self.member.astype(np.float64) if weights is None else self.member * weights
        outside = (~self.member).astype(np.float64) if weights is None else ~self.member * weights
        true, false = (np.concatenate([[0.0], np.cumsum(side)[self.ends]]) for side in (inside, outside))
        if true[-1] == 0 or false[-1] == 0:
            raise ConfigError("an ROC curve needs members and non-members; take more records or federations.")
        return false / false[-1], true / true[-1]


def _sort(scores: FloatArray, members: BoolArray) -> _SortedTrials:
    flat = scores.ravel()
    if not np.isfinite(flat).all():
        raise ConfigError("a membership score is not a finite number; was the training stable?")
    order = np.argsort(-flat, kind="stable")
    target, record = np.divmod(order, scores.shape[1])
    ends = np.append(np.flatnonzero(np.diff(flat[order])), len(order) - 1)
    return _SortedTrials(target, record, members.ravel()[order], ends)


def _area(false: FloatArray, true: FloatArray) -> float:
    return float(np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2))


def _read(false: FloatArray, true: FloatArray, rates: FloatArray) -> FloatArray:
    """TPR at these rates; where several points have one FPR, the highest."""
    last = np.append(np.flatnonzero(np.diff(false)), len(false) - 1)
    found: FloatArray = np.interp(rates, false[last], true[last])
    return found


def measure_roc(scores: FloatArray, members: BoolArray, seed: int = 0, draws: int = DRAWS) -> AttackRoc:
    """The ROC of scores [S, N] (larger: member) against members [S, N]. draws: of the bootstrap."""
    trials, rates = _sort(scores, members), np.array(RATES)
    false, true = trials.curve()
    rng = numpy_generator(seed, "attack", "bootstrap")
    found = np.zeros((draws, 1 + len(rates)))
    for i in range(draws):
        drawn = [np.bincount(rng.integers(n, size=n), minlength=n).astype(np.float64) for n in scores.shape]
        f, t = trials.curve(drawn[0][trials.target] * drawn[1][trials.record])
        found[i] = [_area(f, t), *_read(f, t, rates)]
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    error = found.std(axis=0, ddof=1)
    values = [_area(false, true), *_read(false, true, rates)]
    made = [
        Estimate(float(v), float(a), float(b), float(e)) for v, a, b, e in zip(values, low, high, error, strict=True)
    ]
    return AttackRoc(made[0], dict(zip(RATES, made[1:], strict=True)), _read(false, true, ROC_GRID), scores.size)
