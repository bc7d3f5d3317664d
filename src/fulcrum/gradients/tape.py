"""The interface of a recorded batch, whichever method computed its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fulcrum.errors import ModelError
from fulcrum.gradients.rounding import NormTable, SquaredNorms


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

    @property
    def positions(self) -> int:
        """The most products that add up to one entry of an example's gradient; 1 where gradients are held."""
        ...

    def norm_table(self, groups: tuple[int, ...] = ()) -> NormTable:
        """The Euclidean norm of each example's gradient in each group, [B, G], with bounds on their error."""
        ...

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        """The Euclidean norm of each example's gradient in each group, [B, G]."""
        ...

    def dots(self, direction: Tensor) -> Tensor:
        """The inner product of each example's gradient with `direction` [d], [B]."""
        ...

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        """Sum over the examples of factor times gradient, [d]; `factors` is [B, G].

        proven: products and additions in float64, and so is the result.
        """
        ...


def sum_squares_by_group(squares: SquaredNorms, groups: tuple[int, ...]) -> SquaredNorms:
    """Adds up squared norms [B, tensors] within each group: [B, G]."""
    if not groups:
        return SquaredNorms(*(each.sum(dim=1, keepdim=True) for each in squares))
    index = torch.tensor(groups, device=squares.values.device)
    shape = (len(squares.values), max(groups) + 1)
    return SquaredNorms(*(each.new_zeros(shape).index_add_(1, index, each) for each in squares))


def add_squares(squares: Sequence[SquaredNorms]) -> SquaredNorms:
    """The sum of squared norms [B] of several tensors, in their order."""
    if len(squares) == 1:
        return squares[0]
    table = torch.stack([each for one in squares for each in one]).unflatten(0, (len(squares), 3))
    return SquaredNorms(*table.sum(dim=0).unbind())


def stack_squares(squares: Sequence[SquaredNorms]) -> SquaredNorms:
    """Squared norms [B] of several tensors as [B, tensors]."""
    if len(squares) == 1:
        return SquaredNorms(*(each.unsqueeze(1) for each in squares[0]))
    return SquaredNorms(*(torch.stack(each, dim=1) for each in zip(*squares, strict=True)))


def find_finite_norms(squares: SquaredNorms, dtype: torch.dtype) -> Tensor:
    """Whether all norms of an example, from squares [B, tensors], are finite numbers of this type: [B]."""
    return torch.isfinite(squares.bounds.sum(dim=1).sqrt().to(dtype))


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

    @property
    def positions(self) -> int:
        return 1

    def norm_table(self, groups: tuple[int, ...] = ()) -> NormTable:
        norms = self.norms(groups)
        return NormTable(norms, norms.double(), norms.double())

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.like.new_zeros(0, max(groups) + 1 if groups else 1)

    def dots(self, direction: Tensor) -> Tensor:
        return self.like.new_zeros(0)

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        return torch.zeros_like(self.like, dtype=torch.float64 if proven else None)


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

    @property
    def positions(self) -> int:
        return max(tape.positions for tape in self.tapes)

    def norm_table(self, groups: tuple[int, ...] = ()) -> NormTable:
        return NormTable(*(torch.cat(each) for each in zip(*(t.norm_table(groups) for t in self.tapes), strict=True)))

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.norm_table(groups).norms

    def dots(self, direction: Tensor) -> Tensor:
        return torch.cat([tape.dots(direction) for tape in self.tapes])

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        pieces = zip(self.tapes, factors.split(self.sizes), strict=True)
        sums = [tape.weighted_sum(piece, groups, proven) for tape, piece in pieces]
        return torch.stack(sums).sum(dim=0)


@dataclass(frozen=True)
class PaddedTape:
    """The first `count` examples of a tape of `size`; the others fill it up and contribute nothing."""

    tape: GradientTape
    count: int
    size: int

    @property
    def losses(self) -> Tensor:
        return self.tape.losses[: self.count]

    @property
    def positions(self) -> int:
        return self.tape.positions

    def matrix(self) -> Tensor:
        return self.tape.matrix()[: self.count]

    def norm_table(self, groups: tuple[int, ...] = ()) -> NormTable:
        return NormTable(*(each[: self.count] for each in self.tape.norm_table(groups)))

    def norms(self, groups: tuple[int, ...] = ()) -> Tensor:
        return self.norm_table(groups).norms

    def dots(self, direction: Tensor) -> Tensor:
        return self.tape.dots(direction)[: self.count]

    def weighted_sum(self, factors: Tensor, groups: tuple[int, ...] = (), proven: bool = False) -> Tensor:
        filled = torch.nn.functional.pad(factors, (0, 0, 0, self.size - self.count))
        return self.tape.weighted_sum(filled, groups, proven)
