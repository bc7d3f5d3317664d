"""The private random numbers of stacked training: every number comes from the stream of its run, party and step.

The streams are those of the reference engine (`training.client`, `training.client_level`), under the same names, so a
run gets the same bits however it is stacked, in whichever order and with whichever other runs. On a GPU the streams of
a buffer are made there by one call of the cipher; on a CPU OpenSSL makes them one by one. Uniform numbers are equal bit
for bit on every device, normal numbers up to the rounding of float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fulcrum.engines.stacked import sampling
from fulcrum.rng import CipherRandomness, Randomness, StreamKey
from fulcrum.rng.chacha import draw_keyed_words
from fulcrum.rng.normals import count_normal_words, words_to_normals, words_to_uniforms

WORDS_AT_ONCE = 2**24
"""64-bit words that a device makes in one call; float64 normal numbers take about eight times their 128 MiB."""


NORMALS_AT_ONCE = 2**21
"""Normal numbers that a program holds in float64 at a time."""


class UniformStream(NamedTuple):
    """`size` uniform numbers of a stream, which fill the places from `start` on."""

    source: Randomness
    key: StreamKey
    start: int
    size: int


class NormalStream(NamedTuple):
    """Standard normal numbers of a stream, times `factor`, for one row of a table."""

    source: Randomness
    key: StreamKey
    row: int
    factor: float = 1.0


AnyStream = TypeVar("AnyStream", UniformStream, NormalStream)


class RandomDraws:
    """Fills buffers with the numbers of streams. sources: all that are drawn from.

    A cipher's stream gives the same numbers each time, so a round that is repeated draws again. Sources that are no
    ciphers (recorded numbers) are asked once per stream; their numbers are kept until the next round begins.
    """

    def __init__(self, device: torch.device, sources: Sequence[Randomness]) -> None:
        self.device = device
        self.on_device = sampling.can_draw_on_device(device, sources)
        self._round = -1
        self._kept: dict[tuple[str, int, StreamKey], Tensor] = {}

    def begin_round(self, t: int) -> None:
        """Round t begins, for the first time or again."""
        if t != self._round:
            self._round = t
            self._kept.clear()

    def fill_uniforms(self, buffer: Tensor, streams: Sequence[UniformStream]) -> Tensor | None:
        """Numbers in [0, 1) for the places of a buffer, float64 and contiguous; 1 in places of no stream.

        The streams are in the order of their places. Returns the same numbers on the host, for what the host can tell
        from them; None where the device drew.
        """
        if not self.on_device:
            values = torch.ones(buffer.shape, dtype=torch.float64)
            flat = values.view(-1)
            for source, key, start, size in streams:
                flat[start : start + size] = self._draw_on_host("uniform", source, key, size)
            buffer.copy_(values)
            return values
        buffer.fill_(1)
        for group in _group_by_length(streams):
            longest = max(stream.size for stream in group)
            for chunk in _split_streams(group, longest):
                words = draw_keyed_words(self._make_table(chunk), longest)
                self._place_rows(buffer.view(-1), words_to_uniforms(words), chunk)
        return None

    def fill_normals(self, table: Tensor, streams: Sequence[NormalStream]) -> Tensor:
        """Standard normal numbers for rows of a table [n, m], at most one stream for each; other rows become zeros."""
        table.zero_()
        for chunk, found in self._draw_normals(streams, table.shape[1]):
            table.index_copy_(0, self._to_device([stream.row for stream in chunk]), found.to(table.dtype))
        return table

    def sum_normals(self, table: Tensor, streams: Sequence[NormalStream]) -> Tensor:
        """Each row of a table [n, m]: the sum of its streams' numbers times their factors, added up in float64.

        A row's streams are added one after the other in the order given, so that its bits do not depend on other rows.
        """
        if not table.shape[1] or not streams:
            return table.zero_()
        total = torch.zeros(table.shape, dtype=torch.float64, device=self.device)
        ranks = _number_within_rows(streams)
        order = sorted(range(len(streams)), key=ranks.__getitem__)
        done = 0
        for chunk, found in self._draw_normals([streams[i] for i in order], table.shape[1]):
            rows = self._to_device([stream.row for stream in chunk])
            factors = torch.tensor([stream.factor for stream in chunk], dtype=torch.float64)
            found.mul_(factors.to(self.device, non_blocking=True)[:, None])
            of_chunk = [ranks[i] for i in order[done : done + len(chunk)]]
            done += len(chunk)
            for rank in range(of_chunk[0], of_chunk[-1] + 1):  # no two streams of a rank have the same row
                own = slice(of_chunk.index(rank), len(of_chunk) - of_chunk[::-1].index(rank))
                if own.stop - own.start == 1:  # the same bits, and much faster than index_add_ for one long row
                    total[chunk[own.start].row].add_(found[own.start])
                else:
                    total.index_add_(0, rows[own], found[own])
        return table.copy_(total)

    # --- streams -------------------------------------------------------------------------------

    def _draw_normals(
        self, streams: Sequence[NormalStream], count: int
    ) -> Iterator[tuple[Sequence[NormalStream], Tensor]]:
        """The streams, some at a time, and their `count` normal numbers each: float64 [streams, count]."""
        if not count or not streams:
            return
        if not self.on_device:
            for stream in streams:
                found = self._draw_on_host("normal", stream.source, stream.key, count)
                # A copy: callers scale what they get, and recorded numbers are kept for other rows of the round.
                yield [stream], found[None].to(self.device, torch.float64, copy=True)
            return
        words = count_normal_words(count)
        for chunk in _split_streams(streams, words):
            yield chunk, words_to_normals(draw_keyed_words(self._make_table(chunk), words), count).values

    def _draw_on_host(self, kind: str, source: Randomness, key: StreamKey, count: int) -> Tensor:
        draw = source.uniform if kind == "uniform" else source.normal
        if isinstance(source, CipherRandomness):
            return draw(key, count)
        name = (kind, id(source), key)
        if name not in self._kept:
            self._kept[name] = draw(key, count)
        return self._kept[name]

    def _make_table(self, streams: Sequence[UniformStream] | Sequence[NormalStream]) -> Tensor:
        """The cipher's keys and nonces, int32 [streams, 11], on the device."""
        return torch.from_numpy(make_stream_table(streams)).to(self.device, non_blocking=True)

    def _to_device(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def _place_rows(self, flat: Tensor, rows: Tensor, streams: Sequence[UniformStream]) -> None:
        """Rows [streams, length] into the places of their streams; the host knows where, the device does the rest."""
        first, last = streams[0].start, streams[-1].start + streams[-1].size
        starts = self._to_device([stream.start - first for stream in streams])
        counts = self._to_device([stream.size for stream in streams])
        span = flat[first:last]
        place = torch.arange(len(span), device=self.device)
        owner = torch.searchsorted(starts, place, right=True) - 1
        column = place - starts.index_select(0, owner)
        inside = column < counts.index_select(0, owner)
        index = (owner * rows.shape[1] + column).masked_fill(~inside, 0)
        span.copy_(torch.where(inside, rows.reshape(-1).index_select(0, index), span))


def draw_uniform_rows(table: Tensor, sizes: Tensor, width: int) -> Tensor:
    """Numbers in [0, 1) of streams, float64 [n, width]; 1 beyond each row's size. Part of a device's program.

    table: int32 [n, 11], as `make_stream_table` has it. The numbers are those of `RandomDraws.fill_uniforms`.
    """
    found = words_to_uniforms(draw_keyed_words(table, width))
    return found.masked_fill_(torch.arange(width, device=table.device) >= sizes[:, None], 1.0)


def draw_normal_rows(table: Tensor, count: int) -> Tensor:
    """Standard normal numbers of streams, float32 [n, count]. Part of a device's program.

    The numbers are those of `RandomDraws.fill_normals`, made a few at a time: in float64 they take ten times the
    memory of what is returned.
    """
    found = torch.empty((len(table), count), device=table.device)
    if not count:
        return found
    words = count_normal_words(count)
    half = words // 2
    each = max(1, WORDS_AT_ONCE // words)
    for rows, keys in zip(found.split(each), table.split(each), strict=True):
        drawn = draw_keyed_words(keys, words)
        wide = max(1, NORMALS_AT_ONCE // (2 * len(keys)))
        for first in range(0, half, wide):
            last = min(first + wide, half)
            own = torch.cat([drawn[:, first:last], drawn[:, half + first : half + last]], dim=1)
            one, other = words_to_normals(own, 2 * (last - first)).values.chunk(2, dim=1)
            rows[:, first:last] = one
            rows[:, half + first : half + last] = other[:, : count - half - first]
    return found


def make_stream_table(streams: Sequence[UniformStream] | Sequence[NormalStream]) -> np.ndarray:
    """Keys and nonces of streams of ciphers, int32 [streams, 11]: as `CipherRandomness.locate_stream` has them.

    Streams that differ in client, step and attempt only have one key, which is derived once.
    """
    known: dict[tuple[int, StreamKey, int], int] = {}
    keys: list[bytes] = []
    owner, nonces = [], []
    for stream in streams:
        shared, rest = stream.key[:2], stream.key[2:]
        name = (id(stream.source), shared, len(rest))
        if name not in known:
            assert isinstance(stream.source, CipherRandomness)
            known[name] = len(keys)
            keys.append(stream.source.locate_stream(stream.key)[0])
        owner.append(known[name])
        nonces.append((*rest, 0, 0, 0)[:3])
    of_keys = np.frombuffer(b"".join(keys), dtype="<i4").reshape(-1, 8)
    return np.concatenate([of_keys[owner], np.array(nonces, dtype=np.uint32).view(np.int32)], axis=1)


def make_padded_table(groups: Sequence[Sequence[NormalStream]], places: int) -> np.ndarray:
    """Keys and nonces of groups of streams, int32 [groups, places, 11], with zeros after each group's streams."""
    found = make_stream_table([stream for group in groups for stream in group])
    table = np.zeros((len(groups), places, 11), dtype=np.int32)
    first = 0
    for rows, group in zip(table, groups, strict=True):
        rows[: len(group)] = found[first : first + len(group)]
        first += len(group)
    return table


def _split_streams(streams: Sequence[AnyStream], words: int) -> Iterator[Sequence[AnyStream]]:
    """The streams in parts that a device makes in one call each; `words` for each stream."""
    step = max(1, WORDS_AT_ONCE // words)
    for first in range(0, len(streams), step):
        yield streams[first : first + step]


def _group_by_length(streams: Sequence[UniformStream]) -> list[list[UniformStream]]:
    """Streams of similar length: all of a group are drawn as long as the longest, at most twice too long."""
    found: dict[int, list[UniformStream]] = {}
    for stream in streams:
        if stream.size:
            found.setdefault(stream.size.bit_length(), []).append(stream)
    return list(found.values())


def _number_within_rows(streams: Sequence[NormalStream]) -> list[int]:
    """The number of earlier streams of the same row, for each stream."""
    seen: dict[int, int] = {}
    ranks = []
    for stream in streams:
        ranks.append(seen.get(stream.row, 0))
        seen[stream.row] = ranks[-1] + 1
    return ranks
