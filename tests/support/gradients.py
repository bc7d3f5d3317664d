"""What tests of per-example gradients share: a loop of autograd as the oracle, and the check of a whole tape."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum import gradients as grads
from fulcrum.data.tasks import Task, make_task
from fulcrum.gradients import GradientTape
from fulcrum.models.layout import ParameterLayout
from fulcrum.settings import schema as config

B, CLASSES = 5, 3
CLASSIFY = make_task(config.TaskSettings(classes=CLASSES), [])


def record(
    model: nn.Module,
    layout: ParameterLayout,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    task: Task = CLASSIFY,
    how: str = "auto",
) -> GradientTape:
    return grads.record_gradients(model, layout, params, x, y, task, how)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(count: int = B, seed: int = 1) -> Tensor:
    return torch.randint(0, CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def seeded(model: nn.Module, seed: int = 2, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with reproducible parameters, biases and norm scales included."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def loop(model: nn.Module, layout: ParameterLayout, x: Tensor, y: Tensor) -> Tensor:
    """The plainest oracle: backward on one example after the other."""
    rows = []
    named = dict(model.named_parameters())
    for i in range(len(x)):
        value = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(value, [named[n] for n in layout.names], allow_unused=True)
        rows.append(
            torch.cat(
                [(torch.zeros(s) if g is None else g).reshape(-1) for g, s in zip(found, layout.sizes, strict=True)]
            )
        )
    return torch.stack(rows)


def check_tape(tape: GradientTape, truth: Tensor, layout: ParameterLayout, tight: float = 1e-10) -> None:
    """Every answer of a tape against the matrix of true gradients."""

    def close(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=tight, atol=tight * float(truth.abs().max()))

    dtype = truth.dtype
    close(tape.norms(), truth.norm(dim=1, keepdim=True))
    close(tape.matrix(), truth)
    groups = layout.layers
    by_layer = torch.zeros(len(truth), max(groups) + 1, dtype=dtype)
    for block, group in zip(truth.split(layout.sizes, dim=1), groups, strict=True):
        by_layer[:, group] += block.square().sum(dim=1)
    close(tape.norms(groups), by_layer.sqrt())
    direction = randn(layout.dim, seed=4, dtype=dtype)
    close(tape.dots(direction), truth @ direction)
    factors = randn(len(truth), 1, seed=5, dtype=dtype)
    close(tape.weighted_sum(factors), (factors * truth).sum(dim=0))
    factors = randn(len(truth), max(groups) + 1, seed=6, dtype=dtype)
    per_entry = torch.repeat_interleave(torch.tensor(groups), torch.tensor(layout.sizes))
    close(tape.weighted_sum(factors, groups), (factors[:, per_entry] * truth).sum(dim=0))
