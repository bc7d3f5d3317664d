"""Reserving before a release and settling after it: the only two ways to write down money, each one transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fulcrum.errors import BudgetError
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.budget import Adder, within_budget
from fulcrum.privacy.ledger.rows import Account, write_events
from fulcrum.privacy.ledger.store import Store


class _Wish(NamedTuple):
    """What one party asks for, and what it would have spent with it."""

    party: str
    row: int
    account: Account
    events: str
    spend: Spend


def reserve(store: Store, run: str, round: int, wanted: Mapping[str, Sequence[Event]], attempt: int) -> dict[str, bool]:
    """Write down what fits into the budgets; who was granted."""
    asked = {party: tuple(events) for party, events in wanted.items()}
    with store.changing():
        wishes = _new_wishes(store, run, round, asked, attempt)
        within = within_budget([(wish.account, wish.spend) for wish in wishes])
        granted = [wish for wish, fits in zip(wishes, within, strict=True) if fits]
        now = time.time()
        store.db.executemany(
            "INSERT INTO entries (party, run, round, attempt, events, time) VALUES (?, ?, ?, ?, ?, ?)",
            [(wish.row, run, round, attempt, wish.events, now) for wish in granted],
        )
        (last,) = store.db.execute("SELECT coalesce(max(id), 0) FROM entries").fetchone()
    # Only now is it on disk; the transaction kept every other writer out, so these are all the news.
    store.remember(last, {wish.row: wish.spend for wish in granted})
    refused = {wish.party for wish, fits in zip(wishes, within, strict=True) if not fits}
    return {party: party not in refused for party in asked}


def _new_wishes(
    store: Store, run: str, round: int, asked: Mapping[str, tuple[Event, ...]], attempt: int
) -> list[_Wish]:
    """Those that are not on record yet; BudgetError where other events are."""
    held = dict(
        store.db.execute(
            "SELECT party, events FROM entries WHERE run = ? AND round = ? AND attempt = ?",
            (run, round, attempt),
        )
    )
    wishes: list[_Wish] = []
    add = Adder()
    for party, events in asked.items():
        row, account = store.account(party)
        text = write_events(events)
        if held.get(row, text) != text:
            raise BudgetError(
                f"party {party!r} already reserved other events for round {round} of run {run!r} (attempt "
                f"{attempt}); what is released must be what was reserved, so nothing was released."
            )
        if row not in held:
            wishes.append(_Wish(party, row, account, text, add(store.spend(row), text)))
    return wishes


def settle(store: Store, run: str, round: int, digests: Mapping[str, str], attempt: int | None) -> None:
    """Write down the digest of what each party released."""
    with store.changing():
        rows = store.db.execute(
            "SELECT e.party, e.attempt, e.id, s.digest FROM entries e LEFT JOIN settlements s ON s.entry = e.id"
            " WHERE e.run = ? AND e.round = ? ORDER BY e.attempt",
            (run, round),
        ).fetchall()
        latest = {party: (entry, old) for party, tried, entry, old in rows if attempt in (None, tried)}
        new = []
        for party, digest in digests.items():
            entry, old = latest.get(store.account(party)[0], (None, None))
            if entry is None:
                raise BudgetError(f"party {party!r} settles round {round} of run {run!r}, which it never reserved.")
            if old not in (None, digest):
                raise BudgetError(
                    f"party {party!r} already released something else in round {round} of run {run!r}; reserve a "
                    "new attempt before releasing again."
                )
            if old is None:
                new.append((entry, digest, time.time()))
        store.db.executemany("INSERT INTO settlements (entry, digest, time) VALUES (?, ?, ?)", new)


def settled_attempts(store: Store, run: str, round: int) -> int:
    """One more than the last attempt that was settled."""
    with store.reading():
        (last,) = store.db.execute(
            "SELECT coalesce(max(e.attempt), -1) FROM entries e JOIN settlements s ON s.entry = e.id"
            " WHERE e.run = ? AND e.round = ?",
            (run, round),
        ).fetchone()
        return int(last) + 1
