"""What an epsilon is worth, and where it stands on a scale. What it means is `fulcrum.privacy.statement.meaning`."""

from __future__ import annotations

from dataclasses import dataclass

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


def find_verdict(guarantee: str) -> Verdict:
    """The verdict on an epsilon; an unknown word counts as not known."""
    return VERDICTS.get(guarantee, VERDICTS["unknown"])


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
