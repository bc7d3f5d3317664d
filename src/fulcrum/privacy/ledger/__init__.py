"""The ledger: what every party has spent, in one SQLite file that outlives runs.

What a round will release is reserved before anything leaves a party, and a reservation counts at
once; `settle` later adds the digest of what was released. Rows are only ever added: triggers in the
file refuse changes. A crash at any moment leaves either the whole reservation or none of it, so the
ledger may show more than was released, never less.

ledger.py   `Ledger`: enroll, reserve, settle, and questions about what was spent
store.py    the file: its format, transactions, and its rows kept in memory
rows.py     what the rows say, as frozen values
"""

from __future__ import annotations

from fulcrum.privacy.ledger.ledger import Ledger
from fulcrum.privacy.ledger.rows import LedgerAccount, LedgerEntry, RunCostLine

__all__ = ["Ledger", "LedgerAccount", "LedgerEntry", "RunCostLine"]
