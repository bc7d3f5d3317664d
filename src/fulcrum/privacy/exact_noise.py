"""Noise first, then round: a Gaussian release as integers on a public grid, exactly distributed.

What leaves is round((x + s N) / g), with N a true Gaussian and g a power of two that follows from s alone. x + s N is
never a float that somebody sees: its low bits would tell x apart (Mironov 2012). Rounding after the noise is
post-processing, so the release costs what Gaussian(s) costs, in any dimension; rounding x before would cost up to
g sqrt(d) more sensitivity.

float64 gives (x + s N) / g up to a stated error (`rng.normals.bound_error`). Coordinates that lie within that error of
a boundary between two integers, a few in a million, are decided by `decide_in_high_precision`, with further bits.
docs/privacy/gaussian-release.md has the proof.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache

import torch
from torch import Tensor

from fulcrum.rng import CipherRandomness, StreamKey
from fulcrum.rng.chacha import draw_many_words
from fulcrum.rng.normals import NormalDraws, bound_error, count_normal_words, words_to_normals

GRID_BITS = 20
"""The grid is 2^-20 times the noise's standard deviation s, rounded down to a power of two: 2^20 <= s / g < 2^21. The
variance of the rounding is below 2^-43 of the noise's."""


def choose_grid(scale: float) -> float:
    """The grid g of a release with noise of standard deviation `scale` > 0: a public power of two."""
    if not 0 < scale < math.inf:
        raise ValueError(f"a grid needs noise of a finite scale above 0, not {scale!r}")
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)


@dataclass(frozen=True)
class GridRelease:
    """What leaves: integers int64 [m] in units of `grid`. Everything computed from them is post-processing."""

    integers: Tensor
    grid: float

    @property
    def values(self) -> Tensor:
        """The released numbers, float64 [m]."""
        return self.integers.double() * self.grid


def release_on_grid(clipped: Tensor, scale: float, randomness: CipherRandomness, key: StreamKey) -> GridRelease:
    """The release of a sum x [m] with noise of standard deviation `scale`, from the stream `key`.

    Numbers of x that are not finite count as 0: a sum of bounded contributions has none.
    """
    return release_rows_on_grid(clipped[None], [scale], [(randomness, key)])[0]


MAX_ROW_ELEMENTS = 2**24
"""Numbers that are released together at most, to bound the memory of float64."""
PAIRS_AT_ONCE = 2**14
"""Pairs of normal numbers that a CPU makes and adds at once: what they need stays in its cache."""


def release_rows_on_grid(
    clipped: Tensor, scales: Sequence[float], streams: Sequence[tuple[CipherRandomness, StreamKey]]
) -> list[GridRelease]:
    """The releases of several sums [T, m], each with its own scale and stream; one read from the device for all."""
    found: list[GridRelease] = []
    step = max(1, MAX_ROW_ELEMENTS // max(1, clipped.shape[1]))
    for start in range(0, len(clipped), step):
        part = slice(start, start + step)
        found += _release_some_rows(clipped[part], scales[part], streams[part])
    return found


def _release_some_rows(
    clipped: Tensor, scales: Sequence[float], streams: Sequence[tuple[CipherRandomness, StreamKey]]
) -> list[GridRelease]:
    grids = [choose_grid(scale) for scale in scales]
    count, device = clipped.shape[1], clipped.device
    words = draw_many_words([source.locate_stream(key) for source, key in streams], count_normal_words(count), device)
    half = words.shape[1] // 2
    scale, grid = (torch.tensor(values, dtype=torch.float64).to(device)[:, None] for values in (scales, grids))
    integers = torch.empty((len(words), count), dtype=torch.int64, device=device)
    doubtful: list[tuple[int, int]] = []
    step = half if device.type != "cpu" else max(1, PAIRS_AT_ONCE // len(words))
    for start in range(0, half, step):
        cosine, sine = slice(start, min(half, start + step)), slice(half + start, min(2 * half, half + start + step))
        draws = words_to_normals(torch.cat([words[:, cosine], words[:, sine]], dim=1), count)
        x = _read_finite(torch.cat([clipped[:, cosine], clipped[:, sine]], dim=1))  # one less where `count` is odd
        draws = replace(draws, values=draws.values[:, : x.shape[1]])
        found, unsure = round_with_margin(x, scale, grid, draws)
        size = cosine.stop - cosine.start
        integers[:, cosine], integers[:, sine] = found[:, :size], found[:, size:]
        doubtful += [(i, start + j if j < size else half + start + j - size) for i, j in torch.nonzero(unsure).tolist()]
    for i, j in doubtful:
        pair = (int(words[i, j % half]), int(words[i, half + j % half]))
        more = _read_further_words(streams[i][0], streams[i][1], j % half)
        x = _read_finite(clipped[i, j])
        integers[i, j] = decide_in_high_precision(float(x), scales[i], grids[i], pair, j >= half, more)
    return [GridRelease(row, grid) for row, grid in zip(integers, grids, strict=True)]


def _read_finite(clipped: Tensor) -> Tensor:
    """float64, with 0 in place of numbers that are not finite."""
    return torch.nan_to_num(clipped.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)


def round_with_margin(
    x: Tensor, scale: float | Tensor, grid: float | Tensor, draws: NormalDraws
) -> tuple[Tensor, Tensor]:
    """Integers [..., m] = round((x + scale N) / grid), and where float64 cannot be sure of them [..., m]."""
    exact = (draws.values * scale).add_(x).mul_(1.0 / grid)  # roundings of s N and of the sum; g is a power of two
    rounded = torch.round(exact)
    away = (exact - rounded).abs_()
    if x.device.type != "cpu":  # without waiting for the device
        radius, uniform = (
            torch.cat([value, value], dim=-1)[..., : x.shape[-1]] for value in (draws.radius, draws.uniform)
        )
        doubtful = away >= 0.5 - compute_margin(x, exact, scale, grid, radius, uniform)
        return rounded.masked_fill_(doubtful, 0).to(torch.int64), doubtful
    # Few numbers are near a boundary: the margin is computed for those only. NEAR is above every margin, as long as
    # U R >= 2^-16, R < 64, s / g < 2^21 and sizes stay below 2^33: 2^-17 + 2^-14 + 2^-16 at most.
    unusual = (draws.radius * draws.uniform < 2.0**-16).logical_or_(draws.radius >= 64.0)
    doubtful = (away >= 0.5 - NEAR).logical_or_(torch.cat([unusual, unusual], dim=-1)[..., : x.shape[-1]])
    if float(x.abs().amax() if x.numel() else 0.0) >= 2.0**32 * float(torch.as_tensor(grid).min()):
        doubtful.fill_(True)
    where = torch.nonzero(doubtful, as_tuple=True)
    pair = (*where[:-1], where[-1] % draws.radius.shape[-1])
    own_scale, own_grid = (torch.as_tensor(value, dtype=x.dtype).expand_as(x)[where] for value in (scale, grid))
    margin = compute_margin(x[where], exact[where], own_scale, own_grid, draws.radius[pair], draws.uniform[pair])
    doubtful[where] = away[where] >= 0.5 - margin
    return rounded.masked_fill_(doubtful, 0).to(torch.int64), doubtful


def compute_margin(
    x: Tensor, exact: Tensor, scale: float | Tensor, grid: float | Tensor, radius: Tensor, uniform: Tensor
) -> Tensor:
    """How far float64's (x + scale N) / grid may be from the true one; 1 where no bound holds."""
    margin = bound_error(radius, uniform) * (scale / grid) + 2.0**-50 * (1.0 + exact.abs() + x.abs() / grid)
    return torch.nan_to_num(margin, nan=1.0, posinf=1.0)


NEAR = 2.0**-12
"""Distance from a boundary at which the margin is computed: far above the margin of any usual number."""


# --- arbitrary precision ------------------------------------------------------------------------

FurtherWords = Callable[[int], tuple[int, int]]
"""Number of the extension (from 0) -> 64 further bits of U and of V, as unsigned numbers."""


def _read_further_words(randomness: CipherRandomness, key: StreamKey, pair: int) -> FurtherWords:
    """Further bits of one pair of normal numbers: a stream of its own, named after the stream and the pair."""

    def read(extension: int) -> tuple[int, int]:
        purpose, *place = key
        words = randomness.words((f"{purpose}+{pair}", *place), 2 * (extension + 1))[-2:].tolist()
        return words[0] % 2**64, words[1] % 2**64

    return read


def decide_in_high_precision(
    x: float, scale: float, grid: float, words: tuple[int, int], sine: bool, more: FurtherWords
) -> int:
    """round((x + scale N) / grid) for the N whose first bits are `words`; reads further bits until it is certain."""
    first, second = words[0] % 2**64, words[1] % 2**64
    bits, extension = 64, 0
    while True:
        with decimal.localcontext(decimal.Context(prec=60 + bits, Emin=-(10**9), Emax=10**9)):
            value, error = _enclose_normal(first, second, bits, sine)
            unit = Decimal(scale) / Decimal(grid)
            middle = Decimal(x) / Decimal(grid) + unit * value
            margin = unit * error + abs(middle) * Decimal(10) ** -(40 + bits // 4)
            low, high = _round_half_up(middle - margin), _round_half_up(middle + margin)
            if low == high:
                return low
        after = more(extension)
        first, second = (first << 64) | after[0], (second << 64) | after[1]
        bits, extension = bits + 64, extension + 1


def _round_half_up(value: Decimal) -> int:
    """The nearest integer. An exact half has probability 0, so its direction does not matter."""
    return int((value + Decimal("0.5")).to_integral_value(rounding=decimal.ROUND_FLOOR))


def _enclose_normal(first: int, second: int, bits: int, sine: bool) -> tuple[Decimal, Decimal]:
    """(N, bound of its error) for U in [first, first + 1] / 2^bits, and V likewise (as a signed fraction)."""
    size = Decimal(2) ** bits
    low = Decimal(max(first, 1)) / size  # U = 0 has probability 0; a first word of 0 asks for further bits
    U = (Decimal(first) + Decimal("0.5")) / size
    radius = (-2 * U.ln()).sqrt()
    smallest = max((-2 * (min(U + 1 / size, 1 - 1 / size)).ln()).sqrt(), Decimal(2) ** -(bits // 2 + 2))
    signed = second - (1 << bits) if second >> (bits - 1) else second
    angle = _compute_pi(bits) * (2 * Decimal(signed) + 1) / size
    wave = _sine(angle, bits) if sine else _sine(angle + _compute_pi(bits) / 2, bits)
    spread = 2 / (size * low * smallest) if first else Decimal(10) ** 6
    return radius * wave, spread + 8 * radius / size


@lru_cache(maxsize=64)
def _compute_pi(bits: int) -> Decimal:
    """Pi to far more than `bits` bits, by Machin's formula."""

    def arctan_inverse(n: int) -> Decimal:
        total = term = Decimal(1) / n
        k, square = 1, n * n
        while abs(term) > Decimal(10) ** -(80 + bits // 2):
            term /= -square
            k += 2
            total += term / k
        return total

    with decimal.localcontext(decimal.Context(prec=100 + bits)):
        return 4 * (4 * arctan_inverse(5) - arctan_inverse(239))


def _sine(angle: Decimal, bits: int) -> Decimal:
    """sin(angle) by its series; |angle| is at most 3 pi / 2, so the terms stay below 120."""
    total = term = angle
    k, square = 1, angle * angle
    while abs(term) > Decimal(10) ** -(60 + bits // 2):
        term *= -square / ((k + 1) * (k + 2))
        k += 2
        total += term
    return total
