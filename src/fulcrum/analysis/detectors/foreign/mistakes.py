"""The known mistakes, each a comparison of what was measured with what is claimed.

A reading's p-value is the chance of it where the code does what it claims. Each also asks for an effect that matters,
so that a measurement which is a little off raises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.foreign.adapters import Floats
from fulcrum.analysis.detectors.foreign.claims import Claims
from fulcrum.analysis.detectors.foreign.replay import LARGER, Line, Sample

REPLAY, STATEMENT, AUDIT = "neighbour replay", "statement check", "audit"
FAR = 6.5
"""Standard errors that a measured mean is given: beyond them with a chance of 1e-10."""
CHANCE_FAR = 1e-10

NO_CLIPPING = "no clipping"
CLIPPED_BATCH = "clipped batches"
AVERAGED = "averaging before clipping"
NOISE = "noise of the wrong scale"
SHUFFLING = "shuffling sold as Poisson"
DIVISOR = "divisor by the actual batch"
STATISTICS = "statistics of private data"
SEEDS = "reused seeds"
BUDGET = "a budget per round sold as a total"
EPSILON = "epsilon below what was measured"
FORM = "noise of another form"
RATE = "sampling at a higher rate"
NO_NUMBERS = "releases that are no numbers"


@dataclass(frozen=True)
class Measured:
    """Everything that was replayed, and the claims. `first`, `second` and `larger` have n records, `double` 2 n.

    clear: released numbers that have no noise; they are left out of everything else. small: copies of a record, of
    which about one is sampled. half, half_double: copies of a smaller record, whose
    releases are half as long as those of the extreme one; None where nothing asked for them. with_target, without:
    scores of one extreme record among records of zeros, and of zeros alone, along the direction in which it moves.
    zeros, zeros_sample: records of zeros. relabelled, shared: copies with another label, and a quarter of the first
    kind beside those. huge: beyond half precision. thawed: numbers left out as unchanging that changed. usual,
    with_outlier: a record and its opposite in turn, and the same with one outlying one.
    """

    claims: Claims
    count: int
    first_sample: Sample
    second_sample: Sample
    first: Line
    second: Line
    larger: Line
    double: Line
    small: Sample
    small_count: int
    zeros: Line
    usual: Sample
    with_outlier: Sample
    clear: int
    half_double: float | None
    with_target: Floats
    without: Floats
    zeros_sample: Sample
    relabelled_sample: Sample
    relabelled: Line
    shared: Sample
    huge: Sample
    thawed: int

    @property
    def batch(self) -> float:
        """The expected batch."""
        return self.count * self.claims.rate

    @property
    def scale(self) -> float:
        """What one record adds, as the part of a release's mean: 1 / batch; the noise of E steps is sqrt(E) as large.

        With several local steps the mean is at most E times that of one, so the measured sigma is not too small.
        """
        return self.batch * math.sqrt(self.claims.local_steps)


# --- readings -----------------------------------------------------------------------------------


def read_seeds(found: Measured) -> Iterator[Reading]:
    """Whether calls with different seeds share their noise."""
    rows = found.first_sample.finite
    still = bool((rows.max(axis=0) == rows.min(axis=0)).all())
    yield contradict(
        REPLAY,
        SEEDS,
        still,
        "every call returns the same numbers, whatever its seed: the noise is missing, or the same in every call",
    )
    distinct = np.unique(rows, axis=0)
    few = 1 < len(distinct) < len(rows) // 2
    # Sums of copies without noise lie on a line; noise that comes again does not.
    values = np.linalg.svd(distinct, compute_uv=False) if few else np.zeros(2)
    yield contradict(
        REPLAY,
        SEEDS,
        few and float(values[1]) > 1e-4 * float(values[0]),
        f"{len(rows)} calls with different seeds return {len(distinct)} different vectors",
    )
    if still or few or found.first.noise == 0:
        return
    across = found.first.across - found.first.across.mean(axis=0)
    if across.shape[1] < 2 or is_on_a_line(across):  # one random number for all coordinates is another mistake
        return
    lengths = np.linalg.norm(across, axis=1)
    across = across[lengths > 0.3 * np.median(lengths)]  # and so are calls without noise
    p, i, j, alike = exact.judge_directions(across)
    yield Reading(
        REPLAY,
        SEEDS,
        p if alike > 0.5 else 1.0,
        f"calls {i + 1} and {j + 1}, with different seeds, have the same noise (correlation {alike:.2f})",
    )


def is_on_a_line(across: Floats) -> bool:
    """Whether noise [T, m] is one random number times a fixed vector, and the number is new in every call."""
    if across.shape[1] < 2 or len(across) < 8:
        return False
    left, values, _ = np.linalg.svd(across, full_matrices=False)
    share = float(values[0] ** 2 / max(float(np.square(values).sum()), 1e-300))
    return share > 0.9 and len(np.unique(left[:, 0].round(9))) > len(across) // 2


def read_clipping(found: Measured) -> Iterator[Reading]:
    """Whether a larger record moves a release further, and whether twice as many records move it twice as far."""
    grown = measure_growth(found)
    yield contradict(
        REPLAY,
        NO_CLIPPING,
        is_unclipped(found),
        f"a record that is {LARGER:g} times as large moves a release {grown:.3g} times as far, so nothing bounds it",
    )
    if min(found.first.noise, found.double.noise) == 0 or is_unclipped(found) or found.claims.local_steps > 1:
        return
    one, two = found.first.multiple, found.double.multiple
    error = math.hypot(2 * found.first.error, found.double.error)
    # Estimated deviations of the noise add their own errors, which are small beside the effect that is asked for.
    score = (2 * one - two) / max(error, 1e-300)
    p = float(special.ndtr(-score)) if two < 1.5 * one else 1.0
    averaged = found.half_double is not None and found.half_double < 0.75
    what = AVERAGED if averaged else CLIPPED_BATCH
    why = (
        "the mean gradient of the batch is clipped, not each record's"
        if averaged
        else "the batch's gradient is clipped, not each record's"
    )
    yield Reading(
        REPLAY,
        what,
        p,
        f"twice as many copies of a record move a release {two / one:.2f} times as far beside its noise, not 2: {why}",
    )


def is_measurable(found: Measured) -> bool:
    """Whether copies of an extreme record move a release at all: all else is measured by that."""
    return any(
        line.noise == 0 or line.mean > FAR * float(line.along.std(ddof=1)) / math.sqrt(len(line.along))
        for line in (found.first, found.second)
    )


def measure_growth(found: Measured) -> float:
    """How much further a record that is LARGER times as large moves a release."""
    return found.larger.mean / found.first.mean if found.first.mean > 0 else 1.0


def is_unclipped(found: Measured) -> bool:
    """Whether nothing bounds what a record adds."""
    return measure_growth(found) > 3


def is_batch_clipped(found: Measured) -> bool:
    """Whether a release does not grow with the number of records."""
    if found.first.noise == 0 or found.claims.local_steps > 1 or not is_measurable(found):
        return False
    return found.double.multiple < 1.5 * found.first.multiple


def measure_sigma(found: Measured) -> float:
    """The noise multiplier as measured: the noise over what one record adds, the worse of two records."""
    if is_batch_clipped(found):  # leaving out a record can turn a clipped vector around: it moves by up to 2 C
        return min(line.noise / line.mean / 2 for line in (found.first, found.second) if line.mean > 0)
    large = [line.noise * found.scale / line.mean for line in (found.first, found.second) if line.mean > 0]
    if is_shared_by_neighbours(found):
        # Those that are sampled together add as much as one.
        chance = (1 - (1 - found.claims.rate) ** found.small_count) / (found.small_count * found.claims.rate)
        large.append(chance / max(measure_small_multiple(found)[0], 1e-300))
    return min(large, default=0.0)


def measure_small_multiple(found: Measured) -> tuple[float, float]:
    """What one record adds in a data set of a few, as a multiple of the noise there; and its standard error."""
    rows, direction = found.small.finite, found.first.direction
    if len(rows) < 8:
        return 0.0, math.inf
    along = rows @ direction
    across = rows - np.outer(along, direction)
    degrees = (len(rows) - 1) * (rows.shape[1] - 1)
    noise = math.sqrt(float(np.square(across - across.mean(axis=0)).sum()) / degrees)
    sampled = found.small_count * found.claims.rate
    if noise == 0:
        return 0.0, math.inf
    return float(along.mean()) / noise / sampled, float(along.std(ddof=1)) / math.sqrt(len(rows)) / noise / sampled


def is_shared_by_neighbours(found: Measured) -> bool:
    """Whether a record adds much more among few records than among many: microbatches are clipped as one."""
    if found.first.noise == 0 or found.first.mean <= 0 or found.claims.local_steps > 1:
        return False
    alone, error = measure_small_multiple(found)
    among = found.first.multiple / found.batch
    return alone > 1.7 * among and alone - FAR * error > 1.2 * among


def measure_sigma_error(found: Measured) -> float:
    """The standard error of the measured noise multiplier."""
    line = found.first
    if line.mean <= 0 or line.noise == 0:
        return 0.0
    of_mean = float(line.along.std(ddof=1)) / math.sqrt(len(line.along)) / line.mean
    return measure_sigma(found) * math.hypot(of_mean, 1 / math.sqrt(2 * line.freedom))


def read_noise(found: Measured) -> Iterator[Reading]:
    """Whether the noise is as large as claimed beside what one record adds."""
    if is_batch_clipped(found):
        return
    sigma, claims = measure_sigma(found), found.claims
    faster = is_rate_higher(found)
    for line, sample in ((found.first, found.first_sample), (found.second, found.second_sample)):
        low = line.mean - FAR * float(line.along.std(ddof=1)) / math.sqrt(len(line.along))
        if low <= 0:
            continue
        declared = claims.sigma * low / found.scale
        ratio = line.noise * found.scale / line.mean / claims.sigma
        total = float(np.square(line.across - line.across.mean(axis=0)).sum()) / declared**2
        p = exact.judge_variance_too_small(total, line.freedom) + CHANCE_FAR
        yield Reading(
            REPLAY,
            RATE if faster else NOISE,
            min(1.0, p) if ratio < 0.97 else 1.0,
            f"records are sampled at a rate of about {measure_rate(found):.2g}, and {claims.rate:g} is claimed"
            if faster
            else f"the noise is {ratio:.3g} times what sigma = {claims.sigma:g} and clipping say (sigma {sigma:.3g})",
        )
        rows = sample.finite - sample.finite.mean(axis=0)
        if faster:  # told already: beside one record the noise is as large as claimed
            declared *= claims.rate / measure_rate(found)
        sums = np.square(rows).sum(axis=0) / declared**2
        # Numbers that never move are no release of the gradient, or are in the clear: another reading's.
        moving = sums > 0
        if moving.any():
            least = float(sums[moving].min())
            p = min(1.0, exact.judge_variance_too_small(least, len(rows) - 1) * int(moving.sum()) + CHANCE_FAR)
            weak = math.sqrt(least / (len(rows) - 1))
            yield Reading(
                REPLAY,
                NOISE,
                p if weak < 0.9 else 1.0,
                f"one of the released numbers has {weak:.3g} times the noise that is declared",
            )


def measure_rate(found: Measured) -> float:
    """The sampling rate as measured: the mean n q c and the variance c^2 n q (1 - q) of sampled records give q."""
    line = found.first
    varying = float(line.along.var(ddof=1)) - line.noise**2
    return 1 / (1 + found.count * max(varying, 0.0) / line.mean**2) if line.mean > 0 else 1.0


def is_rate_higher(found: Measured) -> bool:
    """Whether the noise is as claimed beside one record, and records are sampled more often than claimed."""
    claims, rate = found.claims, measure_rate(found)
    if claims.sampling != "poisson" or claims.local_steps > 1 or not 1.3 * claims.rate < rate < 0.9:
        return False
    return abs(measure_sigma(found) * rate / claims.rate / claims.sigma - 1) < 0.15


def read_sampling(found: Measured) -> Iterator[Reading]:
    """Whether the number of sampled records varies as Poisson sampling and a fixed divisor make it vary."""
    claims, line = found.claims, found.first
    if (
        claims.sampling != "poisson"
        or claims.rate >= 1
        or claims.local_steps > 1
        or is_batch_clipped(found)
        or line.noise == 0
    ):
        return
    low = (line.mean - FAR * float(line.along.std(ddof=1)) / math.sqrt(len(line.along))) / found.batch
    noise = line.noise * max(0.0, 1 - FAR / math.sqrt(2 * line.freedom))
    if low <= 0:
        return
    expected = line.noise**2 + (line.mean / found.batch) ** 2 * found.batch * (1 - claims.rate)
    ratio = float(line.along.var(ddof=1)) / expected
    p = bound_small_variance(line.along, low, noise, found.count, claims.rate) + 2 * CHANCE_FAR
    divided = divides_by_actual_batch(found)
    yield Reading(
        REPLAY,
        DIVISOR if divided else SHUFFLING,
        min(1.0, p) if ratio < 0.7 else 1.0,
        f"releases of copies of one record vary {math.sqrt(ratio):.2f} times as much as Poisson samples at rate "
        f"{claims.rate:g} make them: "
        + (
            "the sum is divided by the number that was sampled"
            if divided
            else "samples have a fixed size, or the rate is higher"
        ),
    )


def bound_small_variance(values: Floats, step: float, noise: float, count: int, rate: float) -> float:
    """Chernoff's bound on the chance that releases vary so little.

    values [T]: step times a binomial number plus noise. Half the squared differences of disjoint pairs are independent.
    """
    pairs = len(values) // 2
    total = float((np.square(values[: 2 * pairs : 2] - values[1 : 2 * pairs : 2]) / 2).sum())
    sizes = np.arange(count + 1)
    weights = stats.binom.pmf(sizes, count, rate)
    gaps = np.convolve(weights, weights[::-1])  # of the difference of two numbers, -count..count
    squares = (step * np.arange(-count, count + 1)) ** 2 / 2
    best = 0.0
    mean = noise**2 + step**2 * count * rate * (1 - rate)
    for strength in np.geomspace(1e-2, 1e2, 40) / mean:
        spread = 1 + 2 * strength * noise**2
        moment = float((gaps * np.exp(-strength * squares / spread)).sum()) / math.sqrt(spread)
        best = min(best, strength * total + pairs * math.log(max(moment, 1e-300)))
    return math.exp(best)


def divides_by_actual_batch(found: Measured) -> bool:
    """Whether what looks like a fixed sample is a mean over an actual one: empty batches and uneven noise tell."""
    if len(found.first_sample.finite) < len(found.first_sample.vectors) or len(found.small.finite) < len(
        found.small.vectors
    ):
        return True  # a division by zero
    lengths = np.square(found.first.across - found.first.across.mean(axis=0)).sum(axis=1)
    degrees = found.first.across.shape[1]
    uneven = float(lengths.var(ddof=1) / lengths.mean() ** 2) * degrees / 2
    if uneven > 1 + 8 / math.sqrt(len(lengths)):
        return True
    empty = (1 - found.claims.rate) ** found.small_count
    along = found.small.finite @ found.first.direction
    across = found.small.finite - np.outer(along, found.first.direction)
    noise = float(np.square(across - across.mean(axis=0)).sum()) / ((len(across) - 1) * degrees)
    moved = float(along.mean()) / (1 - empty)
    return bool(float(along.var(ddof=1)) > noise + 0.5 * empty * (1 - empty) * moved**2)


def read_statistics(found: Measured) -> Iterator[Reading]:
    """Whether numbers beside the noised ones follow from private records without noise."""
    yield contradict(
        REPLAY,
        STATISTICS,
        found.clear > 0,
        f"{found.clear} of {found.clear + found.first_sample.vectors.shape[1]} released numbers have no noise and "
        "depend on the records",
    )
    for name, values in found.first_sample.beside.items():
        other = found.second_sample.beside.get(name, values)
        own, others = values[np.isfinite(values)], other[np.isfinite(other)]
        if not len(own) or not len(others):
            continue
        constant = bool((own == own[0]).all() and (others == others[0]).all())
        few = not constant and len(np.unique(own)) < max(3, len(own) // 4)
        yield contradict(
            REPLAY,
            STATISTICS,
            (constant and own[0] != others[0]) or few,
            f"{name!r} is returned beside the update without noise, and follows from the records"
            + (" that were sampled" if few else ""),
        )
