"""Which party holds which record: iid, Dirichlet over labels, label shards, quantity skew, by keyed hash, or as given.

Every split first assigns each item to a party, then moves items to parties below the minimum size from
those above it. Items are records, or whole persons where the data has person ids. Everything is
vectorised, so a million parties take seconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fulcrum.data.dataset import Dataset
from fulcrum.data.fingerprints import assign_hashed_parties
from fulcrum.errors import ConfigError, DataError
from fulcrum.rng import numpy_generator
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.schema import Data
from fulcrum.types import make_short_repr

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Partition:
    """Disjoint parts that together are all n records. Party k of K holds order[starts[k]:starts[k + 1]].

    order [n] int64: rows of the Dataset, ascending within a party; starts [K + 1] int64; names may be
    empty, and then party k is called "party-k".
    """

    __repr__ = make_short_repr

    order: Tensor
    starts: Tensor
    names: tuple[str, ...] = ()

    @property
    def parties(self) -> int:
        """Number of parties K."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> Tensor:
        """Number of records n_k of each party: [K] int64."""
        return self.starts.diff()

    def indices(self, k: int) -> Tensor:
        """Rows of the Dataset that party k holds: [n_k] int64, ascending."""
        if not 0 <= k < self.parties:
            raise IndexError(f"party {k} of {self.parties}")
        return self.order[int(self.starts[k]) : int(self.starts[k + 1])]

    def name(self, k: int) -> str:
        """The party's name."""
        return self.names[k] if self.names else f"party-{k}"


@dataclass(frozen=True)
class _SplitItems:
    """The items to assign: label [m] and weight [m] (number of records) of each item."""

    label: IntArray
    weight: IntArray
    what: str


AssignOwnersFn = Callable[[_SplitItems, Data, np.random.Generator], IntArray]


def split(dataset: Dataset, settings: Data, seed: int) -> Partition:
    """Split the training records over the parties as `settings` says; the same seed gives the same split.

    No party gets fewer than settings.min_examples records: if the draw gives a party fewer, records are
    moved to it from parties that have more. Where the data has person ids, all records of a person go
    to one party (labels then count by each person's most frequent one). With partition = "given"
    nothing is moved: the data names each record's party, and a person may have records at several parties. Splits by
    label (dirichlet, shards) need targets that are classes. An infeasible request
    raises ConfigError (or DataError for "given") with the numbers.
    """
    method = partition_method(settings, dataset)
    if method == "given":
        return _partition_as_given(dataset, settings)
    ids, items = _build_items(dataset)
    _check_feasible(dataset, items, settings, method)
    rng = numpy_generator(seed, "partition", method)
    if method == "hashed":
        owner = np.zeros(len(items.label), dtype=np.int64)
        owner[ids] = assign_hashed_parties(dataset, settings.parties).numpy()
    else:
        owner = PARTITIONERS[method](items, settings, rng)
    lift = _rebalance_records if int(items.weight.max()) == 1 else _rebalance_persons
    owner = lift(owner, items.weight, settings, rng)
    return _build_partition(owner[ids], settings.parties, ())


def partition_method(settings: Data, dataset: Dataset) -> str:
    """How records are split over parties: data.partition, where "auto" is what the data says.

    given where the records name their party; else, for private data, hashed: a split by label would let one private
    label move other records, and one by position would send people to another party when a record is added. For public
    data dirichlet where targets are classes, else iid.
    """
    method, task = settings.partition, dataset.task
    if method == "auto":
        if dataset.train is not None and dataset.train.party is not None:
            return "given"
        if not dataset.public:
            return "hashed"
        return "dirichlet" if task.classes else "iid"
    if method not in PARTITIONS:
        raise ConfigError(f"data.partition = {method!r} is not known; {suggest_nearest_names(method, PARTITIONS)}")
    if method in LABEL_PARTITIONS and not task.classes:
        raise ConfigError(
            f"data.partition = {method!r} splits by class, and the targets of task {task.name!r} are no classes; use "
            "iid or quantity."
        )
    return method


def _build_partition(owner: IntArray, parties: int, names: tuple[str, ...]) -> Partition:
    order = np.argsort(owner, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=parties))])
    return Partition(torch.from_numpy(order.astype(np.int64)), torch.from_numpy(starts.astype(np.int64)), names)


def _partition_as_given(dataset: Dataset, settings: Data) -> Partition:
    if dataset.party is None:
        raise DataError(
            f'data.partition = "given", but {dataset.name} does not name the party of each record; add an array '
            "called party, or choose iid, dirichlet, shards or quantity."
        )
    partition = _build_partition(dataset.party.numpy(), len(dataset.party_names), dataset.party_names)
    smallest = int(partition.sizes.argmin())
    if int(partition.sizes[smallest]) < settings.min_examples:
        raise DataError(
            f"party {partition.name(smallest)!r} holds {int(partition.sizes[smallest])} examples, fewer than "
            f"data.min_examples = {settings.min_examples}; lower that, or merge or drop the party."
        )
    return partition


def _build_items(dataset: Dataset) -> tuple[IntArray, _SplitItems]:
    """(the item of each record [n], the items)."""
    classes = dataset.task.classes or 1
    label = dataset.y.numpy() if dataset.task.classes else np.zeros(len(dataset.y), dtype=np.int64)
    if dataset.person is None:
        return np.arange(len(label)), _SplitItems(label, np.ones(len(label), dtype=np.int64), "examples")
    ids = np.unique(dataset.person.numpy(), return_inverse=True)[1].reshape(-1)
    pairs, counts = np.unique(ids * classes + label, return_counts=True)
    person, kind = np.divmod(pairs, classes)
    ranked = np.lexsort((kind, -counts, person))  # a person's most frequent label first, the lowest on ties
    first = np.unique(person[ranked], return_index=True)[1]
    return ids, _SplitItems(kind[ranked][first], np.bincount(ids), "persons")


def _check_feasible(dataset: Dataset, items: _SplitItems, settings: Data, method: str) -> None:
    parties, floor, n, m = settings.parties, settings.min_examples, len(dataset.y), len(items.label)
    if parties < 1 or floor < 1:
        raise ConfigError(f"data.parties = {parties} and data.min_examples = {floor} must both be at least 1.")
    if parties > m:
        raise ConfigError(
            f"data.parties = {parties:,}, but {dataset.name} has only {m:,} {items.what} to share; use at most {m:,}."
        )
    if floor * parties > n:
        raise ConfigError(
            f"data.parties = {parties:,} with data.min_examples = {floor:,} needs {floor * parties:,} examples, and "
            f"{dataset.name} has {n:,}; use at most {max(1, n // floor):,} part{'y' if n // floor < 2 else 'ies'}, or "
            "data.min_examples of at most "
            f"{n // parties:,}."
        )
    if method == "shards" and settings.shards * parties > m:
        raise ConfigError(
            f"data.shards = {settings.shards:,} for each of data.parties = {parties:,} makes "
            f"{settings.shards * parties:,} shards, and {dataset.name} has {m:,} {items.what}; use at most "
            f"{m // parties:,} shards."
        )


# --- assignment: items, settings, randomness -> the party of each item------------------------


def _assign_iid(items: _SplitItems, settings: Data, rng: np.random.Generator) -> IntArray:
    """At random, with sizes that differ by at most one."""
    owner = np.empty(len(items.label), dtype=np.int64)
    owner[rng.permutation(len(owner))] = np.arange(len(owner)) % settings.parties
    return owner


def _assign_by_quantity(items: _SplitItems, settings: Data, rng: np.random.Generator) -> IntArray:
    """At random, with sizes from Dirichlet(alpha)."""
    owner = np.empty(len(items.label), dtype=np.int64)
    sizes = _apportion_counts(len(owner), _sample_dirichlet(settings.alpha, settings.parties, rng))
    owner[rng.permutation(len(owner))] = np.repeat(np.arange(settings.parties), sizes)
    return owner


def _assign_by_label(items: _SplitItems, settings: Data, rng: np.random.Generator) -> IntArray:
    """Each class is split by its own draw from Dirichlet(alpha)."""
    owner = np.empty(len(items.label), dtype=np.int64)
    for members in _shuffle_within_classes(items.label, rng):
        shares = _apportion_counts(len(members), _sample_dirichlet(settings.alpha, settings.parties, rng))
        owner[members] = np.repeat(np.arange(settings.parties), shares)
    return owner


def _assign_shards(items: _SplitItems, settings: Data, rng: np.random.Generator) -> IntArray:
    """Items are sorted by label and cut into equal shards; each party draws the same number of shards."""
    total = settings.shards * settings.parties
    order = np.concatenate(_shuffle_within_classes(items.label, rng))
    shard = np.arange(len(order)) * total // len(order)  # lengths differ by at most one
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = rng.permutation(total)[shard] // settings.shards
    return owner


PARTITIONERS: dict[str, AssignOwnersFn] = {
    "iid": _assign_iid,
    "dirichlet": _assign_by_label,
    "shards": _assign_shards,
    "quantity": _assign_by_quantity,
}
LABEL_PARTITIONS = ("dirichlet", "shards")
"""Partition methods that need classes."""
PARTITIONS = ("auto", *PARTITIONERS, "hashed", "given")
"""Allowed values of data.partition; "auto": given where the data names each record's party, else hashed for private
data, dirichlet for public data with classes, iid for other public data."""


def _shuffle_within_classes(label: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Items of each class, in random order within it."""
    order = rng.permutation(len(label))
    order = order[np.argsort(label[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1)


def _sample_dirichlet(alpha: float, parties: int, rng: np.random.Generator) -> FloatArray:
    shares: FloatArray = rng.dirichlet(np.full(parties, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares
    shares = np.zeros(parties)  # alpha so small that all shares underflow: in the limit one party gets everything
    shares[rng.integers(parties)] = 1.0
    return shares


def _apportion_counts(total: int, shares: FloatArray) -> IntArray:
    """Whole numbers in proportion to the shares that add up to `total` exactly (largest remainders)."""
    exact = total * (shares / shares.sum())
    parts: IntArray = np.floor(exact).astype(np.int64)
    ranked = np.argsort(parts - exact, kind="stable")
    parts[ranked[: total - int(parts.sum())]] += 1
    return parts


# --- the minimum size -------------------------------------------------------------------------


def _rebalance_records(owner: IntArray, weight: IntArray, settings: Data, rng: np.random.Generator) -> IntArray:
    """Move single records so that every party reaches the minimum size.

    Parties above the minimum give random records in proportion to their surplus;
    a party receives records from few others, so that label skew is preserved.
    """
    sizes = np.bincount(owner, minlength=settings.parties)
    need = np.maximum(settings.min_examples - sizes, 0)
    total = int(need.sum())
    if total == 0:
        return owner
    spare = np.maximum(sizes - settings.min_examples, 0)
    # In integers: a party must never give more than its surplus, and rounding must not lose a record.
    give, rest = np.divmod(spare * total, int(spare.sum()))
    give[np.argsort(-rest, kind="stable")[: total - int(give.sum())]] += 1
    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    rank = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner[order]]
    moved = owner.copy()
    moved[order[rank < give[owner[order]]]] = np.repeat(np.arange(settings.parties), need)
    return moved


def _rebalance_persons(owner: IntArray, weight: IntArray, settings: Data, rng: np.random.Generator) -> IntArray:
    """Move whole persons so that every party reaches the minimum size: the largest party gives first, the best fit."""
    floor = settings.min_examples
    moved = owner.copy()
    sizes: list[int] = np.bincount(owner, weights=weight, minlength=settings.parties).astype(np.int64).tolist()
    if min(sizes) >= floor:
        return moved
    by_party = np.lexsort((weight, owner))  # each party's persons, those with the fewest records first
    members = np.split(by_party, np.cumsum(np.bincount(owner, minlength=settings.parties))[:-1])
    donors = [(-size, k) for k, size in enumerate(sizes) if size > floor]
    heapq.heapify(donors)
    lists: dict[int, tuple[list[int], list[int]]] = {}
    for needy in [k for k, size in enumerate(sizes) if size < floor]:
        while sizes[needy] < floor:
            if not donors:
                raise ConfigError(
                    f"data.parties = {settings.parties:,} with data.min_examples = {floor:,} could not be reached by "
                    f"moving whole persons (one has up to {int(weight.max()):,} records); lower either."
                )
            _, donor = heapq.heappop(donors)
            if donor not in lists:
                lists[donor] = (members[donor].tolist(), weight[members[donor]].tolist())
            persons, weights = lists[donor]
            spare, need = sizes[donor] - floor, floor - sizes[needy]
            at = max(bisect_right(weights, min(spare, need)) - 1, 0)
            if not weights or weights[at] > spare:
                continue  # no person here is small enough; the surplus only shrinks, so skip this party from now on
            load = weights.pop(at)
            moved[persons.pop(at)] = needy
            sizes[donor] -= load
            sizes[needy] += load
            heapq.heappush(donors, (-sizes[donor], donor))
    return moved
