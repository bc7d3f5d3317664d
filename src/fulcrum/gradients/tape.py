"""The interface of a recorded batch, whichever method computed its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fulcrum.errors import ModelError


def check_loss_per_example(losses: Tensor, count: int) -> Tensor:
    """The losses [B]; raises ModelError where they are not one per example."""
    if losses.shape != (count,):
        raise ModelError(f"loss must give one value an example, [B], but gave the shape {list(losses.shape)}.")
    return losses


class GradientTape(Protocol):
    """One forward and backward pass over a batch of B examples, for a model of d parameters.

    An example whose loss, gradient or gradient norm is not finite counts as zero everywhere: a
    row of zeros, norm 0, inner product 0, loss 0, and no contribution to any sum whatever its factor.
    `groups` gives the group 0..G-1 of each parameter tensor of the layout;
    empty means one group.
    """

    @property
    def losses(self) -> Tensor:
        """The loss of each example, [B]."""
        ...

    def matrix(self) -> Tensor:
        """The gradient of each example, [B, d]. Takes B times the memory of the model."""
        ...

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        """The Euclidean norm of each example's gradient in each group, [B, G]."""
        ...

    def dots(self, direction: Tensor) -> Tensor:
        """The inner product of each example's gradient with `direction` [d], [B]."""
        ...

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = ()) -> Tensor:
        """Sum over the examples of factor times gradient, [d]; `factors` is [B, G]."""
        ...


def sum_squares_by_group(squares: Tensor, groups: tuple[int, ...]) -> Tensor:
    """Adds up squared norms [B, tensors] within each group: [B, G]."""
    if not groups:
        return squares.sum(dim=1, keepdim=True)
    index = torch.tensor(groups, device=squares.device)
    return squares.new_zeros(len(squares), max(groups) + 1).index_add_(1, index, squares)


def select_group_factors(factors: Tensor, groups: tuple[int, ...], tensor: int) -> Tensor:
    """The factors [B] that apply to a parameter tensor."""
    return factors[:, groups[tensor] if groups else 0]


@dataclass(frozen=True)
class EmptyTape:
    """The tape of a batch without examples: a Poisson sample may be empty, and the step is still taken."""

    like: Tensor
    """The parameters [d], for size, type and device."""

    @property
    def losses(self) -> Tensor:
        return self.like.new_zeros(0)

    def matrix(self) -> Tensor:
        return self.like.new_zeros(0, len(self.like))

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.like.new_zeros(0, max(groups) + 1 if groups else 1)

    def dots(self, direction: Tensor) -> Tensor:
        return self.like.new_zeros(0)

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = ()) -> Tensor:
        return torch.zeros_like(self.like)


@dataclass(frozen=True)
class ChunkedTape:
    """The tapes of consecutive pieces of a batch, combined."""

    tapes: tuple[GradientTape, ...]
    sizes: tuple[int, ...]

    @property
    def losses(self) -> Tensor:
        return torch.cat([tape.losses for tape in self.tapes])

    def matrix(self) -> Tensor:
        return torch.cat([tape.matrix() for tape in self.tapes])

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return torch.cat([tape.norms(groups) for tape in self.tapes])

    def dots(self, direction: Tensor) -> Tensor:
        return torch.cat([tape.dots(direction) for tape in self.tapes])

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = ()) -> Tensor:
        pieces = zip(self.tapes, factors.split(self.sizes), strict=True)
        sums = [tape.weighted_sum(piece, groups) for tape, piece in pieces]
        return torch.stack(sums).sum(dim=0)
