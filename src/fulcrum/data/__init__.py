"""Data: sources, download, partition over parties, Poisson sampling.

load("mnist") -> Dataset        from_arrays(x, y, x_test, y_test) -> Dataset
holdout(dataset, 0.1, seed)     split(dataset, settings.data, seed) -> Partition
compute_features(dataset, settings.data, device) -> Dataset of fixed, public features
build_party_data(dataset, partition, k, "example") -> PartyData
poisson_sample_units(randomness, key, party, rate) -> rows, slots, count
list_available_datasets(), verify_dataset(name), fetch(name): which data sets are here, and how to get the others
"""

from __future__ import annotations

from fulcrum.data.dataset import Dataset, from_arrays, holdout
from fulcrum.data.features import compute_features
from fulcrum.data.partition import Partition, partition_method, split
from fulcrum.data.sampling import PartyData, build_party_data, count_units_per_party, poisson_sample_units
from fulcrum.data.sources import SOURCES, load, register_source
from fulcrum.data.sources.public.fetch import fetch
from fulcrum.data.sources.public.registry import search_folders, user_cache_folder
from fulcrum.data.sources.public.verify import DatasetAvailability, list_available_datasets, verify_dataset

__all__ = [
    "SOURCES",
    "Dataset",
    "DatasetAvailability",
    "Partition",
    "PartyData",
    "build_party_data",
    "compute_features",
    "count_units_per_party",
    "fetch",
    "from_arrays",
    "holdout",
    "list_available_datasets",
    "load",
    "partition_method",
    "poisson_sample_units",
    "register_source",
    "search_folders",
    "split",
    "user_cache_folder",
    "verify_dataset",
]
