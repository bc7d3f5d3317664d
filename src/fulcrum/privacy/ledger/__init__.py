"""The ledger: what every party has spent, in one SQLite file that outlives runs.

A round's releases are reserved before any data leaves a party, and a reservation counts at once; `settle`
later adds the digest of the release. The file is append-only: its triggers refuse changes. A crash leaves
either the whole reservation or none of it, so the ledger may show more than was released, never less.

ledger.py       `Ledger`: enroll, register, reserve, settle
reader.py       what can be asked of a ledger: who, which runs, what was spent, what fits
checks.py       refusals of terms and budgets
composition.py  how the runs of an account add up, so that the sum holds for people who look before they go on
units.py        who was in which run, by keyed digests
chain.py        the hash chain over all rows
store.py        the file: its format, transactions, and a copy of its rows in memory
rows.py         the rows as frozen values
"""

from __future__ import annotations

from fulcrum.privacy.ledger.ledger import Ledger
from fulcrum.privacy.ledger.rows import (
    UNKNOWN,
    KnownUnits,
    LedgerAccount,
    LedgerEntry,
    LedgerHead,
    RunCostLine,
    RunPlan,
    RunRecord,
    UnitCost,
    make_seed_digest,
)

__all__ = [
    "UNKNOWN",
    "KnownUnits",
    "Ledger",
    "LedgerAccount",
    "LedgerEntry",
    "LedgerHead",
    "RunCostLine",
    "RunPlan",
    "RunRecord",
    "UnitCost",
    "make_seed_digest",
]
