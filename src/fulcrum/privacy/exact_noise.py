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
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fulcrum.privacy import host_noise
from fulcrum.rng import CipherRandomness, StreamKey
from fulcrum.rng.chacha import Nonce, draw_many_words, open_stream
from fulcrum.rng.normals import NormalDraws, Numbers, bound_error, count_normal_words, words_to_normals

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
    """What leaves: integers in units of `grid`. Everything computed from them is post-processing.

    units [m]: the integers as int64, or as int32 where all of them fit.
    """

    units: Tensor
    grid: float

    @property
    def integers(self) -> Tensor:
        """int64 [m]."""
        return self.units.long()

    @property
    def values(self) -> Tensor:
        """The released numbers, float64 [m]."""
        return self.units.double() * self.grid

    @property
    def floats(self) -> Tensor:
        """The released numbers, rounded to float32 [m]."""
        if self.units.dtype == torch.int32 and 2.0**-100 < self.grid < 2.0**90:
            return self.units.float().mul_(self.grid)  # one rounding: g is a power of two
        return self.values.float()


def release_on_grid(clipped: Tensor, scale: float, randomness: CipherRandomness, key: StreamKey) -> GridRelease:
    """The release of a sum x [m] with noise of standard deviation `scale`, from the stream `key`.

    Numbers of x that are not finite count as 0: a sum of bounded contributions has none.
    """
    return release_rows_on_grid(clipped[None], [scale], [(randomness, key)])[0]


MAX_ROW_ELEMENTS = 2**24
"""Numbers that are released together at most, to bound the memory of float64."""


def release_rows_on_grid(
    clipped: Tensor,
    scales: Sequence[float],
    streams: Sequence[tuple[CipherRandomness, StreamKey]],
    grids: Sequence[float] | None = None,
) -> list[GridRelease]:
    """The releases of several sums [T, m], each with its own scale and stream; one read from the device for all.

    grids: powers of two with scale / grid < 2^21, where they do not follow from the scales (`choose_grid`).
    """
    grids = [choose_grid(scale) for scale in scales] if grids is None else grids
    if clipped.device.type == "cpu":
        return [_release_on_host(*given) for given in zip(clipped, scales, streams, grids, strict=True)]
    found: list[GridRelease] = []
    step = max(1, MAX_ROW_ELEMENTS // max(1, clipped.shape[1]))
    for start in range(0, len(clipped), step):
        part = slice(start, start + step)
        found += _release_some_rows(clipped[part], scales[part], streams[part], grids[part])
    return found


def _release_on_host(
    clipped: Tensor, scale: float, stream: tuple[CipherRandomness, StreamKey], grid: float
) -> GridRelease:
    """The release of one sum [m] on a CPU."""
    x = clipped.detach()
    largest = _find_largest(x)
    if not math.isfinite(largest):
        x = _read_finite(x)
        largest = _find_largest(x)
    if not len(x) or not grid > 2.0**-1000 or largest >= host_noise.LARGEST_SIZE * grid:  # 1 / g must be finite
        return _release_some_rows(x[None], [scale], [stream], [grid])[0]
    units = torch.empty(len(x), dtype=torch.int32)
    for place, integer in _write_on_host(x, scale, grid, stream, units):
        units[place] = integer
    return GridRelease(units, grid)


def release_in_place(clipped: Tensor, scale: float, randomness: CipherRandomness, key: StreamKey) -> Tensor:
    """`release_on_grid(...).floats`, float32 [m]. Where it can be, they are written over the sum: large models."""
    x, grid = clipped.detach(), choose_grid(scale)
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and len(x) > 0
    # A sum that is not finite, or is too large, compares as False.
    if not (plain and 2.0**-100 < grid < 2.0**90 and _find_largest(x) < host_noise.LARGEST_SIZE * grid):
        return release_on_grid(clipped, scale, randomness, key).floats
    for place, integer in _write_on_host(x, scale, grid, (randomness, key), x):
        x[place] = GridRelease(torch.tensor(integer), grid).values
    return x


def _write_on_host(
    x: Tensor, scale: float, grid: float, stream: tuple[CipherRandomness, StreamKey], into: Tensor
) -> list[tuple[int, int]]:
    """Writes the release of x [m] as `host_noise.round_on_host` does; places and integers of those to be corrected."""
    source, key = stream
    start, half = source.locate_stream(key), -(-len(x) // 2)
    noted = host_noise.round_on_host(x, scale, grid, start, into, torch.get_num_threads())
    if not len(noted.place):
        return []
    uniform = np.where(noted.t >= 0, noted.t, 0.5)
    margin = compute_margin(noted.x, abs(noted.rounded) + 1.0, scale, grid, noted.radius, uniform)
    doubtful = ~(noted.away < 0.5 - margin)
    found: dict[int, int] = {}
    for j, value in zip(noted.place[doubtful].tolist(), noted.x[doubtful].tolist(), strict=True):
        found[j] = _decide(value, scale, grid, stream, _read_pair(*start, j % half, half), j, half)
    return list(found.items())


def _find_largest(x: Tensor) -> float:
    """The largest absolute value of x [m]; not a number if one of them is none."""
    least, most = torch.aminmax(x) if len(x) else (x.new_zeros(()), x.new_zeros(()))
    return max(-float(least), float(most))


def _read_pair(key: bytes, nonce: Nonce, pair: int, half: int) -> tuple[int, int]:
    """The two words of one pair."""
    words = torch.empty(1, dtype=torch.int64)
    found = []
    for start in (pair, half + pair):
        open_stream(key, nonce, start)(words)
        found.append(int(words[0]))
    return found[0], found[1]


def _release_some_rows(
    clipped: Tensor,
    scales: Sequence[float],
    streams: Sequence[tuple[CipherRandomness, StreamKey]],
    grids: Sequence[float] | None = None,
) -> list[GridRelease]:
    grids = [choose_grid(scale) for scale in scales] if grids is None else grids
    count, device = clipped.shape[1], clipped.device
    words = draw_many_words([source.locate_stream(key) for source, key in streams], count_normal_words(count), device)
    half = words.shape[1] // 2
    scale, grid = (torch.tensor(values, dtype=torch.float64).to(device)[:, None] for values in (scales, grids))
    x = _read_finite(clipped)
    integers, unsure = round_with_margin(x, scale, grid, words_to_normals(words, count))
    for i, j in torch.nonzero(unsure).tolist():
        pair = (int(words[i, j % half]), int(words[i, half + j % half]))
        integers[i, j] = _decide(float(x[i, j]), scales[i], grids[i], streams[i], pair, j, half)
    return [GridRelease(row, grid) for row, grid in zip(integers, grids, strict=True)]


def _decide(
    x: float,
    scale: float,
    grid: float,
    stream: tuple[CipherRandomness, StreamKey],
    pair: tuple[int, int],
    place: int,
    half: int,
) -> int:
    """The integer of the coordinate at `place`, in arbitrary precision. half: number of pairs."""
    more = _read_further_words(*stream, place % half)
    return decide_in_high_precision(x, scale, grid, pair, place >= half, more)


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
    radius, uniform = (torch.cat([value, value], dim=-1)[..., : x.shape[-1]] for value in (draws.radius, draws.uniform))
    doubtful = ~(away < 0.5 - compute_margin(x, exact, scale, grid, radius, uniform))
    return rounded.masked_fill_(doubtful, 0).to(torch.int64), doubtful


def compute_margin(
    x: Numbers, exact: Numbers, scale: float | Tensor, grid: float | Tensor, radius: Numbers, uniform: Numbers
) -> Numbers:
    """How far float64's (x + scale N) / grid may be from the true one; not a number, or infinite, where no bound holds.

    Tensors or NumPy's arrays. A coordinate is sure of its integer where away < 0.5 - margin, and nowhere else.
    """
    return bound_error(radius, uniform) * (scale / grid) + 2.0**-50 * (1.0 + abs(exact) + abs(x) / grid)


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
