"""The fast local step: norms, factors and the clipped sum come from the tape; no gradient is written out for long.

A batch goes through in pieces: each is recorded, clipped and added up before the next one. Nothing of the size of the
batch is kept but norms and losses. Rules that look at a whole batch (not `sound`) get one tape of all pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from fulcrum.data.records import select_rows
from fulcrum.gradients import GradientRecorder, GradientTape
from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.units import join_units
from fulcrum.privacy.bounds import FAST_SUM_MARGIN, choose_sum_margin
from fulcrum.training.client import LocalStepTerms, StepFn, StepSample, compute_probe_losses, make_materialised_step
from fulcrum.training.clipped_sum import Contribution, clip_batch, fill_probes
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import RuleState, Stats, View

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
) -> Contribution:
    """The clipped sum of a tape, which is all or a piece of a batch of so many units.

    probes [B, P]: the units' losses at the probes of the view; None where they were not computed.
    """
    losses = tape.losses
    table = tape.norm_table(problem.groups)
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
