"""Private records that are held out for evaluation, apart from public test records, which are scored in the clear."""

from __future__ import annotations

import dataclasses

from fulcrum.data.dataset import Dataset, compute_dataset_fingerprint, holdout
from fulcrum.data.fingerprints import add_record_digests, select_held_out
from fulcrum.errors import ConfigError


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


def keep_training_units(dataset: Dataset, fraction: float) -> Dataset:
    """The records of a party without the units that the keyed hash holds out; fraction 0: all of them.

    The same units are held out again by `hold_out_units`, whatever else the data holds by then.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"--hold-out = {fraction:g} must be at least 0 and below 1.")
    if fraction == 0:
        return dataset
    private = add_record_digests(dataclasses.replace(dataset, public=False))
    part = hold_out_units(private, fraction, 0)
    kept = dataclasses.replace(part, held_out=None, test=dataset.test, public=dataset.public)
    return dataclasses.replace(kept, fingerprint=compute_dataset_fingerprint(kept))
