"""What is shown of a plan: `PartyPlan`, and the rows of `fulcrum plan --json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum.clipping.rule import no_share
from fulcrum.privacy.plan.party_group import Group

LISTED = 1000
"""The most parties that `Plan.to_json` lists one by one."""


@dataclass(frozen=True)
class PartyPlan:
    """One party's terms. batch is the expected number of units in a step, q n_k; epsilons are at the end.

    sigma is the multiplier of the first round, sigma_last that of the last. budget is None where sigma was
    given. warnings are sentences for the user.
    """

    name: str
    units: int
    rate: float
    steps: int
    participations: int
    sigma: float
    sigma_last: float
    batch: float
    epsilon_rdp: float
    epsilon_pld: float
    budget: float | None
    warnings: tuple[str, ...] = ()


def plain(value: float) -> float | str:
    """The value as JSON can hold it: infinity as the string "inf"."""
    return "inf" if math.isinf(value) else value


def group_row(group: Group, parties: int, ends: tuple[float, float], spent: float) -> dict[str, Any]:
    """A group of so many parties. ends: epsilon by RDP and by PLD at the end. spent: epsilon before the run."""
    rdp, pld = ends
    return {
        "parties": parties,
        "rate": group.rate,
        "steps": group.steps,
        "participations": group.participations,
        "sigma": group.sigma,
        "sigma_last": group.sigmas()[1],
        "statistics_every": group.every if group.share is not no_share else 0,
        "budget": group.budget,
        "spent_before": plain(spent),
        "epsilon_rdp": plain(rdp),
        "epsilon_pld": plain(pld),
    }


def party_row(party: PartyPlan) -> dict[str, Any]:
    """One party."""
    ends = {"epsilon_rdp": plain(party.epsilon_rdp), "epsilon_pld": plain(party.epsilon_pld)}
    return {**vars(party), **ends, "warnings": list(party.warnings)}


def curve_rows(curve: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Epsilon by rounds."""
    return [{"round": t, "epsilon": plain(epsilon)} for t, epsilon in curve]
