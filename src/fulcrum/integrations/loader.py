"""The Poisson loader: a torch DataLoader whose batches are the samples that the steps to come are accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate

from fulcrum.errors import DataError


@dataclass(frozen=True)
class DrawnSample:
    """The records of one step. rows [b]: their numbers in the data set, those of a unit side by side. slots [b]: the
    unit 0..count-1 of each row. cuts: where the pieces end, as numbers of rows."""

    rows: Tensor
    slots: Tensor
    count: int
    cuts: tuple[int, ...]

    @property
    def pieces(self) -> list[list[int]]:
        """The records' numbers, batch by batch; a piece may be empty."""
        starts = (0, *self.cuts[:-1])
        return [self.rows[start:stop].tolist() for start, stop in zip(starts, self.cuts, strict=True)]


def cut_sample(rows: Tensor, slots: Tensor, count: int, pieces: int) -> DrawnSample:
    """A sample in `pieces` pieces of about the same size; no unit is in two of them."""
    order = torch.argsort(slots, stable=True)
    rows, slots = rows[order], slots[order]
    sizes = torch.bincount(slots, minlength=count)
    ends = sizes.cumsum(0)
    cuts = [int(ends[-(-count * (i + 1) // pieces) - 1]) if count else 0 for i in range(pieces)]
    return DrawnSample(rows, slots, count, tuple(cuts))


class DrawsSamples(Protocol):
    """What the loader asks of a private loop."""

    def begin_epoch(self) -> range: ...

    def draw_sample(self, step: int) -> DrawnSample: ...

    @property
    def batches_per_epoch(self) -> int: ...


class PoissonBatches:
    """A batch sampler: the samples of the steps that are due, to the end of the epoch."""

    def __init__(self, loop: DrawsSamples) -> None:
        self._loop = loop

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._loop.begin_epoch():
            yield from self._loop.draw_sample(step).pieces

    def __len__(self) -> int:
        return self._loop.batches_per_epoch


@dataclass(frozen=True)
class CollateAny:
    """The loader's own collate function; without records, an empty batch of the same form."""

    collate: Callable[[Any], Any]
    empty: Any

    def __call__(self, items: Sequence[Any]) -> Any:
        if len(items):
            return self.collate(items)
        leaves, shape = tree_flatten(self.empty)
        return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape)


def make_empty_batch(loader: DataLoader[Any]) -> Any:
    """A batch without records, from the form of the first one."""
    collate = loader.collate_fn or default_collate
    try:
        one = collate([loader.dataset[0]])
    except Exception as problem:
        raise DataError(
            f"the loader cannot make a batch of one record ({type(problem).__name__}), and Poisson samples have any "
            "number of them; let its collate_fn take one."
        ) from problem

    def cut(leaf: Any) -> Any:
        return leaf[:0].clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return tree_map(cut, one)


class PrivateLoader(DataLoader[Any]):
    """A DataLoader of Poisson samples: each record (or person) joins each one with probability q, on its own.

    Batches differ in size and may be empty. An iteration goes from the step that is due to the end of its epoch. All
    else (workers, collate_fn, pinned memory) is the given loader's.
    """

    def __init__(self, loader: DataLoader[Any], loop: DrawsSamples) -> None:
        self.privacy: Any = loop
        more: dict[str, Any] = {}
        if loader.num_workers:
            more = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        super().__init__(
            loader.dataset,
            batch_sampler=PoissonBatches(loop),
            num_workers=loader.num_workers,
            collate_fn=CollateAny(loader.collate_fn or default_collate, make_empty_batch(loader)),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            **more,
        )
