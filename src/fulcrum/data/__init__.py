"""Data: sources, download, partition over parties, Poisson sampling.

load("mnist") -> Dataset        from_arrays(x, y, x_test, y_test) -> Dataset
holdout(dataset, 0.1, seed)     split(dataset, settings.data, seed) -> Partition
compute_features(dataset, settings.data, device) -> Dataset of fixed, public features
build_party_data(dataset, partition, k, "example") -> PartyData
poisson_sample_units(randomness, key, party, rate) -> rows, slots, count
Schema.read("patients.schema.toml"); make_table_dataset(table, schema) -> Dataset; read_object(frame, ...) -> Dataset
list_available_datasets(), verify_dataset(name), fetch(name): which data sets are here, and how to get the others
"""

from __future__ import annotations

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset, holdout
from fulcrum.data.features import compute_features
from fulcrum.data.partition import Partition, partition_method, split
from fulcrum.data.sampling import PartyData, build_party_data, count_units_per_party, poisson_sample_units
from fulcrum.data.sources import SOURCES, load, register_source
from fulcrum.data.sources.objects import read_object
from fulcrum.data.sources.public.fetch import fetch
from fulcrum.data.sources.public.registry import search_folders, user_cache_folder
from fulcrum.data.sources.public.verify import DatasetAvailability, list_available_datasets, verify_dataset
from fulcrum.data.sources.tables import make_table_dataset
from fulcrum.data.table import Column, Schema

__all__ = [
    "SOURCES",
    "Column",
    "Dataset",
    "DatasetAvailability",
    "Partition",
    "PartyData",
    "Schema",
    "build_party_data",
    "compute_features",
    "count_units_per_party",
    "fetch",
    "from_arrays",
    "holdout",
    "list_available_datasets",
    "load",
    "make_table_dataset",
    "partition_method",
    "poisson_sample_units",
    "read_object",
    "register_source",
    "search_folders",
    "split",
    "user_cache_folder",
    "verify_dataset",
]
