"""Made-up records of the shape that settings declare, as a file that a search can train on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.data.made_up import VARIATIONS, can_make_up, make_up_dataset, read_data_facts
from fulcrum.errors import ConfigError
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.settings.schema import Settings

MADE_UP_FILE = "made-up.npz"
TEST_RECORDS = 1_000
MIDDLE = next(each for each in VARIATIONS if each.name == "middle")


def write_made_up_records(settings: Settings, folder: Path) -> dict[str, Any]:
    """Write made-up records into folder/made-up.npz, and return the settings that make a run train on them.

    They have the shape, task, number of units and parties of the run that the settings describe; no value of a record
    is looked at, so it costs no privacy. The same settings give the same records.
    """
    federation = prepare_unrehearsed(settings.replace(clip={"rehearse": False}))
    dataset, plan = federation.problem.dataset, federation.plan
    facts = read_data_facts(dataset, federation.problem.model, settings.task.class_balance)
    records = dataset.train if dataset.train is not None else dataset.test_records
    if isinstance(records.x, Mapping) or not can_make_up(facts):
        raise ConfigError(
            f"--made-up: no records like those of {dataset.name} can be made up; search on a public source instead "
            "(data.source), or on yours with --ledger."
        )
    made = make_up_dataset(facts, MIDDLE, int(plan.sizes.sum()), TEST_RECORDS, seed=0)
    train, test = made.records, made.test_records
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MADE_UP_FILE
    arrays = {"x": train.x, "y": train.y, "x_test": test.x, "y_test": test.y}
    np.savez(file, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
    partition = settings.data.partition if settings.data.partition in ("iid", "dirichlet", "shards") else "iid"
    return {
        "data.source": str(file),
        "data.public": True,
        "data.partition": partition,
        "data.parties": plan.parties,
    }
