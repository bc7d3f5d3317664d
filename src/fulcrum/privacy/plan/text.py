"""Output of a plan: warnings in sentences, and the rows of `fulcrum plan --json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fulcrum.clipping.rule import no_statistics_share
from fulcrum.privacy.client_level import FEW_PARTIES
from fulcrum.privacy.plan.party_group import PartyGroup

# --- rows ---------------------------------------------------------------------------------------

MAX_PARTIES_LISTED = 1000
"""The largest number of parties that `Plan.to_json` lists."""


@dataclass(frozen=True)
class PartyPlan:
    """One party's terms.

    batch: expected number of units in a step, q n_k. epsilons: at the end, by accountant. sigma: multiplier
    of the first round. sigma_last: of the last round. budget: None where sigma was given. warnings: sentences
    for the user.
    """

    name: str
    units: int
    rate: float
    steps: int
    participations: int
    sigma: float
    sigma_last: float
    batch: float
    epsilons: Mapping[str, float]
    budget: float | None
    warnings: tuple[str, ...] = ()

    @property
    def epsilon_rdp(self) -> float:
        """Epsilon by RDP."""
        return self.epsilons["rdp"]

    @property
    def epsilon_pld(self) -> float:
        """Epsilon by PLD."""
        return self.epsilons["pld"]


def infinity_to_text(value: float) -> float | str:
    """The value as JSON can hold it: infinity as the string "inf"."""
    return "inf" if math.isinf(value) else value


def make_headline_keys(epsilons: Mapping[str, float]) -> dict[str, float | str]:
    """Epsilons by accountant as JSON keys: `epsilon` is the first accountant's, then `epsilon_NAME`."""
    first, *others = epsilons
    return {
        "epsilon": infinity_to_text(epsilons[first]),
        **{f"epsilon_{name}": infinity_to_text(epsilons[name]) for name in others},
    }


def make_epsilon_keys(epsilons: Mapping[str, float]) -> dict[str, float | str]:
    """Epsilons by accountant as JSON keys: `epsilon_NAME` each."""
    return {f"epsilon_{name}": infinity_to_text(value) for name, value in epsilons.items()}


def make_group_row(group: PartyGroup, parties: int, ends: Mapping[str, float], spent: float) -> dict[str, Any]:
    """The row of a group. parties: their number. ends: final epsilon by accountant. spent: epsilon before the run."""
    return {
        "parties": parties,
        "rate": group.rate,
        "steps": group.steps,
        "participations": group.participations,
        "sigma": group.sigma,
        "sigma_last": group.sigmas()[1],
        "statistics_every": group.statistics_interval if group.share is not no_statistics_share else 0,
        "budget": group.budget,
        "spent_before": infinity_to_text(spent),
        **make_epsilon_keys(ends),
    }


def make_party_row(party: PartyPlan) -> dict[str, Any]:
    """The row of one party."""
    row: dict[str, Any] = {}
    for name, value in vars(party).items():
        row |= make_epsilon_keys(party.epsilons) if name == "epsilons" else {name: value}
    return {**row, "warnings": list(party.warnings)}


def make_curve_rows(curve: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """One row per point of the curve: round and epsilon."""
    return [{"round": t, "epsilon": infinity_to_text(epsilon)} for t, epsilon in curve]


# --- warnings: a plan that guarantees less than it seems to, or will learn little -----------------

ASSUMED_AGGREGATION_WARNING = (
    "ASSUMES AN IDEAL SECURE AGGREGATION, which is simulated and not implemented: epsilon holds only against a server "
    "that sees nothing but the sum over all {parties} parties, with no party colluding. Each adds 1/{parties} of the "
    "noise's variance, so a single update by itself is NOT private at this epsilon."
)


def warn_about_rule(private: bool, sound: bool) -> list[str]:
    """Warnings about a rule whose epsilon is not a guarantee."""
    if not private:
        return ["The rule adds no noise: there is no privacy guarantee at all."]
    if not sound:
        return ["NOT SOUND: the rule sets C from raw private values, so epsilon is nominal and guarantees nothing."]
    return []


def warn_about_shared_noise(parties: int) -> list[str]:
    """The assumption of parties that share one noise vector."""
    return [ASSUMED_AGGREGATION_WARNING.format(parties=parties)]


NO_COLLUDER_WARNING = (
    "privacy.colluders = 0 covers no participant: a party reads the broadcast model and knows its own message, so it "
    "already sees the sum of the others, with less noise than this epsilon asks for. Set colluders to 1 or more."
)


def warn_about_masks(colluders: int) -> list[str]:
    """What pairwise masks that cover no colluder leave open."""
    return [NO_COLLUDER_WARNING] if colluders == 0 else []


def warn_about_party(delta: float | None, units: int, batch: float) -> list[str]:
    """Warnings about one party: its number of units and expected batch size. delta: None without a guarantee."""
    found = []
    if delta is not None and delta >= 1 / units:
        found.append(f"delta = {delta:g} is not below 1/n = 1/{units}; choose a smaller delta.")
    if batch < 1:
        found.append(f"the expected batch is {batch:.2g}, below 1; choose a larger rate.")
    return found


def warn_about_party_sizes(
    delta: float | None,
    sizes: npt.NDArray[np.int64],
    batches: npt.NDArray[np.float64],
    name: Callable[[int], str],
    unit: str,
) -> list[str]:
    """The same warnings for all parties: their units n_k [K] and expected batch sizes q n_k [K]."""
    found, parties = [], len(sizes)
    exposed = 0 if delta is None else int((delta >= 1 / sizes).sum())
    if exposed:
        k = int(sizes.argmax())
        found.append(
            f"delta = {delta:g} is not below 1/n for {exposed} of {parties} parties (the largest, "
            f"{name(k)}, has {sizes[k]} {unit}s): choose delta below {1 / sizes[k]:.2g}."
        )
    thin = int((batches < 1).sum())
    if thin:
        found.append(f"The expected batch is below 1 for {thin} of {parties} parties: choose a larger rate.")
    return found


def warn_about_client_unit(delta: float | None, parties: int, cohort: float, along: float) -> list[str]:
    """Warnings at unit client. cohort: q_c K. along: a round's noise along any direction, in units of C."""
    found = []
    if delta is not None and delta >= 1 / parties:
        found.append(
            f"delta = {delta:g} is not below 1/K for K = {parties} parties: choose delta below {1 / parties:.2g}."
        )
    if delta is not None and parties < FEW_PARTIES:
        found.append(
            f"One epsilon hides a whole party among {parties}: in any direction the noise of a round is "
            f"{along:.2g} times the longest step the parties can take together, and little can be learned. Client "
            "level needs hundreds of parties; with few, protect examples (unit example)."
        )
    if cohort < 1:
        found.append(f"The expected number of participants is {cohort:.2g}, below 1: choose a larger participation.")
    return found
