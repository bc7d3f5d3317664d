"""A data set as one frozen value: its task, its records, and what may be known of them. `arrays.py` makes one."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulcrum.data.records import ModelInputs, Records, list_input_tensors, map_inputs
from fulcrum.data.table.schema import Schema
from fulcrum.data.tasks import Task
from fulcrum.errors import ConfigError, DataError
from fulcrum.rng import numpy_generator
from fulcrum.settings.schema import TaskSettings
from fulcrum.types import make_short_repr


@dataclass(frozen=True, eq=False)
class Dataset:
    """The task, the training records, and the public test records.

    train is None without training records (a coordinator), test is None without test records.
    Values are scaled by public constants only, never by statistics of the records. party_names: names of the parties
    in the records. warnings: messages for the user. fingerprint: short hash of all records and the task, in memory only
    where data is private (`fingerprints.compute_keyed_fingerprint` is what may be stored).
    task_settings: the settings of the task; None if a Task was given.

    public: whether everybody may see the training records (named public sources, or declared so); otherwise nothing
    but noised releases may depend on them. test: public records, scored in the clear. held_out: private records that
    were held out; scoring them is a release (`privacy.evaluation`). person_names: text ids that `person` indexes.
    inferred: what was read off private targets because it is not declared; training then refuses.

    schema: the table's columns, where the records come from one; it is kept with the model. own_notes: sentences that
    follow from private values (how many were clipped, ...): shown to whoever holds the data, never stored or sent.
    """

    __repr__ = make_short_repr

    name: str
    task: Task
    train: Records | None
    test: Records | None = None
    party_names: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=(), repr=False)
    fingerprint: str = field(default="", repr=False)
    task_settings: TaskSettings | None = None
    public: bool = False
    held_out: Records | None = None
    person_names: tuple[str, ...] = field(default=(), repr=False)
    inferred: str = field(default="", repr=False)
    schema: Schema | None = None
    own_notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def records(self) -> Records:
        """The training records; DataError if there are none."""
        if self.train is None:
            raise DataError(f"{self.name} has no training records; add x and y.")
        return self.train

    @property
    def test_records(self) -> Records:
        """The test records; DataError if there are none."""
        if self.test is None:
            raise DataError(f"{self.name} has no test set; add x_test and y_test, public records to evaluate on.")
        return self.test

    @property
    def sample(self) -> Records:
        """Records that show shapes and types: the training records, else the test records."""
        return self.train if self.train is not None else self.test_records

    @property
    def shape(self) -> Any:
        """Shape of one record's input, a tuple; one per name where a record has several inputs."""
        return self.sample.shape

    # Shortcuts for records with one input.

    @property
    def x(self) -> Any:
        """Inputs of the training records [n, ...]."""
        return self.records.x

    @property
    def y(self) -> Tensor:
        """Targets of the training records [n, ...]."""
        return self.records.y

    @property
    def x_test(self) -> Any:
        """Inputs of the test records."""
        return self.test_records.x

    @property
    def y_test(self) -> Tensor:
        """Targets of the test records."""
        return self.test_records.y

    @property
    def person(self) -> Tensor | None:
        """The person of each training record."""
        return self.records.person

    @property
    def party(self) -> Tensor | None:
        """The party of each training record."""
        return self.records.party

    @property
    def classes(self) -> int:
        """Number of classes, or number of outputs where targets are not classes."""
        return self.task.classes or self.task.outputs

    def with_changes(self, **changes: Any) -> Dataset:
        """A copy with some of x, y, person, party, x_test, y_test and party_test replaced; nothing is checked again."""
        train = {name: value for name, value in changes.items() if not name.endswith("_test")}
        test = {name.removesuffix("_test"): value for name, value in changes.items() if name.endswith("_test")}
        for part in (train, test):
            if "x" in part:
                part["digests"] = None  # those of the former inputs
        changed = dataclasses.replace(
            self,
            train=dataclasses.replace(self.records, **train) if train else self.train,
            test=dataclasses.replace(self.test_records, **test) if test else self.test,
        )
        # Other records must not pass for these: runs, their noise and their ledgers know data by its fingerprint.
        return dataclasses.replace(changed, fingerprint=compute_dataset_fingerprint(changed))

    def with_float_inputs(self) -> Dataset:
        """The same records with integer inputs as float32, for models that take numbers."""

        def numbers(records: Records | None) -> Records | None:
            return None if records is None else dataclasses.replace(records, x=map_inputs(Tensor.float, records.x))

        if not self.has_integers:
            return self
        floats = dataclasses.replace(
            self, train=numbers(self.train), test=numbers(self.test), held_out=numbers(self.held_out)
        )
        # As if saved as float32: the fingerprint describes the data used for training.
        return dataclasses.replace(floats, fingerprint=compute_dataset_fingerprint(floats))

    @property
    def has_integers(self) -> bool:
        """Whether an input holds integers, such as token ids."""
        return not all(part.is_floating_point() for part in list_input_tensors(self.sample.x))


def refuse_inferred_task(data: Dataset) -> None:
    """Raise DataError where private data declares too little: what everybody sees must not follow from its labels."""
    if not data.public and data.inferred:
        raise DataError(
            f"{data.name} is private, and {data.inferred} would be read off its targets; declare task.classes (in "
            "Python or a file also classes), hand over y_test, or say data.public = true if everybody may see the data."
        )


def declare_public(data: Dataset) -> Dataset:
    """The same records, which the user declares that everybody may see (data.public)."""
    return dataclasses.replace(data, public=True)


def compute_dataset_fingerprint(data: Dataset) -> str:
    """16 hexadecimal digits that change when any record, target, id, party or the task does."""
    task = "" if data.task.name == "classification" else f"|{data.task.name}"
    digest = hashlib.blake2b(f"{data.classes}|{data.party_names}{task}".encode(), digest_size=8)
    for part in _list_dataset_tensors(data):
        if part is None:
            digest.update(b"none")
        else:
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def _list_dataset_tensors(data: Dataset) -> list[Tensor | None]:
    """All tensors of a data set, in an order that is compatible with old run folders."""
    found: list[Tensor | None] = []
    for records in (data.train, data.test):
        found += [None, None] if records is None else [*_list_input_tensors(records.x), records.y]
    train, test = data.train, data.test
    found += [train.person if train else None, train.party if train else None]
    found = found if test is None or test.party is None else [*found, test.party]
    held = data.held_out
    return found if held is None else [*found, *_list_input_tensors(held.x), held.y, held.person, held.party]


def _list_input_tensors(x: ModelInputs) -> list[Tensor]:
    """The tensors of the inputs, in the order of their names."""
    return [x] if isinstance(x, Tensor) else [x[name] for name in sorted(x)]


def holdout(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Hold out a random part of the training records and evaluate on it instead of the test set.

    fraction in (0, 1) of the records, to the nearest record; whole persons where there are person ids
    (then at least that fraction). The original test set is dropped, so that tuning never
    uses it. The same seed gives the same part.
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(f"data.validation = {fraction!r} is out of range; it must lie between 0 and 1.")
    train = dataset.records
    n = len(train)
    ids = np.arange(n) if train.person is None else np.unique(train.person.numpy(), return_inverse=True)[1]
    sizes = np.bincount(ids)  # records of each person
    if len(sizes) < 2:
        what = "example" if train.person is None else "person"
        raise DataError(f"{dataset.name} has a single {what}; holding out a part needs at least two.")
    order = numpy_generator(seed, "holdout").permutation(len(sizes))
    wanted = max(1, round(fraction * n))
    taken = 1 + int(np.searchsorted(np.cumsum(sizes[order]), wanted))
    held = np.zeros(len(sizes), dtype=bool)
    held[order[: min(taken, len(sizes) - 1)]] = True
    out = torch.from_numpy(held[ids])
    warning = f"{int(out.sum())} held-out records replace the test set; they are evaluated on without noise."
    kept = dataclasses.replace(
        dataset,
        train=train.take(~out),
        test=dataclasses.replace(train.take(out), person=None),
        warnings=(*dataset.warnings, warning),
    )
    return dataclasses.replace(kept, fingerprint=compute_dataset_fingerprint(kept))
