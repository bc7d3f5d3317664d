"""Accuracy and loss on public data. Never called on a party's own records."""

from __future__ import annotations

import torch
from torch import nn

from fulcrum.models import Layout, call


@torch.no_grad()
def evaluate(
    model: nn.Module, layout: Layout, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, batch: int = 2000
) -> tuple[float, float]:
    """(accuracy as a fraction, mean cross-entropy) of the model with weights `params` [d] on public (x, y)."""
    weights = layout.unflatten(params)
    right, loss = 0, 0.0
    for start in range(0, len(y), batch):
        inputs, labels = x[start : start + batch].to(params.device), y[start : start + batch].to(params.device)
        logits = call(model, weights, inputs)
        right += int((logits.argmax(dim=1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return right / len(y), loss / len(y)
