"""Enrolling parties, on terms that stay, and changing their budgets."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import check_terms
from fulcrum.privacy.ledger.budget import check_budget
from fulcrum.privacy.ledger.rows import Account
from fulcrum.privacy.ledger.store import Store


def enroll_all(store: Store, given: Iterable[Account]) -> None:
    """Add those that are new; all or none."""
    accounts = list(given)
    for account in accounts:
        check_terms(account.delta, account.accountant)
        check_budget(account.name, account.budget)
    if all(account.name in store.accounts for account in accounts):  # terms never change: no need to look
        for account in accounts:
            _same_terms(store.accounts[account.name][1], account)
        return
    with store.changing():
        added: dict[str, Account] = {}
        for account in accounts:
            known = store.accounts[account.name][1] if account.name in store.accounts else added.get(account.name)
            if known is not None:
                _same_terms(known, account)
                continue
            added[account.name] = account
            now = time.time()
            cursor = store.db.execute(
                "INSERT INTO parties (name, delta, accountant, unit, population, time) VALUES (?, ?, ?, ?, ?, ?)",
                (account.name, account.delta, account.accountant, account.unit, account.population, now),
            )
            _add_budget(store, cursor.lastrowid, account.budget, now)


def set_budget(store: Store, party: str, budget: float | None) -> None:
    """Add another budget; the last one counts."""
    check_budget(party, budget)
    with store.changing():
        row, _ = store.account(party)
        _add_budget(store, row, budget, time.time())


def _add_budget(store: Store, row: int | None, budget: float | None, now: float) -> None:
    store.db.execute("INSERT INTO budgets (party, epsilon, time) VALUES (?, ?, ?)", (row, budget, now))


def _same_terms(known: Account, given: Account) -> None:
    for term in ("unit", "delta", "accountant", "population"):
        if getattr(known, term) != getattr(given, term):
            raise ConfigError(
                f"party {known.name!r} is in the ledger with {term} = {getattr(known, term)!r}, not "
                f"{getattr(given, term)!r}; use the same {term}, or another ledger."
            )
