"""Neighbour replay, the records: what each unit adds to a release, and who is sampled.

What a unit adds alone must be within the bound, and must be what it adds beside others. So a release is the sum of the
sampled units' own parts, and solving for it says who was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from fulcrum.analysis.detectors import exact
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.probe import QUIET_SIGMA, Probe

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
NAME = "neighbour replay"
ROUNDING = 2e-3
"""Relative error that fast arithmetic in float32 may have, and margins of proven arithmetic."""
TOLERANCE = 0.1
"""How far the measured part of a unit may be from 0 or 1: the noise of quiet rounds moves it by about 0.01."""


def read_bounds(probe: Probe) -> Iterator[Reading]:
    """Whether each unit alone stays within what is charged for it."""
    width = probe.units[0][0].shape[1]
    task_share = _find_quiet_deviations(probe)
    for party, name in enumerate(probe.names):
        for columns, deviation, what in (
            (slice(0, probe.gradient), task_share[0], "gradient"),
            (slice(probe.gradient, width), task_share[1], "row of statistics"),
        ):
            count = len(range(*columns.indices(width)))
            if not count:
                continue
            longest = max(float(np.linalg.norm(state[party][:, columns], axis=1).max()) for state in probe.units)
            excess = longest - 1.0 - ROUNDING
            p = 1.0
            if excess > 0:
                units = sum(len(state[party]) for state in probe.units)
                # |a + z| <= |a| + |z|: the noise must be at least so long.
                p = units * float(special.gammaincc(count / 2, (excess / max(deviation, 1e-300)) ** 2 / 2))
            yield Reading(
                NAME,
                f"bound of a {what}",
                min(1.0, p),
                f"one unit moves the {what} by {longest:.3g} times the bound that the noise is scaled to",
                name,
            )


def _find_quiet_deviations(probe: Probe) -> tuple[float, float]:
    """Deviations of the noise when a unit was measured alone: of the sum and of the statistics, in units of bounds."""
    share = probe.federation.problem.rule.share(QUIET_SIGMA, probe.alone)
    on_extra = QUIET_SIGMA / math.sqrt(share) if share > 0 else 0.0
    return QUIET_SIGMA / math.sqrt(1 - share), on_extra


@dataclass(frozen=True)
class Decoded:
    """Who was in the quiet rounds of a party. parts [T, n]: how much of its own part each unit added: 0 or 1."""

    parts: Floats
    rest: float

    @property
    def joined(self) -> Flags:
        """Whether each unit was sampled [T, n]."""
        return self.parts > 0.5


def decode(probe: Probe, party: int) -> Decoded:
    """Solve the quiet rounds of a party for its units' parts."""
    rows = [i for i, place in enumerate(probe.quiet.places) if place[2] == party]
    values, own = probe.quiet.values[rows][:, : probe.gradient], probe.units[0][party][:, : probe.gradient]
    parts = values @ np.linalg.pinv(own)
    rest = values - parts @ own
    return Decoded(parts, float(np.linalg.norm(rest, axis=1).max(initial=0.0)))


def read_parts(found: Decoded, name: str) -> Iterator[Reading]:
    """Whether a release is the sum of what its units add alone."""
    distance = np.minimum(np.abs(found.parts), np.abs(found.parts - 1.0))
    worst = np.unravel_index(int(distance.argmax()), distance.shape)
    part = float(found.parts[worst])
    sign = "subtracts" if part < -TOLERANCE else "adds"
    yield contradict(
        NAME,
        "parts of units",
        bool(distance.max() > TOLERANCE),
        f"in round {int(worst[0]) + 1} a unit {sign} {abs(part):.3g} times what it adds alone, so the divisor, C or "
        "its factor follow from the other units of the batch",
        name,
    )
    yield contradict(
        NAME,
        "rest of a release",
        found.rest > TOLERANCE,
        f"a release holds a part of {found.rest:.3g} times C that no sampled unit adds alone",
        name,
    )


def read_sampling(joined: Sequence[Flags], rates: Sequence[float], names: Sequence[str]) -> Iterator[Reading]:
    """Whether units were sampled by Poisson's scheme at the declared rate: [T, n] of each party."""
    for own, rate, name in zip(joined, rates, names, strict=True):
        rounds, units = own.shape
        total = int(own.sum())
        yield Reading(
            NAME,
            "sampling rate",
            exact.judge_count(total, own.size, rate),
            f"units are sampled at a rate of {total / own.size:.3g}, and {rate:.3g} is declared",
            name,
        )
        sizes = own.sum(axis=1)
        yield Reading(
            NAME,
            "sizes of samples",
            exact.judge_dispersion(sizes, units, rate),
            f"the sizes of samples do not scatter as independent coins do (from {sizes.min()} to {sizes.max()} in "
            f"{rounds} rounds): samples are of a fixed size, or drawn together",
            name,
        )
        yield Reading(
            NAME,
            "turns of units",
            exact.judge_dispersion(own.sum(axis=0), rounds, rate),
            "units do not take part equally often by chance alone: they take turns, or some are preferred",
            name,
        )
        for lag in (1, 2, rounds // 2):
            yield _read_overlap(own, rate, lag, name)
        for lag in (1, 2, 3, units // 2):
            yield _read_companions(own, rate, lag, name)
    yield from _read_sizes(joined, rates)
    for a in range(len(joined)):
        for b in range(a):
            if joined[a].shape == joined[b].shape:
                both = int((joined[a] & joined[b]).sum())
                yield Reading(
                    NAME,
                    "samples of two parties",
                    exact.judge_count(both, joined[a].size, rates[a] * rates[b]),
                    f"parties {names[b]} and {names[a]} sample the same units more or less often than by chance",
                    names[a],
                )


def _count_shared(rows: Flags, lag: int) -> tuple[int, int]:
    """In how many of how many places two rows that are `lag` apart both have a flag; no row is in two pairs."""
    firsts = [i for i in range(len(rows)) if i % (2 * lag) < lag and i + lag < len(rows)]
    return sum(int((rows[i] & rows[i + lag]).sum()) for i in firsts), len(firsts) * rows.shape[1]


def _read_overlap(own: Flags, rate: float, lag: int, name: str) -> Reading:
    """Whether two rounds share units by chance alone."""
    both, draws = _count_shared(own, lag)
    return Reading(
        NAME,
        "samples of two rounds",
        exact.judge_count(both, draws, rate * rate) if draws else 1.0,
        f"rounds that are {lag} apart share {both} of {draws} units, which independent samples do not",
        name,
    )


def _read_companions(own: Flags, rate: float, lag: int, name: str) -> Reading:
    """Whether two units join together by chance alone."""
    both, draws = _count_shared(own.T, lag)
    return Reading(
        NAME,
        "units that join together",
        exact.judge_count(both, draws, rate * rate) if draws else 1.0,
        f"units that are {lag} apart are sampled together in {both} of {draws} cases, which independent coins do not",
        name,
    )


def _read_sizes(joined: Sequence[Flags], rates: Sequence[float]) -> Iterator[Reading]:
    """Whether every size of a sample comes as often as it should, over all parties of one rate and number of units.

    Samples that are cut off, filled up or drawn again keep their mean and much of their scatter.
    """
    alike: dict[tuple[int, float], list[Flags]] = {}
    for own, rate in zip(joined, rates, strict=True):
        alike.setdefault((own.shape[1], rate), []).append(own)
    for (units, rate), group in alike.items():
        sizes = np.concatenate([own.sum(axis=1) for own in group])
        limits = range(units)
        found = [
            (exact.judge_count(int((sizes <= most).sum()), len(sizes), float(stats.binom.cdf(most, units, rate))), most)
            for most in limits
        ]
        p, most = min(found)
        yield Reading(
            NAME,
            "distribution of sizes",
            min(1.0, p * len(found)),
            f"{int((sizes <= most).sum())} of {len(sizes)} samples have at most {most} units, and "
            f"{len(sizes) * stats.binom.cdf(most, units, rate):.3g} should: samples are cut off, filled up or drawn "
            "again",
        )


def read_probe_records(probe: Probe) -> Iterator[Reading]:
    """All readings of the records of a probe."""
    yield from read_bounds(probe)
    decoded = [decode(probe, party) for party in range(len(probe.names))]
    for found, name in zip(decoded, probe.names, strict=True):
        yield from read_parts(found, name)
    rates = [
        next(t.rate for t, place in zip(probe.quiet.terms, probe.quiet.places, strict=True) if place[2] == party)
        for party in range(len(probe.names))
    ]
    yield from read_sampling([found.joined for found in decoded], rates, probe.names)
    yield from read_two_steps(probe, rates)


def read_two_steps(probe: Probe, rates: Sequence[float]) -> Iterator[Reading]:
    """Whether two local steps of a round draw samples of their own: a unit that is in both adds twice its part."""
    for party, name in enumerate(probe.names):
        rows = [i for i, place in enumerate(probe.twice.places) if place[2] == party]
        if not rows:
            continue
        parts = probe.twice.values[rows][:, : probe.gradient] @ np.linalg.pinv(
            probe.units[0][party][:, : probe.gradient]
        )
        both, once = int((parts > 1.5).sum()), int(((parts > 0.5) & (parts <= 1.5)).sum())
        rate = rates[party]
        yield Reading(
            NAME,
            "samples of two steps",
            exact.judge_count(both, parts.size, rate * rate),
            f"{both} of {parts.size} units are in both steps of a round, which independent samples do not do",
            name,
        )
        yield Reading(
            NAME,
            "units of two steps",
            exact.judge_count(once, parts.size, 2 * rate * (1 - rate)),
            f"{once} of {parts.size} units are in one of two steps of a round, and "
            f"{2 * rate * (1 - rate) * parts.size:.3g} should be",
            name,
        )
