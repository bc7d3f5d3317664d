"""The ledger's rows as frozen values, and events as text in a row."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fulcrum.errors import InputError
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


SUMS_ONLY = ", seen in sums only (ideal secure aggregation)"
MASKED_SUMS = ", seen in masked sums only, by the server and up to {} colluding parties"
"""The end of the population's name of accounts that hold against a server that sees sums only."""
_MASKED_PATTERN = re.compile(re.escape(MASKED_SUMS).replace(re.escape("{}"), "[0-9]+"))


def name_adversary(population: str) -> str:
    """Against whom an account's epsilon holds, by the end of its population's name; "" against everybody."""
    if SUMS_ONLY in population:
        return SUMS_ONLY
    found = _MASKED_PATTERN.search(population)
    return found.group() if found else ""


UNKNOWN = "unknown"
"""What a run's record says where nobody registered the run: rows of older files, and callers that only reserve."""


@dataclass(frozen=True)
class RunRecord:
    """What a run was: registered once, before its first release, and never changed.

    rule, sound, private: the clipping rule, and whether its epsilon is a guarantee. randomness: "seeded" or "secure".
    arithmetic: "proven" or "fast". aggregation, unit: as in the settings. seed_digest: of the private seed
    (`make_seed_digest`); empty for secure randomness. data_digest: a keyed fingerprint of the data. settings_digest: of
    what decides the releases. simulation: whether the run is a simulation, so that nothing is claimed for real people.
    """

    id: str
    rule: str
    sound: bool
    private: bool
    randomness: str
    arithmetic: str
    aggregation: str
    unit: str
    seed_digest: str
    data_digest: str
    settings_digest: str
    simulation: bool

    @staticmethod
    def unknown(id: str) -> RunRecord:
        """A run of which nobody said what it was. Statements must take it for the worst."""
        return RunRecord(
            id, UNKNOWN, False, False, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, False
        )

    @property
    def is_known(self) -> bool:
        """Whether the run was registered."""
        return self.rule != UNKNOWN


@dataclass(frozen=True)
class RunPlan:
    """The most that a party will release in a run, fixed before its first release. delta: of this run's guarantee."""

    events: tuple[Event, ...]
    delta: float


@dataclass(frozen=True)
class LedgerHead:
    """The end of a ledger's chain of rows. ledger: its identity. sequence: number of rows. digest: of the last one."""

    ledger: str
    sequence: int
    digest: str


@dataclass(frozen=True)
class UnitCost:
    """Units of a party with the same past. count: how many. runs: the runs that they were in, as (party, run).
    epsilon, delta: what was released of each of them, over all those runs."""

    count: int
    runs: tuple[tuple[str, str], ...]
    epsilon: float
    delta: float


@dataclass(frozen=True)
class KnownUnits:
    """A party's units now, compared with those of its earlier runs in a ledger: numbers of units.

    new: in no earlier run of this party. staying: in one of them. gone: in one of them, and not there now. elsewhere:
    units known under another party's name, by that name.
    """

    new: int
    staying: int
    gone: int
    elsewhere: Mapping[str, int] = field(default_factory=dict)


def make_seed_digest(seed: int | None, ledger_identity: str) -> str:
    """A fingerprint by which one ledger knows a private seed again; another ledger's differs. None (secure): empty.

    A slow hash (scrypt): seeds are often small numbers, and whoever reads the ledger must not find one by trying.
    """
    if seed is None:
        return ""
    salt = b"fulcrum private seed" + ledger_identity.encode()
    return hashlib.scrypt(str(int(seed)).encode(), salt=salt, n=2**14, r=8, p=1, dklen=16).hex()


@lru_cache(maxsize=65536)
def write_events_text(events: tuple[Event, ...]) -> str:
    """Events as the text of a row: JSON with all digits."""
    return json.dumps(events_to_json(events), separators=(",", ":"), allow_nan=False)


@lru_cache(maxsize=65536)
def read_events_text(text: str) -> tuple[Event, ...]:
    """The events of a row. Files of format 1 omit the kind: [rate, sigma, count] with noise, [count] without."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        rows = None
    if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        raise InputError("the ledger is damaged: the events of a row cannot be read; restore it from a copy.")
    return events_from_json([_add_event_kind(row) for row in rows])


def _add_event_kind(row: list[Any]) -> list[Any]:
    if row and isinstance(row[0], str):
        return row
    return [(Gaussian if len(row) == 3 else Unprotected).kind, *row]
