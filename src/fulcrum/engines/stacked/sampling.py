"""Poisson sampling on the device: padded, masked, and never truncated.

Every unit of every task gets its own uniform number, as in the reference. Those who join are moved to the
front of a row of `pad` places; how many joined is reported, so that a row that was too short is noticed and
the step is done again, on the same numbers, with a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fulcrum.rng import Key, Randomness, Seeded, stream_seed

ROOM = 8.0
"""Standard deviations above the mean for which a row has room: one in 10^15 samples is larger."""

STEP = 8
"""Pads are multiples of this: matrix units like it, and fewer shapes are recorded."""

LONG = 1024
"""Pads from here on are multiples of a sixteenth of it."""


def pad_for(units: float, rate: float) -> int:
    """Places for a Poisson sample of `units` at `rate`: the mean and eight standard deviations, at most all."""
    places = math.ceil(units * rate + ROOM * math.sqrt(units * rate * (1 - rate)))
    # Long rows have many divisors, for sums that are cut into equal parts.
    return min(round_up(places, STEP if places < LONG else LONG // 16), round_up(math.ceil(units)))


def round_up(count: int, step: int = STEP) -> int:
    """The next multiple, at least one step."""
    return max(step, -(-count // step) * step)


def bucket(units: int) -> int:
    """The size that parties of this size are padded to: at most a quarter more, so that few sizes occur."""
    if units <= 32:
        return round_up(units)
    step = 1 << (units.bit_length() - 3)
    return -(-units // step) * step


def compact(joins: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Moves the True entries of each row to the front: joins [m, U] -> places [m, pad], mask [m, pad], count [m].

    Where count > pad the row does not hold them all.
    """
    place = joins.cumsum(dim=1) - 1
    target = place.masked_fill(~joins | (place >= pad), pad)  # what does not join lands in a column of its own
    here = torch.arange(joins.shape[1], device=joins.device).expand(len(joins), -1)
    table = torch.zeros((len(joins), pad + 1), dtype=torch.int64, device=joins.device).scatter_(1, target, here)
    count = place[:, -1] + 1
    mask = torch.arange(pad, device=joins.device) < count[:, None]
    return table[:, :pad].masked_fill(~mask, 0), mask, count


def at(table: Tensor, t: Tensor) -> Tensor:
    """Row t of a table, for a t that lies on the device; plain indexing would fetch it to the host."""
    return table.index_select(0, t.view(1)).squeeze(0)


def draws_on_device(device: torch.device, sources: Sequence[Randomness]) -> bool:
    """Whether the device's own generator may stand in for these: on a GPU, where all of them are seeded."""
    return device.type != "cpu" and all(isinstance(source, Seeded) for source in sources)


def device_seed(seed: int, key: Key) -> int:
    """The seed of the device's generator for one key."""
    return stream_seed(seed, ("stacked", *key))
