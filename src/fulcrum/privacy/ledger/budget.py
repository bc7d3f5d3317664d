"""Spends added up, priced by each account's terms, and held against its budget; nothing here touches the file."""

from __future__ import annotations

from collections.abc import Sequence

from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend, epsilons
from fulcrum.privacy.ledger.rows import Account, read_events

SLACK = 1e-9
"""Relative tolerance of the budget check: rounding in a sum, nothing else."""
NOTHING = Spend.none()


class Adder:
    """Spend plus events, computed once for all parties with the same past: they share one object."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, str, int], tuple[Spend, Spend]] = {}

    def __call__(self, past: Spend, events: str, times: int = 1) -> Spend:
        key = (id(past), events, times)
        if key not in self._done:
            # The past is kept beside the sum, so that its id cannot pass to another object.
            self._done[key] = (past, past.plus(read_events(events), times))
        return self._done[key][1]


def costs(pairs: Sequence[tuple[Account, Spend]]) -> list[float]:
    """Epsilon of each spend by the terms of its account, many at once."""
    terms: dict[tuple[float, str], dict[int, Spend]] = {}
    for account, spend in pairs:
        terms.setdefault((account.delta, account.accountant), {})[id(spend)] = spend
    found = {
        term: dict(zip(spends, epsilons(list(spends.values()), *term).tolist(), strict=True))
        for term, spends in terms.items()
    }
    return [found[account.delta, account.accountant][id(spend)] for account, spend in pairs]


def within_budget(pairs: Sequence[tuple[Account, Spend]]) -> list[bool]:
    """Whether each spend fits into the budget of its account."""
    limited = [(account, spend) for account, spend in pairs if account.budget is not None]
    prices = iter(costs(limited))
    return [a.budget is None or next(prices) <= a.budget * (1 + SLACK) for a, _ in pairs]


def check_budget(party: str, budget: float | None) -> None:
    """Refuse a budget that limits nothing by mistake, or everything."""
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(
            f"budget of party {party!r} = {budget!r} is out of range; it must be a finite number above 0."
        )
