"""Uniform and normal numbers from random 64-bit words, in float64.

A normal number is defined by infinitely many random bits: N = R cos(theta), R = sqrt(-2 ln U), theta = pi V, with U
uniform in (0, 1) and V in (-1, 1). The first 64 bits of U and of V are two words. float64 gives N up to a stated
error; `privacy.exact_noise` decides in arbitrary precision, with further bits, where that error could matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

Numbers = TypeVar("Numbers", Tensor, npt.NDArray[Any])
"""float64 numbers of either library."""


def words_to_uniforms(words: Tensor) -> Tensor:
    """Words [...] -> numbers in [0, 1), float64, all multiples of 2^-53 equally likely."""
    return ((words >> 11) & (2**53 - 1)).double() * 2.0**-53


def count_normal_words(count: int) -> int:
    """Number of words for `count` normal numbers: two words make two numbers."""
    return 2 * -(-count // 2)


@dataclass(frozen=True)
class NormalDraws:
    """Normal numbers in float64 and what bounds their error. words: [..., 2 h] made values [..., count], h = count / 2.

    Value j < h is R_j cos(theta_j), value h + j is R_j sin(theta_j). radius [..., h]: R. uniform [..., h]: the float64
    of U, or 1/2 where U is larger.
    """

    values: Tensor
    words: Tensor
    radius: Tensor
    uniform: Tensor


def words_to_normals(words: Tensor, count: int) -> NormalDraws:
    """Words [..., 2 h] (`count_normal_words`) -> `count` standard normal numbers, float64."""
    first, second = words.chunk(2, dim=-1)
    # With the word w as a signed number, t = (w + 1/2) / 2^64 lies in (-1/2, 1/2), and U = t or 1 + t, whichever is in
    # (0, 1): the middle of what the further bits can make of it. ln U = ln(1 + z) keeps all digits near U = 1; near
    # U = 0 the rounding of z = U - 1 is part of `bound_error`.
    t = first.double().add_(0.5).mul_(2.0**-64)
    tail = t >= 0
    radius = torch.log1p(torch.where(tail, t - 1.0, t).clamp_min_(2.0**-53 - 1.0)).mul_(-2.0).sqrt_()
    angle = second.double().add_(0.5).mul_(math.pi * 2.0**-63)
    values = torch.cat([torch.cos(angle).mul_(radius), torch.sin(angle).mul_(radius)], dim=-1)[..., :count]
    return NormalDraws(values, words, radius, torch.where(tail, t, 0.5))


def bound_error(radius: Numbers, uniform: Numbers) -> Numbers:
    """An upper bound of |value - N|, whatever the further bits are, from `NormalDraws.radius` and `uniform`.

    log1p, sqrt, cos and sin are taken to be within 16 units in the last place (the libraries state 1 to 4), which the
    first term covers with room to spare; the second is the rounding of U and its unknown bits: dR/dU = -1 / (U R). The
    radius is at least 2^-33, that of the largest U.
    """
    found: Numbers = 2.0**-44 * radius + 2.0**-51 / (uniform.clip(min=2.0**-66) * radius.clip(min=2.0**-33))
    return found
