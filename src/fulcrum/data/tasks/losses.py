"""Losses of single examples, each with its closed-form gradient where there is one.

Examples are all leading dimensions: outputs [..., O] (or [..., L, O] for sequences of length L) and their targets
give one loss per example, [...]. A `loss` is differentiable by autograd; its `slopes` give the same losses and their
gradient in the outputs without autograd. Half precision is widened to float32; float64 is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

LossFn = Callable[[Tensor, Tensor], Tensor]
"""outputs [..., O] and targets [...] -> one loss per example [...]."""
LossGradientFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""outputs and targets -> (losses [...], gradient of each loss in its outputs, as outputs)."""


def to_full_precision(outputs: Tensor) -> Tensor:
    """Outputs of half precision as float32; float32 and float64 unchanged."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


# --- one of several classes -----------------------------------------------------------------------


def make_cross_entropy(weights: tuple[float, ...] = ()) -> tuple[LossFn, LossGradientFn]:
    """Cross-entropy of logits [..., O] with class numbers [...]; weights: one factor per class, empty for 1."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = -F.log_softmax(to_full_precision(outputs), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return found * _select_class_weights(weights, targets, found) if weights else found

    def slopes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logs = F.log_softmax(to_full_precision(outputs), dim=-1)
        column = targets.unsqueeze(-1)
        losses = logs.gather(-1, column).squeeze(-1).neg()
        slope = logs.exp().scatter_add_(-1, column, logs.new_full((), -1.0).expand_as(column))
        if not weights:
            return losses, slope
        factors = _select_class_weights(weights, targets, losses)
        return losses * factors, slope * factors.unsqueeze(-1)

    return loss, slopes


def _select_class_weights(weights: tuple[float, ...], targets: Tensor, like: Tensor) -> Tensor:
    """The weight of each target's class, without a copy from the host, which a CUDA graph cannot record."""
    total = torch.zeros_like(like)
    for number, weight in enumerate(weights):
        total = torch.where(targets == number, weight, total)
    return total


def shift_logits(pair: tuple[LossFn, LossGradientFn], shift: tuple[float, ...]) -> tuple[LossFn, LossGradientFn]:
    """A loss and its slopes that see outputs [..., O] plus a constant per output; empty: the pair itself.

    With the log shares of the classes as constants this is logit adjustment (Menon et al. 2021): the outputs themselves
    then predict as if the classes were equally frequent.
    """
    if not shift:
        return pair
    loss, slopes = pair

    def shifted(outputs: Tensor) -> Tensor:
        # Scalars, without a copy from the host, which a CUDA graph cannot record.
        return torch.stack([to_full_precision(outputs[..., k]) + value for k, value in enumerate(shift)], dim=-1)

    return (lambda outputs, targets: loss(shifted(outputs), targets)), (
        lambda outputs, targets: slopes(shifted(outputs), targets)
    )


# --- yes or no ------------------------------------------------------------------------------------


def make_binary_cross_entropy(weights: tuple[float, ...] = ()) -> tuple[LossFn, LossGradientFn]:
    """Binary cross-entropy of one logit, [..., 1], with targets 0 or 1, [...]; weights: of 0 and of 1."""

    def weighted(targets: Tensor) -> Tensor:
        return weights[0] + (weights[1] - weights[0]) * targets if weights else torch.ones_like(targets)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        logits = to_full_precision(outputs).squeeze(-1)
        answers = targets.to(logits)
        return (F.softplus(logits) - logits * answers) * weighted(answers)

    def slopes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = to_full_precision(outputs).squeeze(-1)
        answers = targets.to(logits)
        factors = weighted(answers)
        losses = (F.softplus(logits) - logits * answers) * factors
        return losses, ((torch.sigmoid(logits) - answers) * factors).unsqueeze(-1)

    return loss, slopes


def make_multilabel_cross_entropy(weights: tuple[float, ...] = ()) -> tuple[LossFn, LossGradientFn]:
    """Mean binary cross-entropy over labels: logits and targets (0 or 1) [..., O]; weights: of the 1s, per label."""

    def weighted(answers: Tensor) -> Tensor:
        if not weights:
            return torch.ones_like(answers)
        columns = [1 + (weight - 1) * answers[..., k] for k, weight in enumerate(weights)]
        return torch.stack(columns, dim=-1)

    def parts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = to_full_precision(outputs)
        answers = targets.to(logits)
        return logits, answers, weighted(answers)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        logits, answers, factors = parts(outputs, targets)
        return ((F.softplus(logits) - logits * answers) * factors).mean(dim=-1)

    def slopes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, answers, factors = parts(outputs, targets)
        losses = ((F.softplus(logits) - logits * answers) * factors).mean(dim=-1)
        return losses, (torch.sigmoid(logits) - answers) * factors / logits.shape[-1]

    return loss, slopes


# --- numbers --------------------------------------------------------------------------------------


def make_regression_loss(kind: str, scale: float, offset: float, width: float = 1.0) -> tuple[LossFn, LossGradientFn]:
    """Mean over the targets of an example of the squared, absolute or Huber error; outputs and targets [..., O].

    The model learns (target - offset) / scale, so that its outputs are of order 1. squared: half the square. huber:
    half the square up to `width`, linear beyond.
    """
    value, slope = REGRESSION_LOSSES[kind]

    def errors(outputs: Tensor, targets: Tensor) -> Tensor:
        found = to_full_precision(outputs)
        wanted = targets.to(found) if targets.dim() == outputs.dim() else targets.to(found).unsqueeze(-1)
        return found - (wanted - offset) / scale

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return value(errors(outputs, targets), width).mean(dim=-1)

    def slopes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = errors(outputs, targets)
        return value(found, width).mean(dim=-1), slope(found, width) / found.shape[-1]

    return loss, slopes


def _huber_loss(error: Tensor, width: float) -> Tensor:
    small = error.abs().clamp(max=width)
    return small * (error.abs() - 0.5 * small)


PointwiseErrorFn = Callable[[Tensor, float], Tensor]
REGRESSION_LOSSES: dict[str, tuple[PointwiseErrorFn, PointwiseErrorFn]] = {
    "squared": (lambda error, width: 0.5 * error.square(), lambda error, width: error),
    "absolute": (lambda error, width: error.abs(), lambda error, width: error.sign()),
    "huber": (_huber_loss, lambda error, width: error.clamp(-width, width)),
}
"""Regression losses by name: (value, derivative) of an error; the second argument is Huber's width."""


# --- sequences of tokens --------------------------------------------------------------------------


def make_token_cross_entropy(ignored: int) -> tuple[LossFn, LossGradientFn]:
    """Mean cross-entropy over the positions of an example: logits [..., L, O], token numbers [..., L].

    Positions whose target is `ignored` do not count; an example without any counted position has loss 0.
    """

    def parts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = targets != ignored
        column = targets.masked_fill(~counts, 0).unsqueeze(-1)
        logs = F.log_softmax(to_full_precision(outputs), dim=-1)
        counted = counts.to(logs)
        return logs, column, counted / counted.sum(dim=-1, keepdim=True).clamp_min(1.0)  # share: [..., L]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        logs, column, share = parts(outputs, targets)
        return -(logs.gather(-1, column).squeeze(-1) * share).sum(dim=-1)

    def slopes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logs, column, share = parts(outputs, targets)
        losses = -(logs.gather(-1, column).squeeze(-1) * share).sum(dim=-1)
        slope = logs.exp().scatter_add_(-1, column, logs.new_full((), -1.0).expand_as(column))
        return losses, slope * share.unsqueeze(-1)

    return loss, slopes


def sum_token_log_likelihood(outputs: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Per example the summed log likelihood of its counted tokens, and their number: [...] each, float64."""
    counts = targets != ignored
    column = targets.masked_fill(~counts, 0).unsqueeze(-1)
    logs = F.log_softmax(to_full_precision(outputs), dim=-1).gather(-1, column).squeeze(-1).double()
    return (logs * counts).sum(dim=-1), counts.double().sum(dim=-1)


# --- any loss -------------------------------------------------------------------------------------


def make_autograd_gradient(loss: LossFn) -> LossGradientFn:
    """The gradient of a loss without a closed form: one backward pass through the loss only."""

    def slopes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            losses = loss(leaf, targets)
            (slope,) = torch.autograd.grad(losses.sum(), leaf, materialize_grads=True)
        return losses.detach(), slope

    return slopes
