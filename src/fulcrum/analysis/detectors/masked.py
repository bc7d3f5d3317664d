"""Neighbour replay under masks: what one unit adds to the sum of all parties' messages.

The sum is all that the server can read. The same round is played with a unit and without it (its features are no
numbers, so it adds nothing), from the same random streams: the noise and the masks cancel in the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.analysis.detectors.probe import SIZES, prepare_probe
from fulcrum.engines import find_engine
from fulcrum.privacy.bounds import sanitise_bounds
from fulcrum.privacy.pairwise.integers import read_sum, sum_messages
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation
from fulcrum.training.round import run_round
from fulcrum.training.snapshot import make_first_snapshot

NAME = "neighbour replay"
ROUNDING = 5e-3
"""Relative to the bound: float32 arithmetic and the grid of the messages."""


def read_masked_records(settings: Settings) -> Iterator[Reading]:
    """Whether single units move the sum of masked messages by more than is charged for them."""
    federation = prepare_probe(settings.replace(train={"rate": 1.0}), 2, seed=settings.run.seed)
    problem, plan = federation.problem, federation.plan
    snapshot = make_first_snapshot(federation)
    reach = float(
        torch.linalg.vector_norm(sanitise_bounds(problem.rule, problem.rule.bounds(snapshot.rule)).C.double())
    )
    whole = _play(federation, None)
    for k in range(plan.parties):
        party, worst = problem.party(k), 0.0
        factor = plan.units(k) / sum(plan.units(j) for j in range(plan.parties)) / plan.units(k)
        for unit in range(len(SIZES)):  # the sizes of records come in turn
            change = whole - _play(federation, party.index[party.unit_of == unit])
            worst = max(worst, float(torch.linalg.vector_norm(change)) / (factor * reach))
        yield contradict(
            NAME,
            "bound of a unit under masks",
            worst > 1 + ROUNDING,
            f"one unit moves the sum of masked messages by {worst:.3g} times the bound that the noise is scaled to",
            plan.name(k),
        )


def _play(federation: Federation, without: Tensor | None) -> Tensor:
    """The sum of a round's messages [d], float64. without: rows of records that are to add nothing."""
    problem = federation.problem
    if without is not None:
        x = problem.dataset.records.x.clone()  # type: ignore[union-attr]
        x[without] = torch.nan
        problem = dataclasses.replace(problem, dataset=problem.dataset.with_changes(x=x))
    made = dataclasses.replace(federation, problem=problem, engine=find_engine(federation.settings.run.engine, problem))
    _, replies, _ = run_round(made, make_first_snapshot(made), list(range(made.plan.parties)), 0)
    return read_sum(sum_messages(reply.delta for reply in replies), replies[0].grid, replies[0].bits).double()
