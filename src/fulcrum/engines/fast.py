"""The fast local step: norms, factors and the clipped sum come from the tape; no gradient is written out for long.

A batch goes through in pieces: each is recorded, clipped and added up before the next one. Nothing of the size of the
batch is kept but norms and losses. Rules that look at a whole batch (not `sound`) get one tape of all pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from fulcrum.data.records import select_rows
from fulcrum.gradients import GradientRecorder, GradientTape
from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.rounding import NormTable
from fulcrum.gradients.units import join_units
from fulcrum.models.prepared import draws_keys
from fulcrum.privacy.bounds import FAST_SUM_MARGIN, choose_sum_margin
from fulcrum.training.client import (
    LocalStepTerms,
    StepFn,
    StepRequest,
    StepSample,
    compute_probe_losses,
    make_materialised_step,
    run_local_steps,
)
from fulcrum.training.clipped_sum import Contribution, clip_batch, fill_probes
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState, Stats, View

MapPieces = Callable[[Callable[[GradientRecorder, slice], Contribution], Sequence[slice]], Iterable[Contribution]]
"""Calls a function of a recorder and a piece for every piece, in any order, and returns the results in theirs."""


def make_ghost_step(follow: GradientRecorder, map_pieces: MapPieces | None = None) -> StepFn:
    """Like `make_materialised_step`, from norms and inner products only.

    Rules that look at gradients in another basis need the gradients themselves.
    map_pieces: how the pieces of a batch are worked on; default: one after the other.
    """
    written_out = make_materialised_step(follow)

    def one_by_one(
        work: Callable[[GradientRecorder, slice], Contribution], pieces: Sequence[slice]
    ) -> Iterable[Contribution]:
        return (work(follow, piece) for piece in pieces)

    map_pieces = map_pieces or one_by_one

    def work(
        problem: TrainingProblem, sample: StepSample, view: View, state: RuleState, terms: LocalStepTerms
    ) -> Contribution:
        if view.needs_gradients:
            return written_out(problem, sample, view, state, terms)
        if problem.unit != "example":
            found = _clip_units(follow, problem, sample, view, state, terms)
            return written_out(problem, sample, view, state, terms) if found is None else found
        x, y = sample.records(problem)
        probes = compute_probe_losses(problem, follow, sample)
        pieces = follow.split(sample.theta, x, y) if sample.count else ()
        if len(pieces) < 2 or not problem.rule.sound:
            return clip_tape(problem, follow(sample.theta, x, y), sample.count, view, state, terms, probes)

        def work_on_piece(recorder: GradientRecorder, piece: slice) -> Contribution:
            tape = recorder.record_piece(sample.theta, x, y, piece)
            here = None if probes is None else probes[piece]
            return clip_tape(problem, tape, sample.count, view, state, terms, here)

        return add_contributions(map_pieces(work_on_piece, pieces))

    return work


def _clip_units(
    follow: GradientRecorder,
    problem: TrainingProblem,
    sample: StepSample,
    view: View,
    state: RuleState,
    terms: LocalStepTerms,
) -> Contribution | None:
    """The clipped sum of units of several records.

    None where the gradients must be written out: a proven sum, a rule that looks at the whole batch, a model that
    book-keeping cannot follow, or a record whose gradient is not finite (it counts as zero, the unit's others do not).
    """
    if problem.proven or not problem.rule.sound or not sample.count:
        return None
    x, y = sample.records(problem)
    slots = sample.slots.to(problem.device)
    numbers = torch.bincount(slots, minlength=sample.count)
    most = max(piece.stop - piece.start for piece in follow.split(sample.theta, x, y))
    probes = compute_probe_losses(problem, follow, sample)
    found: list[Contribution] = []
    for units in _group_units(numbers, most):
        local = torch.full_like(numbers, -1)
        local[units] = torch.arange(len(units), device=units.device)
        rows = torch.nonzero(local[slots] >= 0)[:, 0]
        tape = follow.record_piece(sample.theta, select_rows(x, rows), y[rows], slice(0, len(rows)))
        if not isinstance(tape, GhostTape):
            return None
        joined = join_units(tape, local[slots[rows]], len(units))
        if not joined.is_finite:
            return None
        here = None if probes is None else probes[units]
        found.append(clip_tape(problem, joined, sample.count, view, state, terms, here))
    return found[0] if len(found) == 1 else add_contributions(found)


def _group_units(numbers: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Consecutive units in groups of at most `most` records where possible; numbers [U]: of each unit's records."""
    order = torch.arange(len(numbers), device=numbers.device)
    groups, start, held = [], 0, 0
    for place, records in enumerate(numbers.tolist()):
        if held and held + records > most:
            groups.append(order[start:place])
            start, held = place, 0
        held += records
    return [*groups, order[start:]]


def clip_tape(
    problem: TrainingProblem,
    tape: GradientTape,
    units: int,
    view: View,
    state: RuleState,
    terms: LocalStepTerms,
    probes: torch.Tensor | None = None,
    table: NormTable | None = None,
) -> Contribution:
    """The clipped sum of a tape, which is all or a piece of a batch of so many units.

    probes [B, P]: the units' losses at the probes of the view; None where they were not computed. table: the norms of
    the tape; None where they are not known.
    """
    losses = tape.losses
    table = table or tape.norm_table(problem.groups)
    stats = Stats(
        norms=table.norms,
        norm_bounds=table.bounds,
        lengths=table.lengths,
        margin=choose_sum_margin(units, tape.positions, units) if problem.proven else FAST_SUM_MARGIN["float32"],
        mask=torch.ones(len(losses), dtype=torch.bool, device=problem.device),
        dots=None if view.direction is None else tape.dots(view.direction),
        losses=losses if view.losses else None,
        probes=fill_probes(view, len(losses), probes, losses),
        sigma=terms.sigma,
        batch=terms.batch,
        lr=terms.lr,
    )

    def add_up(factors: torch.Tensor) -> torch.Tensor:
        return tape.weighted_sum(factors, problem.groups, problem.proven)

    factors, extra, bounds, state = clip_batch(problem.rule, stats, state, add_up)
    return Contribution(add_up(factors), extra, bounds, state, stats, factors, losses)


# --- several clients side by side -------------------------------------------------------------------

TOGETHER_BYTES = 48 * 2**20
"""Bytes of layer inputs and outputs up to which clients go through a pass together."""


def may_go_together(problem: TrainingProblem, follow: GradientRecorder) -> bool:
    """Whether clients may go through the layers side by side: a plain sequence, clipped example by example."""
    plain = problem.unit == "example" and problem.rule.sound and not problem.proven
    sequence = follow.is_thread_safe and isinstance(problem.dataset.records.x, torch.Tensor)
    return plain and sequence and problem.device.type == "cpu" and not draws_keys(problem.model)


def train_side_by_side(
    problem: TrainingProblem,
    request: RoundRequest,
    clients: Sequence[tuple[Assignment, RuleState]],
    follow: GradientRecorder,
    before_step: Callable[[], None],
) -> list[ClientReply]:
    """The replies of several clients, which take their steps together; after `may_go_together`.

    A small model's layers take less time than the calls that start them, and these serve all clients. Every client's
    numbers are those of `train_client` with `make_ghost_step`, bit for bit.
    """
    alone = make_ghost_step(follow)
    runs = {n: run_local_steps(problem, request, *client) for n, client in enumerate(clients)}
    answers: dict[int, list[Contribution]] = {}
    replies: dict[int, ClientReply] = {}
    while runs:
        before_step()
        asked: dict[int, StepRequest] = {}
        for n, run in list(runs.items()):
            try:
                asked[n] = run.send(answers.pop(n)) if n in answers else next(run)
            except StopIteration as end:
                replies[n] = end.value
                del runs[n]
        found = _clip_together(problem, follow, tuple(asked.values()))
        if found is None:
            found = [alone(problem, each.sample, each.view, each.state, each.terms) for each in asked.values()]
        answers = {n: [given] for n, given in zip(asked, found, strict=True)}
    return [replies[n] for n in range(len(clients))]


def _clip_together(
    problem: TrainingProblem, follow: GradientRecorder, asked: tuple[StepRequest, ...]
) -> list[Contribution] | None:
    """The clipped sums of several clients' samples from one pass; None where each client must go alone."""
    counts = [each.sample.count for each in asked]
    if len(asked) < 2 or not all(counts) or any(each.view.needs_gradients for each in asked):
        return None
    records = problem.dataset.records
    rows = torch.cat([each.sample.rows for each in asked])
    x, y = records.x[rows], records.y[rows]  # type: ignore[index]
    starts = [0, *accumulate(counts)]
    parts = tuple(slice(*ends) for ends in pairwise(starts))
    for each, part in zip(asked, parts, strict=True):
        if len(follow.split(each.sample.theta, x[part], y[part])) > 1:
            return None
    tape = follow.record_together([each.sample.theta for each in asked], parts, x, y)
    if not tape.is_finite:
        return None
    table = tape.norm_table(problem.groups)
    found = []
    for each, part, count in zip(asked, parts, counts, strict=True):
        own = tape.select(part.start, part.stop)
        norms = NormTable(*(values[part] for values in table))
        probes = compute_probe_losses(problem, follow, each.sample)
        found.append(clip_tape(problem, own, count, each.view, each.state, each.terms, probes, norms))
    return found


def add_contributions(pieces: Iterable[Contribution]) -> Contribution:
    """The pieces of one batch as one, added up in their order; the sum of the first is overwritten."""
    arriving = iter(pieces)
    first = last = next(arriving)
    small = [(first.stats.norms, first.factors, first.losses)]
    extra = first.extra
    for last in arriving:
        first.sum.add_(last.sum)
        extra = extra + last.extra
        small.append((last.stats.norms, last.factors, last.losses))
    norms, factors, losses = (torch.cat(each) for each in zip(*small, strict=True))
    return Contribution(first.sum, extra, last.bounds, last.state, replace(last.stats, norms=norms), factors, losses)
