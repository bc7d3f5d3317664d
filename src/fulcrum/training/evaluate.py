"""Accuracy and loss on public data. Never called on a party's own records."""

from __future__ import annotations

import torch
from torch import nn

from fulcrum.gradients import Follower
from fulcrum.models.layout import Layout

BATCH = {"cpu": 250, "cuda": 2000}
"""Examples at a time: on a CPU few enough to stay near the cache."""


@torch.no_grad()
def evaluate(
    model: nn.Module, layout: Layout, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, batch: int = 0
) -> tuple[float, float]:
    """(accuracy as a fraction, mean cross-entropy) of the model with weights `params` [d] on public (x, y)."""
    follow, device = Follower(model, layout), params.device
    right, loss = 0, 0.0
    step = batch or BATCH.get(device.type, BATCH["cuda"])
    for inputs, labels in zip(x.split(step), y.to(device).split(step), strict=True):
        logits = follow.outputs(params, inputs.to(device))
        right += int((logits.argmax(dim=1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return right / len(y), loss / len(y)
