"""What an audit found: bounds per party beside the claim, as RUN/audit.json and as lines to read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulcrum.analysis.audit.bounds import LowerBound
from fulcrum.privacy.accounting import format_epsilon

FORMAT = "fulcrum-audit-1"
"""The name of the format of audit.json (docs/audit.md)."""


@dataclass(frozen=True)
class PartyAudit:
    """One party's bounds beside its claim.

    claimed: the epsilon that its ledger or its statement says, at delta. included: how many canaries were in. above:
    whether a bound is above the claim even at the confidence that all bounds of the audit share. point: rates of false
    and of true positives that the attacker reached with its highest scores. shared: where this party has the highest
    bound of the audit, its highest one at the level that all bounds share: the highest of many is not chosen for free.
    """

    name: str
    claimed: float
    canaries: int
    included: int
    releases: int
    bounds: tuple[LowerBound, ...]
    above: bool = False
    point: tuple[float, float] | None = None
    shared: LowerBound | None = None

    @property
    def best(self) -> LowerBound:
        """The highest of the bounds."""
        return max(self.bounds, key=lambda bound: bound.epsilon)


@dataclass(frozen=True)
class Audit:
    """The outcome of an audit.

    view: what the attacker sees, in words. kind: "gradient" or "example" canaries, "members" of a finished run, or
    "releases" of others. together: all parties' canaries as one, where their claims are the same.
    checks: what was compared with the ledger and the statement, and whether it agreed.
    """

    view: str
    kind: str
    delta: float
    confidence: float
    parties: tuple[PartyAudit, ...]
    together: PartyAudit | None = None
    checks: Mapping[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entries(self) -> tuple[PartyAudit, ...]:
        """Every party, and all together."""
        return (*self.parties, *((self.together,) if self.together else ()))

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the claims."""
        return all(self.checks.values()) and not any(entry.above for entry in self.entries)

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json; `measured` is the point to show beside the claimed epsilon."""
        entries = [entry for entry in self.entries if entry.bounds]
        best = max(entries, key=lambda entry: entry.best.epsilon, default=None)
        headline = None if best is None else best.shared or best.best
        return {
            "format": FORMAT,
            "kind": self.kind,
            "view": self.view,
            "delta": self.delta,
            "confidence": self.confidence,
            "passed": self.passed,
            "measured": None
            if best is None or headline is None
            else {
                "epsilon": headline.epsilon,
                "claimed": best.claimed,
                "method": headline.method,
                "assumes": headline.assumes,
                "party": best.name,
            },
            "points": [
                {"name": entry.name, "false_positives": entry.point[0], "true_positives": entry.point[1]}
                for entry in self.entries
                if entry.point is not None
            ],
            "parties": [_entry_to_json(entry) for entry in self.parties],
            "together": _entry_to_json(self.together) if self.together else None,
            "checks": dict(self.checks),
            "notes": list(self.notes),
            **self.facts,
        }

    def list_rows(self) -> list[tuple[str, ...]]:
        """A table: party, claimed epsilon, then each bound with its method."""
        return [
            (
                entry.name,
                format_epsilon(entry.claimed),
                bound.method,
                format_lower_bound(bound.epsilon),
                format_lower_bound(bound.epsilon / entry.claimed, 2) if entry.claimed > 0 else "-",
                _describe_counts(bound.numbers),
            )
            for entry in self.entries
            for bound in entry.bounds
        ]

    def list_assumptions(self) -> list[str]:
        """One line per method that assumes something."""
        found = {bound.method: bound.assumes for entry in self.entries for bound in entry.bounds}
        return [f"{method} assumes: {words}" for method, words in found.items() if words]


def format_lower_bound(value: float, digits: int = 3) -> str:
    """A lower bound with so many decimals, rounded down: what is printed is never more than what was measured."""
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def _entry_to_json(entry: PartyAudit) -> dict[str, Any]:
    return {
        "name": entry.name,
        "claimed": entry.claimed,
        "canaries": entry.canaries,
        "included": entry.included,
        "releases": entry.releases,
        "above": entry.above,
        "bounds": [dataclasses.asdict(bound) for bound in entry.bounds],
    }


def _describe_counts(numbers: Mapping[str, float]) -> str:
    if "guesses" in numbers:
        return f"{numbers['correct']:.0f} of {numbers['guesses']:.0f} guesses, {numbers['canaries']:.0f} canaries"
    if "true_positives" in numbers:
        return (
            f"{numbers['true_positives']:.0f} of {numbers['members']:.0f} in, "
            f"{numbers['false_positives']:.0f} of {numbers['others']:.0f} out"
        )
    noise = f", noise at most {numbers['noise_at_most']:.3f} of the claim" if "noise_at_most" in numbers else ""
    return f"{numbers.get('members', 0):.0f} in, {numbers.get('others', 0):.0f} out{noise}"


BoundFn = Callable[[float], tuple[LowerBound, ...]]
"""Confidence of each bound -> the bounds of one entry."""


@dataclass(frozen=True)
class Measured:
    """An entry before its bounds: what is claimed, and how to bound it at a confidence."""

    name: str
    claimed: float
    canaries: int
    included: int
    releases: int
    bound: BoundFn
    point: tuple[float, float] | None = None


def conclude(measured: Sequence[Measured], confidence: float) -> list[PartyAudit]:
    """Bounds at the confidence, each for itself; what is above its claim is tried again at a level that all share.

    With many parties and methods some bound would be above its claim by chance. The audit as a whole raises a false
    alarm with probability 1 - confidence at most.
    """
    plain = [(entry, entry.bound(confidence)) for entry in measured]
    total = sum(len(bounds) for _, bounds in plain)
    highest = max((bound.epsilon for _, bounds in plain for bound in bounds), default=0.0)
    found = []
    for entry, bounds in plain:
        above = any(bound.epsilon > entry.claimed for bound in bounds)
        best = max((bound.epsilon for bound in bounds), default=-1.0) == highest
        shared = None
        if total > 1 and (above or best):
            strict = entry.bound(1 - (1 - confidence) / total)
            above = above and any(bound.epsilon > entry.claimed for bound in strict)
            shared = max(strict, key=lambda bound: bound.epsilon) if best else None
        counts = entry.canaries, entry.included, entry.releases
        found.append(PartyAudit(entry.name, entry.claimed, *counts, bounds, above, entry.point, shared))
    return found
