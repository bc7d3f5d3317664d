"""Fulcrum's parts, each usable alone: `from fulcrum import parts`. docs/parts.md shows each in about ten lines.

per-example gradients   record -> GradientTape: norms, inner products, clipped sums, without writing gradients out
rules                   RULES, find_rule, ClipRule, apply_rule: factors that keep every example within its bound
mechanism               release: a sum with exactly distributed noise on a public grid, and its event
accountant              Gaussian, compute_epsilon, calibrate_sigma, Spend
ledger                  Ledger: budgets over several runs, paid before anything leaves
samples                 draw_poisson_sample; SecureRandomness and SeededRandomness, which all of it draws from
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulcrum.clipping import RULES, ClipRule, find_rule
from fulcrum.clipping.rule import ModelFacts
from fulcrum.data.records import ModelInputs
from fulcrum.data.tasks import Task
from fulcrum.gradients import GradientTape, record_gradients
from fulcrum.models.layout import ParameterLayout
from fulcrum.privacy.accounting import Spend, calibrate_sigma, compute_epsilon
from fulcrum.privacy.bounds import FAST_SUM_MARGIN, RuleDecision, apply_rule
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.exact_noise import release_on_grid
from fulcrum.privacy.ledger import Ledger, RunPlan
from fulcrum.rng import CipherRandomness, SecureRandomness, SeededRandomness
from fulcrum.settings.schema import Clip
from fulcrum.types import Released, RuleState, Stats

__all__ = [
    "RULES",
    "Clip",
    "ClipRule",
    "Event",
    "Gaussian",
    "GradientTape",
    "Ledger",
    "ModelFacts",
    "ParameterLayout",
    "Release",
    "Released",
    "RuleDecision",
    "RunPlan",
    "SecureRandomness",
    "SeededRandomness",
    "Spend",
    "apply_rule",
    "calibrate_sigma",
    "clip",
    "compute_epsilon",
    "draw_poisson_sample",
    "find_rule",
    "record",
    "release",
    "start_rule",
]

LossOfExamples = Callable[[Any, Tensor], Tensor]
"""(outputs [B, ...], targets [B, ...]) -> one loss per example [B], such as F.cross_entropy(..., reduction="none")."""


def record(model: nn.Module, loss: LossOfExamples, x: ModelInputs, y: Tensor, how: str = "auto") -> GradientTape:
    """One forward and backward pass over x [B, ...], y [B, ...]: the per-example gradients in all trainable parameters.

    The tape has `norms()` [B, 1], `weighted_sum(factors [B, 1])` [d], `dots(direction [d])` [B], `losses` [B] and
    `matrix()` [B, d]; only the last one takes B times the memory of the model. An example whose gradient is not finite
    counts as zero. The model's own .grad stay as they are. loss: one loss per example. how: see `record_gradients`.
    """
    layout = ParameterLayout.of(model)
    task = Task("own", 1, loss, {}, "loss", lambda outputs: outputs, lambda name, value: torch.zeros(0))
    return record_gradients(model, layout, layout.flatten(model), x, y, task, how)


def start_rule(
    rule: str | ClipRule, dim: int, settings: Clip | None = None, **facts: Any
) -> tuple[ClipRule, RuleState]:
    """A rule and its first state, for a model of `dim` parameters. facts: other fields of `ModelFacts`."""
    chosen = find_rule(rule) if isinstance(rule, str) else rule
    return chosen, chosen.init(settings or Clip(), ModelFacts(dim, (dim,), **facts))


def clip(
    rule: ClipRule, state: RuleState, tape: GradientTape, sigma: float = 0.0, batch: float = 1.0
) -> tuple[Tensor, RuleDecision]:
    """The clipped sum [d] of a tape, and the rule's decision: its factors, bounds and extra statistics.

    No example's part of the sum is longer than `decision.bounds.C`, whatever the rule says: `apply_rule` enforces it.
    """
    table = tape.norm_table()
    stats = Stats(
        norms=table.norms,
        norm_bounds=table.bounds,
        lengths=table.lengths,
        margin=FAST_SUM_MARGIN["float32"],
        mask=torch.ones(len(table.norms), dtype=torch.bool, device=table.norms.device),
        losses=tape.losses,
        sigma=sigma,
        batch=batch,
    )
    decision = apply_rule(rule, stats, state)
    return tape.weighted_sum(decision.factors), decision


class Release(NamedTuple):
    """What may leave: the noised sum [m] as float64 multiples of a public grid, and what it costs."""

    values: Tensor
    event: Gaussian


def release(
    clipped: Tensor, bound: float, rate: float, sigma: float, randomness: CipherRandomness, number: int
) -> Release:
    """A clipped sum [m] with Gaussian noise of sigma times `bound`, rounded after the noise: no float gives it away.

    bound: the norm of one unit's part. rate: probability with which each unit joined. number: of this release; the
    same number repeats the same noise, so count.
    """
    found = release_on_grid(clipped, sigma * bound, randomness, ("noise", number))
    return Release(found.values, Gaussian(rate, sigma))


def draw_poisson_sample(units: int, rate: float, randomness: CipherRandomness, number: int) -> Tensor:
    """The numbers 0..units-1 that join sample `number`: each with probability `rate`, on its own. May be empty."""
    return torch.nonzero(randomness.uniform(("sample", number), units) < rate)[:, 0]
