"""Examples that stay on the device, as bytes where that loses nothing; one copy for all runs on a data set."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fulcrum.data import Dataset
from fulcrum.gradients.stacked.layers import Program

CODES = (255.0, 127.5, 16.0, 1.0)
"""Scales s for which images may be stored as bytes v: x = v / s or v / s - 1, exactly."""


@dataclass(frozen=True)
class Table:
    """Examples on the device, [n, ...]: as they are, or as bytes when (v / scale - shift) gives the same bits."""

    values: Tensor
    scale: float = 0.0
    shift: float = 0.0

    def rows(self, index: Tensor) -> Tensor:
        """Examples as float32."""
        found = self.values[index]
        return found if self.scale == 0 else _decode(found, self.scale, self.shift)


def _decode(values: Tensor, scale: float, shift: float) -> Tensor:
    scaled = values.float() / scale
    return scaled - shift if shift else scaled


_kept: WeakKeyDictionary[Dataset, dict[tuple[str, str, str], tuple[Table, Tensor]]] = WeakKeyDictionary()


def resident(dataset: Dataset, which: str, program: Program | None, device: torch.device) -> tuple[Table, Tensor]:
    """The training ("x") or test ("x_test") examples and labels on the device, in the order the program wants."""
    order = "plain" if program is None else "channels last" if program.image else "flat"
    kept = _kept.setdefault(dataset, {})
    key = (which, order, str(device))
    if key not in kept:
        x: Tensor = getattr(dataset, which)
        y: Tensor = getattr(dataset, which.replace("x", "y"))
        kept[key] = store(program.table(x) if program else x, device, small=device.type != "cpu"), y.to(device)
    return kept[key]


def store(x: Tensor, device: torch.device, small: bool) -> Table:
    """Examples on the device; with `small` four times smaller, where that loses nothing."""
    low, high = float(x.min()), float(x.max())
    for scale in CODES if small else ():
        shift = 1.0 if low < 0 else 0.0
        if low + shift < 0 or (high + shift) * scale > 255:
            continue
        codes = ((x + shift) * scale).round().to(torch.uint8)
        # The device's own arithmetic decides: what it gives back must be the very same numbers.
        moved = codes.to(device)
        if torch.equal(_decode(moved, scale, shift), x.to(device)):
            return Table(moved, scale, shift)
    return Table(x.to(device))
