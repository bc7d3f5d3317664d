"""A pool of shadow federations: who holds which record, and in which of the federations it is a member.

Every party has its candidates and its controls, drawn from the same records. A candidate is a member of each federation
with probability 1/2, by a coin of its own: the number of federations that hold it says nothing about any one of them.
Controls, the non-members' twins, are never members of any federation, and have coins all the same: an attack that
tells their coins apart is wrong. Common records are in every federation and are not attacked: with them a party can be
as large as models need, however few of its records take turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fulcrum.data import Dataset, count_units_per_party
from fulcrum.data.dataset import compute_dataset_fingerprint
from fulcrum.data.declared import refuse_without_ledger
from fulcrum.data.partition import Partition
from fulcrum.engines import find_engine
from fulcrum.errors import ConfigError, DataError
from fulcrum.privacy.plan import make_plan
from fulcrum.rng import make_randomness, numpy_generator
from fulcrum.settings.schema import Settings
from fulcrum.training.client_level import make_local_problem
from fulcrum.training.federation import Federation
from fulcrum.training.problem import get_private_seed, identify_releases

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
SEED_STRIDE = 1_000_003
"""Private seeds of the shadows of one pool are seed * SEED_STRIDE + number: other pools have others."""


@dataclass(frozen=True)
class PoolSize:
    """How large a pool is. candidates, controls, common: records per party, on average; shadows: federations.

    known: how many of a party's common records the server has on its list, beside all candidates; None: all.
    """

    shadows: int = 64
    candidates: int = 100
    controls: int = 20
    common: int = 0
    known: int | None = None

    @property
    def per_party(self) -> int:
        """Records of a party, members or not."""
        return self.candidates + self.controls + self.common

    def check(self) -> None:
        """ConfigError where an attack could not be measured."""
        if self.shadows < 4:
            raise ConfigError(f"shadows = {self.shadows} leaves too few to calibrate on; take at least 4.")
        if self.candidates < 4 or self.controls < 1:
            raise ConfigError(
                f"candidates = {self.candidates} and controls = {self.controls} per party are too few; take at least "
                "4 candidates and 1 control."
            )
        if self.common < 0:
            raise ConfigError(f"common = {self.common} records per party; give 0 or more.")


@dataclass(frozen=True, eq=False)
class ShadowPool:
    """The records of a pool, N in all, and the coins of S federations.

    base: a federation over all of the records. party [N]: who holds each record. control [N]: never a member. common
    [N]: always a member. coins [S, N]: membership of candidates; of the others, coins without a meaning.
    """

    base: Federation
    party: IntArray
    control: BoolArray
    common: BoolArray
    coins: BoolArray

    @property
    def members(self) -> BoolArray:
        """Which records each federation trains on: [S, N]."""
        held: BoolArray = (self.coins & ~self.control) | self.common
        return held

    @property
    def watched(self) -> IntArray:
        """The rows that are attacked, in order: candidates and controls."""
        return np.flatnonzero(~self.common)

    @property
    def parties(self) -> int:
        """Number of parties K."""
        return self.base.problem.partition.parties


def take_pool_records(dataset: Dataset, settings: Settings, size: PoolSize, seed: int) -> Dataset:
    """The records of a pool: a random part of the training records, the same for the same seed."""
    size.check()
    refuse_without_ledger(dataset)
    if dataset.person is not None:
        raise DataError(f"{dataset.name} has several records per person; membership is attacked record by record.")
    wanted, have = settings.data.parties * size.per_party, len(dataset.records)
    if wanted > have:
        raise ConfigError(
            f"{settings.data.parties} parties with {size.candidates} candidates, {size.controls} controls and "
            f"{size.common} common records each need {wanted:,} records, and {dataset.name} has {have:,}; take at most "
            f"{have // settings.data.parties} per party."
        )
    return _take_rows(dataset, order_records(dataset, seed)[:wanted])


def order_records(dataset: Dataset, seed: int) -> IntArray:
    """The training records in random order: a pool has the first of them, and the rest are in no federation."""
    order: IntArray = numpy_generator(seed, "attack", "pool").permutation(len(dataset.records))
    return order


def _take_rows(dataset: Dataset, rows: IntArray) -> Dataset:
    part = dataclasses.replace(dataset, train=dataset.records.take(torch.from_numpy(np.sort(rows))))
    return dataclasses.replace(part, fingerprint=compute_dataset_fingerprint(part))


def make_pool(base: Federation, size: PoolSize, seed: int) -> ShadowPool:
    """The pool over the parties of a federation that was prepared on all of the pool's records."""
    partition = base.problem.partition
    party = np.zeros(len(partition.order), dtype=np.int64)
    control, common = (np.zeros(len(partition.order), dtype=bool) for _ in range(2))
    for k in range(partition.parties):
        rows = partition.indices(k).numpy()
        party[rows] = k
        chosen = numpy_generator(seed, "attack", "controls", k).permutation(rows)
        controls = max(1, round(size.controls / size.per_party * len(rows)))
        control[chosen[:controls]] = True
        common[chosen[controls : controls + round(size.common / size.per_party * len(rows))]] = True
    coins = numpy_generator(seed, "attack", "coins").random((size.shadows, len(party))) < 0.5
    pool = ShadowPool(base, party, control, common, coins)
    for k in range(pool.parties):
        if not pool.members[:, party == k].any(axis=1).all():
            raise ConfigError(f"party {k} would have no record in one of the federations; take more candidates.")
    return pool


def make_shadows(pool: ShadowPool, numbers: Sequence[int], seed: int) -> list[Federation]:
    """The federations of these numbers, each over its own members; data, model and initial weights are shared."""
    return [_make_shadow(pool.base, pool.members[s], seed * SEED_STRIDE + s) for s in numbers]


def _make_shadow(base: Federation, members: BoolArray, private_seed: int) -> Federation:
    settings = base.settings.replace(privacy={"seed": private_seed})
    problem, whole = base.problem, base.problem.partition
    parts = [whole.indices(k)[torch.from_numpy(members[whole.indices(k).numpy()])] for k in range(whole.parties)]
    starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
    partition = Partition(torch.cat(parts), starts, whole.names)
    plan = make_plan(
        settings, partition, count_units_per_party(problem.dataset, partition, settings.privacy.unit), problem.rule
    )
    identity = identify_releases(settings, problem.dataset, partition, problem.model, problem.layout)
    randomness = make_randomness(settings.privacy.randomness, get_private_seed(settings), identity)
    problem = dataclasses.replace(problem, partition=partition, randomness=randomness)
    engine = find_engine(settings.run.engine, make_local_problem(problem))
    return dataclasses.replace(base, settings=settings, problem=problem, plan=plan, engine=engine)
