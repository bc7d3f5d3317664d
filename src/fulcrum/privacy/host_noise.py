"""Noise and certified rounding on a CPU, in blocks that stay in its cache: what `exact_noise` does elsewhere at once.

The released integers are defined by the stream's bits, so they do not depend on blocks, on threads, or on which of the
implementations made them: this one, or the compiled loop of `compiled_noise`, which is taken where there is one.
Symbols as in `rng.normals`; all numbers below are in units of the grid g.

Few coordinates lie near a boundary between two integers. A block only notes them; their margins are computed at the
end, for all blocks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.gradients.threads import find_shared_pool
from fulcrum.privacy import compiled_noise
from fulcrum.rng.chacha import Nonce, open_stream

Numbers = npt.NDArray[Any]

PAIRS_AT_ONCE = 2**15
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


class Noted(NamedTuple):
    """Coordinates that may be near a boundary. place [k]: index. x [k]: the sum there. rounded [k]: the integer.

    away [k]: its distance. t [k]: the pair's signed uniform number; radius [k]: its R.
    """

    place: Numbers
    x: Numbers
    rounded: Numbers
    away: Numbers
    t: Numbers
    radius: Numbers


def round_on_host(
    x: Tensor, scale: float, grid: float, stream: tuple[bytes, Nonce], into: Tensor, threads: int
) -> Noted:
    """Write round((x + scale N) / grid) of x [m] into an int32 tensor [m]; the coordinates that are noted.

    into: or float32, for the integers times the grid; it may be x itself, which is then overwritten.
    x is finite, below LARGEST_SIZE grid units; m >= 1.
    """
    half = -(-len(x) // 2)
    wanted = max(1, min(threads, half // PAIRS_PER_THREAD))
    each = -(-half // wanted)
    parts = [range(start, min(start + each, half)) for start in range(0, half, each)]

    rounder = compiled_noise.find_rounder() if compiled_noise.accepts(x, into) else None

    def run(part: range) -> list[Noted]:
        if rounder is None:
            return _round_pairs(x, scale, grid, stream, into, part)
        found = compiled_noise.round_pairs(rounder, x, scale, grid, stream, into, part, NEAR, SMALLEST_USUAL)
        return [Noted(table[:, 0].astype(np.int64), *table.T[1:]) for table in found]

    if len(parts) == 1:
        found = run(parts[0])
    else:
        found = [noted for some in find_shared_pool(threads).map(run, parts) for noted in some]
    return _join(found)


def _round_pairs(
    x: Tensor, scale: float, grid: float, stream: tuple[bytes, Nonce], into: Tensor, pairs: range
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
    numbers = torch.empty((4, 2 * size), dtype=torch.float64)
    numbers[2].zero_()  # where a sum has no coordinate, in the last pair of an odd number
    block = _Block(words, numbers, size)
    found: list[Noted] = []
    for start in range(pairs.start, pairs.stop, size):
        n = min(size, pairs.stop - start)
        if n < size:
            block = _Block(words, numbers, n)
        if alone:
            read_first(words)
            places = [(slice(0, count), slice(0, count))]
        else:
            read_first(block.words[0])
            read_second(block.words[1])
            last = min(n, count - half - start)  # an odd number has no sine at its end
            places = [
                (slice(0, n), slice(start, start + n)),
                (slice(n, n + last), slice(half + start, half + start + last)),
            ]
        block.draw(ratio)
        for here, there in places:
            block.exact[here].copy_(x[there])
        block.add(grid)
        found += _note(start, half, x, ratio, block)
        for here, there in places:
            part = into[there].copy_(block.rounded[here])
            if part.is_floating_point():
                part.mul_(grid)  # exact: a power of two
    return found


class _Block:
    """The numbers of a block of n pairs, in memory that serves all blocks.

    words [2, n]. radius [n]: in grid units. wave [2, n]: cosines and sines. exact, rounded [2 n]: of the cosines, then
    of the sines. Arrays of NumPy where it starts an operation faster.
    """

    def __init__(self, words: Tensor, numbers: Tensor, n: int) -> None:
        uniform, wave, exact, rounded = (values[: 2 * n] for values in numbers)
        self.words = words[: 2 * n].view(2, n)
        self.wave, self.exact, self.rounded = wave.view(2, n), exact, rounded
        self.radius, self.angle = uniform.view(2, n).unbind()
        self._sums, self._products = exact.view(2, n), (wave[:n], wave[n:])
        self._flat, self._given = uniform.numpy(), words[: 2 * n].numpy()
        self.sizes, self._turns = self._flat[:n], self._flat[n:]
        self._scratch = rounded.numpy()[:n]
        self.distances, self.integers = exact.numpy(), rounded.numpy()

    def draw(self, ratio: float) -> None:
        """Radii, cosines and sines from the words. ratio: s / g. See `words_to_normals`.

        U = t - floor(t) with t = w / 2^64: t where it is positive, else 1 + t. The further bits add up to 2^-64.
        """
        np.copyto(self._flat, self._given)
        uniform = np.multiply(self.sizes, 2.0**-64, out=self.sizes)
        np.subtract(uniform, np.floor(uniform, out=self._scratch), out=uniform)
        torch.log(self.radius, out=self.radius)
        np.multiply(self.sizes, -2.0 * ratio * ratio, out=self.sizes)
        torch.sqrt(self.radius, out=self.radius)
        np.multiply(self._turns, math.pi * 2.0**-63, out=self._turns)
        torch.cos(self.angle, out=self._products[0])
        torch.sin(self.angle, out=self._products[1])

    def add(self, grid: float) -> None:
        """The sums in `exact`, with noise in grid units: as integers in `rounded`, and how far from them in `exact`."""
        exact = self.distances
        np.multiply(exact, 1.0 / grid, out=exact)
        torch.addcmul(self._sums, self.wave, self.radius, out=self._sums)
        np.rint(exact, out=self.integers)
        np.abs(np.subtract(exact, self.integers, out=exact), out=exact)


def _note(start: int, half: int, x: Tensor, ratio: float, block: _Block) -> list[Noted]:
    """The coordinates of a block that are near a boundary, and those of unusual pairs (some twice)."""
    sizes, distances, count = block.sizes, block.distances, x.shape[0]
    n = len(sizes)
    flat = np.flatnonzero(distances >= 0.5 - NEAR)
    low, high = SMALLEST_RADIUS * ratio, LARGEST_RADIUS * ratio
    if not (sizes.min() >= low and sizes.max() <= high):
        unusual = np.flatnonzero(~((sizes >= low) & (sizes <= high)))
        flat = np.concatenate([flat, unusual, unusual + n])
    pair = flat % n
    place = start + pair + half * (flat >= n)
    if not place.size:
        return []
    inside = place < count
    if not inside.all():
        flat, pair, place = flat[inside], pair[inside], place[inside]
    t = block.words[0].numpy()[pair] * 2.0**-64
    sums = x.numpy()[place].astype(np.float64)
    return [Noted(place, sums, block.integers[flat], distances[flat], t, sizes[pair] / ratio)]


def _join(parts: Sequence[Noted]) -> Noted:
    if not parts:
        return Noted(np.zeros(0, dtype=np.int64), *(np.zeros(0) for _ in Noted._fields[1:]))
    return parts[0] if len(parts) == 1 else Noted(*map(np.concatenate, zip(*parts, strict=True)))
