"""Records: inputs of any type with their targets, persons and parties; and functions on the inputs of a batch.

Inputs are one tensor [n, ...] or several by name, {name: [n, ...]}; token ids stay integers. A model gets one tensor
as its argument, several as keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulcrum.types import make_short_repr

ModelInputs = Tensor | Mapping[str, Tensor]
"""The inputs of n examples: [n, ...], or several by name."""


def map_inputs(change: Callable[[Tensor], Any], x: ModelInputs) -> Any:
    """Applies `change` to each tensor of the inputs."""
    return change(x) if isinstance(x, Tensor) else {name: change(value) for name, value in x.items()}


def list_input_tensors(x: ModelInputs) -> list[Tensor]:
    """The tensors of the inputs, in order."""
    return [x] if isinstance(x, Tensor) else list(x.values())


def count_examples(x: ModelInputs) -> int:
    """Number of examples n."""
    return len(list_input_tensors(x)[0])


def select_rows(x: ModelInputs, rows: Any) -> ModelInputs:
    """The inputs of some examples."""
    return map_inputs(lambda value: value[rows], x)  # type: ignore[no-any-return]


def move_inputs_to_device(x: ModelInputs, device: torch.device) -> ModelInputs:
    """The inputs on a device."""
    return map_inputs(lambda value: value.to(device), x)  # type: ignore[no-any-return]


def split_inputs(x: ModelInputs, size: int) -> Iterator[ModelInputs]:
    """The inputs in pieces of at most `size` examples."""
    for start in range(0, count_examples(x), size):
        yield select_rows(x, slice(start, start + size))


def get_input_shape(x: ModelInputs) -> Any:
    """The shape of one example: a tuple, or one per name."""
    return map_inputs(lambda value: tuple(value.shape[1:]), x)


@dataclass(frozen=True, eq=False)
class Records:
    """n records. x: inputs [n, ...], or several by name. y [n, ...]: targets, as the task checks them.

    person [n] int64: the person of each record (None: one person per record). party [n] int64: the party, an
    index into the data set's party_names (None: not given). digests [n, 16] uint8: hashes of the inputs as they were
    loaded, for `fingerprints` (None: not computed). They stay in memory: stored, they would be a test for guesses.
    """

    __repr__ = make_short_repr

    x: ModelInputs
    y: Tensor
    person: Tensor | None = None
    party: Tensor | None = None
    digests: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> Any:
        """The shape of one record's inputs."""
        return get_input_shape(self.x)

    def take(self, rows: Tensor) -> Records:
        """Some of the records, by index or by mask."""

        def part(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[rows]

        return Records(select_rows(self.x, rows), self.y[rows], part(self.person), part(self.party), part(self.digests))

    def tensors(self) -> Iterator[Tensor | None]:
        """All tensors in a fixed order, for fingerprints."""
        yield from list_input_tensors(self.x)
        yield from (self.y, self.person, self.party)
