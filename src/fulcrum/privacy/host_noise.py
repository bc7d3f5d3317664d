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
    half = -(-len(x) // 2)
    size = min(PAIRS_AT_ONCE, len(pairs))
    ratio = scale / grid
    alone = size == half  # all pairs are one block: cosines and sines, and their words, stand side by side
    read_first = open_stream(*stream, pairs.start)
    read_second = read_first if alone else open_stream(*stream, half + pairs.start)
    words = torch.empty(2 * size, dtype=torch.int64)
    numbers = torch.empty((5, 2 * size), dtype=torch.float64)
    numbers[3].zero_()  # where a sum has no coordinate, in the last pair of an odd number
    found: list[Noted] = []
    for start in range(pairs.start, pairs.stop, size):
        n = min(size, pairs.stop - start)
        uniform, reach, wave, exact, rounded = (values[: 2 * n].view(2, n) for values in numbers)
        if alone:
            read_first(words)
            places: tuple[slice, ...] = (slice(0, len(x)),)
        else:
            read_first(words[:n])
            read_second(words[n : 2 * n])
            places = (slice(start, start + n), slice(half + start, min(half + start + n, len(x))))
        torch.add(MIDDLE, uniform.copy_(words[: 2 * n].view(2, n)), alpha=2.0**-64, out=uniform)
        # The radius in grid units, s R / g: see `words_to_normals`. U - 1 is t - 1 for t > 0 and t for t < 0.
        t, turns = uniform
        radius, angle = reach
        torch.sub(t, torch.ceil(t, out=radius), out=radius).clamp_min_(2.0**-53 - 1.0)
        torch.log1p(radius, out=radius).mul_(-2.0 * ratio * ratio).sqrt_()
        torch.mul(turns, 2 * math.pi, out=angle)
        torch.cos(angle, out=wave[0])
        torch.sin(angle, out=wave[1])
        _copy_places(exact, x, places, n, into=True)
        torch.addcmul(exact.mul_(1.0 / grid), wave, radius, out=exact)
        torch.round(exact, out=rounded)
        _copy_places(rounded, units, places, n, into=False)
        found += _note(start, half, len(x), ratio, t, radius, rounded, exact.sub_(rounded).abs_())
    return found


def _copy_places(block: Tensor, whole: Tensor, places: Sequence[slice], n: int, into: bool) -> None:
    """Copy the coordinates at `places` of `whole` [m] into a block [2, n], or out of it."""
    flat = block.view(-1)
    for number, place in enumerate(places):
        part = flat[number * n : number * n + place.stop - place.start]
        if into:
            part.copy_(whole[place])
        else:
            whole[place].copy_(part)


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
