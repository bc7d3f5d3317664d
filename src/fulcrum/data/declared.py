"""What the data says is the default: settings left at "auto" follow what is declared, never the records' values.

Whether data is private, which party holds a record, and whose record it is, are declared by the data and the user.
`resolve_data_settings` turns "auto" into what they mean, so that a run's record holds plain values.
"""

from __future__ import annotations

import dataclasses
import warnings

from fulcrum.data.dataset import Dataset
from fulcrum.data.fingerprints import shares_records_with_test
from fulcrum.data.partition import LABEL_PARTITIONS, partition_method
from fulcrum.errors import ConfigError, UserNote
from fulcrum.settings.schema import Data, Settings


def resolve_data_settings(settings: Settings, dataset: Dataset) -> tuple[Settings, Dataset]:
    """The settings with plain values for "auto" in partition, unit and randomness; the data set with warnings.

    Raises ConfigError where explicit settings contradict what private data says of its parties.
    """
    method = partition_method(settings.data, dataset)
    notes = [*_check_parties(settings, dataset)]
    unit, randomness = choose_unit(settings, dataset), choose_randomness(settings, dataset)
    if settings.data.partition == "auto" and method in ("iid", "hashed") and dataset.train is not None:
        notes.append(_explain_even_split(dataset))
    if unit == "example" and dataset.train is not None and dataset.train.person is not None:
        notes.append(
            f"privacy.unit = 'example', but {dataset.name} says whose record each is: somebody with k records is "
            "protected k times less than epsilon says; use --unit person to protect persons."
        )
    if not dataset.public and randomness != "secure":
        notes.append(describe_simulation(settings))
    elif not dataset.public and settings.run.diagnostics and dataset.train is not None:
        raise ConfigError(
            f"run.diagnostics = true writes down clip fractions and losses of {dataset.name} without noise, and the "
            "data is private; turn it off, or say data.public = true if everybody may see the data."
        )
    if not dataset.public and shares_records_with_test(dataset):
        # Said to whoever holds the data, and never stored: in a statement it would tell whether a test record trained.
        warnings.warn(
            "Some test records are also training records: test records count as public and are scored in the clear, so "
            "hand over others, or hold some out with data.validation and privacy.evaluation_epsilon.",
            UserNote,
            stacklevel=2,
        )
    resolved = settings.replace(data={"partition": method}, privacy={"unit": unit, "randomness": randomness})
    return resolved, dataclasses.replace(dataset, warnings=(*dataset.warnings, *notes))


def choose_unit(settings: Settings, dataset: Dataset) -> str:
    """privacy.unit, where "auto" means person if the records say whose they are, else example."""
    if settings.privacy.unit != "auto":
        return settings.privacy.unit
    return "person" if dataset.train is not None and dataset.train.person is not None else "example"


def choose_randomness(settings: Settings, dataset: Dataset) -> str:
    """privacy.randomness, where "auto" means secure for private data and seeded for public data.

    A simulated secure aggregation protects nobody, whatever the randomness: "auto" stays seeded there.
    """
    if settings.privacy.randomness != "auto":
        return settings.privacy.randomness
    simulated = dataset.public or settings.privacy.aggregation == "ideal-secagg"
    return "seeded" if simulated else "secure"


def describe_simulation(settings: Settings) -> str:
    """The warning of a run on private data whose noise somebody can know."""
    if settings.privacy.aggregation == "ideal-secagg":
        return (
            "This is a simulation and protects nobody: privacy.aggregation = 'ideal-secagg' is not implemented, so "
            "the server would see every update."
        )
    return (
        "This is a simulation: with privacy.randomness = 'seeded' whoever knows the seed can take the noise off, and "
        "the data is not declared public; use secure for a guarantee, or say data.public = true."
    )


def refuse_without_ledger(dataset: Dataset) -> None:
    """Raise ConfigError for private data where nothing would be charged: studies, comparisons, searches, run_many."""
    if dataset.train is not None and not dataset.public:
        raise ConfigError(
            f"{dataset.name} is private, and a study or comparison trains on it again and again without a ledger that "
            "is charged; say data.public = true if everybody may see the data, or use fulcrum run with --ledger."
        )


def _check_parties(settings: Settings, dataset: Dataset) -> list[str]:
    """Refuse a split that contradicts the parties of private data; for public data, a warning."""
    data, names = settings.data, dataset.party_names
    named = dataset.train is not None and dataset.train.party is not None
    if named and data.partition not in ("auto", "given"):
        what = f"data.partition = {data.partition!r}, but {dataset.name} names the party of each record"
        if not dataset.public:
            raise ConfigError(
                f"{what}: under other names the same people would pay again from a full budget; leave partition at "
                "auto, or say data.public = true if everybody may see the data."
            )
        return [f"{what}; they are split anew, and the file's parties do not train here."]
    if named and data.partition == "auto" and data.parties not in (Data().parties, len(names)):
        raise ConfigError(
            f"data.parties = {data.parties}, but {dataset.name} names {len(names)} parties; leave parties out, or set "
            "data.partition to split the records anew."
        )
    if not dataset.public and data.partition in LABEL_PARTITIONS:
        raise ConfigError(
            f"data.partition = {data.partition!r} splits by the labels, so one label would move other records and "
            "change every party's size; for private data use hashed, iid, quantity or given, or say data.public = true."
        )
    return []


def _explain_even_split(dataset: Dataset) -> str:
    if not dataset.public:
        return (
            f"{dataset.name} names no parties, so a keyed hash of each record (or person) sends it to one of the "
            "simulated parties (data.partition = hashed); an array called party says who holds what."
        )
    return (
        f"The targets of task {dataset.task.name!r} are no classes to split by, so the records are split evenly and at "
        "random over the parties (data.partition = iid)."
    )
