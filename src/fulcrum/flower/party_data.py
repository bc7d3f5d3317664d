"""A party's own records, and the partition in which it is the only party with any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from fulcrum.data import Dataset, Partition, build_party_data, load
from fulcrum.data.dataset import compute_dataset_fingerprint
from fulcrum.errors import DataError
from fulcrum.flower.task_terms import declare_task, same_task
from fulcrum.settings.schema import TaskSettings

LoadRecords = Callable[[TaskSettings], Dataset]
"""Loads a party's own records, with targets checked by the task of its terms."""


def load_party_data(source: str, folder: str = "", task: TaskSettings | None = None) -> Dataset:
    """A party's own records: what `fulcrum run --data` takes; an .npz needs x and y, no test records.

    task: what the party agreed to. Raises DataError, for the party alone, where the records do not fit it.
    """
    return check_task(load(source, folder, task=task, need=("train",)), task or TaskSettings())


def check_task(dataset: Dataset, agreed: TaskSettings) -> Dataset:
    """The records, or a DataError where they declare another task than the agreed one."""
    declared = declare_task(dataset)
    if not same_task(declared, agreed):
        raise DataError(
            f"{dataset.name} declares the task {declared}, and the terms say {agreed}; leave the task to the terms."
        )
    return dataset


def population_fingerprint(dataset: Dataset) -> str:
    """The fingerprint by which a party's ledger knows the records.

    Version 0.1 used the first training record as the test set if there was none; the fingerprint is still
    computed that way, so that old ledgers stay valid.
    """
    if dataset.test is not None:
        return dataset.fingerprint
    first = dataclasses.replace(dataset.records.take(torch.arange(1)), person=None, party=None)
    return compute_dataset_fingerprint(dataclasses.replace(dataset, test=first))


def take_part(dataset: Dataset, rows: torch.Tensor, name: str) -> Dataset:
    """The training records of one simulated party, out of the data of all; no test records."""
    own = dataclasses.replace(dataset.records.take(rows), party=None)
    part = dataclasses.replace(dataset, name=name, train=own, test=None, party_names=())
    return dataclasses.replace(part, fingerprint=compute_dataset_fingerprint(part))


def count_units(dataset: Dataset, unit: str) -> int:
    """The number of units n_k: this party's examples or persons."""
    return build_party_data(dataset, make_single_party_partition(len(dataset.y), 0, dataset.name), 0, unit).units


def make_single_party_partition(records: int, client: int, name: str) -> Partition:
    """A partition in which party number `client` holds all `records`; the parties before it hold none."""
    starts = torch.zeros(client + 2, dtype=torch.int64)
    starts[-1] = records
    return Partition(torch.arange(records), starts, (*(f"other-{k}" for k in range(client)), name))
