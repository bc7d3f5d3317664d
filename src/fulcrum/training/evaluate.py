"""The task's metrics on public test records, over all records and per party. Never called on training records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulcrum.data.records import Records, move_inputs_to_device, select_rows
from fulcrum.data.tasks import merge_metric_sums
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import mean_over_parties

EVALUATION_BATCH_SIZES = {"cpu": 250, "cuda": 2000}
"""Examples per batch; on a CPU few enough to fit the cache."""

MetricValues = dict[str, float]
MetricSums = dict[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name on all test records (empty without test records), and per party where test records name one."""

    metrics: MetricValues
    parties: dict[str, MetricValues] = field(default_factory=dict)

    @property
    def mean_over_parties(self) -> MetricValues:
        """Each metric's mean over the parties with equal weights; parties without a value (NaN) are left out."""
        return mean_over_parties(self.parties)


def evaluate_model(problem: TrainingProblem, params: Tensor, batch: int = 0) -> MetricValues:
    """The task's metrics, by name, of the model with weights `params` [d]; empty where there are no test records."""
    return evaluate_with_parties(problem, params, batch).metrics


def evaluate_parties(problem: TrainingProblem, params: Tensor, batch: int = 0) -> dict[str, MetricValues]:
    """Metrics on each party's test records, by the party's name; empty where test records name no party."""
    return evaluate_with_parties(problem, params, batch).parties


@torch.no_grad()
def evaluate_with_parties(problem: TrainingProblem, params: Tensor, batch: int = 0) -> Evaluation:
    """Both in one pass over the test records, `batch` records at a time (0: chosen by device)."""
    test, task, names = problem.dataset.test, problem.dataset.task, problem.dataset.party_names
    if test is None or not len(test):
        return Evaluation({})
    if (
        problem.dataset.train is not None
        and problem.dataset.train.party is not None
        and problem.partition.names != names
    ):
        test = dataclasses.replace(
            test, party=None
        )  # the records were split anew: the file's parties do not train here
    step = batch or EVALUATION_BATCH_SIZES.get(params.device.type, EVALUATION_BATCH_SIZES["cuda"])
    pooled: MetricSums | None = None
    of_party: MetricSums | None = None
    current, parties = -1, {}
    for party, sums in _iterate_party_sums(problem, params, test, step):
        if party != current and of_party is not None:
            parties[names[current]] = task.results(of_party)
            of_party = None
        current = party
        pooled = merge_metric_sums(pooled, sums)
        if party >= 0:  # one party's sums at a time, because the sums of a ranking metric are long
            of_party = merge_metric_sums(of_party, sums)
    if of_party is not None:
        parties[names[current]] = task.results(of_party)
    return Evaluation(task.results(pooled or {}), parties)


def _iterate_party_sums(
    problem: TrainingProblem, params: Tensor, test: Records, step: int
) -> Iterator[tuple[int, MetricSums]]:
    """(party, sums) in pieces of at most `step` records, party by party; party -1 where records name no party."""
    task, device = problem.dataset.task, params.device
    order = None if test.party is None else torch.argsort(test.party, stable=True)
    for start in range(0, len(test), step):
        rows = slice(start, start + step) if order is None else order[start : start + step]
        outputs = problem.gradient_recorder.outputs(params, move_inputs_to_device(select_rows(test.x, rows), device))
        targets = test.y[rows].to(device)
        if test.party is None:
            yield -1, task.sums(outputs, targets)
            continue
        members, counts = torch.unique_consecutive(test.party[rows], return_counts=True)
        own = zip(outputs.split(counts.tolist()), targets.split(counts.tolist()), strict=True)
        for party, piece in zip(members.tolist(), own, strict=True):
            yield party, task.sums(*piece)
