"""Neighbour replay, the noise: is what hides the records normal, as large as declared, and new in every number?

Rows that are whitened by the declared deviations are standard normal where the code is right. Where records are part of
a release, only directions in which no record moves it are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy import special

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.probe import Probe, Releases

Floats = npt.NDArray[np.float64]
NAME = "neighbour replay"
Place = tuple[int, int, int]
LAGS = (1, 2, 3, 6, 8, 16, 32, 64)
"""Distances between coordinates whose noise is compared."""


def find_free_directions(moves: Sequence[Floats], size: int) -> Floats:
    """An orthonormal basis [size, r] of the directions in which none of these rows [n, size] has a part."""
    stacked = np.concatenate(moves) if moves else np.zeros((0, size))
    _, values, rows = np.linalg.svd(stacked, full_matrices=True)
    largest = float(values[0]) if len(values) else 0.0
    # Measured rows have a little noise of their own: directions in which they are no more than that stay free.
    rank = int((values > max(1e-2, 1e-9 * largest)).sum())
    free: Floats = rows[rank:].T
    return free


def whiten(releases: Releases, columns: slice = slice(None)) -> Floats:
    """The released numbers over their declared deviations; those without noise are left as zeros."""
    values = releases.values[:, columns]
    if not len(values):
        return values
    deviations = np.stack([terms.deviations for terms in releases.terms])[:, columns]
    return np.where(deviations > 0, values / np.where(deviations > 0, deviations, 1.0), 0.0)


def describe_ratio(square_sum: float, degrees: float) -> str:
    """The measured standard deviation as a multiple of the declared one."""
    return f"{np.sqrt(square_sum / degrees):.3g} times"


def read_noise(
    rows: Floats, places: Sequence[Place], names: Sequence[str], where: str, blocks: Sequence[slice] = ()
) -> Iterator[Reading]:
    """Readings of whitened noise [N, D], one row per release. blocks: columns that belong together (layers)."""
    if not rows.size:
        return
    clients = np.array([place[2] for place in places])
    for party in np.unique(clients):
        own = rows[clients == party]
        total, name = float(np.square(own).sum()), names[int(party)]
        yield Reading(
            NAME,
            "noise scale",
            exact.judge_variance(total, own.size),
            f"the noise of {where} is {describe_ratio(total, own.size)} what sigma and C declare",
            name,
        )
        yield _read_worst(
            "noise of one release",
            [
                (exact.judge_variance(float(np.square(row).sum()), len(row)), float(np.square(row).sum()), len(row))
                for row in own
            ],
            f"the noise of one vector ({where}) is {{}} what is declared",
            name,
        )
        yield _read_worst(
            "noise of one number",
            [
                (exact.judge_variance(float(np.square(each).sum()), len(each)), float(np.square(each).sum()), len(each))
                for each in own.T
            ],
            f"the noise of one coordinate ({where}) is {{}} what is declared",
            name,
        )
        for block in blocks:
            part = own[:, block]
            if part.size:
                total = float(np.square(part).sum())
                yield Reading(
                    NAME,
                    "noise of one layer",
                    exact.judge_variance(total, part.size),
                    f"the noise on parameters {block.start} to {block.stop - 1} is {describe_ratio(total, part.size)} "
                    "what is declared",
                    name,
                )
        flat = own.ravel()
        yield Reading(
            NAME,
            "form of the noise",
            exact.judge_distribution(special.ndtr(flat)),
            f"the noise of {where} is not normal with the declared deviation",
            name,
        )
        yield Reading(
            NAME,
            "tails of the noise",
            exact.judge_largest(flat),
            f"the largest of {len(flat)} numbers of the noise of {where} is {np.abs(flat).max():.3g} deviations out, "
            "which normal noise does not do",
            name,
        )
        distinct = len(np.unique(np.abs(flat[flat != 0])))
        yield contradict(
            NAME,
            "values of the noise",
            len(flat) >= 100 and distinct < 0.5 * len(flat),
            f"the noise of {where} takes {distinct} values in {len(flat)} numbers, so it can be recognised",
            name,
        )
    yield from read_dependence(rows, places, names, where)


def read_dependence(rows: Floats, places: Sequence[Place], names: Sequence[str], where: str) -> Iterator[Reading]:
    """Whether any two releases share their noise, and whether coordinates do."""
    p, i, j = exact.judge_pairs(rows)
    yield Reading(
        NAME,
        "noise used twice",
        p,
        f"{describe_place(places[i], names)} and {describe_place(places[j], names)} share noise",
    )
    yield Reading(
        NAME,
        "correlated noise",
        exact.judge_singular_values(rows),
        f"the noise of {where} is correlated: some direction has much more or much less than declared",
    )
    tried = [(exact.judge_neighbours(rows, lag), lag) for lag in LAGS if lag < rows.shape[1]]
    if tried:
        p, lag = min(tried)
        yield Reading(
            NAME,
            "noise of neighbours",
            min(1.0, p * len(tried)),
            f"the noise of coordinates that are {lag} apart ({where}) is correlated, so it cancels in sums of them",
        )


def read_repeated_numbers(rows: Floats, places: Sequence[Place], names: Sequence[str], where: str) -> Iterator[Reading]:
    """Whether two releases have numbers of their noise in common, at whatever places: streams that overlap."""
    pairs = [(i, j) for i in range(len(rows)) for j in range(i)]
    if not pairs:
        return
    (p, count), i, j = min((exact.judge_matches(rows[i], rows[j]), i, j) for i, j in pairs)
    yield Reading(
        NAME,
        "numbers used twice",
        min(1.0, p * len(pairs)),
        f"{describe_place(places[i], names)} and {describe_place(places[j], names)} have {count} numbers of their "
        f"noise in common ({where}), at other places",
    )


def describe_place(place: Place, names: Sequence[str]) -> str:
    """A release in words."""
    source, round, party = place
    run = f"run {source + 1}, " if source else ""
    return f"{run}round {round + 1} of party {names[party]}"


def _read_worst(what: str, found: Sequence[tuple[float, float, int]], says: str, party: str) -> Reading:
    """The smallest p-value of several of the same kind, for all of them together."""
    p, total, degrees = min(found)
    return Reading(NAME, what, min(1.0, p * len(found)), says.format(describe_ratio(total, degrees)), party)


def read_probe_noise(probe: Probe) -> Iterator[Reading]:
    """All readings of the noise of a probe."""
    ends = np.cumsum([0, *probe.tensors])
    blocks = [slice(int(start), int(stop)) for start, stop in itertools.pairwise(ends)]
    gradient = slice(0, probe.gradient)
    yield from read_noise(whiten(probe.empty, gradient), probe.empty.places, probe.names, "an empty sample", blocks)
    yield from read_repeated_numbers(whiten(probe.empty, gradient), probe.empty.places, probe.names, "empty samples")
    if probe.loud.values.shape[1] > probe.gradient:
        yield from _read_statistics_noise(probe)
    yield from read_noise(whiten(probe.steps, gradient), probe.steps.places, probe.names, "two local steps")
    moves = [units[:, gradient] for by_party in probe.units for units in by_party]
    free = find_free_directions(moves, probe.gradient)
    rows = whiten(probe.loud, gradient) @ free
    yield from read_noise(rows, probe.loud.places, probe.names, "a release")
    yield from _read_smallest_noise(probe, blocks)


def _read_statistics_noise(probe: Probe) -> Iterator[Reading]:
    """The noise of a rule's statistics, where nobody was sampled; and of all rounds with records, at least so much."""
    silent = [
        row[probe.gradient :]
        for releases in (probe.loud, probe.quiet)
        for row, terms in zip(releases.values, releases.terms, strict=True)
        if not terms.asked
    ]
    yield contradict(
        NAME,
        "statistics that nobody asked for",
        any(row.any() for row in silent),
        "a rule's statistics leave in rounds that do not pay for them",
    )
    asked = [i for i, terms in enumerate(probe.empty.terms) if terms.asked]
    own = probe.empty.pick(asked)
    if asked:
        rows = whiten(own, slice(probe.gradient, None))
        yield from read_noise(rows, own.places, probe.names, "the statistics")
        of_sums = whiten(own, slice(0, probe.gradient))
        counts = [exact.judge_matches(extra, sums)[1] for extra, sums in zip(rows, of_sums, strict=True)]
        chance = min(1.0, of_sums.shape[1] * exact.MATCH_CHANCE)
        yield Reading(
            NAME,
            "noise of sum and statistics",
            exact.judge_count_too_large(sum(counts), rows.size, chance),
            f"{sum(counts)} of {rows.size} numbers of the statistics' noise are in the sum's noise too, so one can be "
            "subtracted from the other",
        )
    asked = [i for i, terms in enumerate(probe.loud.terms) if terms.asked]
    own = probe.loud.pick(asked)
    for key, rows in _group(own, slice(probe.gradient, None)):
        centred = rows - rows.mean(axis=0)
        degrees = (len(rows) - 1) * rows.shape[1]
        if degrees > 0:
            total = float(np.square(centred).sum())
            yield Reading(
                NAME,
                "noise of the statistics",
                exact.judge_variance_too_small(total, degrees),
                f"the statistics of a rule have {describe_ratio(total, degrees)} the noise that is declared",
                probe.names[key[0]],
            )


def _read_smallest_noise(probe: Probe, blocks: Sequence[slice]) -> Iterator[Reading]:
    """Each layer's numbers scatter at least as much as the noise alone would, whatever the records add."""
    for (party, _), rows in _group(probe.loud, slice(0, probe.gradient)):
        for block in blocks:
            part = rows[:, block]
            centred = part - part.mean(axis=0)
            degrees = (len(part) - 1) * part.shape[1]
            total = float(np.square(centred).sum())
            yield Reading(
                NAME,
                "noise of one layer",
                exact.judge_variance_too_small(total, degrees),
                f"parameters {block.start} to {block.stop - 1} have {describe_ratio(total, degrees)} their noise",
                probe.names[party],
            )


def _group(releases: Releases, columns: slice) -> Iterator[tuple[tuple[int, int], Floats]]:
    """Whitened rows by (party, state): those of one group have the same distribution."""
    rows = whiten(releases, columns)
    keys = [(place[2], state) for place, state in zip(releases.places, releases.states, strict=True)]
    for key in dict.fromkeys(keys):
        chosen = [i for i, other in enumerate(keys) if other == key]
        if len(chosen) > 1:
            yield key, rows[chosen]


def read_other_runs(releases: Releases, gradient: int, names: Sequence[str]) -> Iterator[Reading]:
    """Whether several runs share noise."""
    rows = whiten(releases, slice(0, gradient))
    p, i, j = exact.judge_pairs(rows)
    yield Reading(
        NAME,
        "noise used in two runs",
        p,
        f"{describe_place(releases.places[i], names)} has noise of {describe_place(releases.places[j], names)} of "
        "another run",
    )
