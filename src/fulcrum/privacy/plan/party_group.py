"""What parties with the same terms release, round by round, and the most it can cost them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fulcrum.clipping.rule import Share, alone, no_share
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Event, Gaussian, Unprotected
from fulcrum.types import Assignment


@dataclass(frozen=True)
class Group:
    """Parties with the same terms, and the sigma that follows.

    rate: q. steps: N a round. participations: the public cap on rounds. budget: epsilon over the whole
    run and what was spent before it, None where sigma was given. spent: what was spent before. sigma: the
    multiplier of the first round. factors: those of the noise schedule, one a round. every: the rule's
    statistics go out with every so-manieth step, and share is their part of the precision then. batch: the
    parties' expected batch where the share depends on it. shares: how many parties make up one dose of noise.
    """

    rate: float
    steps: int
    participations: int
    budget: float | None
    spent: Spend
    sigma: float
    factors: tuple[float, ...] = (1.0,)
    every: int = 1
    share: Share = no_share
    batch: float = 1.0
    shares: int = 1

    def assignment(self, k: int, t: int, lr: float) -> Assignment:
        """What party k of this group is asked to do in round t (from 0)."""
        return Assignment(k, self.rate, self.sigma * self.factors[t], self.steps, lr, self.every, self.shares)

    def round_events(self, t: int = 0) -> tuple[Event, ...]:
        """What round t (from 0) releases."""
        if self.sigma == 0:
            return (Unprotected(self.steps),)
        task = self.assignment(0, t, 1.0)
        asked = task.asked(t)
        kinds = ((task.sigma, asked), (alone(self.share, task.sigma, self.batch), self.steps - asked))
        return tuple(Gaussian(self.rate, sigma, count) for sigma, count in kinds if count)

    def worst(self, rounds: int) -> tuple[Event, ...]:
        """The most that the first `rounds` rounds can cost a party that keeps to its cap.

        Where it may take part in all of them these are their events. Otherwise it is charged for as many
        steps as its cap allows, with the least noise that any steps have: whichever rounds it takes part in,
        its i-th costliest step costs no more than the i-th of these.
        """
        taken = min(rounds, self.participations) * self.steps
        if self.sigma == 0 or not taken:
            return (Unprotected(taken),) if taken else ()
        alike = self.every == 1 and len(set(self.factors[:rounds])) == 1
        counts: Counter[float] = Counter()
        for t in range(1 if alike else rounds):
            for event in self.round_events(t):
                assert isinstance(event, Gaussian)  # sigma is not 0
                counts[event.sigma] += taken if alike else event.count
        found = []
        for sigma in sorted(counts):
            count = min(counts[sigma], taken)
            found.append(Gaussian(self.rate, sigma, count))
            taken -= count
        return tuple(event for event in found if event.count)

    def epsilon(self, rounds: int, delta: float, accountant: str) -> float:
        """Epsilon after `rounds` rounds, of which a party takes part in at most its cap, with the past."""
        return self.spent.plus(self.worst(rounds)).epsilon(delta, accountant)

    def sigmas(self) -> tuple[float, float]:
        """The multiplier of the first round and that of the last."""
        return self.sigma * self.factors[0], self.sigma * self.factors[-1]
