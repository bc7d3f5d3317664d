"""The ledger's rows as frozen values, and events as text in a row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fulcrum.privacy.events import Event, Gaussian, Unprotected, events_from_json, events_to_json


@dataclass(frozen=True)
class LedgerAccount:
    """A party's account. budget: epsilon over all runs; None: no limit.

    unit, delta, accountant and population (a name or fingerprint of the party's data) are fixed at
    enrolment, since a sum over different terms would have no meaning.
    """

    name: str
    budget: float | None
    delta: float
    accountant: str
    unit: str
    population: str


@dataclass(frozen=True)
class LedgerEntry:
    """One reservation. digest and released (seconds since 1970) are None until it is settled."""

    party: str
    run: str
    round: int
    attempt: int
    events: tuple[Event, ...]
    reserved: float
    digest: str | None
    released: float | None


@dataclass(frozen=True)
class RunCostLine:
    """What one run cost one party, for display. epsilon: of that run alone; epsilons of runs do not simply add."""

    party: str
    run: str
    first_round: int
    last_round: int
    reservations: int
    settled: int
    releases: int
    epsilon: float


@lru_cache(maxsize=65536)
def write_events_text(events: tuple[Event, ...]) -> str:
    """Events as the text of a row: JSON with all digits."""
    return json.dumps(events_to_json(events), separators=(",", ":"), allow_nan=False)


@lru_cache(maxsize=65536)
def read_events_text(text: str) -> tuple[Event, ...]:
    """The events of a row. Files of format 1 omit the kind: [rate, sigma, count] with noise, [count] without."""
    return events_from_json([_add_event_kind(row) for row in json.loads(text)])


def _add_event_kind(row: list[Any]) -> list[Any]:
    if row and isinstance(row[0], str):
        return row
    return [(Gaussian if len(row) == 3 else Unprotected).kind, *row]
