"""Examples that stay on the device, as bytes where that loses nothing; one copy for all runs on a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fulcrum.data import Dataset
from fulcrum.data.records import Records
from fulcrum.gradients.stacked.layers import StackedProgram

BYTE_SCALES = (255.0, 127.5, 16.0, 1.0)
"""Scales s for which images may be stored as bytes v: x = v / s or v / s - 1, exactly."""


@dataclass(frozen=True)
class DeviceExamples:
    """Examples on the device, [n, ...]: as they are, or as bytes when (v / scale - shift) gives the same bits.

    Integers, such as token ids, stay as they are.
    """

    values: Tensor
    scale: float = 0.0
    shift: float = 0.0

    def rows(self, index: Tensor) -> Tensor:
        """Some examples: float32, or integers where the data hold integers."""
        found = self.values[index]
        return found if self.scale == 0 else _decode_bytes(found, self.scale, self.shift)


@dataclass(frozen=True)
class DeviceInputs:
    """Examples with several inputs: a table per input, by name."""

    inputs: Mapping[str, DeviceExamples]

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        """The inputs of some examples, by name."""
        return {name: table.rows(index) for name, table in self.inputs.items()}


def _decode_bytes(values: Tensor, scale: float, shift: float) -> Tensor:
    scaled = values.float() / scale
    return scaled - shift if shift else scaled


_resident_examples: WeakKeyDictionary[Records, dict[tuple[str, str], tuple[DeviceExamples | DeviceInputs, Tensor]]] = (
    WeakKeyDictionary()
)
"""By the records themselves: data sets that differ in their notes alone share one copy."""


def get_resident_examples(
    dataset: Dataset, which: str, program: StackedProgram | None, device: torch.device
) -> tuple[DeviceExamples | DeviceInputs, Tensor]:
    """The training ("x") or test ("x_test") examples and targets on the device, in the order the program wants."""
    order = "plain" if program is None else "channels last" if program.image else "flat"
    records = dataset.records if which == "x" else dataset.test_records
    kept = _resident_examples.setdefault(records, {})
    key = (order, str(device))
    if key not in kept:
        x, y = records.x, records.y
        small = device.type != "cpu"
        if isinstance(x, Tensor):
            kept[key] = store_on_device(program.table(x) if program else x, device, small), y.to(device)
        else:
            kept[key] = (
                DeviceInputs({name: store_on_device(value, device, small) for name, value in x.items()}),
                y.to(device),
            )
    return kept[key]


def store_on_device(x: Tensor, device: torch.device, small: bool) -> DeviceExamples:
    """Examples on the device; with `small` four times smaller, where that loses nothing."""
    if not x.is_floating_point():
        return DeviceExamples(x.to(device))
    low, high = float(x.min()), float(x.max())
    for scale in BYTE_SCALES if small else ():
        shift = 1.0 if low < 0 else 0.0
        if low + shift < 0 or (high + shift) * scale > 255:
            continue
        codes = ((x + shift) * scale).round().to(torch.uint8)
        # The device's own arithmetic decides: what it gives back must be the very same numbers.
        moved = codes.to(device)
        if torch.equal(_decode_bytes(moved, scale, shift), x.to(device)):
            return DeviceExamples(moved, scale, shift)
    return DeviceExamples(x.to(device))
