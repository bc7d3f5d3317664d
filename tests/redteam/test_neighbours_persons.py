"""Neighbours of finding 15: records whose persons were left out, or renamed, came with a full budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulcrum.data import Dataset, from_arrays
from fulcrum.errors import BudgetError
from fulcrum.runs import execute, prepare
from fulcrum.settings.schema import Settings

X = np.random.default_rng(1).normal(size=(80, 3)).astype(np.float32)
PERSONS = np.arange(80) // 2
HOSPITALS = np.array(["north", "south"])[PERSONS % 2]
WITH: dict[str, Any] = {"person": PERSONS, "party": HOSPITALS}


def patients(n: int = 80, **more: Any) -> Dataset:
    return from_arrays(X[:n], np.arange(n) % 2, classes=2, **{name: value[:n] for name, value in more.items()})


def train(data: Dataset, folder: Path, unit: str = "auto") -> None:
    settings = Settings().replace(
        data={"min_examples": 2},
        model={"name": "linear"},
        train={"rounds": 2, "rate": 0.5},
        privacy={"epsilon": 1.0, "budget": 4.0, "unit": unit},
        run={"device": "cpu", "ledger": str(folder.parent / "kept.sqlite")},
    )
    execute(prepare(settings, data), folder)


@pytest.mark.parametrize(
    ("first", "second", "unit"),
    [
        (WITH, {}, "auto"),
        ({}, WITH, "auto"),
        (WITH, {"party": np.char.add(HOSPITALS, "-2")}, "auto"),
        (WITH, {"party": HOSPITALS}, "example"),
        ({"party": HOSPITALS}, WITH, "example"),
        (WITH, {**WITH, "person": PERSONS + 1000}, "auto"),
        (WITH, {"person": PERSONS + 1000, "party": np.char.add(HOSPITALS, "-2")}, "auto"),
    ],
    ids=["stripped", "added", "renamed", "same-party", "same-party-added", "other-ids", "other-ids-and-parties"],
)
def test_the_same_records_get_no_second_budget(
    first: dict[str, Any], second: dict[str, Any], unit: str, tmp_path: Path
) -> None:
    train(patients(**first), tmp_path / "first", unit)
    with pytest.raises(BudgetError, match=r"records of party .* are in (this )?ledger"):
        train(patients(**second), tmp_path / "second", unit)
    assert not (tmp_path / "second").exists()


def test_the_same_people_with_fewer_or_more_records_are_welcome(tmp_path: Path) -> None:
    for name, n in (("first", 70), ("second", 80), ("third", 60)):
        train(patients(n, **WITH), tmp_path / name)
