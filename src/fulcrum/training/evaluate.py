"""Accuracy and loss on public data. Never called on a party's own records."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fulcrum.gradients import Follower
from fulcrum.models.layout import Layout
from fulcrum.training.problem import Problem

BATCH = {"cpu": 250, "cuda": 2000}
"""Examples at a time: on a CPU few enough to stay near the cache."""


SCORE = "accuracy"
"""The metric that a search maximises; a name behind a minus sign ("-loss") is minimised."""


def evaluate(problem: Problem, params: torch.Tensor) -> dict[str, float]:
    """Metrics of the problem's model with weights `params` [d] on its public test data, by name."""
    return evaluate_on(problem.model, problem.layout, params, problem.dataset.x_test, problem.dataset.y_test)


def score_of(metrics: Mapping[str, float], name: str = SCORE) -> float | None:
    """What a search maximises, from a round's metrics; None in rounds without evaluation."""
    value = metrics.get(name.removeprefix("-"))
    return -value if value is not None and name.startswith("-") else value


@torch.no_grad()
def evaluate_on(
    model: nn.Module, layout: Layout, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, batch: int = 0
) -> dict[str, float]:
    """Accuracy (a fraction) and mean cross-entropy of the model with weights `params` [d] on public (x, y)."""
    follow, device = Follower(model, layout), params.device
    right, loss = 0, 0.0
    step = batch or BATCH.get(device.type, BATCH["cuda"])
    for inputs, labels in zip(x.split(step), y.to(device).split(step), strict=True):
        logits = follow.outputs(params, inputs.to(device))
        right += int((logits.argmax(dim=1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return {"accuracy": right / len(y), "loss": loss / len(y)}
