"""Private records that are held out for evaluation, apart from public test records, which are scored in the clear."""

from __future__ import annotations

import dataclasses

from fulcrum.data.dataset import Dataset, compute_dataset_fingerprint, holdout
from fulcrum.data.fingerprints import select_held_out


def hold_out_units(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Hold out a part of the training records: of public data in place of the test set, of private data apart.

    Public: `holdout`, at random by seed. Private: by a keyed hash of each unit, into `Dataset.held_out`; the test set
    is dropped there too, so that tuning never uses it.
    """
    if dataset.public:
        return holdout(dataset, fraction, seed)
    held = select_held_out(dataset, fraction)
    kept = dataclasses.replace(
        dataset,
        train=dataset.records.take(~held),
        test=None,
        held_out=dataset.records.take(held),
    )
    return dataclasses.replace(kept, fingerprint=compute_dataset_fingerprint(kept))
