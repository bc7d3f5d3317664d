"""What was spent, read from the file: by party, by run, line by line. Nothing here writes."""

from __future__ import annotations

from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger.budget import NOTHING, costs
from fulcrum.privacy.ledger.rows import Account, Entry, Line, read_events
from fulcrum.privacy.ledger.store import Store


def accounts(store: Store) -> dict[str, Account]:
    """Every party's present terms, by name."""
    with store.reading():
        return {name: account for name, (_, account) in store.accounts.items()}


def spent(store: Store, party: str) -> Spend:
    """One party, over all runs."""
    with store.reading():
        return store.spend(store.account(party)[0])


def spends(store: Store, run: str | None) -> dict[str, Spend]:
    """Every party, over all runs or in one."""
    with store.reading():
        if run is None:
            return {name: store.spend(row) for name, (row, _) in store.accounts.items()}
        totals = dict.fromkeys(store.accounts, NOTHING)
        for name, events, times in store.db.execute(
            "SELECT p.name, e.events, count(*) FROM entries e JOIN parties p ON p.id = e.party"
            " WHERE e.run = ? GROUP BY p.name, e.events",
            (run,),
        ):
            totals[name] = totals[name].plus(read_events(events), times)
        return totals


def reservations(store: Store, run: str, rounds: range) -> list[tuple[str, tuple[Event, ...]]]:
    """Every reservation of a run in these rounds, in the order of rounds and attempts."""
    with store.reading():
        rows = store.db.execute(
            "SELECT p.name, e.events FROM entries e JOIN parties p ON p.id = e.party"
            " WHERE e.run = ? AND e.round >= ? AND e.round < ? ORDER BY e.round, e.attempt, e.id",
            (run, rounds.start, rounds.stop),
        )
        return [(name, read_events(events)) for name, events in rows]


def epsilon(store: Store, party: str) -> float:
    """One party's, by its own terms."""
    with store.reading():
        row, account = store.account(party)
        return store.spend(row).epsilon(account.delta, account.accountant)


def epsilons(store: Store) -> dict[str, float]:
    """Every party's, many at once."""
    with store.reading():
        pairs = [(account, store.spend(row)) for row, account in store.accounts.values()]
        return dict(zip(store.accounts, costs(pairs), strict=True))


def entries(store: Store, party: str) -> list[Entry]:
    """One party's reservations, oldest first."""
    with store.reading():
        rows = store.db.execute(
            "SELECT e.run, e.round, e.attempt, e.events, e.time, s.digest, s.time FROM entries e"
            " LEFT JOIN settlements s ON s.entry = e.id WHERE e.party = ? ORDER BY e.id",
            (store.account(party)[0],),
        )
        return [
            Entry(party, run, round, attempt, read_events(events), reserved, digest, released)
            for run, round, attempt, events, reserved, digest, released in rows
        ]


def history(store: Store) -> list[Line]:
    """One line for each run of each party, in the order in which they began."""
    with store.reading():
        rows = store.db.execute(
            "SELECT p.name, e.run, e.events, min(e.round), max(e.round), count(*), count(s.entry)"
            " FROM entries e JOIN parties p ON p.id = e.party LEFT JOIN settlements s ON s.entry = e.id"
            " GROUP BY e.party, e.run, e.events ORDER BY min(e.id)"
        ).fetchall()
        totals: dict[tuple[str, str], tuple[int, int, int, int, Spend]] = {}
        for name, run, events, first, last, count, settled in rows:
            old = totals.get((name, run), (first, last, 0, 0, NOTHING))
            spend = old[4].plus(read_events(events), count)
            totals[name, run] = min(old[0], first), max(old[1], last), old[2] + count, old[3] + settled, spend
        prices = costs([(store.accounts[name][1], total[4]) for (name, _), total in totals.items()])
    return [
        Line(*key, *total[:4], total[4].releases, price)
        for (key, total), price in zip(totals.items(), prices, strict=True)
    ]
