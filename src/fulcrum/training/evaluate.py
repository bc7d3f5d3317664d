"""The task's metrics on public test records: of all of them, and of each party's. Never called on training records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulcrum.data.records import Records, move_inputs, take_rows
from fulcrum.data.tasks import merge_sums
from fulcrum.training.problem import Problem
from fulcrum.types import mean_over_parties

BATCH = {"cpu": 250, "cuda": 2000}
"""Examples at a time: on a CPU few enough to stay near the cache."""

Metrics = dict[str, float]
Sums = dict[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name on all test records, empty where there are none; and by party where test records name theirs."""

    metrics: Metrics
    parties: dict[str, Metrics] = field(default_factory=dict)

    @property
    def mean_over_parties(self) -> Metrics:
        """Each metric's mean over the parties, each counting the same; parties without a value (NaN) do not count."""
        return mean_over_parties(self.parties)


def evaluate(problem: Problem, params: Tensor, batch: int = 0) -> Metrics:
    """The task's metrics, by name, of the model with weights `params` [d]; empty where there are no test records."""
    return evaluate_all(problem, params, batch).metrics


def evaluate_parties(problem: Problem, params: Tensor, batch: int = 0) -> dict[str, Metrics]:
    """Metrics on each party's test records, by the party's name; empty where test records name no party."""
    return evaluate_all(problem, params, batch).parties


@torch.no_grad()
def evaluate_all(problem: Problem, params: Tensor, batch: int = 0) -> Evaluation:
    """Both at once, in one pass over the test records, `batch` of them at a time (0: as suits the device)."""
    test, task, names = problem.dataset.test, problem.dataset.task, problem.dataset.party_names
    if test is None or not len(test):
        return Evaluation({})
    step = batch or BATCH.get(params.device.type, BATCH["cuda"])
    pooled: Sums | None = None
    of_party: Sums | None = None
    current, parties = -1, {}
    for party, sums in _sums_by_party(problem, params, test, step):
        if party != current and of_party is not None:
            parties[names[current]] = task.results(of_party)
            of_party = None
        current = party
        pooled = merge_sums(pooled, sums)
        if party >= 0:  # sums of one party at a time: those of a ranking metric are long
            of_party = merge_sums(of_party, sums)
    if of_party is not None:
        parties[names[current]] = task.results(of_party)
    return Evaluation(task.results(pooled or {}), parties)


def _sums_by_party(problem: Problem, params: Tensor, test: Records, step: int) -> Iterator[tuple[int, Sums]]:
    """(party, sums) in pieces of at most `step` records, one party after the other; party -1 where none is named."""
    task, device = problem.dataset.task, params.device
    order = None if test.party is None else torch.argsort(test.party, stable=True)
    for start in range(0, len(test), step):
        rows = slice(start, start + step) if order is None else order[start : start + step]
        outputs = problem.follower.outputs(params, move_inputs(take_rows(test.x, rows), device))
        targets = test.y[rows].to(device)
        if test.party is None:
            yield -1, task.sums(outputs, targets)
            continue
        members, counts = torch.unique_consecutive(test.party[rows], return_counts=True)
        own = zip(outputs.split(counts.tolist()), targets.split(counts.tolist()), strict=True)
        for party, piece in zip(members.tolist(), own, strict=True):
            yield party, task.sums(*piece)
