"""Who trains when in runs whose unit is the client: drawn for all rounds beforehand, from the private streams.

So it is known how many parties and examples the largest cohort holds, and no shape depends on chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.privacy.client_level import Terms
from fulcrum.training.client_level import draw_cohort
from fulcrum.training.federation import Federation


@dataclass(frozen=True)
class Parties:
    """The parties of all R runs, run by run, and behind them one that is nobody, of run R and without data: [P + 1].

    start: where each one's examples begin in the runs' orders, one behind the other. rate: of a local step, float64.
    weight: w_k, float32.
    """

    run: Tensor
    start: Tensor
    size: Tensor
    rate: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> Parties:
        """On the device."""
        return Parties(*(getattr(self, name).to(device) for name in ("run", "start", "size", "rate", "weight")))


@dataclass(frozen=True)
class Roster:
    """The cohorts of T rounds of R runs, as jobs in groups of J that train side by side. All of it is on the host.

    table [T * groups, J]: the party of each job, sorted, so run by run; nobody where there are fewer. groups_of: how
    many groups each round has, at least one, for a round that nobody joins is released like any other. divisor
    [T, R]: what each run's sum is divided by. firsts: where each run's parties begin. places and slots: the most
    examples of a group, and the most jobs of one run in it.
    """

    parties: Parties
    firsts: list[int]
    table: Tensor
    groups: int
    groups_of: list[int]
    divisor: Tensor
    places: int
    slots: int

    @property
    def jobs(self) -> int:
        """J."""
        return self.table.shape[1]


def terms_of(federation: Federation) -> Terms:
    """The mechanism of a run whose unit is the client."""
    assert federation.plan.central is not None
    return federation.plan.central


def draw_roster(federations: Sequence[Federation], rounds: int, allowed: int) -> Roster:
    """Draw the cohorts, as `federate.play_client_round` does. allowed: the most jobs in a group."""
    terms = [terms_of(federation) for federation in federations]
    firsts: list[int] = torch.tensor([0, *(own.clients for own in terms)]).cumsum(0).tolist()
    divisor = torch.ones((rounds, len(terms)))
    drawn: list[Tensor] = []
    for t in range(rounds):
        here = []
        for r, own in enumerate(terms):
            cohort = torch.tensor(draw_cohort(federations[r].problem.randomness, t, own), dtype=torch.int64)
            divisor[t, r] = own.divisor(float(own.weights[cohort].sum()))
            here.append(firsts[r] + cohort)
        drawn.append(torch.cat(here))
    most = max(1, *(len(own) for own in drawn))
    groups = -(-most // allowed)
    jobs = -(-most // groups)
    table = torch.full((rounds, groups * jobs), firsts[-1])
    for t, own_jobs in enumerate(drawn):
        table[t, : len(own_jobs)] = own_jobs
    table = table.view(-1, jobs)
    parties = _parties(federations, terms)
    of_run = parties.run[table]
    return Roster(
        parties,
        firsts,
        table,
        groups,
        [max(1, -(-len(own) // jobs)) for own in drawn],
        divisor,
        places=max(1, int(parties.size[table].sum(dim=1).max())),
        slots=max(1, *(int((of_run == r).sum(dim=1).max()) for r in range(len(terms)))),
    )


def _parties(federations: Sequence[Federation], terms: Sequence[Terms]) -> Parties:
    sizes = [federation.problem.partition.sizes for federation in federations]
    size = torch.cat([*sizes, torch.zeros(1, dtype=torch.int64)])
    run = torch.repeat_interleave(torch.arange(len(terms) + 1), torch.tensor([*map(len, sizes), 1]))
    rates = torch.tensor([*(own.local_rate for own in terms), 0.0], dtype=torch.float64)
    weight = torch.cat([*(own.weights for own in terms), torch.zeros(1, dtype=torch.float64)]).float()
    return Parties(run, size.cumsum(0) - size, size, rates[run], weight)
