"""What each party has spent in a run, according to the ledger."""

from __future__ import annotations

from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import Plan


class RunAccount:
    """The epsilon of each party in one run so far, for display. All of it is read from the ledger, round by round.

    It is what these rounds cost as a plan of their own. Statements take `Ledger.costs`, which holds for people who stop
    or go on after looking and may say more; after the last round of a run without pauses the two agree.

    Reservations are summed in the order of the rounds, so that an interrupted run ends with the same bits.
    Parties with the same past share one `Spend`, and its epsilon is computed once.
    """

    def __init__(self, ledger: Ledger, run: str, delta: float, accountant: str) -> None:
        self.ledger, self.run, self.delta, self.accountant = ledger, run, delta, accountant
        self.largest = 0.0
        self._rounds_read = 0
        self._pasts: list[tuple[Spend, float]] = [(Spend.empty(), 0.0)]
        self._past_of: dict[str, int] = {}
        self._next: dict[tuple[int, tuple[Event, ...]], int] = {}

    def read_rounds_until(self, rounds: int) -> None:
        """Add the ledger's reservations of the first `rounds` rounds that were not read before."""
        for party, events in self.ledger.list_round_reservations(self.run, range(self._rounds_read, rounds)):
            past = self._past_of.get(party, 0)
            if (past, events) not in self._next:
                spend = self._pasts[past][0].add_events(events)
                self._pasts.append((spend, spend.epsilon(self.delta, self.accountant)))
                self._next[past, events] = len(self._pasts) - 1
            self._past_of[party] = self._next[past, events]
            self.largest = max(self.largest, self._pasts[self._past_of[party]][1])
        self._rounds_read = rounds

    def epsilons(self, plan: Plan) -> tuple[float, ...]:
        """Each party's epsilon so far, in the order of the plan's parties."""
        return tuple(self._pasts[self._past_of.get(plan.name(k), 0)][1] for k in range(plan.parties))
