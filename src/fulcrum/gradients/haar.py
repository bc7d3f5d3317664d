"""The orthonormal Haar transform of gradients, and the norms of its levels without storing the coefficients."""

from __future__ import annotations

import torch

from fulcrum.gradients.rounding import squared_norms


def haar_transform(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Haar transform along the last axis, whose length is a power of two.

    Coefficients are ordered from coarse to fine: the mean's, then details of 1, 1, 2, 4, ... coefficients.
    """
    details = []
    while x.shape[-1] > 1:
        even, odd = x[..., 0::2], x[..., 1::2]
        details.append((even - odd) * 0.5**0.5)
        x = (even + odd) * 0.5**0.5
    return torch.cat([x, *reversed(details)], dim=-1)


def inverse_haar_transform(w: torch.Tensor) -> torch.Tensor:
    """The inverse of `haar_transform`, which is its transpose."""
    x, rest = w[..., :1], w[..., 1:]
    while rest.shape[-1]:
        detail, rest = rest[..., : x.shape[-1]], rest[..., x.shape[-1] :]
        x = torch.stack([x + detail, x - detail], dim=-1).flatten(-2) * 0.5**0.5
    return x


def haar_level_norms(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Norm of each level of `haar_transform`, per row [B, d] padded to 2^(levels - 1), coarse to fine: [B, levels].

    The coefficients are not stored.
    """
    squares = []
    for _ in range(levels - 1):
        pairs = _pad_to_even_length(x).unflatten(1, (-1, 2))
        squares.append(0.5 * squared_norms(pairs[..., 0] - pairs[..., 1]).values)
        x = pairs.sum(dim=2) * 0.5**0.5
    return torch.stack([x[:, 0].double().square(), *reversed(squares)], dim=1).sqrt().to(x.dtype)


def bound_level_norms(norms: torch.Tensor, whole: torch.Tensor, levels: int, dtype: torch.dtype) -> torch.Tensor:
    """Upper bounds of the true norms of levels [B, G], float64, where rows of norm `whole` [B, 1] were transformed.

    Each level rounds three times: the sum of a pair, the product with 2^-1/2, and that number itself. The transform is
    orthonormal, so these errors add up to at most (3 levels + 6) u |row| at any level; the squares of a level add up in
    blocks of at most 128 in the type of the rows.
    """
    u = torch.finfo(dtype).eps / 2
    return norms.double() * (1 + 128 * u) + (3 * levels + 6) * u * whole.double()


def haar_level_sums(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Level l of `haar_transform` of row l: rows [T, levels, d], padded to m = 2^(levels - 1) -> [T, m], coarse first.

    Row l is transformed down to level l only, and the padding is not computed.
    """
    found = x.new_zeros((len(x), 1 << (levels - 1)))
    for level in range(levels - 1, 0, -1):
        x = _pad_to_even_length(x)
        even, odd = x[..., 0::2], x[..., 1::2]
        detail = (even[:, level] - odd[:, level]) * 0.5**0.5
        first = 1 << (level - 1)
        found[:, first : first + detail.shape[1]] = detail
        x = (even[:, :level] + odd[:, :level]) * 0.5**0.5
    found[:, 0] = x[:, 0, 0]
    return found


def _pad_to_even_length(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 1)) if x.shape[-1] % 2 else x  # padding by zero would copy
