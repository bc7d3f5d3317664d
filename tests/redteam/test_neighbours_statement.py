"""Neighbours of findings 14, 15 and 17: what a statement says after kill -9, over slices, and under another key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulcrum.data import Dataset, from_arrays
from fulcrum.data.fingerprints import name_record_key
from fulcrum.errors import ConfigError
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs import execute, prepare
from fulcrum.settings.schema import Settings
from support.stopped_runs import kill_run, resume, stop_run

X = np.random.default_rng(1).normal(size=(80, 3)).astype(np.float32)


def patients() -> Dataset:
    return from_arrays(X, np.arange(80) % 2, party=np.array(["north", "south"])[np.arange(80) % 2], classes=2)


def settings(ledger: Path | str, **sections: dict[str, Any]) -> Settings:
    base = Settings().replace(
        data={"min_examples": 2},
        model={"name": "linear"},
        train={"rounds": 2, "rate": 0.5},
        privacy={"epsilon": 2.0, "budget": 4.0},
        run={"device": "cpu", "ledger": str(ledger)},
    )
    return base.replace(**sections)


def test_a_killed_run_leaves_no_statement_that_says_less_than_its_rounds(tmp_path: Path) -> None:
    (killed,) = kill_run(tmp_path / "run", 5, randomness="secure")
    assert not (killed / "privacy.json").exists()
    assert not (killed / "PRIVACY.md").exists()
    resume(killed)
    assert json.loads((killed / "privacy.json").read_text())["epsilon"] > 0


def test_a_run_that_goes_on_leaves_no_statement_of_before(tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", randomness="secure")
    assert (folder / "PRIVACY.md").exists()

    def killed(_: object) -> None:
        assert not (folder / "PRIVACY.md").exists()

    resume(folder, on_round=killed)
    assert (folder / "PRIVACY.md").exists()


def test_deltas_that_the_ledger_adds_up_are_added_up_in_the_statement(tmp_path: Path) -> None:
    terms = settings(tmp_path / "kept.sqlite", privacy={"accountant": "pld", "budget_delta": 2e-5})
    for name in ("first", "second"):
        execute(prepare(terms, patients()), tmp_path / name)
    with Ledger.open(tmp_path / "kept.sqlite") as ledger:
        spent = ledger.cost("north")
    facts = json.loads((tmp_path / "second" / "privacy.json").read_text())
    assert spent.delta == pytest.approx(2e-5)
    assert (facts["epsilon"], facts["delta"]) == (spent.epsilon, spent.delta)
    assert "delta = 2e-05" in (tmp_path / "second" / "PRIVACY.md").read_text()


def test_another_key_of_the_records_gives_no_second_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = settings(tmp_path / "kept.sqlite")
    execute(prepare(terms, patients()), tmp_path / "first")
    before = name_record_key()
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "another.key"))
    assert name_record_key() != before
    with pytest.raises(ConfigError, match=r"key by which ledger .* knows the records again is another one"):
        execute(prepare(terms, patients()), tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_what_held_out_units_pay_is_not_in_the_trained_units_pld_value(tmp_path: Path) -> None:
    terms = settings("", data={"validation": 0.3}, privacy={"epsilon": 1.0, "budget": None, "evaluation_epsilon": 8.0})
    summary = execute(prepare(terms, patients()), tmp_path / "run").summary
    facts = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert summary["epsilon_pld"] == facts["epsilon_pld"] < 1
