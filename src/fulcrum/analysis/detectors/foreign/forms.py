"""Mistakes that show in the form of the noise, and in what one record does to the others.

Each compares releases of data sets with each other, or with normal noise of any scale; none needs the claimed sigma.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import special

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.foreign.adapters import Floats
from fulcrum.analysis.detectors.foreign.mistakes import (
    AVERAGED,
    CHANCE_FAR,
    FAR,
    FORM,
    NOISE,
    REPLAY,
    STATISTICS,
    Measured,
    is_batch_clipped,
    is_on_a_line,
    is_shared_by_neighbours,
    is_unclipped,
    measure_small_multiple,
)

FEWEST_COORDINATES = 8
"""Fewer say little about the form of the noise."""


def read_form(found: Measured) -> Iterator[Reading]:
    """Whether the noise is normal: the kurtosis of each release, which its scale does not change."""
    rows = found.first.across - found.first.across.mean(axis=0)
    size = rows.shape[1]
    if found.first.noise == 0 or size < FEWEST_COORDINATES or is_on_a_line(rows):
        return
    lengths = np.square(rows).sum(axis=1)
    rows = rows[lengths > 0.05 * np.median(lengths)]
    each = size * np.power(rows, 4).sum(axis=1) / np.square(np.square(rows).sum(axis=1))
    expected = 3 * size / (size + 2)
    off = float(each.mean()) - expected
    score = abs(off) * math.sqrt(len(each)) / max(float(each.std(ddof=1)), 1e-300)
    yield Reading(
        REPLAY,
        FORM,
        2 * float(special.ndtr(-score)) + CHANCE_FAR if abs(off) > 0.3 and score > FAR else 1.0,
        f"the noise is not normal (kurtosis {3 + off:.2g}, not 3), so sigma says nothing about epsilon: "
        + ("it has heavy tails, as Laplace's" if off > 0 else "it has no tails, as if it was cut off"),
    )


def read_directions(found: Measured) -> Iterator[Reading]:
    """Whether every direction has its noise: coordinates that move together leave others in the clear."""
    rows = found.first.across - found.first.across.mean(axis=0)
    if found.first.noise == 0 or rows.shape[1] < 2:
        return
    if is_on_a_line(rows):
        yield contradict(
            REPLAY, NOISE, True, "the noise is one random number for all coordinates: it can be subtracted"
        )
        return
    lengths = np.linalg.norm(rows, axis=1)
    weak = lengths < 0.1 * np.median(lengths)
    yield contradict(
        REPLAY,
        NOISE,
        bool(weak.any()) and rows.shape[1] >= FEWEST_COORDINATES,
        f"{int(weak.sum())} of {len(rows)} calls have almost no noise",
    )
    rows = rows[~weak]
    if rows.shape[1] > len(rows) // 4:
        return
    # The lengths of rows are made equal, so that uneven noise is not told twice.
    rows = rows * math.sqrt(rows.shape[1]) / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    values = np.linalg.svd(rows, compute_uv=False)
    least = float(values[-1]) / math.sqrt(len(rows))
    p = exact.judge_singular_values(rows)
    yield Reading(
        REPLAY,
        NOISE,
        min(1.0, p + CHANCE_FAR) if least < 0.6 else 1.0,
        f"the noise of coordinates is correlated: one direction has {least:.2g} times its share",
    )


def read_empty_samples(found: Measured) -> Iterator[Reading]:
    """Whether releases of a few records repeat one vector: an empty sample got no noise."""
    rows = found.small.finite
    if found.first.noise == 0 or len(rows) < 8:
        return
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    most = int(counts.max())
    yield contradict(
        REPLAY,
        NOISE,
        most > 2 and len(rows) - most == len(distinct) - 1,
        f"{most} of {len(rows)} releases of {found.small_count} records are the same numbers: an empty sample gets no "
        "noise, and shows that it is empty",
    )


def read_microbatches(found: Measured) -> Iterator[Reading]:
    """Whether a record adds more among few records than among many."""
    if is_batch_clipped(found) or found.first.noise == 0:
        return
    alone, error = measure_small_multiple(found)
    among = found.first.multiple / found.batch
    score = (alone - among) / max(math.hypot(error, found.first.error / found.batch), 1e-300)
    yield Reading(
        REPLAY,
        AVERAGED,
        float(special.ndtr(-score)) + CHANCE_FAR if is_shared_by_neighbours(found) else 1.0,
        f"a record among {found.small_count} moves a release {alone / max(among, 1e-300):.2g} times as far, beside its "
        f"noise, as a record among {found.count}: the gradients of a microbatch are averaged before they are clipped",
    )


def read_scales(found: Measured) -> Iterator[Reading]:
    """Whether the scale of the noise follows from the records: a C that is taken from them."""
    if found.first.noise == 0:
        return
    for line, what in (
        (found.zeros, "of zeros"),
        (found.larger, "that are larger"),
        (found.second, "of another kind"),
        (found.relabelled, "with another label"),
    ):
        if line.noise == 0 or line.across.shape[1] < FEWEST_COORDINATES:
            continue
        ratio = line.noise / found.first.noise
        # Uneven lengths (a divisor by the actual batch) are alike in both, and make the ratio less certain.
        lengths = [_measure_lengths(each.across) for each in (line, found.first)]
        errors = [float(each.std(ddof=1) / each.mean() / math.sqrt(len(each))) for each in lengths]
        score = abs(math.log(ratio**2)) / max(math.hypot(*errors), 1e-300)
        yield Reading(
            REPLAY,
            STATISTICS,
            2 * float(special.ndtr(-score)) + CHANCE_FAR if abs(ratio - 1) > 0.2 and score > FAR else 1.0,
            f"with records {what} the noise is {ratio:.3g} times as large: its scale follows from the records, as if C "
            "was taken from them",
        )


def _measure_lengths(rows: Floats) -> Floats:
    """Squared lengths of rows, centred."""
    lengths: Floats = np.square(rows - rows.mean(axis=0)).sum(axis=1)
    return lengths


def read_outlier(found: Measured) -> Iterator[Reading]:
    """Whether one outlying record changes what the others add: features that are standardised with private records."""
    usual, other = found.usual.finite, found.with_outlier.finite
    if (
        len(usual) < 8
        or len(other) < 8
        or found.claims.local_steps > 1
        or is_batch_clipped(found)
        or is_unclipped(found)
    ):
        return
    half = len(usual) // 2
    mean = usual[:half].mean(axis=0)
    direction = mean / max(float(np.linalg.norm(mean)), 1e-300)
    before, after = usual[half:] @ direction, other @ direction
    moved = abs(float(before.mean() - after.mean()))
    error = math.hypot(*(float(each.std(ddof=1)) / math.sqrt(len(each)) for each in (before, after)))
    share = max(found.first.mean, float(before.mean())) / found.count  # of one record, sampled or not
    score = (moved - 2 * share) / max(error, 1e-300)
    yield Reading(
        REPLAY,
        STATISTICS,
        float(special.ndtr(-score)) + CHANCE_FAR if moved > 4 * share and score > FAR else 1.0,
        f"one outlying record changes a release by {moved / max(share, 1e-300):.3g} times what a record may add: what "
        "the others add follows from it, as where features are standardised with private records",
    )
