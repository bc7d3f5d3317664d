"""A run that is ready to start, and the public facts that a rule may use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fulcrum.clipping.rule import ModelFacts
from fulcrum.models.checkpoints import WeightOrigin
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.whitening import find_centred_biases
from fulcrum.privacy.evaluation import EvaluationPlan
from fulcrum.privacy.plan import Plan
from fulcrum.settings.derived import compute_local_steps
from fulcrum.settings.schema import Settings, Train
from fulcrum.training.combine import COMBINERS
from fulcrum.training.engine import Engine
from fulcrum.training.problem import TrainingProblem
from fulcrum.training.server import SERVERS, compute_client_weights
from fulcrum.types import make_short_repr


@dataclass(frozen=True)
class Federation:
    """A run that is ready to start: settings, problem, plan and engine, all consistent.

    evaluation: how private held-out records are scored; None where there are none. model_given: the model was handed
    over as an object, not named by the settings. origin: the run whose model the initial weights are, if any.
    rehearsed: what a rehearsal on made-up data answered, as plain values; empty where there was none.
    """

    __repr__ = make_short_repr

    settings: Settings
    problem: TrainingProblem
    plan: Plan
    engine: Engine
    evaluation: EvaluationPlan | None = None
    model_given: bool = False
    origin: WeightOrigin | None = None
    rehearsed: Mapping[str, Any] = field(default_factory=dict)


PRETRAINED_NORM_RATIO = 1.5
"""Initial weights count as pretrained above this ratio of their norm to that of random weights."""


def make_model_facts(federation: Federation) -> ModelFacts:
    """The facts a rule may use at the start. The settings and the public initial weights determine all of them."""
    problem = federation.problem
    return gather_model_facts(federation.settings.train, federation.plan, problem.shape, problem.layout, problem.model)


def measure_weights(layout: ParameterLayout, model: nn.Module, left_out: Collection[str]) -> float:
    """The norm of a model's weights, as a multiple of that of random ones.

    Embedding tables are left out: PyTorch draws them with variance 1, far larger than other layers, so that random ones
    would look pretrained. left_out: further names.
    """
    weights = list(layout.unflatten(layout.flatten(model)).items())
    kept = [place for place in range(len(weights)) if place not in layout.lookups and weights[place][0] not in left_out]
    rows = sum(layout.shapes[place][0] for place in kept if len(layout.shapes[place]) > 1)
    own = torch.cat([weights[place][1].flatten() for place in kept] or [torch.ones(1)])
    return float(torch.linalg.vector_norm(own)) / (math.sqrt(rows / 3) or 1.0)


MAX_PARTIES_COMPARED = 400


def compare_noise_with_mean(train: Train, plan: Plan) -> float:
    """The noise of the combined update (`train.combine`) as a multiple of that of the mean, with all parties there."""
    if train.combine == "mean" or plan.central:
        return 1.0
    chosen = range(0, plan.parties, -(-plan.parties // MAX_PARTIES_COMPARED))
    scales = [plan.compute_step_noise(k) for k in chosen]
    weights: list[float] = compute_client_weights([plan.units(k) for k in chosen], train.weights).tolist()
    mean = COMBINERS.find("mean").noise(scales, weights, train.trim)
    combiner = COMBINERS.find(train.combine)
    return combiner.noise(scales, combiner.expect_weights(scales, weights), train.trim) / mean if mean > 0 else 1.0


def gather_model_facts(
    train: Train, plan: Plan, shape: ModelFacts, layout: ParameterLayout, model: nn.Module
) -> ModelFacts:
    """The facts of a model under a plan. shape: its sizes and groups; model: with its public initial weights."""
    # At unit client a whole update is one step at learning rate 1.
    steps, lr = (1, 1.0) if plan.central else (compute_local_steps(train), train.lr)
    noise = plan.compute_noise_to_signal(layout.dim).direction / steps**0.5 * compare_noise_with_mean(train, plan)
    usual = layout.expected_init_norm
    left_out = find_centred_biases(model)  # biases that represent a mean do not measure the size of the weights
    larger = measure_weights(layout, model, left_out)
    return dataclasses.replace(
        shape,
        start=usual,
        larger=larger if larger > PRETRAINED_NORM_RATIO else 1.0,
        first=train.server_lr if SERVERS.find(train.server).scales else 1.0,
        depth=layout.depth,
        mixed=any(centre.mix is not None for centre in left_out.values()),
        noise=noise,
        rounds=train.rounds,
        lr=lr,
        steps=float(steps),
    )
