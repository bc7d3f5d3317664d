"""What an epsilon means, in plain words and in numbers that a person can weigh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum.privacy.accounting import format_epsilon

UNIT_WORDS = {
    "example": "one record",
    "person": "all records of one person",
    "client": "all data of one party",
}
"""By privacy unit: what epsilon protects."""


@dataclass(frozen=True)
class Verdict:
    """What an epsilon is worth. level: "good", "care" or "bad", for its colour; short and long are for people."""

    level: str
    short: str
    long: str


VERDICTS = {
    "yes": Verdict("good", "sound", "The rule is sound and the random numbers are secure: this epsilon holds."),
    "simulation": Verdict(
        "care",
        "simulation",
        "The random numbers follow from a seed. The epsilon holds only while nobody knows or guesses it; "
        "on real data, use privacy.randomness = secure.",
    ),
    "assumed": Verdict(
        "care",
        "assumed",
        "The epsilon rests on a secure aggregation that is simulated here: single updates are not private.",
    ),
    "unknown": Verdict("care", "not known", "The files do not say what makes this epsilon a guarantee."),
    "nominal": Verdict(
        "bad",
        "not sound",
        "The clipping rule looks at private values to set C. The epsilon is nominal: it does not hold.",
    ),
    "none": Verdict("bad", "not private", "Values left without noise. Nothing is protected."),
    "": Verdict("care", "not known", "The files that would say what the epsilon is worth are missing."),
}
"""By the statement's `guarantee`."""
PRIORS = (0.01, 0.1, 0.5)
"""How sure somebody is beforehand; the rows of the table."""
FALSE_ALARMS = 0.01


def find_verdict(guarantee: str) -> Verdict:
    """The verdict on an epsilon; an unknown word counts as not known."""
    return VERDICTS.get(guarantee, VERDICTS["unknown"])


def compute_posterior(prior: float, epsilon: float) -> float:
    """The most that somebody can believe after seeing the releases who believed `prior` before (delta left aside)."""
    odds = math.exp(min(epsilon, 700.0)) * prior
    return odds / (1 - prior + odds)


def compute_detection_bound(epsilon: float, delta: float, false_alarms: float = FALSE_ALARMS) -> float:
    """The largest true positive rate of any test for membership with this rate of false alarms."""
    low = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    high = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(low, high, 1.0)


def format_share(share: float) -> str:
    """A probability as people read it, rounded up: 73%, 0.1%, 99.98%; 100% only where it is 1."""
    percent = 100 * share
    if percent >= 100:
        return "100%"
    digits = 0 if percent >= 10 else 1 - math.floor(math.log10(percent)) if percent > 0 else 0
    while (shown := math.ceil(percent * 10**digits - 1e-6) / 10**digits) >= 100 and digits < 12:
        digits += 1
    return f"{shown:.{digits}f}%" if percent >= 10 else f"{shown:.2g}%"


def explain_epsilon(epsilon: float, delta: float, unit: str) -> list[str]:
    """Sentences that say what an epsilon promises; empty where there is no finite one."""
    if not math.isfinite(epsilon) or not math.isfinite(delta):
        return []
    what = UNIT_WORDS.get(unit, "one unit")
    factor = math.exp(min(epsilon, 700.0))
    times = f"{factor:.3g}" if factor < 1e6 else f"{factor:.2e}"
    found = [
        f"Take two worlds: in one of them {what} took part, in the other it did not. Whatever anybody sees of this "
        f"run, and whatever else they know, they see it at most {times} times as often in one world as in the other "
        f"(e to the power of epsilon = {format_epsilon(epsilon)}), but for a probability of delta = {delta:g}.",
        f"Any test for whether {what} took part that raises a false alarm in {format_share(FALSE_ALARMS)} of all cases "
        f"finds at most {format_share(compute_detection_bound(epsilon, delta))} of those who did.",
        describe_scale(epsilon),
    ]
    return found


def describe_scale(epsilon: float) -> str:
    """Where an epsilon stands on the scale of Ponomareva and others (2023)."""
    place = (
        "strong (up to 1)"
        if epsilon <= 1
        else "reasonable (1 to 10)"
        if epsilon <= 10
        else "weak (above 10): little is promised by the number itself"
    )
    return (
        f"On the scale of Ponomareva and others (How to DP-fy ML, 2023) this epsilon is {place}. A scale says nothing "
        "about what is at stake; that is for whoever answers for the data to weigh."
    )


def list_beliefs(epsilon: float, priors: Sequence[float] = PRIORS) -> list[tuple[str, str]]:
    """(how sure before, how sure at most after) for some beliefs that a unit took part."""
    return [(format_share(prior), format_share(compute_posterior(prior, epsilon))) for prior in priors]
