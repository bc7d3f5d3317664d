"""What each party has spent in a run, according to the ledger."""

from __future__ import annotations

from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.evaluation import is_held_out_account
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import Plan


class RunAccount:
    """The epsilon of each party in one run, after the rounds that were read so far. All of it is the ledger's.

    A run that repeats a round after a crash sees what it saw the first time, so an interrupted run has the same lines.
    Parties with the same past share one `Spend`. Held-out units pay for their scores in accounts of their own, which
    are not the run's parties.
    """

    def __init__(self, ledger: Ledger, run: str) -> None:
        self.ledger, self.run = ledger, run
        self.largest = 0.0
        self._rounds_read = 0
        self._pasts: dict[int, Spend] = {0: Spend.empty()}
        self._made = 0  # the number of the latest past
        self._past_of: dict[str, int] = {}
        self._next: dict[tuple[int, tuple[Event, ...]], int] = {}
        self._epsilons: dict[str, float] = {}

    def read_rounds_until(self, rounds: int) -> None:
        """Add the ledger's reservations of the first `rounds` rounds that were not read before."""
        moved: dict[str, Spend] = {}
        for party, events in self.ledger.list_round_reservations(self.run, range(self._rounds_read, rounds)):
            if is_held_out_account(party):
                continue
            past = self._past_of.get(party, 0)
            if (past, events) not in self._next:
                self._made += 1
                self._pasts[self._made] = self._pasts[past].add_events(events)
                self._next[past, events] = self._made
            self._past_of[party] = self._next[past, events]
            moved[party] = self._pasts[self._past_of[party]]
        self._epsilons |= self.ledger.price_run(self.run, moved)
        self.largest = max([self.largest, *(self._epsilons[party] for party in moved)])
        self._rounds_read = rounds
        if len(self._pasts) > 2 * len(self._past_of) + 100:
            self._forget_old_pasts()

    def _forget_old_pasts(self) -> None:
        """Keep the pasts that some party has now: a long run must not keep one for each of its rounds."""
        used = {0, *self._past_of.values()}
        self._pasts = {number: spend for number, spend in self._pasts.items() if number in used}
        self._next = {key: number for key, number in self._next.items() if key[0] in used and number in used}

    def epsilons(self, plan: Plan) -> tuple[float, ...]:
        """Each party's epsilon so far, in the order of the plan's parties."""
        return tuple(self._epsilons.get(plan.name(k), 0.0) for k in range(plan.parties))
