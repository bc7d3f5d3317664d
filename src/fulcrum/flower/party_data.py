"""A party's own records, and the partition in which it is the only party with any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fulcrum.data import Dataset, Partition, from_arrays, load
from fulcrum.errors import DataError


def own_data(source: str, folder: str = "", classes: int = 0) -> Dataset:
    """A party's own records: what `fulcrum run --data` takes, or an .npz with x and y alone (no test data)."""
    if source.endswith(".npz") and Path(source).is_file():
        with np.load(source, allow_pickle=False) as archive:
            if "x_test" not in archive.files:
                missing = {"x", "y"} - set(archive.files)
                if missing:
                    raise DataError(f"{source} has no array named {missing.pop()}; a party's data needs x and y.")
                x, y = archive["x"], archive["y"]
                person = archive["person"] if "person" in archive.files else None
                known = int(archive["classes"]) if "classes" in archive.files else None
                # A party never evaluates; a Dataset has test data, so one record stands in for it.
                return from_arrays(x, y, x[:1], y[:1], person=person, name=Path(source).name, classes=classes or known)
    return load(source, folder)


def single_party_partition(records: int, client: int, name: str) -> Partition:
    """A partition in which party number `client` holds all `records`; the parties before it hold none."""
    starts = torch.zeros(client + 2, dtype=torch.int64)
    starts[-1] = records
    return Partition(torch.arange(records), starts, (*(f"other-{k}" for k in range(client)), name))
