"""Examples that stay on the device, as bytes where that loses nothing; one copy for all runs on a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fulcrum.data import Dataset
from fulcrum.data.records import Inputs
from fulcrum.gradients.stacked.layers import Program

CODES = (255.0, 127.5, 16.0, 1.0)
"""Scales s for which images may be stored as bytes v: x = v / s or v / s - 1, exactly."""


@dataclass(frozen=True)
class Table:
    """Examples on the device, [n, ...]: as they are, or as bytes when (v / scale - shift) gives the same bits.

    Integers, such as token ids, stay as they are.
    """

    values: Tensor
    scale: float = 0.0
    shift: float = 0.0

    def rows(self, index: Tensor) -> Tensor:
        """Some examples: float32, or integers where the data hold integers."""
        found = self.values[index]
        return found if self.scale == 0 else _decode(found, self.scale, self.shift)


@dataclass(frozen=True)
class Tables:
    """Examples with several inputs: a table per input, by name."""

    inputs: Mapping[str, Table]

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        """The inputs of some examples, by name."""
        return {name: table.rows(index) for name, table in self.inputs.items()}


def _decode(values: Tensor, scale: float, shift: float) -> Tensor:
    scaled = values.float() / scale
    return scaled - shift if shift else scaled


_kept: WeakKeyDictionary[Dataset, dict[tuple[str, str, str], tuple[Table | Tables, Tensor]]] = WeakKeyDictionary()


def resident(
    dataset: Dataset, which: str, program: Program | None, device: torch.device
) -> tuple[Table | Tables, Tensor]:
    """The training ("x") or test ("x_test") examples and targets on the device, in the order the program wants."""
    order = "plain" if program is None else "channels last" if program.image else "flat"
    kept = _kept.setdefault(dataset, {})
    key = (which, order, str(device))
    if key not in kept:
        x: Inputs = getattr(dataset, which)
        y: Tensor = getattr(dataset, which.replace("x", "y"))
        small = device.type != "cpu"
        if isinstance(x, Tensor):
            kept[key] = store(program.table(x) if program else x, device, small), y.to(device)
        else:
            kept[key] = Tables({name: store(value, device, small) for name, value in x.items()}), y.to(device)
    return kept[key]


def store(x: Tensor, device: torch.device, small: bool) -> Table:
    """Examples on the device; with `small` four times smaller, where that loses nothing."""
    if not x.is_floating_point():
        return Table(x.to(device))
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
