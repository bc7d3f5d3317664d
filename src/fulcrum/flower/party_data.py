"""A party's own records, and the partition in which it is the only party with any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fulcrum.data import Dataset, Partition, build_party_data, load
from fulcrum.data.dataset import compute_dataset_fingerprint
from fulcrum.data.records import Records, map_inputs
from fulcrum.data.tasks import Task, make_task
from fulcrum.errors import DataError
from fulcrum.flower.task_terms import declare_task, same_task
from fulcrum.rng import torch_generator
from fulcrum.settings.schema import Table, TaskSettings

LoadRecords = Callable[[TaskSettings], Dataset]
"""Loads a party's own records, with targets checked by the task of its terms."""


def load_party_data(
    source: str, folder: str = "", task: TaskSettings | None = None, table: Table | None = None
) -> Dataset:
    """A party's own records: what `fulcrum run --data` takes; an .npz needs x and y, no test records.

    task: what the party agreed to. table: the columns of a table. Raises DataError, for the party alone, where the
    records do not fit it.
    """
    return check_task(load(source, folder, task=task, need=("train",), table=table), task or TaskSettings())


def check_task(dataset: Dataset, agreed: TaskSettings) -> Dataset:
    """The records, or a DataError where they declare another task than the agreed one.

    A task's form (number of outputs, dimensions of targets) must follow from the terms and the targets' shape, since
    others get to know it.
    """
    declared = declare_task(dataset)
    if not same_task(declared, agreed):
        raise DataError(
            f"{dataset.name} declares the task {declared}, and the terms say {agreed}; leave the task to the terms."
        )
    form = make_stand_in(dataset).records.y.numpy()
    blind = dataset.task if dataset.task_settings is None else make_task(dataset.task_settings, [form])
    if _describe_form(blind) != _describe_form(dataset.task):
        raise DataError(
            f"the task {dataset.task.name!r} has {dataset.task.outputs} outputs for these targets and {blind.outputs} "
            "for others of the same shape: its form must follow from the terms; declare task.classes."
        )
    return dataset


def _describe_form(task: Task) -> tuple[Any, ...]:
    """What others get to know about a task (`task_fingerprint`)."""
    return task.name, task.outputs, task.classes, task.target_dims, task.sequence


STAND_IN_RECORDS = 8


def make_stand_in(dataset: Dataset) -> Dataset:
    """Records of the same shapes and types, with values that say nothing about the party's: what others get to know
    about model and task is made from these. Whole numbers (tokens, labels) are 0."""
    rows = dataset.records.take(torch.zeros(STAND_IN_RECORDS, dtype=torch.int64))
    generator = torch_generator(0, "stand-in")

    def replace(values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return torch.zeros_like(values)
        return torch.randn(values.shape, generator=generator, dtype=torch.float32).to(values.dtype)

    blind = Records(map_inputs(replace, rows.x), torch.zeros_like(rows.y))
    return dataclasses.replace(dataset, train=blind, test=None, party_names=())


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
