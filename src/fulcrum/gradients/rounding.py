"""Squared norms with a stated bound on their rounding error, and how much a long float64 sum may round.

Symbols: u, the unit roundoff of a type (2^-24 for float32, 2^-53 for float64); gamma(n) = n u / (1 - n u), the largest
relative error of n roundings one after the other (Higham 2002, section 3.1).

A squared norm of n numbers adds up chunks of 16 to CHUNK squares in the type of the numbers and combines the chunks in
float64. Its relative error is at most gamma(CHUNK + 4) of that type plus gamma(n / 16 + 8) of float64: 4e-6 for
float32, whatever n is (a plain float32 sum of 4e6 squares was wrong by 10%). Squares too small for the type are lost;
UNDERFLOW times n bounds what they add up to.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fulcrum.gradients.compiled import address, find_kernels

CHUNK = 64
"""Number of squares that are added up in the type of the numbers; beyond that, in float64."""

UNDERFLOW = {torch.float32: 2.0**-125, torch.float64: 2.0**-1021}
"""Upper limit of what one square and its addition lose where they are too small for the type, or are set to 0."""


def bound_roundings(count: int, dtype: torch.dtype = torch.float64) -> float:
    """gamma(count): the largest relative error of `count` roundings in `dtype`; infinite where no bound holds."""
    error = count * (torch.finfo(dtype).eps / 2)
    return error / (1 - error) if error < 0.5 else float("inf")


class SquaredNorms(NamedTuple):
    """Squared norms of B gradients, float64 [B] each.

    values: as computed. bounds: at least the true ones. lengths: squares of A, what each norm would be at most if none
    of the products that make up the gradient cancelled (A = sum over positions of |a_t| |g_t|); A is what the rounding
    of sums is measured by, and A = the norm's bound where a gradient is held as numbers of its own.
    """

    values: Tensor
    bounds: Tensor
    lengths: Tensor


def squared_norms(values: Tensor, dims: int = 1) -> SquaredNorms:
    """Squared norms over all but the first `dims` dimensions of [B, ...]; not finite where an entry's square is not.

    bf16 is widened to float32, in which its squares are exact.
    """
    rows = values.flatten(dims) if values.dim() > dims + 1 else values
    if values.dim() == dims:
        rows = values.unsqueeze(-1)
    kind = torch.float64 if rows.dtype == torch.float64 else torch.float32
    count = rows.shape[-1]
    chunk = CHUNK if count % CHUNK == 0 else next((c for c in range(CHUNK, 15, -1) if count % c == 0), count)
    if count <= CHUNK:
        found = torch.linalg.vector_norm(rows, dim=-1, dtype=kind).double().square()
    elif chunk <= CHUNK:
        chunks = rows.unflatten(-1, (-1, chunk))
        found = torch.linalg.vector_norm(chunks, dim=-1, dtype=kind).double().square().sum(dim=-1)
    else:
        whole = count // CHUNK * CHUNK
        chunks = rows[..., :whole].unflatten(-1, (-1, CHUNK))
        tail: Tensor = torch.linalg.vector_norm(rows[..., whole:], dim=-1, dtype=kind)
        found = torch.linalg.vector_norm(chunks, dim=-1, dtype=kind).double().square().sum(dim=-1)
        found = found + tail.double().square()
    bounds = found * (1 + relative_square_error(count, kind)) + count * UNDERFLOW[kind]
    return SquaredNorms(found, bounds, bounds)


def relative_square_error(count: int, dtype: torch.dtype) -> float:
    """The relative error of a squared norm of `count` numbers of this type, as `squared_norms` computes it."""
    inner = bound_roundings(CHUNK + 4, dtype)  # squares, additions, a root, and its square twice over
    return (1 + inner) / (1 - inner) * (1 + 2 * bound_roundings(count // 16 + 8)) - 1  # chunks have 16 to 64 squares


def multiply_squared_norms(one: SquaredNorms, other: SquaredNorms) -> SquaredNorms:
    """Of outer products g a^T: |g a^T| = |g| |a|."""
    bounds = one.bounds * other.bounds * (1 + 2.0**-50)
    return SquaredNorms(one.values * other.values, bounds, bounds)


def add_error(squares: Tensor, lengths: Tensor, terms: int) -> SquaredNorms:
    """Squared norms [B] of gradients that were added up in float64 from products of `terms` each, and then squared.

    lengths [B]: A, not squared. The computed gradient is off by at most gamma(terms) A, so its norm is too.
    """
    error = bound_roundings(terms + 8)
    reach = lengths * (1 + error)
    bounds = (squares.sqrt() * (1 + error) + error * reach).square() * (1 + 2.0**-50)
    return SquaredNorms(squares, bounds, reach.square())


def ghost_squared_norms(inputs: Tensor, grads: Tensor) -> SquaredNorms:
    """Squared norms of sum_t g_t a_t^T from a [B, K, T] and g [B, T, O], as sum_st <a_s, a_t><g_s, g_t>, in float64.

    Where positions cancel, that sum loses digits: it is off by at most gamma(K + O + T^2 + 8) A^2.
    """
    if inputs.shape[2] == 1:
        return multiply_squared_norms(squared_norms(inputs), squared_norms(grads))
    a, g = inputs.double(), grads.double()
    gram, other = torch.bmm(a.transpose(1, 2), a), torch.bmm(g, g.transpose(1, 2))
    return from_grams(gram, other, a.shape[1] + g.shape[2])


def from_grams(gram: Tensor, other: Tensor, terms: int) -> SquaredNorms:
    """Squared norms from the Gram matrices over positions [B, T, T], float64; each entry a sum of `terms` at most."""
    positions = gram.shape[1]
    lengths = (gram.diagonal(dim1=1, dim2=2).sqrt() * other.diagonal(dim1=1, dim2=2).sqrt()).sum(dim=1)
    error = bound_roundings(terms + positions**2 + 8)
    lengths_squared = lengths.square() * (1 + 4 * error)
    values = (gram * other).sum(dim=(1, 2)).clamp_min(0)
    bounds = values * (1 + 2.0**-50) + error * lengths_squared
    return SquaredNorms(values, torch.minimum(bounds, lengths_squared), lengths_squared)


FAST_GRAM_ERROR = 2.0**-17
"""Error of a squared norm from float32 Gram matrices, in units of A^2: measured (64 roundings), not proven."""


def add_fast_error(squares: Tensor, lengths: Tensor) -> SquaredNorms:
    """Squared norms [B] from products in float32 or less, with A [B] (not squared) and a measured bound."""
    reach = lengths.square()
    squares = squares.double()
    return SquaredNorms(squares, squares + FAST_GRAM_ERROR * reach, reach)


def from_fast_grams(gram: Tensor, other: Tensor) -> SquaredNorms:
    """Squared norms from the Gram matrices over positions [B, T, T] in float32."""
    products = gram * other
    lengths = products.diagonal(dim1=1, dim2=2).sqrt().sum(dim=1)
    return add_fast_error(products.sum(dim=(1, 2)).clamp_min(0), lengths.double())


def fast_squared_norms(rows: Tensor, dims: int = 1) -> SquaredNorms:
    """Squared norms over the last dimension, with a measured bound: a GPU adds up a row in a tree, in float32.

    dims: number of dimensions before it.
    """
    if not rows.is_cuda or rows.dtype == torch.float64:
        return squared_norms(rows, dims)
    found = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).double().square()
    bounds = found * (1 + FAST_GRAM_ERROR)
    return SquaredNorms(found, bounds, bounds)


FAST_CHUNK = 256
"""Number of squares that a CPU adds up in float32, in four or more lanes, where bounds are measured."""


@lru_cache(maxsize=256)
def _choose_chunk(count: int) -> int:
    """The largest divisor of count up to FAST_CHUNK that is worth a reduction of its own; 0 where there is none."""
    return next((size for size in range(min(FAST_CHUNK, count), 63, -1) if count % size == 0), 0)


def add_fast_squares(rows: Tensor, dims: int = 1) -> Tensor:
    """Squared norms over the last dimension, float64, on a CPU: off by FAST_GRAM_ERROR of themselves at most.

    Chunks are added up in float32 and combined in float64. dims: number of dimensions before the last.
    """
    if rows.dtype == torch.float64:
        return squared_norms(rows, dims).values
    count = rows.shape[-1]
    compiled = _add_compiled_squares(rows) if count > FAST_CHUNK else None
    if compiled is not None:
        return compiled
    if count <= FAST_CHUNK:
        found: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).double()
        return found.square_()
    chunk = _choose_chunk(count)
    whole = count if chunk else count // FAST_CHUNK * FAST_CHUNK
    chunks = (rows if chunk else rows[..., :whole]).unflatten(-1, (-1, chunk or FAST_CHUNK))
    parts = torch.linalg.vector_norm(chunks, dim=-1, dtype=torch.float32)
    squares: Tensor = torch.linalg.vector_norm(parts, dim=-1, dtype=torch.float64).square_()
    return squares if chunk else squares.add_(add_fast_squares(rows[..., whole:], dims))


def _add_compiled_squares(rows: Tensor) -> Tensor | None:
    """The same by compiled code: lanes of at most 32 squares each. None where there is none for these rows."""
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or not rows.is_contiguous() or not rows.numel():
        return None
    library = find_kernels()
    if library is None:
        return None
    squares = torch.empty(rows.shape[:-1], dtype=torch.float64)
    library.fulcrum_squares(
        address(rows), address(squares), ctypes.c_long(squares.numel()), ctypes.c_long(rows.shape[-1])
    )
    return squares


def bound_fast_squares(squares: Tensor, count: int) -> SquaredNorms:
    """Squared norms [B] from `add_fast_squares` of `count` numbers in all, with their bounds."""
    bounds = squares * (1 + FAST_GRAM_ERROR)
    bounds += count * UNDERFLOW[torch.float32]
    return SquaredNorms(squares, bounds, bounds)


class NormTable(NamedTuple):
    """Norms of B gradients in G groups: [B, G] each.

    norms: as a rule sees them, in the gradients' type. bounds: at least the true norms, float64. lengths: A, float64.
    """

    norms: Tensor
    bounds: Tensor
    lengths: Tensor


def to_norm_table(squares: SquaredNorms, dtype: torch.dtype) -> NormTable:
    """Norms from squared norms [B, G]."""
    up = 1 + 2.0**-50  # for the roots' own rounding
    bounds = squares.bounds.sqrt().mul_(up)
    lengths = bounds if squares.lengths is squares.bounds else squares.lengths.sqrt().mul_(up)
    return NormTable(squares.values.sqrt().to(dtype), bounds, lengths)
