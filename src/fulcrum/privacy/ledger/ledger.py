"""`Ledger`: all that can be asked of an open ledger, and what each call promises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import enrolling, reports, spending
from fulcrum.privacy.ledger.rows import Account, Entry, Line, read_events
from fulcrum.privacy.ledger.store import Store


class Ledger:
    """An open ledger. Use `with Ledger.open(path) as ledger:`; safe to share between threads and processes.

    Every change is one transaction that is on disk when the call returns. Spends are kept in memory
    and brought up to date, from the rows that were added since, whenever something is asked.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @staticmethod
    def open(path: str | Path, wait: float = 30.0) -> Ledger:
        """Open a ledger, or start a new one where there is no file; `wait` seconds for other processes.

        ":memory:" is a ledger that is gone when closed.
        """
        return Ledger(Store.open(Path(path), wait))

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self._store.path

    def close(self) -> None:
        """Close the file. Nothing is lost without it."""
        self._store.db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- parties ---------------------------------------------------------------------------------

    def enroll(
        self, party: str, budget: float | None, delta: float, accountant: str, unit: str, population: str
    ) -> None:
        """Open an account. Once enrolled, the same terms change nothing; other terms are a ConfigError.

        A known party keeps its budget whatever is given here; `set_budget` changes it.
        """
        self.enroll_all([Account(party, budget, delta, accountant, unit, population)])

    def enroll_all(self, accounts: Iterable[Account]) -> None:
        """Enroll many parties in one transaction; if one is refused none is added."""
        enrolling.enroll_all(self._store, accounts)

    def set_budget(self, party: str, budget: float | None) -> None:
        """Give a party another budget from now on; the former one stays on record."""
        enrolling.set_budget(self._store, party, budget)

    def accounts(self) -> dict[str, Account]:
        """Every party with its present budget and terms, by name."""
        return reports.accounts(self._store)

    # --- money -----------------------------------------------------------------------------------

    def reserve(self, run: str, round: int, wanted: Mapping[str, Sequence[Event]], attempt: int = 0) -> dict[str, bool]:
        """Write down what each party is about to release, before it does. One transaction for all.

        True: granted, and counted from now on, whether or not anything is released. False: it would
        pass the party's budget; nothing was written for it, and it must sit out. Asking again for the
        same (party, run, round, attempt) and the same events is granted and costs nothing (a crash
        lies between); other events under the same key are a BudgetError. To release something new for
        a round that was already reserved, raise `attempt`: it is paid again.
        """
        return spending.reserve(self._store, run, round, wanted, attempt)

    def settle(self, run: str, round: int, digests: Mapping[str, str], attempt: int | None = None) -> None:
        """Mark reservations as released, with the digest of what each party released. One transaction.

        Settles each party's latest attempt unless told which. Again with the same digest changes
        nothing; with another one it is a BudgetError, since the second release was not paid for.
        """
        spending.settle(self._store, run, round, digests, attempt)

    def settled_attempts(self, run: str, round: int) -> int:
        """The first attempt at this round that has not been settled: 0 unless something was released before."""
        return spending.settled_attempts(self._store, run, round)

    # --- questions -------------------------------------------------------------------------------

    def spent(self, party: str) -> Spend:
        """All that the party has reserved so far, over all runs."""
        return reports.spent(self._store, party)

    def spends(self, run: str | None = None) -> dict[str, Spend]:
        """What every party has reserved so far: over all runs, or in one run."""
        return reports.spends(self._store, run)

    def epsilon(self, party: str) -> float:
        """The epsilon the party has reserved so far, over all runs, by its own delta and accountant."""
        return reports.epsilon(self._store, party)

    def epsilons(self) -> dict[str, float]:
        """`epsilon` of every party."""
        return reports.epsilons(self._store)

    def entries(self, party: str) -> list[Entry]:
        """Every reservation of a party, oldest first."""
        return reports.entries(self._store, party)

    def history(self) -> list[Line]:
        """What each run cost each party, in the order in which they began."""
        return reports.history(self._store)

    def reservations(self, party: str, run: str, round: int) -> list[Entry]:
        """A party's reservations for one round of one run, first attempt first; found by index."""
        with self._store.reading():
            rows = self._store.db.execute(
                "SELECT e.attempt, e.events, e.time, s.digest, s.time FROM entries e LEFT JOIN settlements s"
                " ON s.entry = e.id WHERE e.run = ? AND e.round = ? AND e.party = ? ORDER BY e.attempt",
                (run, round, self._store.account(party)[0]),
            )
            return [
                Entry(party, run, round, attempt, read_events(events), reserved, digest, released)
                for attempt, events, reserved, digest, released in rows
            ]
