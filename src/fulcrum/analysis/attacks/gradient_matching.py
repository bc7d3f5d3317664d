"""Gradient inversion by search: images whose clipped gradients add up to what the server saw.

    dlg      squared distance, by L-BFGS (Zhu, Liu and Han 2019)
    cosine   cosine distance with total variation, by Adam on the gradient's signs (Geiping et al. 2020)

Both know the weights, C, the labels and the number of records. A step needs second derivatives of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from fulcrum.analysis.attacks.server_view import ServerView
from fulcrum.models.layout import call_with_parameters
from fulcrum.rng import torch_generator


@dataclass(frozen=True)
class MatchingOptions:
    """Steps of the search; weight of the total variation; range of the inputs; seed of the first guess."""

    steps: int = 200
    total_variation: float = 1e-2
    low: float = 0.0
    high: float = 1.0
    seed: int = 0


def sum_clipped_gradients(view: ServerView, x: Tensor) -> Tensor:
    """What records x [n, ...] with the view's labels would add up to, before noise: [d], differentiable in x."""

    def loss(theta: Tensor, record: Tensor, label: Tensor) -> Tensor:
        outputs = call_with_parameters(view.model, view.layout.unflatten(theta), record[None])
        return view.task.loss(outputs, label[None]).sum()

    if float("inf") == view.C:

        def whole(theta: Tensor) -> Tensor:
            outputs = call_with_parameters(view.model, view.layout.unflatten(theta), x)
            return view.task.loss(outputs, view.y).sum()

        found: Tensor = grad(whole)(view.theta)
        return found
    gradients: Tensor = vmap(grad(loss), in_dims=(None, 0, 0))(view.theta, x, view.y)
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True).clamp_min(1e-12)
    total: Tensor = (gradients * (view.C / norms).clamp_max(1.0)).sum(dim=0)
    return total


def compute_total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels of images [n, c, h, w]."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def invert_by_distance(view: ServerView, options: MatchingOptions) -> Tensor:
    """dlg: images [n, ...] of least squared distance between gradients."""
    x = _draw_first_guess(view, options)
    scale = float(view.total.square().sum().clamp_min(1e-12))
    search = torch.optim.LBFGS(
        [x],
        max_iter=options.steps,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def distance() -> Tensor:
        search.zero_grad()
        error = (sum_clipped_gradients(view, x) - view.total).square().sum() / scale * 1e3
        error.backward()
        return error

    before = x.detach().clone()
    search.step(distance)
    found = x.detach()
    return torch.where(torch.isfinite(found), found, before).clamp(options.low, options.high)


def invert_by_cosine(view: ServerView, options: MatchingOptions) -> Tensor:
    """cosine: images [n, ...] of least cosine distance between gradients, plus total variation."""
    x = _draw_first_guess(view, options)
    width = options.high - options.low
    search = torch.optim.Adam([x], lr=0.1 * width)
    slower = torch.optim.lr_scheduler.MultiStepLR(
        search, [options.steps * eighths // 8 for eighths in (3, 5, 7)], gamma=0.1
    )
    length = torch.linalg.vector_norm(view.total).clamp_min(1e-12)
    for _ in range(options.steps):
        search.zero_grad()
        seen = sum_clipped_gradients(view, x)
        cosine = (seen * view.total).sum() / (torch.linalg.vector_norm(seen).clamp_min(1e-12) * length)
        cost = 1 - cosine
        if x.dim() == 4:
            cost = cost + options.total_variation * compute_total_variation(x) / width
        cost.backward()
        assert x.grad is not None
        x.grad = torch.nan_to_num(x.grad).sign()
        search.step()
        slower.step()
        with torch.no_grad():
            x.clamp_(options.low, options.high)
    return x.detach()


def _draw_first_guess(view: ServerView, options: MatchingOptions) -> Tensor:
    noise = torch.randn(view.x.shape, generator=torch_generator(options.seed, "attack", "inversion"))
    middle, width = (options.low + options.high) / 2, options.high - options.low
    return (middle + 0.15 * width * noise).requires_grad_()


MATCHING: dict[str, Callable[[ServerView, MatchingOptions], Tensor]] = {
    "dlg": invert_by_distance,
    "cosine": invert_by_cosine,
}
