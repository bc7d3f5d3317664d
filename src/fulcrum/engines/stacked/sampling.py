"""Poisson sampling on the device: padded, masked, and never truncated.

Every unit of every task gets its own uniform number, as in the reference. Sampled units are moved to the
front of a row of `pad` places. Their number is reported: if a row was too short, the step is repeated on the
same numbers with a longer row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fulcrum.rng import CipherRandomness, Randomness

PAD_DEVIATIONS = 8.0
"""Standard deviations above the mean for which a row has room: one in 10^15 samples is larger."""

PAD_MULTIPLE = 8
"""Pads are multiples of this: matrix units like it, and fewer shapes are recorded."""

LONG_PAD = 1024
"""Pads from here on are multiples of a sixteenth of it."""


def compute_pad_size(units: float, rate: float) -> int:
    """Places for a Poisson sample of `units` at `rate`: the mean and eight standard deviations, at most all."""
    places = math.ceil(units * rate + PAD_DEVIATIONS * math.sqrt(units * rate * (1 - rate)))
    # Long rows have many divisors, for sums that are cut into equal parts.
    return min(
        round_up_to_multiple(places, PAD_MULTIPLE if places < LONG_PAD else LONG_PAD // 16),
        round_up_to_multiple(math.ceil(units)),
    )


def round_up_to_multiple(count: int, step: int = PAD_MULTIPLE) -> int:
    """The next multiple, at least one step."""
    return max(step, -(-count // step) * step)


def compute_bucket_size(units: int) -> int:
    """The size that parties of this size are padded to: at most a quarter more, so that few sizes occur."""
    if units <= 32:
        return round_up_to_multiple(units)
    step = 1 << (units.bit_length() - 3)
    return -(-units // step) * step


def compact_rows(joins: Tensor, pad: int) -> tuple[Tensor, Tensor, Tensor]:
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


def select_row_on_device(table: Tensor, t: Tensor) -> Tensor:
    """Row t of a table, for a t that lies on the device; plain indexing would fetch it to the host."""
    return table.index_select(0, t.view(1)).squeeze(0)


def can_draw_on_device(device: torch.device, sources: Sequence[Randomness]) -> bool:
    """Whether the device makes the numbers of these sources itself: on a GPU, where all of them are ciphers."""
    return device.type != "cpu" and all(isinstance(source, CipherRandomness) for source in sources)
