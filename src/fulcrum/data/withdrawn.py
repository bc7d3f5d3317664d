"""People who withdrew their consent: their records are left out before anything is computed.

The file has one id per line, as the data has it (the first column of a CSV counts; a first line `person` or
`patient_id` is skipped). What was released with their records stays released: the ledger keeps it.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import torch

from fulcrum.data.dataset import Dataset, compute_dataset_fingerprint
from fulcrum.data.records import Records
from fulcrum.data.table.cells import to_text
from fulcrum.data.table.encoding import PERSON_NAMES
from fulcrum.errors import ConfigError, DataError


def read_withdrawn(path: str | Path) -> set[str]:
    """The ids in a file; ConfigError where it cannot be read."""
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig", newline="") as file:
            found = [row[0].strip() for row in csv.reader(file) if row and row[0].strip()]
    except UnicodeDecodeError:
        raise ConfigError(f"data.withdrawn = {str(path)!r} is not text in UTF-8.") from None
    except (OSError, csv.Error) as error:
        words = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"data.withdrawn = {str(path)!r} cannot be read: {words}.") from None
    if found and found[0].lower() in PERSON_NAMES:
        found = found[1:]
    return {to_text(each) for each in found}


def leave_out_withdrawn(dataset: Dataset, path: str) -> Dataset:
    """The data set without the training records of the people in a file; how many, its holder alone is told.

    Ids that nobody has are no error: a list of withdrawals outlives the records.
    """
    if not path or dataset.train is None:
        return dataset
    ids = read_withdrawn(path)
    if dataset.train.person is None:
        raise ConfigError(
            f"data.withdrawn = {path!r} lists persons, and {dataset.name} does not say whose record each is; name the "
            "column with table.person, or give an array called person."
        )
    persons = dataset.train.person
    names = dataset.person_names
    present = torch.unique(persons).tolist()
    gone = [code for code in present if (names[code] if names else str(code)) in ids]
    if not gone:
        return _tell(dataset, "nobody of the list of withdrawn persons has records here.")
    out = torch.isin(persons, torch.tensor(gone))
    if bool(out.all()):
        raise DataError(f"data.withdrawn leaves no records of {dataset.name}.")
    kept = dataclasses.replace(dataset, train=_renumber(dataset, ~out))
    kept = dataclasses.replace(kept, person_names=_keep_names(dataset, ~out))
    _refuse_empty_parties(kept)
    kept = dataclasses.replace(kept, fingerprint=compute_dataset_fingerprint(kept))
    text = f"{len(gone):,} withdrawn persons with {int(out.sum()):,} records were left out."
    if len(gone) < len(ids):
        text += f" Further lines of the list ({len(ids) - len(gone):,}) name nobody who has records here."
    return _tell(kept, text)


def _renumber(dataset: Dataset, kept: torch.Tensor) -> Records:
    """The records that are kept, with persons numbered among themselves where they have names."""
    records = dataset.records.take(kept)
    if not dataset.person_names or records.person is None:
        return records
    codes = np.unique(records.person.numpy(), return_inverse=True)[1].reshape(-1).astype(np.int64)
    return dataclasses.replace(records, person=torch.from_numpy(codes))


def _keep_names(dataset: Dataset, kept: torch.Tensor) -> tuple[str, ...]:
    person = dataset.records.person
    if not dataset.person_names or person is None:
        return ()
    return tuple(dataset.person_names[code] for code in torch.unique(person[kept]).tolist())


def _refuse_empty_parties(dataset: Dataset) -> None:
    """DataError where a party has lost all its records: it must be taken out by whoever runs the federation."""
    party = dataset.records.party
    if party is not None:
        left = torch.bincount(party, minlength=len(dataset.party_names))
        empty = [name for name, count in zip(dataset.party_names, left.tolist(), strict=True) if not count]
        if empty:
            raise DataError(f"data.withdrawn leaves no records of party {empty[0]!r}; leave the party out of the data.")


def _tell(dataset: Dataset, note: str) -> Dataset:
    return dataclasses.replace(dataset, own_notes=(*dataset.own_notes, note))
