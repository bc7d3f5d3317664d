"""The noise of a step relative to the largest signal, of norm C: of one party, the aggregate, or a trusted server.

Values are standard deviations of a mean gradient (unit client: mean update) along one fixed direction, in units of C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fulcrum.clipping.rule import gradient_multiplier, no_statistics_share
from fulcrum.privacy.client_level import ClientLevelTerms
from fulcrum.privacy.plan.party_group import PartyGroup
from fulcrum.settings.derived import WEIGHT_POWERS


@dataclass(frozen=True)
class PlannedNoise:
    """The noise in one local step's mean gradient (unit client: a round's mean update), relative to the
    largest signal, of norm C.

    coordinate: standard deviation per coordinate. norm: of the whole vector, C sigma sqrt(d) / (q n).
    ratio: norm / C. direction: standard deviation along one fixed direction, in units of C: sigma / (q n).
    """

    coordinate: float
    norm: float
    ratio: float
    direction: float


def compute_total_noise(direction: float, dim: int, C: float) -> PlannedNoise:
    """The noise of a vector of `dim` coordinates, from its standard deviation along one direction."""
    ratio = direction * math.sqrt(dim)
    return PlannedNoise(coordinate=direction * C, norm=ratio * C, ratio=ratio, direction=direction)


def plan_step_noise(group: PartyGroup, units: int, t: int = 0) -> float:
    """The noise that one party of this group, with this number of units, adds in a step of round t (from 0)."""
    batch = group.rate * units
    return (
        gradient_multiplier(group.share, group.sigma * group.factors[t], batch) / batch / math.sqrt(group.noise_parties)
    )


def plan_aggregate_noise(
    groups: Sequence[PartyGroup],
    group_of: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int64],
    weights: str,
    participation: float,
) -> float:
    """The noise of the aggregate step in the first round: run's weights, expected number of participants.

    group_of [K]: index of each party's group. sizes [K]: units per party.
    """
    if groups[0].share is no_statistics_share:  # vectorised, since there may be a million parties
        rates, sigmas = np.array([g.rate for g in groups]), np.array([g.sigma for g in groups])
        each = sigmas[group_of] / (rates[group_of] * sizes) / math.sqrt(groups[0].noise_parties)
    else:
        each = np.array([plan_step_noise(groups[at], int(n)) for at, n in zip(group_of, sizes, strict=True)])
    heights = sizes.astype(np.float64) ** WEIGHT_POWERS[weights]
    shares = heights / heights.sum()
    return math.sqrt(float(((shares * each) ** 2).sum()) / participation)


def plan_server_noise(groups: Sequence[PartyGroup], central: ClientLevelTerms) -> float:
    """The noise of a trusted server's mean update in the first round: the largest over the groups, which share it."""
    loudest = max(group.sigma for group in groups)
    return gradient_multiplier(groups[0].share, loudest, central.cohort) * central.sensitivity
