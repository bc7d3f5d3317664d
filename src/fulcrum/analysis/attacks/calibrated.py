"""Membership scores from a pool: each federation in turn is the target, and all others are its shadows.

    threshold      the score itself: loss threshold (Yeom et al. 2018) for the final model
    lira           likelihood ratio of two Gaussians per record, fitted on shadows with and without it (Carlini 2022)
    lira-offline   the same from shadows without the record alone
    rmia           for how many records z of a population the target favours x over z, each beside its mean over the
                   shadows (Zarifzadeh, Liu and Shokri 2024; gamma = 1)

Input and output are [S, N]; larger means member. Population of rmia: the controls.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fulcrum.analysis.attacks.pool import BoolArray

FloatArray = npt.NDArray[np.float64]
CalibrateFn = Callable[[FloatArray, BoolArray, BoolArray], FloatArray]
"""(scores [S, N], members [S, N], control [N]) -> membership scores [S, N]."""
FEW_SHADOWS = 64
"""Up to this many shadows all records share one variance: one of each record takes more of them (Carlini et al.)."""


def leave_one_out_moments(scores: FloatArray, kept: BoolArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Number, mean and variance over the kept federations but the row's own: [S, N] each.

    Mean 0 and variance NaN where there are none (two are needed for a variance).
    """
    centre = scores.mean(axis=0)  # against cancellation
    values = np.where(kept, scores - centre, 0.0)
    count = kept.sum(axis=0) - kept
    total, squares = values.sum(axis=0) - values, (values**2).sum(axis=0) - values**2
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, total / count, 0.0)
        variance = np.where(count > 1, np.maximum(squares - count * mean**2, 0.0) / (count - 1), np.nan)
    return count.astype(np.float64), mean + centre, variance


def _share_variance(count: FloatArray, variance: FloatArray) -> FloatArray:
    """The variance to use: each record's own where there are many shadows, else the mean over all records."""
    known = np.isfinite(variance)
    shared = np.where(known, variance, 0.0).sum(axis=1, keepdims=True) / np.maximum(known.sum(axis=1, keepdims=True), 1)
    shared = np.where(shared > 0, shared, 1.0)
    if len(count) > FEW_SHADOWS:
        return np.where(np.isfinite(variance) & (variance > 1e-3 * shared), variance, shared)
    return np.broadcast_to(shared, variance.shape)


def threshold(scores: FloatArray, members: BoolArray, control: BoolArray) -> FloatArray:
    """The score itself."""
    return scores


def lira(scores: FloatArray, members: BoolArray, control: BoolArray) -> FloatArray:
    """log N(score; members) - log N(score; non-members), per record; 0 for records that one side lacks.

    With up to `FEW_SHADOWS` federations both sides of all records share one variance, and the two means of a
    record are moved towards the mean difference of all candidates, by how much their own is noise. Controls are never
    members: their coins stand for membership, so that they go the same way.
    """
    sides = [leave_one_out_moments(scores, side) for side in (members, ~members)]
    known = (sides[0][0] > 0) & (sides[1][0] > 0)
    if len(scores) > FEW_SHADOWS:
        means = [side[1] for side in sides]
        variances = [_share_variance(side[0], side[2]) for side in sides]
    else:
        weights = [np.maximum(side[0] - 1, 0) for side in sides]
        pooled = sum(w * np.nan_to_num(side[2]) for w, side in zip(weights, sides, strict=True))
        with np.errstate(invalid="ignore", divide="ignore"):
            pooled = np.where(sum(weights) > 0, pooled / sum(weights), np.nan)
        shared = _share_variance(sides[0][0], pooled)
        means, variances = _shrink_differences(sides[0], sides[1], shared, known & ~control), [shared, shared]
    logs = [
        -0.5 * np.log(variance) - (scores - mean) ** 2 / (2 * variance)
        for mean, variance in zip(means, variances, strict=True)
    ]
    return np.where(known, logs[0] - logs[1], 0.0)


Moments = tuple[FloatArray, FloatArray, FloatArray]


def _shrink_differences(inside: Moments, outside: Moments, variance: FloatArray, used: BoolArray) -> list[FloatArray]:
    """The means of both sides [S, N] each, with differences moved towards their mean over the used records."""
    count = [np.maximum(side[0], 1.0) for side in (inside, outside)]
    difference = inside[1] - outside[1]
    noise = variance * (1 / count[0] + 1 / count[1])
    total = np.maximum(used.sum(axis=1, keepdims=True), 1)
    centre = (difference * used).sum(axis=1, keepdims=True) / total
    spread = (((difference - centre) ** 2 - noise) * used).sum(axis=1, keepdims=True) / total
    kept = np.maximum(spread, 0.0) / (np.maximum(spread, 0.0) + noise)
    shrunk = centre + kept * (difference - centre)
    middle = (count[0] * inside[1] + count[1] * outside[1]) / (count[0] + count[1])
    return [middle + shrunk * count[1] / (count[0] + count[1]), middle - shrunk * count[0] / (count[0] + count[1])]


def lira_offline(scores: FloatArray, members: BoolArray, control: BoolArray) -> FloatArray:
    """How many standard deviations the score lies above its mean over federations without the record."""
    count, mean, variance = leave_one_out_moments(scores, ~members)
    return np.where(count > 0, (scores - mean) / np.sqrt(_share_variance(count, variance)), 0.0)


def rmia(scores: FloatArray, members: BoolArray, control: BoolArray) -> FloatArray:
    """Share of the controls z with P(x | target) / P(x) >= P(z | target) / P(z).

    scores: the logit of the true class's probability P(. | target). P(.): its mean over the shadows, those with and
    those without the record with equal weights. A control is not compared with itself.
    """
    logs = -np.logaddexp(0.0, -scores)  # log P
    return _rank_among_controls(logs - np.log(_mean_of_sides(np.exp(logs), members).clip(1e-300)), control)


def rmia_of_releases(scores: FloatArray, members: BoolArray, control: BoolArray) -> FloatArray:
    """As `rmia`, for scores that are log-likelihoods up to a factor, as those of releases are.

    Their mean over the shadows takes the place of log P(.): at gamma = 1 the factor falls out of the comparison.
    """
    return _rank_among_controls(scores - _mean_of_sides(scores, members), control)


def _mean_of_sides(values: FloatArray, members: BoolArray) -> FloatArray:
    inside, outside = (leave_one_out_moments(values, side) for side in (members, ~members))
    mean = (inside[1] + outside[1]) / 2
    return np.where(inside[0] == 0, outside[1], np.where(outside[0] == 0, inside[1], mean))


def _rank_among_controls(above: FloatArray, control: BoolArray) -> FloatArray:
    found = np.zeros_like(above)
    for s in range(len(above)):
        reference = np.sort(above[s, control])
        below = np.searchsorted(reference, above[s], side="right").astype(np.float64)
        found[s] = np.where(control, (below - 1) / max(1, len(reference) - 1), below / len(reference))
        # Between and beyond the population's values the order of the scores decides: no ties at 0 and 1.
        found[s] += 1e-3 / (len(reference) + 1) * np.tanh(above[s] / (np.abs(above[s]).max() + 1e-30))
    return found


ATTACKS: dict[str, CalibrateFn] = {
    "threshold": threshold,
    "lira": lira,
    "lira-offline": lira_offline,
    "rmia": rmia,
}
"""Attacks on the final model's confidence."""
RELEASE_ATTACKS: dict[str, CalibrateFn] = {**ATTACKS, "rmia": rmia_of_releases}
"""Attacks on scores of releases, and on losses of models without classes."""
