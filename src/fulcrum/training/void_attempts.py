"""Masked rounds that lost a message: what they cost in the coordinator's ledger.

With pairwise masks a message that does not come voids an attempt at a round. Whoever was asked for a message may have
sent it, and has then paid in its own ledger; the next attempt is a new release. The coordinator's counts no less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import Plan

VOID_DIGEST = hashlib.blake2b(b"fulcrum: a masked message of a void attempt", digest_size=16).hexdigest()
"""The digest by which a ledger's entry says that its message may have left, and was never unmasked."""


@dataclass
class VoidAttempts:
    """Pays for the attempts at round t. events: of every client that was reserved; refused: whom the ledger refused."""

    ledger: Ledger
    run: str
    t: int
    plan: Plan
    events: Mapping[int, tuple[Event, ...]]
    refused: set[int] = field(default_factory=set)

    def pay_again(self, sent: Sequence[int]) -> set[int]:
        """Settle a void attempt of these clients and reserve the next; returns the clients that may go on.

        sent: those that were asked for a message. Whoever was not has its reservation left.
        """
        names = {k: self.plan.name(k) for k in sent}
        self.ledger.settle(self.run, self.t, dict.fromkeys(names.values(), VOID_DIGEST))
        attempt = self.ledger.count_settled_attempts(self.run, self.t)
        wanted = {names[k]: self.events[k] for k in sent}
        granted = self.ledger.reserve(self.run, self.t, wanted, attempt)
        self.refused |= {k for k in sent if not granted[names[k]]}
        return set(self.events) - self.refused


def settle_lost_attempt(ledger: Ledger, run: str, t: int, plan: Plan) -> None:
    """After a crash of the coordinator: messages of round t may have left, so what was reserved for it is spent."""
    open_ones = {}
    known = ledger.accounts()
    for name in (plan.name(k) for k in range(plan.parties)):
        entries = ledger.list_round_entries(name, run, t) if name in known else []
        if entries and entries[-1].digest is None:
            open_ones[name] = VOID_DIGEST
    if open_ones:
        ledger.settle(run, t, open_ones)
