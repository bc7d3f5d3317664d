"""Mistakes that show where other records are replayed: other labels, huge ones, several kinds together.

All compare releases of data sets with each other; a right client adds up what its records add, and hides every number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import special

from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.foreign.mistakes import (
    CHANCE_FAR,
    FAR,
    NO_CLIPPING,
    NO_NUMBERS,
    NOISE,
    REPLAY,
    STATISTICS,
    Measured,
    is_batch_clipped,
    is_shared_by_neighbours,
    is_unclipped,
)
from fulcrum.analysis.detectors.foreign.replay import HUGE, find_still_columns

ALIKE = 0.9
"""Correlation of two released numbers whose noise is called the same."""
MOST_COLUMNS = 3000


def read_huge(found: Measured) -> Iterator[Reading]:
    """Whether a record beyond half precision is clipped, and whether it makes releases that are no numbers."""
    rows, usual = found.huge.finite, found.first_sample
    lost = 1 - len(rows) / len(found.huge.vectors)
    lost_before = 1 - len(usual.finite) / len(usual.vectors)
    yield contradict(
        REPLAY,
        NO_NUMBERS,
        lost > 0.5 and lost_before < 0.1,
        f"a record that is {HUGE:g} times as large makes releases that are no numbers, which show that it is there",
    )
    if len(rows) < 8 or found.first.mean <= 0 or is_unclipped(found):
        return
    grown = float(np.linalg.norm(rows.mean(axis=0))) / found.first.mean
    spread = float(np.sqrt(rows.var(axis=0).sum() / len(rows))) / found.first.mean
    yield contradict(
        REPLAY,
        NO_CLIPPING,
        grown > 3 + FAR * spread,
        f"a record that is {HUGE:g} times as large moves a release {grown:.3g} times as far: its norm overflows, or is "
        "not a number, and it is not clipped",
    )


def read_missing_noise(found: Measured) -> Iterator[Reading]:
    """Whether the noise of some number, or all of it, is there with some records only."""
    if found.first.noise == 0:
        return
    yield contradict(
        REPLAY,
        NOISE,
        found.thawed > 0,
        f"{found.thawed} of the released numbers have no noise with some records, and move with others",
    )
    moving = ~find_still_columns(found.first_sample)
    for sample, what in ((found.second_sample, "of another kind"), (found.relabelled_sample, "with another label")):
        if len(sample.finite) < 8:
            continue
        still = int((moving & find_still_columns(sample)).sum())
        yield contradict(
            REPLAY,
            NOISE,
            still > 0,
            f"with records {what} {still} of {len(moving)} released numbers are the same in every call: they have "
            "noise with some records only",
        )


def read_sum(found: Measured) -> Iterator[Reading]:
    """Whether a data set of two kinds of records moves a release as both do in their shares."""
    rows = found.shared.finite
    if (
        found.claims.local_steps > 1
        or len(rows) < 8
        or found.first.noise == 0
        or found.relabelled_sample is found.second_sample
    ):
        return
    if is_batch_clipped(found) or is_unclipped(found) or is_shared_by_neighbours(found):
        return
    share = (found.count // 4) / found.count
    both, other = rows @ found.first.direction, found.relabelled_sample.finite @ found.first.direction
    if len(other) < 8:
        return
    parts = share * found.first.along.mean(), (1 - share) * other.mean()
    errors = [
        factor * float(each.std(ddof=1)) / math.sqrt(len(each))
        for factor, each in ((1.0, both), (share, found.first.along), (1 - share, other))
    ]
    off = float(both.mean()) - float(sum(parts))
    score = abs(off) / max(math.hypot(*errors), 1e-300)
    size = max(abs(float(part)) for part in parts)
    yield Reading(
        REPLAY,
        STATISTICS,
        2 * float(special.ndtr(-score)) + CHANCE_FAR if abs(off) > 0.25 * size and score > FAR else 1.0,
        f"a quarter of records with one label and the rest with another move a release {abs(off) / size:.2g} times a "
        "share away from what both add alone: what a record adds follows from the others, as with weights or rates by "
        "class",
    )


def read_twin_numbers(found: Measured) -> Iterator[Reading]:
    """Whether two released numbers have the same noise: a generator that starts anew for every layer."""
    samples = [each.finite for each in (found.first_sample, found.second_sample, found.zeros_sample)]
    columns = samples[0].shape[1]
    if found.first.noise == 0 or min(len(rows) for rows in samples) < 50 or not 8 <= columns <= MOST_COLUMNS:
        return
    least = np.full((columns, columns), np.inf)
    for rows in samples:
        centred = rows - rows.mean(axis=0)
        units = centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-300)
        least = np.minimum(least, np.abs(units.T @ units))
    least[np.tril_indices(columns)] = 0.0
    alike = int((least > ALIKE).sum())
    # Sampled records move numbers together too: in three data sets alike, and beyond ALIKE, they do not.
    count = min(len(rows) for rows in samples)
    p = 2 * special.ndtr(-math.atanh(ALIKE) * math.sqrt(count - 3)) * columns**2
    yield Reading(
        REPLAY,
        NOISE,
        min(1.0, float(p) + CHANCE_FAR) if alike > 0 and not _move_together(least) else 1.0,
        f"{alike} pairs of released numbers have the same noise, which can be subtracted: a generator starts anew for "
        "each layer",
    )


def _move_together(least: np.ndarray) -> bool:
    """Whether most pairs are alike: one random number for all coordinates, which another reading tells."""
    pairs = least.shape[0] * (least.shape[0] - 1) / 2
    return bool(float((least > ALIKE).sum()) > 0.5 * pairs)


def read_numbers_beside(found: Measured) -> Iterator[Reading]:
    """Whether a number beside the update follows from the records with too little noise to hide one of them.

    Between two data sets of n records its mean moves by so much that one of n replacements moves it by more than ten
    deviations.
    """
    samples = [found.first_sample, found.second_sample, found.relabelled_sample]
    for name, values in found.first_sample.beside.items():
        sets = [sample.beside.get(name, values) for sample in samples]
        sets = [each[np.isfinite(each)] for each in sets]
        if min(len(each) for each in sets) < 8 or len(np.unique(sets[0])) < len(sets[0]) // 4:
            continue
        means, spread = [float(np.median(each)) for each in sets], max(float(each.std(ddof=1)) for each in sets)
        yield contradict(
            REPLAY,
            STATISTICS,
            max(means) - min(means) > 10 * found.count * spread,
            f"{name!r} is returned beside the update and follows from the records; its noise does not hide one of them",
        )
    for name, values in found.first_sample.beside.items():
        other = found.relabelled_sample.beside.get(name, values)
        own, others = values[np.isfinite(values)], other[np.isfinite(other)]
        if len(own) and len(others):
            constant = bool((own == own[0]).all() and (others == others[0]).all())
            yield contradict(
                REPLAY,
                STATISTICS,
                constant and bool(own[0] != others[0]),
                f"{name!r} is returned beside the update without noise, and follows from the labels",
            )
