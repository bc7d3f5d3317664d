"""Which parties train in which round, of all stacked runs, as one table of jobs that is known before the first round.

A job is one party's training in one round of one run. Because the table is known beforehand, so are the largest
number of jobs and of examples that train side by side, and no shape depends on chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.privacy.client_level import ClientLevelTerms
from fulcrum.training.client_level import draw_cohort
from fulcrum.training.federation import Federation


@dataclass(frozen=True)
class RoundCohort:
    """Who trains in one round of one run, by party number, and the weight of each in the run's sum."""

    clients: Sequence[int]
    weights: Sequence[float]


@dataclass(frozen=True)
class PartyTable:
    """The parties of all R runs, run by run, followed by one padding party (run index R, size 0): [P + 1].

    start: first place of each party's examples in the concatenated orders of the runs. rate: of a local step, float64.
    """

    run: Tensor
    start: Tensor
    size: Tensor
    rate: Tensor

    def to(self, device: torch.device) -> PartyTable:
        """On the device."""
        return PartyTable(*(getattr(self, name).to(device) for name in ("run", "start", "size", "rate")))


@dataclass(frozen=True)
class JobTable:
    """The jobs of T rounds of R runs, in groups of J that train side by side. All of it is on the host.

    party [T * groups, J]: the party of each job, sorted, so run by run; padded with the padding party. weight, same
    shape: the job's weight in its run's sum, 0 for padding. steady: all rounds are equal, and the table has rows for
    one round only. groups_of: number of groups per round, at least one, because a round without participants also ends
    with a server step. firsts: the first party of each run. places: the most examples in a group. slots: the most jobs
    of one run in a group.
    """

    parties: PartyTable
    firsts: list[int]
    party: Tensor
    weight: Tensor
    groups: int
    groups_of: list[int]
    steady: bool
    places: int
    slots: int

    @property
    def jobs(self) -> int:
        """Number of jobs J per group."""
        return self.party.shape[1]

    def members(self, t: int, group: int) -> list[tuple[int, int, int]]:
        """(place, run, party's number in its run) of the jobs in a group of round t, without padding."""
        row = self.party[group if self.steady else t * self.groups + group].tolist()
        runs = self.parties.run[row].tolist()
        return [(j, r, p - self.firsts[r]) for j, (p, r) in enumerate(zip(row, runs, strict=True)) if r < len(self)]

    def __len__(self) -> int:
        """Number of runs R."""
        return len(self.firsts) - 1


def make_job_table(
    federations: Sequence[Federation], rounds: Sequence[Sequence[RoundCohort]], allowed: int
) -> JobTable:
    """The table of rounds [T][R]. allowed: the most jobs in a group, for the memory that their weights take."""
    parties = _make_party_table(federations)
    counts = [federation.problem.partition.parties for federation in federations]
    firsts: list[int] = torch.tensor([0, *counts]).cumsum(0).tolist()
    steady = all(here == rounds[0] for here in rounds)
    jobs_of = [sum(len(run.clients) for run in here) for here in rounds]
    most = max(1, *jobs_of)
    groups = -(-most // allowed)
    jobs = -(-most // groups)
    kept = rounds[:1] if steady else rounds
    party = torch.full((len(kept), groups * jobs), firsts[-1])
    weight = torch.zeros(party.shape)
    for t, here in enumerate(kept):
        chosen = [first + k for first, run in zip(firsts, here, strict=False) for k in run.clients]
        party[t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        weight[t, : len(chosen)] = torch.tensor([w for run in here for w in run.weights])
    party, weight = party.view(-1, jobs), weight.view(-1, jobs)
    of_run = parties.run[party]
    return JobTable(
        parties,
        firsts,
        party,
        weight,
        groups,
        [max(1, -(-count // jobs)) for count in jobs_of],
        steady,
        places=max(1, int(parties.size[party].sum(dim=1).max())),
        slots=max(1, *(int((of_run == r).sum(dim=1).max()) for r in range(len(federations)))),
    )


def _make_party_table(federations: Sequence[Federation]) -> PartyTable:
    sizes = [federation.problem.partition.sizes for federation in federations]
    size = torch.cat([*sizes, torch.zeros(1, dtype=torch.int64)])
    run = torch.repeat_interleave(torch.arange(len(federations) + 1), torch.tensor([*map(len, sizes), 1]))
    plans = [federation.plan for federation in federations]
    rates = [plan.assignment(k, 0, 1.0).rate for plan in plans for k in range(plan.parties)]
    return PartyTable(run, size.cumsum(0) - size, size, torch.tensor([*rates, 0.0], dtype=torch.float64))


# --- unit client: who trains is secret --------------------------------------------------------------


def get_client_level_terms(federation: Federation) -> ClientLevelTerms:
    """The server's mechanism in a run whose unit is the client."""
    assert federation.plan.central is not None
    return federation.plan.central


def draw_round_cohorts(federations: Sequence[Federation], rounds: int) -> tuple[list[list[RoundCohort]], Tensor]:
    """The cohorts [T][R], from the private streams of `run_client_level_round`, and each sum's divisor [T, R]."""
    divisor = torch.ones((rounds, len(federations)))
    found = []
    for t in range(rounds):
        here = []
        for r, federation in enumerate(federations):
            terms = get_client_level_terms(federation)
            cohort = draw_cohort(federation.problem.randomness, t, terms)
            weights = terms.weights[cohort]
            divisor[t, r] = terms.divisor(float(weights.sum()))
            here.append(RoundCohort(cohort, weights.tolist()))
        found.append(here)
    return found, divisor
