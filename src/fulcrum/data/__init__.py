"""Data: sources, download, partition over parties, Poisson sampling.

load("mnist") -> Dataset        from_arrays(x, y, x_test, y_test) -> Dataset
holdout(dataset, 0.1, seed)     split(dataset, settings.data, seed) -> Partition
featured(dataset, settings.data, device) -> Dataset of fixed, public features
party_of(dataset, partition, k, "example") -> Party
sample_units(randomness, key, party, rate) -> rows, slots, count
available(), verify(name), fetch(name): what is on this machine, and how to get the rest
"""

from __future__ import annotations

from fulcrum.data.dataset import Dataset, from_arrays, holdout
from fulcrum.data.features import featured
from fulcrum.data.partition import Partition, partition_method, split
from fulcrum.data.sampling import Party, party_of, sample_units, unit_counts
from fulcrum.data.sources import SOURCES, load, register_source
from fulcrum.data.sources.public.fetch import fetch
from fulcrum.data.sources.public.registry import search_folders, user_cache
from fulcrum.data.sources.public.verify import Availability, available, verify

__all__ = [
    "SOURCES",
    "Availability",
    "Dataset",
    "Partition",
    "Party",
    "available",
    "featured",
    "fetch",
    "from_arrays",
    "holdout",
    "load",
    "partition_method",
    "party_of",
    "register_source",
    "sample_units",
    "search_folders",
    "split",
    "unit_counts",
    "user_cache",
    "verify",
]
