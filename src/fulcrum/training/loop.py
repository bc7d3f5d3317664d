"""The round loop: who takes part, reserve, train, aggregate, adapt C, settle, evaluate.

`federate` is a generator: each round is finished, paid and settled before it is yielded, and the
snapshot that comes with it is all that is needed to go on from there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Account, Ledger
from fulcrum.privacy.plan import Plan
from fulcrum.rng import numpy_stream
from fulcrum.settings.schema import Settings
from fulcrum.training.engine import Remote
from fulcrum.training.evaluate import evaluate
from fulcrum.training.federation import Federation
from fulcrum.training.round import digests, mean_diagnostics, play_client_round, play_round
from fulcrum.training.snapshot import Snapshot, first_snapshot
from fulcrum.types import RoundResult

EPSILONS = 1000
"""Federations of up to this many parties list every party's epsilon in every round."""


def federate(
    federation: Federation,
    ledger: Ledger,
    run: str,
    start: Snapshot | None = None,
    history: Sequence[Sequence[int]] = (),
) -> Iterator[tuple[RoundResult, Snapshot]]:
    """Train round by round. `start` and `history` (who paid in the rounds done) continue a run.

    Ends early when fewer than `train.min_parties` parties have budget left, or any party's has run out where all of
    them share one noise. Each yielded round has
    been reserved in the ledger before anything was computed, and settled after.
    """
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    train = settings.train
    snapshot = start or first_snapshot(federation)
    purse = Purse(plan, settings.privacy.delta, settings.privacy.accountant)
    for done, clients in enumerate(history):
        purse.pay(done, clients)
    exhausted: set[int] = set()

    for t in range(snapshot.round, train.rounds):
        began = time.perf_counter()
        asked = invite(settings, problem.partition.parties, t) if not plan.central else range(plan.parties)
        invited = [k for k in asked if k not in exhausted]
        invited = [k for k in invited if int(snapshot.participations[k]) < plan.participations(k)]
        mode = problem.randomness.mode
        if isinstance(federation.engine, Remote):
            # The parties keep the ledgers that count, and send a round's stored bytes again: this one mirrors them.
            invited, mode = federation.engine.present(invited), "stored"
            exhausted |= federation.engine.spent()
        granted = reserve(ledger, run, t, plan, invited, mode)
        exhausted |= set(invited) - set(granted)
        if problem.partition.parties - len(exhausted) < train.min_parties:
            return
        if plan.shared and len(granted) < plan.parties:
            return  # without its part of the noise the sum of the others would not be private

        snapshot, replies, C = (play_client_round if plan.central else play_round)(federation, snapshot, granted, t)
        ledger.settle(run, t, digests(plan, replies, granted, settings.train.weights))
        took_part = [reply.client for reply in replies] if isinstance(federation.engine, Remote) else granted
        purse.pay(t, took_part)

        accuracy, loss = None, None
        if (t + 1) % settings.run.evaluate_every == 0 or t + 1 == train.rounds:
            found = evaluate(problem, snapshot.averaged)
            accuracy, loss = found.get("accuracy"), found.get("loss")
        result = RoundResult(
            round=t + 1,
            rounds=train.rounds,
            params=snapshot.params,
            averaged=snapshot.averaged,
            C=C,
            epsilon=purse.largest,
            epsilons=purse.listed(),
            participants=None if plan.central else tuple(took_part),
            seconds=time.perf_counter() - began,
            accuracy=accuracy,
            loss=loss,
            diagnostics=mean_diagnostics(replies),
            out_of_budget=tuple(sorted(exhausted)) if plan.central else (),
        )
        yield result, snapshot


def invite(settings: Settings, parties: int, t: int) -> list[int]:
    """Who is asked in round t: each party with probability q_c. The coin is public: it amplifies nothing."""
    if settings.train.participation >= 1:
        return list(range(parties))
    # The gaps between those who are drawn are geometric: nothing is drawn for the many who sit out.
    stream, chance = numpy_stream(settings.run.seed, "participation", t), settings.train.participation
    chosen: list[int] = []
    last = -1
    while last < parties:
        places = last + stream.geometric(chance, size=int(1.1 * chance * parties) + 20).cumsum()
        chosen += places[places < parties].tolist()
        last = int(places[-1])
    return chosen


def reserve(ledger: Ledger, run: str, t: int, plan: Plan, invited: Sequence[int], mode: str) -> list[int]:
    """Reserve the round's cost for every invited party; those whose budget it would pass sit out.

    A round that was settled before (its outcome lost in a crash) gives the same bytes again in a
    seeded run and costs nothing. With secure randomness it would give others: that is a new release,
    so it is paid as a new attempt.
    """
    wanted = {plan.name(k): plan.events(k, t) for k in invited}
    ledger.enroll_all(Account(plan.name(k), **plan.terms(k)) for k in invited)
    attempt = ledger.settled_attempts(run, t) if mode == "secure" else 0
    granted = ledger.reserve(run, t, wanted, attempt=attempt)
    return [k for k in invited if granted[plan.name(k)]]


class Purse:
    """What each party has spent in this run, kept up to date at the cost of those who took part."""

    def __init__(self, plan: Plan, delta: float, accountant: str) -> None:
        self.plan, self.delta, self.accountant = plan, delta, accountant
        self.largest = 0.0
        # Parties with the same past share one Spend, and its epsilon is computed once.
        self._pasts: list[tuple[Spend, float]] = [(Spend.none(), 0.0)]
        self._past_of: dict[int, int] = {}
        self._next: dict[tuple[int, tuple[Event, ...]], int] = {}

    def pay(self, t: int, clients: Sequence[int]) -> None:
        """Add round t's events for the clients that took part."""
        for k in clients:
            past, events = self._past_of.get(k, 0), self.plan.events(k, t)
            if (past, events) not in self._next:
                spend = self._pasts[past][0].plus(events)
                self._pasts.append((spend, spend.epsilon(self.delta, self.accountant)))
                self._next[past, events] = len(self._pasts) - 1
            self._past_of[k] = self._next[past, events]
            self.largest = max(self.largest, self._pasts[self._past_of[k]][1])

    def listed(self) -> tuple[float, ...]:
        """Every party's epsilon so far; empty in a federation too large to list each round (`EPSILONS`)."""
        if self.plan.parties > EPSILONS:
            return ()
        return tuple(self._pasts[self._past_of.get(k, 0)][1] for k in range(self.plan.parties))
