"""Neighbour replay, what follows from releases: the run again, with the same releases and other private records.

An engine that repeats what left the parties takes the place of the real one. Whatever the server, the rule, the loop
and the evaluation on public records do must then be the same to the last bit: weights, C, metrics, the number of rounds
and who takes part. What differs follows from private records, and nobody paid for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum.analysis.detectors.executed import Executed, make_run_dataset
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.probe import CLASSES, make_model
from fulcrum.data import Dataset
from fulcrum.errors import FulcrumError
from fulcrum.runs import execute, prepare
from fulcrum.training.engine import Engine
from fulcrum.types import ClientReply, RoundRequest, RoundResult

NAME = "neighbour replay"
SIZES = (0.02, 20.0)
"""The other records are so much smaller, and so much larger, than those of the run, with other labels."""


@dataclass
class Repeats(Engine):
    """An engine that answers with what left in another run. asked: rounds that the other run did not have."""

    replies: Mapping[tuple[int, int], ClientReply]
    strange: int = 0

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """The recorded replies; of a round or a party that has none, one that changes nothing."""
        found = []
        for task, state in zip(request.assignments, request.states, strict=True):
            known = self.replies.get((request.round, task.client))
            if known is None:
                self.strange += 1
                any_reply = next(iter(self.replies.values()))
                known = dataclasses.replace(
                    any_reply, client=task.client, delta=torch.zeros_like(any_reply.delta), state=state
                )
            found.append(known)
        return found

    def replays_rounds(self, randomness_mode: str) -> bool:
        """Every round repeats the same bytes."""
        return True


def make_other_records(dataset: Dataset, size: float) -> Dataset:
    """The data set with other private records: as many of them, of the same parties and persons."""
    records = dataset.records
    turned = torch.roll(records.x, 1, dims=1)  # type: ignore[arg-type]
    return dataset.with_changes(x=size * turned, y=(records.y + 1) % CLASSES)


def read_same_releases(run: Executed, folder: Path) -> Iterator[Reading]:
    """Whether anything beside the releases follows from private records."""
    plan = run.federation.plan
    if plan.central or run.refused or not run.sent:  # at unit client the server itself makes the release
        return
    replies = {(each.round, each.task.client): each.reply for each in run.sent}
    first = {result.round: result for result in run.results}
    settings = run.federation.settings
    for number, size in enumerate(SIZES):
        dataset = make_other_records(make_run_dataset(settings), size)
        results: list[RoundResult] = []
        try:
            made = prepare(settings, dataset, make_model())
            if not np.array_equal(made.plan.sizes, plan.sizes):
                continue  # a keyed hash of each record says which ones are held out; the numbers left are public
            execute(dataclasses.replace(made, engine=Repeats(replies)), folder / f"same{number}", results.append)
        except FulcrumError as error:
            yield contradict(NAME, "same releases", True, f"with other private records the run stops: {error}")
            continue
        second = {result.round: result for result in results}
        for what, differs in compare(first, second, settings.data.validation > 0):
            yield contradict(
                NAME,
                "same releases",
                bool(differs),
                f"with the same releases and other private records, {what} {differs}, so it follows from those records",
            )


def compare(
    first: Mapping[int, RoundResult], second: Mapping[int, RoundResult], held_out: bool
) -> Iterator[tuple[str, str]]:
    """(what, how it differs) of two runs that had the same releases; how is empty where they are the same."""
    rounds = sorted(set(first) & set(second))
    yield "the number of rounds", "" if set(first) == set(second) else f"is {len(second)}, not {len(first)}"
    read: list[tuple[str, Any]] = [
        ("C", lambda r: r.C),
        ("the model", lambda r: r.params.double().tolist()),
        ("the averaged model", lambda r: r.averaged.double().tolist()),
        ("who takes part", lambda r: r.participants),
        ("epsilon", lambda r: (r.epsilon, *r.epsilons)),
        ("the course", lambda r: tuple(sorted(r.course.items()))),
    ]
    if not held_out:  # scores of private held-out records are noised, and paid for
        read.append(("a metric of public records", lambda r: tuple(sorted(r.metrics.items()))))
        read.append(("the confusion of public records", lambda r: r.facts.confusion))
    for what, take in read:
        other = [t for t in rounds if not _same(take(first[t]), take(second[t]))]
        yield what, f"after round {other[0]} is another one" if other else ""


def _same(one: Any, two: Any) -> bool:
    """Equal to the last bit; what is no number equals what is no number."""
    if isinstance(one, float) and isinstance(two, float):
        return one == two or (math.isnan(one) and math.isnan(two))
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(_same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)
