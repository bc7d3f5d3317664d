"""Per-example gradients of one parameter tensor, for one use of it by a batch.

Each class has the same methods (`ParamGrad`) and avoids materialising the gradients of all examples where it can:

    MaterialisedGrad  the gradients themselves, where they are small or needed anyway
    BlockedGrad       the same in blocks of entries, as some products make them
    EmbeddingGrad     indices and output gradients of an embedding
    LinearGrad        inputs and output gradients of a linear layer (`outer_products.py`)
    ConvGrad          inputs and output gradients of a convolution (`outer_products.py`)
    OwnGrad           inputs and output gradients of a user's layer, with its norm and its sum
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fulcrum.errors import ModelError
from fulcrum.gradients.rounding import (
    FAST_GRAM_ERROR,
    SquaredNorms,
    add_error,
    add_fast_squares,
    fast_squared_norms,
    from_fast_grams,
    from_grams,
    squared_norms,
)

SCRATCH_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""Maximum bytes of unfolded patches (or gradients) at a time: on a CPU they should fit the cache."""

DOUBLE_SCRATCH = {"cpu": 2**19, "cuda": 256 * 2**20}
"""Maximum bytes of numbers that are widened to float64 at a time."""


MAX_GRAM_POSITIONS = 1024
"""Positions up to which the norm of an embedding's gradient comes from products of all pairs."""


MAX_DENSE_ENTRIES = 512
"""Rows of an embedding's table up to which its sums on a GPU are a product with indicators."""


class ParamGrad(Protocol):
    """Per-example gradients [B, n] of one parameter tensor with n entries."""

    @property
    def positions(self) -> int:
        """Number of products that add up to one entry of an example's gradient; 1 where the entry itself is held."""
        ...

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        """Squared norms with their bounds: proven, or (`fast`) measured."""
        ...

    def dots(self, direction: Tensor) -> Tensor:
        """Inner products with `direction` [n], [B]."""
        ...

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        """Sum of the gradients scaled by `factors` [B], [n]. proven: products and additions in float64."""
        ...

    def rows(self) -> Tensor:
        """The materialised gradients, [B, n]."""
        ...

    def only(self, good: Tensor) -> ParamGrad:
        """The same gradients, with zero for every example where `good` [B] is False."""
        ...

    def slice(self, start: int, stop: int) -> ParamGrad:
        """The gradients of a range of examples."""
        ...


def zero_masked_rows(values: Tensor, good: Tensor) -> Tensor:
    """Sets rows to zero where `good` is False; multiplying by 0 would keep a NaN."""
    return torch.where(good.view(-1, *[1] * (values.dim() - 1)), values, torch.zeros((), dtype=values.dtype))


def scale_rows(values: Tensor, factors: Tensor) -> Tensor:
    """Row b of `values` times factors[b]."""
    return values * factors.view(-1, *[1] * (values.dim() - 1))


def sum_rows_in_float64(factors: Tensor, rows: Tensor) -> Tensor:
    """factors [..., B] times rows [B, n] in float64, a few rows at a time: [..., n].

    A product of two float32 numbers is exact in float64, so only the additions round.
    """
    factors = factors.double()
    total = factors.new_zeros((*factors.shape[:-1], rows.shape[1]))
    for start, stop in scratch_ranges(len(rows), 8 * rows.shape[1], rows.device, DOUBLE_SCRATCH):
        total += factors[..., start:stop] @ rows[start:stop].double()
    return total


def scratch_ranges(
    count: int, bytes_each: float, device: torch.device, limits: dict[str, int] = SCRATCH_BYTES
) -> Iterator[tuple[int, int]]:
    """Splits `count` examples into ranges that fit the scratch memory."""
    step = max(1, int(limits.get(device.type, limits["cuda"]) // bytes_each)) if bytes_each else max(1, count)
    return ((start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True)
class EntryOrder:
    """How stored entries map to a parameter's entries: view as `sizes`, then permute dimensions by `permutation`."""

    sizes: tuple[int, ...]
    permutation: tuple[int, ...]

    def to_parameter(self, values: Tensor) -> Tensor:
        """[..., n] in stored order -> [..., n] in the parameter's order."""
        lead = values.dim() - 1
        moved = (*range(lead), *(lead + i for i in self.permutation))
        return values.reshape(*values.shape[:lead], *self.sizes).permute(moved).reshape(values.shape)

    def write(self, values: Tensor, block: Tensor) -> None:
        """Write values [n] in stored order into block [n] in the parameter's order."""
        sizes = [self.sizes[i] for i in self.permutation]
        block.view(sizes).copy_(values.view(self.sizes).permute(self.permutation))

    def to_stored(self, direction: Tensor) -> Tensor:
        """[n] in the parameter's order -> [n] in stored order."""
        back = tuple(self.permutation.index(i) for i in range(len(self.sizes)))
        return direction.reshape([self.sizes[i] for i in self.permutation]).permute(back).reshape(-1)


@dataclass(frozen=True)
class MaterialisedGrad:
    """Materialised gradients [B, n]; the entry order may differ from the parameter's."""

    grads: Tensor
    order: EntryOrder | None = None
    squares: Tensor | None = None
    """Squared norms [B], float64, where they came along: as exact as those of `add_fast_squares`."""

    @property
    def positions(self) -> int:
        return 1

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        return fast_squared_norms(self.grads) if fast else squared_norms(self.grads)

    def fast_squares(self) -> Tensor | None:
        """Squared norms [B], float64, whose error is a small part of themselves; see `add_fast_squares`."""
        return add_fast_squares(self.grads) if self.squares is None else self.squares

    def write_sum(self, factors: Tensor, block: Tensor) -> None:
        """Write `weighted_sum` into block [n]."""
        if self.order is None:
            torch.mv(self.grads.t(), factors, out=block)
        else:
            self.order.write(factors @ self.grads, block)

    def dots(self, direction: Tensor) -> Tensor:
        return self.grads @ (self.order.to_stored(direction) if self.order else direction)

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        total = sum_rows_in_float64(factors, self.grads) if proven else factors @ self.grads
        return self.order.to_parameter(total) if self.order else total

    def rows(self) -> Tensor:
        return self.order.to_parameter(self.grads) if self.order else self.grads

    def only(self, good: Tensor) -> MaterialisedGrad:
        return MaterialisedGrad(zero_masked_rows(self.grads, good), self.order)

    def slice(self, start: int, stop: int) -> MaterialisedGrad:
        squares = None if self.squares is None else self.squares[start:stop]
        return MaterialisedGrad(self.grads[start:stop], self.order, squares)


@dataclass(frozen=True)
class BlockedGrad:
    """Materialised gradients in S blocks of m entries: [S, B, m], with n = S m entries in this order."""

    blocks: Tensor
    order: EntryOrder | None = None

    @property
    def positions(self) -> int:
        return 1

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        found = fast_squared_norms(self.blocks, 2) if fast else squared_norms(self.blocks, 2)
        values, bounds, lengths = (each.sum(dim=0) for each in found)
        up = 1 + len(self.blocks) * 2.0**-52  # for the additions
        return SquaredNorms(values, bounds * up, lengths * up)

    def fast_squares(self) -> Tensor | None:
        """Squared norms [B], float64, whose error is a small part of themselves."""
        return add_fast_squares(self.blocks, 2).sum(dim=0)

    def write_sum(self, factors: Tensor, block: Tensor) -> None:
        """Write `weighted_sum` into block [n]."""
        total = torch.matmul(factors, self.blocks).reshape(-1)
        if self.order is None:
            block.copy_(total)
        else:
            self.order.write(total, block)

    def dots(self, direction: Tensor) -> Tensor:
        stored = self.order.to_stored(direction) if self.order else direction
        return torch.bmm(self.blocks, stored.view(len(self.blocks), -1, 1)).sum(dim=0)[:, 0]

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        if proven:
            total = torch.cat([sum_rows_in_float64(factors, block) for block in self.blocks])
        else:
            total = torch.matmul(factors, self.blocks).reshape(-1)
        return self.order.to_parameter(total) if self.order else total

    def rows(self) -> Tensor:
        rows = self.blocks.transpose(0, 1).flatten(1)
        return self.order.to_parameter(rows) if self.order else rows

    def only(self, good: Tensor) -> BlockedGrad:
        zeros = torch.zeros((), dtype=self.blocks.dtype)
        return BlockedGrad(torch.where(good.view(1, -1, 1), self.blocks, zeros), self.order)

    def slice(self, start: int, stop: int) -> BlockedGrad:
        return BlockedGrad(self.blocks[:, start:stop], self.order)


# --- embeddings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbeddingGrad:
    """An embedding's weight [V, D]: indices [B, T], output gradients g [B, T, D]."""

    index: Tensor
    g: Tensor
    entries: int
    """Number of embedding rows V."""

    def _flat_indices(self, example_offset: int) -> Tensor:
        """Indices [B * T]; b * example_offset is added to those of example b."""
        offset = torch.arange(len(self.index), device=self.index.device) * example_offset
        return (self.index + offset.view(-1, 1)).reshape(-1)

    @property
    def positions(self) -> int:
        return self.index.shape[1]

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        # Gradients of an index that occurs twice in an example are summed before squaring.
        if self.positions == 1:
            return squared_norms(self.g.flatten(1))
        fast = fast and self.g.dtype != torch.float64
        if self.positions > MAX_GRAM_POSITIONS:
            return self._sorted_squared_norms()
        pieces = []
        each = (4 if fast else 8) * self.positions * (3 * self.positions + 2 * self.g.shape[2])
        for start, stop in scratch_ranges(len(self.g), each, self.g.device):
            index, g = self.index[start:stop], self.g[start:stop]
            g = g.float() if fast else g.double()
            same = (index.unsqueeze(1) == index.unsqueeze(2)).to(g.dtype)
            gram = torch.bmm(g, g.transpose(1, 2))
            found = from_fast_grams(same, gram) if fast else from_grams(same, gram, g.shape[2] + 1)
            pieces.append(torch.stack(found))
        return SquaredNorms(*torch.cat(pieces, dim=1))

    def _sorted_squared_norms(self) -> SquaredNorms:
        """Norms for long texts: gradients of the same index stand side by side after sorting, and are added up."""
        g = self.g.double()
        found, order = self.index.sort(dim=1, stable=True)
        first = torch.ones_like(found, dtype=torch.bool)
        first[:, 1:] = found[:, 1:] != found[:, :-1]
        place = first.cumsum(dim=1) - 1 + torch.arange(len(g), device=g.device).view(-1, 1) * self.positions
        ordered = g.gather(1, order.unsqueeze(2).expand_as(g))
        sums = g.new_zeros(g.shape).view(-1, g.shape[2]).index_add_(0, place.reshape(-1), ordered.flatten(0, 1))
        squares = sums.view(len(g), -1).square().sum(dim=1)
        lengths = torch.linalg.vector_norm(g, dim=2).sum(dim=1)
        return add_error(squares, lengths, self.positions * (g.shape[2] + 1))

    def dots(self, direction: Tensor) -> Tensor:
        return (F.embedding(self.index, direction.view(self.entries, -1)) * self.g).flatten(1).sum(dim=1)

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        g, factors = (self.g.double(), factors.double()) if proven else (self.g, factors)
        if g.is_cuda and not proven and self.entries <= MAX_DENSE_ENTRIES:
            # Many examples add to each row of a small table: a product is faster than additions in turn.
            places = torch.arange(self.entries, device=g.device)
            chosen = (self.index.unsqueeze(2) == places) * factors.view(-1, 1, 1)
            return (chosen.flatten(0, 1).t() @ g.flatten(0, 1).to(factors.dtype)).reshape(-1)
        total = factors.new_zeros(self.entries, g.shape[2])
        return total.index_add_(0, self.index.reshape(-1), scale_rows(g, factors).flatten(0, 1)).reshape(-1)

    def rows(self) -> Tensor:
        table = self.g.new_zeros(len(self.g) * self.entries, self.g.shape[2])
        return table.index_add_(0, self._flat_indices(self.entries), self.g.flatten(0, 1)).reshape(len(self.g), -1)

    def only(self, good: Tensor) -> EmbeddingGrad:
        return dataclasses.replace(self, g=zero_masked_rows(self.g, good))

    def slice(self, start: int, stop: int) -> EmbeddingGrad:
        return dataclasses.replace(self, index=self.index[start:stop], g=self.g[start:stop])


# --- a user's own layer ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnGrad:
    """A parameter of a user's layer: its input a [B, ...], its output's gradient g [B, ...], and two functions.

    norm(a, g) -> squared norms [B]. total(a, g, factors [B]) -> the sum of the gradients times factors, [n] or in the
    parameter's shape. Where bounds must be proven, gradients are written out by `total` of one example at a time.
    """

    a: Tensor
    g: Tensor
    norm: Callable[[Tensor, Tensor], Tensor]
    total: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def positions(self) -> int:
        return 1

    def squared_norms(self, fast: bool = False) -> SquaredNorms:
        if not fast:
            return squared_norms(self.rows())
        found = self.norm(self.a, self.g).double()
        if found.shape != self.g.shape[:1]:
            raise ModelError(
                f"norm of an OwnGrad must give one squared norm per example, [{len(self.g)}], but gave the shape "
                f"{list(found.shape)}."
            )
        bounds = found * (1 + FAST_GRAM_ERROR)
        return SquaredNorms(found, bounds, bounds)

    def dots(self, direction: Tensor) -> Tensor:
        return self.rows() @ direction

    def weighted_sum(self, factors: Tensor, proven: bool = False) -> Tensor:
        return sum_rows_in_float64(factors, self.rows()) if proven else self.total(self.a, self.g, factors).reshape(-1)

    def rows(self) -> Tensor:
        one = self.g.new_ones(1)
        each = zip(self.a.split(1), self.g.split(1), strict=True)
        return torch.stack([self.total(a, g, one).reshape(-1) for a, g in each])

    def only(self, good: Tensor) -> OwnGrad:
        return dataclasses.replace(self, a=zero_masked_rows(self.a, good), g=zero_masked_rows(self.g, good))

    def slice(self, start: int, stop: int) -> OwnGrad:
        return dataclasses.replace(self, a=self.a[start:stop], g=self.g[start:stop])
