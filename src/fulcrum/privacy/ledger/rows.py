"""What the ledger's rows say, as frozen values; and events as the text that a row holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fulcrum.privacy.events import Event, Gaussian, Unprotected, events_from_json, events_to_json


@dataclass(frozen=True)
class LedgerAccount:
    """A party as the ledger knows it. budget is the epsilon over all runs; None records without a limit.

    unit, delta, accountant and population (which data it holds: a name or fingerprint) are fixed once
    enrolled, since sums over different ones would mean nothing.
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
    """What one run cost one party, for display. epsilon is that run's alone; epsilons of runs do not simply add."""

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
    """Events as the text of a row: JSON, every digit kept."""
    return json.dumps(events_to_json(events), separators=(",", ":"), allow_nan=False)


@lru_cache(maxsize=65536)
def read_events_text(text: str) -> tuple[Event, ...]:
    """The events of a row. Files of format 1 leave out the kind: [rate, sigma, count] with noise, [count] without."""
    return events_from_json([_add_event_kind(row) for row in json.loads(text)])


def _add_event_kind(row: list[Any]) -> list[Any]:
    if row and isinstance(row[0], str):
        return row
    return [(Gaussian if len(row) == 3 else Unprotected).kind, *row]
