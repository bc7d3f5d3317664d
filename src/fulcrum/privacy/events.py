"""Privacy events: what was released, not what it costs. New kinds can be added.

An event is a frozen dataclass with a `kind` name and a `count`. Its JSON form is a list that starts with its kind,
`["gaussian", 0.05, 1.2, 1]`, and `EVENT_KINDS` finds the class that reads such a list. Ledgers and messages store
events through `events_to_json` and `events_from_json` alone, so a new kind needs one class and one row of
`EVENT_KINDS` here, and an accountant that supports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from fulcrum.errors import InputError


class Event:
    """Something that was released `count` times. Subclasses are frozen dataclasses."""

    kind: ClassVar[str]
    count: int

    def with_count(self, count: int) -> Self:
        """The same event, released `count` times."""
        return replace(self, count=count)  # type: ignore[type-var]  # every event is a dataclass

    def to_json(self) -> list[Any]:
        """The event as a JSON list: its kind, then its values; every digit is kept."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """The event from the values after its kind; InputError if they are invalid."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(Event):
    """One noised sum, released `count` times over fresh Poisson samples.

    Each unit is sampled with probability `rate` and changes the sum by at most 1 (after scaling). The
    noise has standard deviation `sigma` in the same scale.
    """

    kind: ClassVar[str] = "gaussian"
    rate: float
    sigma: float
    count: int = 1

    def to_json(self) -> list[Any]:
        """["gaussian", rate, sigma, count]."""
        return [self.kind, float(self.rate), float(self.sigma), int(self.count)]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """From [rate, sigma, count]."""
        if not (len(values) == 3 and all(map(_is_finite_number, values)) and _is_event_count(values[2])):
            raise InputError(f"the event {list(values)!r} is not [rate, sigma, count] of a Gaussian release.")
        return cls(float(values[0]), float(values[1]), values[2])


@dataclass(frozen=True)
class Unprotected(Event):
    """A release of private data without noise, `count` times: no finite epsilon holds."""

    kind: ClassVar[str] = "unprotected"
    count: int = 1

    def to_json(self) -> list[Any]:
        """["unprotected", count]."""
        return [self.kind, int(self.count)]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """From [count]."""
        if not (len(values) == 1 and _is_event_count(values[0])):
            raise InputError(f"the event {list(values)!r} is not [count] of an unprotected release.")
        return cls(values[0])


EVENT_KINDS: dict[str, type[Event]] = {event.kind: event for event in (Gaussian, Unprotected)}
"""Event classes by the name of their kind. A package with its own kind adds it here."""


def events_to_json(events: Iterable[Event]) -> list[list[Any]]:
    """Events as JSON lists, each starting with its kind."""
    return [event.to_json() for event in events]


def events_from_json(rows: Any) -> tuple[Event, ...]:
    """The events that `events_to_json` wrote; InputError, in one sentence, for anything else."""
    if not isinstance(rows, list):
        raise InputError(f"events must be a list of lists, not a {type(rows).__name__}.")
    return tuple(map(_event_from_json, rows))


def _event_from_json(row: Any) -> Event:
    if not (isinstance(row, list) and row and isinstance(row[0], str)):
        raise InputError(f"the event {row!r} is not a list that starts with the name of its kind.")
    if row[0] not in EVENT_KINDS:
        known = ", ".join(EVENT_KINDS)
        raise InputError(
            f"an event of kind {row[0]!r} is not known to this Fulcrum, which knows {known}; "
            "use the version or import the package that wrote it."
        )
    return EVENT_KINDS[row[0]].from_json(row[1:])


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_event_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
