"""`fulcrum ledger`: parties, runs, how they add up, and the check of the chain."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fulcrum.cli import main
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger, RunPlan, RunRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        for party, accountant in (("north", "rdp"), ("south", "pld")):
            ledger.enroll(party, 4.0, 1e-5, accountant, "example", "digits")
        record = RunRecord("first", "median", False, True, "seeded", "fast", "plain", "example", "s", "d", "t", True)
        ledger.register_run(record, dict.fromkeys(("north", "south"), RunPlan((Gaussian(0.05, 1.0, 50),), 1e-5)))
        for run in ("first", "old"):
            ledger.reserve(run, 0, {"north": [Gaussian(0.05, 1.0)]})
        ledger.reserve("first", 0, {"south": [Gaussian(0.05, 1.0)]})
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    return code, *capsys.readouterr()


def test_runs_are_shown_with_what_they_were(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "ledger", str(path))
    assert code == 0
    first, old = (next(line.split() for line in out.splitlines() if line.startswith(run)) for run in ("first", "old"))
    assert first[1:5] == ["median", "NO", "seeded,", "simulation"]
    assert old[1:4] == ["unknown"] * 3
    assert "north: Runs add up by Renyi DP at order" in out
    assert "south: The run counts as its whole plan, fixed in advance and priced by pld" in out


def test_json_has_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(said(capsys, "ledger", str(path), "--json")[1])
    with Ledger.open(path) as ledger:
        assert {row["name"]: row["epsilon"] for row in told["parties"]} == ledger.epsilons()
        assert told["ledger"] == vars(ledger.head())
    assert {row["id"]: (row["rule"], row["sound"]) for row in told["records"]} == {
        "first": ("median", False),
        "old": ("unknown", False),
    }
    only = json.loads(said(capsys, "ledger", str(path), "--json", "--party", "south")[1])
    assert [row["id"] for row in only["records"]] == ["first"]


def test_verify_says_what_was_checked_and_refuses_a_changed_file(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ledger.open(path) as ledger:
        head = ledger.head()
    code, out, _ = said(capsys, "ledger", str(path), "--verify")
    assert code == 0
    assert f"{head.sequence} rows" in out
    assert head.digest in out
    assert json.loads(said(capsys, "ledger", str(path), "--verify", "--json")[1])["verified"]
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DROP TRIGGER budgets_UPDATE")
        db.execute("UPDATE budgets SET epsilon = 40")
    code, out, err = said(capsys, "ledger", str(path), "--verify")
    assert (code, out) == (2, "")
    assert "row 1 of budgets" in err
