"""Sentences about a plan that promises less than it seems to, or will learn little. Parties are counted, not listed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fulcrum.privacy.client_level import FEW

ASSUMED = (
    "ASSUMES AN IDEAL SECURE AGGREGATION, which is simulated and not implemented: epsilon holds only against a server "
    "that sees nothing but the sum over all {parties} parties, with no party colluding. Each adds 1/{parties} of the "
    "noise's variance, so a single update by itself is NOT private at this epsilon."
)


def about_rule(private: bool, sound: bool) -> list[str]:
    """Whether the rule's epsilon is a guarantee at all."""
    if not private:
        return ["The rule adds no noise: there is no privacy guarantee at all."]
    if not sound:
        return ["NOT SOUND: the rule sets C from raw private values, so epsilon is nominal and guarantees nothing."]
    return []


def about_sharing(parties: int) -> list[str]:
    """What parties that share one dose of noise rely on."""
    return [ASSUMED.format(parties=parties)]


def about_party(delta: float | None, units: int, batch: float) -> list[str]:
    """One party of that many units and that expected batch; delta is None where nothing is promised."""
    found = []
    if delta is not None and delta >= 1 / units:
        found.append(f"delta = {delta:g} is not below 1/n = 1/{units}; choose a smaller delta.")
    if batch < 1:
        found.append(f"the expected batch is {batch:.2g}, below 1; choose a larger rate.")
    return found


def about_sizes(
    delta: float | None,
    sizes: npt.NDArray[np.int64],
    batches: npt.NDArray[np.float64],
    name: Callable[[int], str],
    unit: str,
) -> list[str]:
    """The same of all parties: their units n_k [K] and expected batches q n_k [K]."""
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


def about_clients(delta: float | None, parties: int, cohort: float, along: float) -> list[str]:
    """A plan whose unit is the client. cohort: q_c K. along: a round's noise along any direction, in units of C."""
    found = []
    if delta is not None and delta >= 1 / parties:
        found.append(
            f"delta = {delta:g} is not below 1/K for K = {parties} parties: choose delta below {1 / parties:.2g}."
        )
    if delta is not None and parties < FEW:
        found.append(
            f"One epsilon hides a whole party among {parties}: in any direction the noise of a round is "
            f"{along:.2g} times the longest step the parties can take together, and little can be learned. Client "
            "level needs hundreds of parties; with few, protect examples (unit example)."
        )
    if cohort < 1:
        found.append(f"The expected number of participants is {cohort:.2g}, below 1: choose a larger participation.")
    return found
