"""How many bytes will travel in a run: per party and round, and in all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulcrum.training.federation import Federation
from fulcrum.training.loop import select_participants
from fulcrum.training.snapshot import make_first_snapshot
from fulcrum.training.traffic import RoundTraffic, measure_array_traffic

MAX_INVITATIONS = 10**6
"""Invitations up to which the public coin of every round is drawn; above, their number is the expected one."""


@dataclass(frozen=True)
class Traffic:
    """Bytes. down, up: per party and round, to the party and from it. participations: rounds times parties in them.

    counted: what is counted, in words; note: why there is no more, or what comes on top.
    """

    down: int
    up: int
    rounds: int
    participations: float
    counted: str
    note: str = ""

    @property
    def down_per_round(self) -> float:
        """To all parties of a round, on average."""
        return self.down * self.participations / self.rounds

    @property
    def up_per_round(self) -> float:
        """From all parties of a round, on average."""
        return self.up * self.participations / self.rounds

    @property
    def total(self) -> float:
        """In the whole run, both ways."""
        return (self.down + self.up) * self.participations


def estimate_traffic(federation: Federation, messages: RoundTraffic | None = None, note: str = "") -> Traffic:
    """The traffic of a run. messages: bytes of a round's messages where they are known (`flower.traffic`), else of the
    arrays in them."""
    found = messages or measure_array_traffic(federation.problem, make_first_snapshot(federation).rule)
    counted = "arrays alone" if messages is None else "messages"
    rounds = federation.settings.train.rounds
    return Traffic(found.down, found.up, rounds, count_participations(federation), counted, note)


def count_participations(federation: Federation) -> float:
    """How often a party takes part, over all parties and rounds: those that the public coin will invite, within caps.

    At unit client, where the coin is secret, and for very many invitations: the expected number.
    """
    plan, train = federation.plan, federation.settings.train
    if plan.central:
        return plan.central.cohort * train.rounds
    members = torch.bincount(torch.as_tensor(plan.group_of), minlength=len(plan.groups)).tolist()
    if train.participation >= 1 or train.participation * plan.parties * train.rounds > MAX_INVITATIONS:
        invited = train.participation * train.rounds
        return float(sum(n * min(invited, group.participations) for n, group in zip(members, plan.groups, strict=True)))
    counts = torch.zeros(plan.parties, dtype=torch.int64)
    for t in range(train.rounds):
        counts[select_participants(federation, t, counts)] += 1
    return float(counts.sum())
