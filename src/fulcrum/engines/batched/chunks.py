"""Poisson samples of jobs of any size, side by side in chunks of the same length.

One row per job, of the length of the largest possible sample, would be mostly padding where jobs differ in size. Here
a job takes as many chunks as its sample fills, at least one. Only its last chunk has padding, and the margin for
random sample sizes is shared by all jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.engines.stacked.core import StackedCore

CHUNK_MARGIN_DEVIATIONS = 5.0
"""Margin of chunks above their mean number, in standard deviations: one step in four million needs more, and its
burst of rounds is repeated."""

ROUNDS_PER_CHECK = 25
"""Rounds between two checks that every sample fitted and every sum was finite."""

NUM_OVERFLOW_PLACES = 1024
"""Places for units that are not sampled."""

CHUNK_LENGTHS = (8, 16, 32, 64, 128, 256, 512)
"""Allowed numbers of places per chunk."""


@dataclass(frozen=True)
class JobUnits:
    """The units of all J jobs in one row of n places, job by job.

    rows [n]: each unit's row in the data set. owner [n]: its job. rate [n], float64. last [J]: each job's last place.
    """

    rows: Tensor
    owner: Tensor
    rate: Tensor
    last: Tensor


@dataclass(frozen=True)
class ChunkedBatch:
    """rows and mask [S, B]; owner [S], the job of each chunk; starts [J + 1], each job's first chunk, then the end.

    needed: number of chunks that all samples fill; if above S, repeat with more chunks.
    """

    rows: Tensor
    mask: Tensor
    owner: Tensor
    starts: Tensor
    needed: Tensor


def sample_into_chunks(units: JobUnits, uniforms: Tensor, count: int, length: int) -> ChunkedBatch:
    """The units whose uniform number [n] is below their rate, in `count` chunks of `length` places."""
    device = uniforms.device
    joins = uniforms < units.rate
    so_far = joins.cumsum(dim=0)
    upto = so_far.index_select(0, units.last)  # [J]
    sizes = torch.diff(upto, prepend=torch.zeros_like(upto[:1]))
    need = count_chunks(sizes, length)
    end = need.cumsum(dim=0)
    first = end - need
    # Where a job's first unit goes, less how many joined before it: a unit's place is that and its own number.
    shift = first * length - (upto - sizes)
    place = shift.index_select(0, units.owner) + so_far - 1
    total = count * length
    # Units that are not sampled go to many separate places at the end, since writes to one place would serialise.
    behind = total + torch.arange(len(place), device=device) % NUM_OVERFLOW_PLACES
    place = torch.where(joins & (place < total), place, behind)
    table = torch.zeros(total + NUM_OVERFLOW_PLACES, dtype=torch.int64, device=device).scatter_(0, place, units.rows)
    chunk = torch.arange(count, device=device)
    owner = torch.searchsorted(end, chunk, right=True).clamp_max(len(end) - 1)  # [S]
    left = (sizes + first * length).index_select(0, owner) - chunk * length
    mask = torch.arange(length, device=device) < left[:, None]
    starts = torch.cat([first, end[-1:]]).clamp_max(count)
    rows = table[:total].view(count, length).masked_fill(~mask, 0)
    return ChunkedBatch(rows, mask, owner, starts, end[-1])


def count_chunks(sizes: Tensor, length: int) -> Tensor:
    """The chunks that samples of these sizes take: at least one."""
    return torch.div(sizes + length - 1, length, rounding_mode="floor").clamp_min(1)


def sum_chunks_by_job(chunks: ChunkedBatch, values: Tensor) -> Tensor:
    """Sums over each job's chunks, [S, x] -> [J, x], one after the other: the bits are always the same."""
    if not values.shape[1]:
        return values.new_zeros((len(chunks.starts) - 1, 0))
    every = torch.arange(len(values), device=values.device)
    sums = torch.nn.functional.embedding_bag(every, values, chunks.starts, mode="sum")
    return sums[:-1]  # the last sum is of the unused chunks


def estimate_weights_cost(core: StackedCore) -> float:
    """What a set of weights costs, in examples: it is read and written about as often as activations are, twice."""
    dim, program = core.problem.layout.dim, core.program
    return max(8.0, 2 * dim / (program.elements if program else 4 * dim))


def read_overflow_check(core: StackedCore, most: Tensor, finite: Tensor) -> tuple[int, bool]:
    """Wait for the device: the most places needed since the last check, and whether to repeat with masking.

    Resets both values.
    """
    needed, fine = torch.stack([most, finite.to(most)]).tolist()
    most.zero_()
    finite.fill_(True)
    again = not fine and not core.how.careful
    if again:
        core.careful()
    return int(needed), again


def estimate_chunk_count(sizes: Sequence[int], rates: Sequence[float], length: int, among: Tensor | None = None) -> int:
    """Chunks for the samples of all jobs, `CHUNK_MARGIN_DEVIATIONS` above the mean; sample sizes as if normal.

    among [m, j]: rows of jobs that train together (None: all jobs at once); the result is enough for each row.
    """
    n, q = torch.tensor(sizes, dtype=torch.float64), torch.tensor(rates, dtype=torch.float64)
    mean, spread = n * q, (n * q * (1 - q)).sqrt().clamp_min(1e-6)
    most = int(torch.minimum(mean + 8 * spread, n).max()) // length + 1
    i = torch.arange(1, most + 1, dtype=torch.float64)
    more = torch.special.ndtr((mean[:, None] - i * length - 0.5) / spread[:, None])  # chance of more than i chunks
    expected = 1 + more.sum(dim=1)
    squares = 1 + ((2 * i + 1) * more).sum(dim=1)
    variance, largest = (squares - expected.square()).clamp_min(0), count_chunks(n.long(), length)
    among = torch.arange(len(n))[None] if among is None else among
    means, deviations = (value[among].sum(dim=1) for value in (expected, variance))
    needed = torch.minimum(means + CHUNK_MARGIN_DEVIATIONS * deviations.sqrt(), largest[among].sum(dim=1))
    return max(1, math.ceil(float(needed.max())))


def choose_chunk_layout(
    sizes: Sequence[int], rates: Sequence[float], limit: int, weights: float, among: Tensor | None = None
) -> tuple[int, int]:
    """(chunks, places in each) that cost least, for chunks of at most `limit` places.

    weights: what a set of weights costs, in examples; every chunk has one. among: as in `estimate_chunk_count`.
    """
    largest = max(n * q for n, q in zip(sizes, rates, strict=True))
    allowed = [length for length in CHUNK_LENGTHS if length <= limit] or [CHUNK_LENGTHS[0]]
    # A sample of hundreds of chunks wastes next to nothing: still shorter ones are not worth trying.
    tried = [length for length in allowed if largest <= 256 * length] or allowed[-1:]
    found = [(estimate_chunk_count(sizes, rates, length, among), length) for length in tried]
    return min(found, key=lambda pair: pair[0] * (pair[1] + weights))
