"""A part is one use of one parameter tensor by a batch: what its per-example gradients are made of.

Each kind of part answers the same five questions from what it holds, without writing out the
gradients of all examples where that can be avoided:

    Rows    the gradients themselves, where they are small or were needed anyway
    Lookup  indices and output gradients of an embedding
    Dense   activations and output gradients of a linear layer (`outer.py`)
    Conv    the same of a convolution (`outer.py`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

SCRATCH = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""Bytes of unfolded patches (or gradients) alive at a time: on a CPU they should stay in the cache."""


class Part(Protocol):
    """Per-example gradients [B, n] of one parameter tensor with n entries."""

    def squares(self) -> Tensor:
        """Squared norms, [B]."""
        ...

    def dots(self, direction: Tensor) -> Tensor:
        """Inner products with `direction` [n], [B]."""
        ...

    def weighted(self, factors: Tensor) -> Tensor:
        """Sum of the gradients scaled by `factors` [B], [n]."""
        ...

    def rows(self) -> Tensor:
        """The gradients written out, [B, n]."""
        ...

    def only(self, good: Tensor) -> Part:
        """The same with zero for every example where `good` [B] is False."""
        ...

    def slice(self, start: int, stop: int) -> Part:
        """The same for a range of the examples."""
        ...


def zero_out(values: Tensor, good: Tensor) -> Tensor:
    """Zero in the rows where `good` is False; multiplying would keep a NaN."""
    return torch.where(good.view(-1, *[1] * (values.dim() - 1)), values, torch.zeros((), dtype=values.dtype))


def scale(values: Tensor, factors: Tensor) -> Tensor:
    """Row b of `values` times factors[b]."""
    return values * factors.view(-1, *[1] * (values.dim() - 1))


def row_squares(values: Tensor) -> Tensor:
    """Squared norm [B] of each row of [B, ...]; in one pass, where squaring first would write a copy."""
    norms: Tensor = torch.linalg.vector_norm(values if values.dim() == 2 else values.flatten(1), dim=1)
    return norms.square()


def ranges(count: int, bytes_each: float, device: torch.device) -> Iterator[tuple[int, int]]:
    """Splits `count` examples into ranges that fit the scratch memory."""
    step = max(1, int(SCRATCH.get(device.type, SCRATCH["cuda"]) // bytes_each)) if bytes_each else max(1, count)
    return ((start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True)
class Order:
    """How stored entries become a parameter's: seen as `sizes`, dimensions moved by `permutation`."""

    sizes: tuple[int, ...]
    permutation: tuple[int, ...]

    def to_parameter(self, values: Tensor) -> Tensor:
        """[..., n] as stored -> [..., n] as the parameter has them."""
        lead = values.dim() - 1
        moved = (*range(lead), *(lead + i for i in self.permutation))
        return values.reshape(*values.shape[:lead], *self.sizes).permute(moved).reshape(values.shape)

    def to_stored(self, direction: Tensor) -> Tensor:
        """[n] as the parameter has them -> [n] as stored."""
        back = tuple(self.permutation.index(i) for i in range(len(self.sizes)))
        return direction.reshape([self.sizes[i] for i in self.permutation]).permute(back).reshape(-1)


@dataclass(frozen=True)
class Rows:
    """Gradients that are written out: [B, n], perhaps in another order of entries than the parameter's."""

    grads: Tensor
    order: Order | None = None

    def squares(self) -> Tensor:
        return row_squares(self.grads)

    def dots(self, direction: Tensor) -> Tensor:
        return self.grads @ (self.order.to_stored(direction) if self.order else direction)

    def weighted(self, factors: Tensor) -> Tensor:
        total = factors @ self.grads
        return self.order.to_parameter(total) if self.order else total

    def rows(self) -> Tensor:
        return self.order.to_parameter(self.grads) if self.order else self.grads

    def only(self, good: Tensor) -> Rows:
        return Rows(zero_out(self.grads, good), self.order)

    def slice(self, start: int, stop: int) -> Rows:
        return Rows(self.grads[start:stop], self.order)


# --- embeddings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lookup:
    """An embedding's weight [V, D]: indices [B, T], output gradients g [B, T, D]."""

    index: Tensor
    g: Tensor
    entries: int
    """V."""

    def _flat(self, example_offset: int) -> Tensor:
        """Indices [B * T], those of example b moved up by b * offset."""
        offset = torch.arange(len(self.index), device=self.index.device) * example_offset
        return (self.index + offset.view(-1, 1)).reshape(-1)

    def squares(self) -> Tensor:
        # An index that occurs twice in an example adds up before it is squared.
        found, place = torch.unique(self._flat(self.entries), return_inverse=True)
        sums = self.g.new_zeros(len(found), self.g.shape[2]).index_add_(0, place, self.g.flatten(0, 1))
        owner = torch.div(found, self.entries, rounding_mode="floor")
        return self.g.new_zeros(len(self.g)).index_add_(0, owner, sums.square().sum(dim=1))

    def dots(self, direction: Tensor) -> Tensor:
        return (F.embedding(self.index, direction.view(self.entries, -1)) * self.g).sum(dim=(1, 2))

    def weighted(self, factors: Tensor) -> Tensor:
        total = self.g.new_zeros(self.entries, self.g.shape[2])
        return total.index_add_(0, self._flat(0), scale(self.g, factors).flatten(0, 1)).reshape(-1)

    def rows(self) -> Tensor:
        table = self.g.new_zeros(len(self.g) * self.entries, self.g.shape[2])
        return table.index_add_(0, self._flat(self.entries), self.g.flatten(0, 1)).reshape(len(self.g), -1)

    def only(self, good: Tensor) -> Lookup:
        return dataclasses.replace(self, g=zero_out(self.g, good))

    def slice(self, start: int, stop: int) -> Lookup:
        return dataclasses.replace(self, index=self.index[start:stop], g=self.g[start:stop])
