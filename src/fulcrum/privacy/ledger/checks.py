"""Checks of what is written to a ledger against what is there; each raises an error of one sentence."""

from __future__ import annotations

from fulcrum.errors import ConfigError
from fulcrum.privacy.ledger.rows import LedgerAccount, name_adversary


def check_budget_value(party: str, budget: float | None) -> None:
    """Refuse a budget that is not a finite number above 0."""
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(
            f"budget of party {party!r} = {budget!r} is out of range; it must be a finite number above 0."
        )


def check_same_account_terms(known: LedgerAccount, given: LedgerAccount, has_units: bool) -> None:
    """Refuse other terms. has_units: the party's units are known by digests, so its data may change."""
    for term in ("unit", "delta", "accountant"):
        if getattr(known, term) != getattr(given, term):
            raise ConfigError(
                f"party {known.name!r} is in the ledger with {term} = {getattr(known, term)!r}, not "
                f"{getattr(given, term)!r}; use the same {term}, or another ledger."
            )
    if name_adversary(known.population) != name_adversary(given.population):
        raise ConfigError(
            f"party {known.name!r} is in the ledger with population = {known.population!r}, not {given.population!r}; "
            "epsilons against different adversaries do not add up: use the same privacy.aggregation and "
            "privacy.colluders, or another ledger."
        )
    if known.population != given.population and not has_units:
        raise ConfigError(
            f"party {known.name!r} is in the ledger with population = {known.population!r}, not {given.population!r}; "
            "use the same data, or register the digests of its records with every run (Ledger.register_units), so that "
            "the people who stay keep what was spent."
        )
