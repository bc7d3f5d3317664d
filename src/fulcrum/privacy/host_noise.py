"""Noise and certified rounding on a CPU, in blocks that stay in its cache: what `exact_noise` does elsewhere at once.

The released integers are defined by the stream's bits, so they do not depend on blocks, on threads, or on which of the
two implementations made them. Symbols as in `rng.normals`; all numbers below are in units of the grid g.

Few coordinates lie near a boundary between two integers. A block only notes them; their margins are computed at the
end, for all blocks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.rng.chacha import Nonce, open_stream

Numbers = npt.NDArray[Any]

PAIRS_AT_ONCE = 2**14
"""Pairs of normal numbers in a block."""

PAIRS_PER_THREAD = 2**16
"""Fewer pairs than this are not worth a thread of their own."""

LARGEST_SIZE = 2.0**30
"""Sums up to so many grid units are released here: integers of 32 bits hold them with their noise."""

NEAR = 2.0**-13
"""Distance from a boundary at which a coordinate is noted. It is above the margin of every usual pair: with
|t| >= SMALLEST_USUAL, U R >= 2^-16, R < 5 and s / g < 2^21, the margin is below 2^-20 + 2^-14 + 2^-18."""

SMALLEST_USUAL = 2.0**-16
"""Pairs whose t is smaller than this are noted whole: U is near 0 or near 1."""

LARGEST_RADIUS = math.sqrt(-2 * math.log(SMALLEST_USUAL)) * (1 - 2.0**-20)
SMALLEST_RADIUS = math.sqrt(-2 * math.log1p(-SMALLEST_USUAL)) * (1 + 2.0**-20)
"""Radii of usual pairs lie between these two."""


MIDDLE = torch.tensor(2.0**-65, dtype=torch.float64)
"""What the further bits add to a word's 64 on average."""


class Noted(NamedTuple):
    """Coordinates that may be near a boundary. place [k]: index. rounded [k]: the integer. away [k]: its distance.

    t [k]: the pair's signed uniform number; radius [k]: its R.
    """

    place: Numbers
    rounded: Numbers
    away: Numbers
    t: Numbers
    radius: Numbers


def round_on_host(
    x: Tensor, scale: float, grid: float, stream: tuple[bytes, Nonce], units: Tensor, threads: int
) -> Noted:
    """Write round((x + scale N) / grid) of x [m] into units int32 [m]; the coordinates that are noted.

    x is finite, below LARGEST_SIZE grid units; m >= 1.
    """
    half = -(-len(x) // 2)
    wanted = max(1, min(threads, half // PAIRS_PER_THREAD))
    each = -(-half // wanted)
    parts = [range(start, min(start + each, half)) for start in range(0, half, each)]

    def run(part: range) -> list[Noted]:
        return _round_pairs(x, scale, grid, stream, units, part)

    if len(parts) == 1:
        found = run(parts[0])
    else:
        with ThreadPoolExecutor(len(parts), thread_name_prefix="fulcrum-noise") as pool:
            found = [noted for some in pool.map(run, parts) for noted in some]
    return _join(found)


def _round_pairs(
    x: Tensor, scale: float, grid: float, stream: tuple[bytes, Nonce], units: Tensor, pairs: range
) -> list[Noted]:
    """The coordinates of some pairs: j and half + j of each."""
    count = x.shape[0]
    half = -(-count // 2)
    size = min(PAIRS_AT_ONCE, len(pairs))
    ratio = scale / grid
    alone = size == half  # all pairs are one block: cosines and sines, and their words, stand side by side
    read_first = open_stream(*stream, pairs.start)
    read_second = read_first if alone else open_stream(*stream, half + pairs.start)
    words = torch.empty(2 * size, dtype=torch.int64)
    numbers = torch.empty((5, 2 * size), dtype=torch.float64)
    numbers[3].zero_()  # where a sum has no coordinate, in the last pair of an odd number
    views = _view_block(words, numbers, size)
    found: list[Noted] = []
    for start in range(pairs.start, pairs.stop, size):
        n = min(size, pairs.stop - start)
        if n < size:
            views = _view_block(words, numbers, n)
        given, uniform, t, turns, radius, angle, wave, exact, rounded = views
        if alone:
            read_first(words)
            places = [(exact.view(-1)[:count], rounded.view(-1)[:count], slice(0, count))]
        else:
            read_first(given[0])
            read_second(given[1])
            last = min(n, count - half - start)  # an odd number has no sine at its end
            places = [
                (exact[0], rounded[0], slice(start, start + n)),
                (exact[1, :last], rounded[1, :last], slice(half + start, half + start + last)),
            ]
        torch.add(MIDDLE, given, alpha=2.0**-64, out=uniform)
        # The radius in grid units, s R / g: see `words_to_normals`. U - 1 is t - 1 for t > 0 and t for t < 0.
        torch.sub(t, torch.ceil(t, out=radius), out=radius).clamp_min_(2.0**-53 - 1.0)
        torch.log1p(radius, out=radius).mul_(-2.0 * ratio * ratio).sqrt_()
        torch.mul(turns, 2 * math.pi, out=angle)
        torch.cos(angle, out=wave[0])
        torch.sin(angle, out=wave[1])
        for sums, _, place in places:
            sums.copy_(x[place])
        torch.addcmul(exact.mul_(1.0 / grid), wave, radius, out=exact)
        torch.round(exact, out=rounded)
        for _, integers, place in places:
            units[place].copy_(integers)
        found += _note(start, half, count, ratio, t, radius, rounded, exact.sub_(rounded).abs_())
    return found


def _view_block(words: Tensor, numbers: Tensor, n: int) -> tuple[Tensor, ...]:
    """Views of a block of n pairs: words [2, n]; uniform numbers [2, n] and their rows t and turns [n]; radius and
    angle [n]; cosines and sines, exact and rounded sums [2, n] each."""
    uniform, reach, wave, exact, rounded = (values[: 2 * n].view(2, n) for values in numbers)
    return words[: 2 * n].view(2, n), uniform, *uniform.unbind(), *reach.unbind(), wave, exact, rounded


def _note(
    start: int, half: int, count: int, ratio: float, t: Tensor, reach: Tensor, rounded: Tensor, away: Tensor
) -> list[Noted]:
    """The coordinates of a block that are near a boundary, and those of unusual pairs (some twice).

    rounded, away [2, n]: of the cosines and of the sines.
    """
    n, sizes = len(t), reach.numpy()
    distances = away.numpy().reshape(-1)
    flat = np.flatnonzero(distances >= 0.5 - NEAR)
    low, high = SMALLEST_RADIUS * ratio, LARGEST_RADIUS * ratio
    if sizes.min() < low or sizes.max() > high:
        unusual = np.flatnonzero((sizes < low) | (sizes > high))
        flat = np.concatenate([flat, unusual, unusual + n])
    pair = flat % n
    place = start + pair + half * (flat >= n)
    if not place.size:
        return []
    noted = Noted(place, rounded.numpy().reshape(-1)[flat], distances[flat], t.numpy()[pair], sizes[pair] / ratio)
    inside = place < count
    return [noted if inside.all() else Noted(*(values[inside] for values in noted))]


def _join(parts: Sequence[Noted]) -> Noted:
    if not parts:
        return Noted(np.zeros(0, dtype=np.int64), *(np.zeros(0) for _ in Noted._fields[1:]))
    return parts[0] if len(parts) == 1 else Noted(*map(np.concatenate, zip(*parts, strict=True)))
