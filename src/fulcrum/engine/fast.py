"""The fast local step: norms, factors and the clipped sum come from the tape; no gradient is written out for long."""

from __future__ import annotations

import torch
from torch import Tensor

from fulcrum.grads import Follower
from fulcrum.local import Contribution, Problem, Sample, Terms, Work, by_matrix, judge
from fulcrum.types import State, Stats, View


def by_tape(follow: Follower) -> Work:
    """As `by_matrix`, from norms and inner products alone.

    Rules that look at gradients in another basis, and units of several records, need the gradients themselves; where
    such a basis can tell its norms, only a few sums are changed to it in place of every gradient.
    """
    written_out, few_changed = by_matrix(follow), by_sums(follow)

    def work(problem: Problem, sample: Sample, view: View, state: State, terms: Terms) -> Contribution:
        if view.transform is not None or problem.unit != "example":
            told = problem.unit == "example" and view.transform is not None and view.transform.norms is not None
            return (few_changed if told else written_out)(problem, sample, view, state, terms)
        tape = follow(sample.theta, *sample.records(problem))
        losses = tape.losses
        stats = Stats(
            norms=tape.norms(problem.groups),
            mask=torch.ones(sample.count, dtype=torch.bool, device=problem.device),
            dots=None if view.direction is None else tape.dots(view.direction),
            losses=losses if view.losses else None,
            sigma=terms.sigma,
            batch=terms.batch,
            lr=terms.lr,
        )
        factors, extra, bounds, state = judge(
            problem.rule, stats, state, lambda f: tape.weighted_sum(f, problem.groups)
        )
        clipped = tape.weighted_sum(factors, problem.groups)
        return Contribution(clipped, extra, bounds, state, stats, factors, losses)

    return work


def by_sums(follow: Follower) -> Work:
    """As `by_matrix` for a change of basis that can tell norms: it is linear, so sums of each group change theirs."""

    def work(problem: Problem, sample: Sample, view: View, state: State, terms: Terms) -> Contribution:
        change = view.transform
        assert change is not None
        assert change.norms is not None
        tape = follow(sample.theta, *sample.records(problem))
        gradients, losses = tape.matrix(), tape.losses
        norms = change.norms(gradients)
        counted = torch.isfinite(norms).all(dim=1)
        if not bool(counted.all()):  # as zero, as anywhere else
            gradients = torch.where(counted[:, None], gradients, torch.zeros_like(gradients))
            norms = torch.where(counted[:, None], norms, torch.zeros_like(norms))
        losses = torch.where(counted & torch.isfinite(losses), losses, torch.zeros_like(losses))
        stats = Stats(
            norms=norms,
            mask=torch.ones(sample.count, dtype=torch.bool, device=problem.device),
            dots=None if view.direction is None else gradients @ view.direction,
            losses=losses if view.losses else None,
            sigma=terms.sigma,
            batch=terms.batch,
            lr=terms.lr,
        )

        def add_up(factors: Tensor) -> Tensor:
            by_group = change.forward(factors.T @ gradients)
            return by_group.gather(0, change.groups[None]).squeeze(0)

        factors, extra, bounds, state = judge(problem.rule, stats, state, add_up)
        return Contribution(add_up(factors), extra, bounds, state, stats, factors, losses)

    return work
