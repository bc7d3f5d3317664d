"""The non-private reference: the same model, records, split and rounds without clipping and noise.

For public data only. Without noise another step length is right, so several are tried, and the one with the smallest
training loss at the end counts; test records choose nothing.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Mapping
from typing import Any

import torch

from fulcrum.clipping import find_rule
from fulcrum.data import Dataset, count_units_per_party
from fulcrum.data.records import move_inputs_to_device, select_rows
from fulcrum.engines import find_engine
from fulcrum.errors import ConfigError
from fulcrum.privacy.plan import make_plan
from fulcrum.settings.schema import Settings
from fulcrum.training.evaluate import EVALUATION_BATCH_SIZES, evaluate_with_parties
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate
from fulcrum.training.problem import TrainingProblem

LEARNING_RATE_FACTORS = (0.1, 1.0, 10.0)
"""Multiples of train.lr that are tried with the settings' own server optimiser."""
ADAM_RATES = (0.01, 0.05, 0.25)
"""Learning rates that are tried with Adam at the server: without noise it needs no tuned step length."""


def check_reference(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError where a reference is asked for that would train without privacy on private records."""
    if settings.run.reference and not dataset.public:
        raise ConfigError(
            f"run.reference = true would train without privacy on {dataset.name}, which is private; leave it out, or "
            "declare data that everybody may see with --public."
        )


def train_reference(federation: Federation) -> dict[str, Any]:
    """Metrics of the model trained without privacy, per party and pooled, and what trained it best.

    Keys: metrics, party_metrics and mean_over_parties where test records name parties, optimiser.
    """
    best: tuple[float, str, torch.Tensor] | None = None
    for words, changes in list_candidates(federation.settings).items():
        plain = make_reference(federation, changes)
        ((_, last),) = collections.deque(federate(plain), maxlen=1)
        loss = compute_training_loss(plain.problem, last.averaged)
        if best is None or loss < best[0]:
            best = loss, words, last.averaged
    if best is None or not math.isfinite(best[0]):
        return {}
    found = evaluate_with_parties(federation.problem, best[2])
    made: dict[str, Any] = {"optimiser": best[1], "metrics": found.metrics}
    if found.parties:
        made |= {"party_metrics": found.parties, "mean_over_parties": found.mean_over_parties}
    return made


def list_candidates(settings: Settings) -> dict[str, dict[str, Any]]:
    """What is tried, in words -> changes of [train]."""
    lr, server = settings.train.lr, settings.train.server
    found: dict[str, dict[str, Any]] = {
        f"{server}, learning rate {lr * factor:g}": {"lr": lr * factor} for factor in LEARNING_RATE_FACTORS
    }
    for rate in ADAM_RATES:
        adam = {"server": "adam", "server_lr": rate, "server_momentum": 0.9, "server_beta2": 0.99, "server_eps": 1e-6}
        found[f"adam, learning rate {rate:g}"] = {**adam, "lr": 0.1 * lr}
    return found


def make_reference(federation: Federation, changes: Mapping[str, Any]) -> Federation:
    """The same federation without clipping and noise, with these changes of [train]; evaluated after the last round."""
    old = federation.problem
    settings = federation.settings.replace(
        clip={"rule": "none"},
        train=dict(changes),
        privacy={"epsilon": None, "sigma": None, "unit": "example", "aggregation": "plain", "evaluation_epsilon": None},
        run={"evaluate_every": federation.settings.train.rounds, "ledger": "", "diagnostics": False},
    )
    rule = find_rule("none")
    problem = TrainingProblem.of(settings, old.dataset, old.partition, copy.deepcopy(old.model), old.device, rule=rule)
    plan = make_plan(settings, old.partition, count_units_per_party(old.dataset, old.partition, "example"), rule)
    return Federation(settings, problem, plan, find_engine(settings.run.engine, problem))


@torch.no_grad()
def compute_training_loss(problem: TrainingProblem, params: torch.Tensor) -> float:
    """The mean loss over the training records; infinite where it is not a number."""
    train, total = problem.dataset.records, 0.0
    step = EVALUATION_BATCH_SIZES.get(params.device.type, EVALUATION_BATCH_SIZES["cuda"])
    for start in range(0, len(train), step):
        rows = slice(start, start + step)
        outputs = problem.gradient_recorder.outputs(
            params, move_inputs_to_device(select_rows(train.x, rows), params.device)
        )
        total += float(problem.dataset.task.loss(outputs, train.y[rows].to(params.device)).sum())
    mean = total / max(len(train), 1)
    return mean if math.isfinite(mean) else math.inf
