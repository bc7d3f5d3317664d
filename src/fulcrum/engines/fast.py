"""The fast local step: norms, factors and the clipped sum come from the tape; no gradient is written out for long."""

from __future__ import annotations

import torch

from fulcrum.gradients import GradientRecorder
from fulcrum.privacy.bounds import FAST_SUM_MARGIN, choose_sum_margin
from fulcrum.training.client import LocalStepTerms, StepFn, StepSample, make_materialised_step
from fulcrum.training.clipped_sum import Contribution, clip_batch
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import RuleState, Stats, View


def make_ghost_step(follow: GradientRecorder) -> StepFn:
    """Like `make_materialised_step`, from norms and inner products only.

    Rules that look at gradients in another basis, and units of several records, need the gradients themselves.
    """
    written_out = make_materialised_step(follow)

    def work(
        problem: TrainingProblem, sample: StepSample, view: View, state: RuleState, terms: LocalStepTerms
    ) -> Contribution:
        if view.transform is not None or problem.unit != "example":
            return written_out(problem, sample, view, state, terms)
        tape = follow(sample.theta, *sample.records(problem))
        losses = tape.losses
        table = tape.norm_table(problem.groups)
        stats = Stats(
            norms=table.norms,
            norm_bounds=table.bounds,
            lengths=table.lengths,
            margin=choose_sum_margin(sample.count, tape.positions, sample.count)
            if problem.proven
            else FAST_SUM_MARGIN["float32"],
            mask=torch.ones(sample.count, dtype=torch.bool, device=problem.device),
            dots=None if view.direction is None else tape.dots(view.direction),
            losses=losses if view.losses else None,
            sigma=terms.sigma,
            batch=terms.batch,
            lr=terms.lr,
        )

        def add_up(factors: torch.Tensor) -> torch.Tensor:
            return tape.weighted_sum(factors, problem.groups, problem.proven)

        factors, extra, bounds, state = clip_batch(problem.rule, stats, state, add_up)
        clipped = add_up(factors)
        return Contribution(clipped, extra, bounds, state, stats, factors, losses)

    return work
