"""Finding 6: a statement over a kept ledger takes the worst of the runs that it covers.

At 243f1c8 an unsound run with seed 0, then a secure `moo` in the same ledger, gave guarantee "yes" and "nothing can be
replayed": the statement looked at its own run only.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import fulcrum
from support.federations import toy_data

TERMS: dict[str, Any] = {"parties": 2, "partition": "iid", "rounds": 3, "rate": 0.5, "model": "linear", "sigma": 8.0}

RUNS: dict[str, dict[str, Any]] = {
    "secure": {"randomness": "secure"},
    "fast": {"randomness": "secure", "privacy": {"arithmetic": "fast"}},
    "seeded": {"randomness": "seeded"},
    "unsound": {"randomness": "secure", "method": "moo-paper-batch"},
    "none": {"randomness": "secure", "method": "none", "sigma": None},
}
LEVELS = {"secure": "yes", "fast": "yes", "seeded": "simulation", "unsound": "nominal", "none": "none"}
"""What a run alone is worth, from best to worst."""


def state(folder: Path, ledger: Path | None, seed: int = 0, **names: Any) -> dict[str, Any]:
    """The statement of a run."""
    kept: dict[str, Any] = {} if ledger is None else {"ledger": str(ledger)}
    names = {**TERMS, **names, "privacy": {"seed": seed, **names.get("privacy", {})}}
    fulcrum.train(toy_data(), out=folder, **kept, **names)
    found: dict[str, Any] = json.loads((folder / "privacy.json").read_text())
    return found


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_alone_is_worth_what_it_is(kind: str, tmp_path: Path) -> None:
    assert state(tmp_path / "run", None, **RUNS[kind])["guarantee"] == LEVELS[kind]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(RUNS, 2)))
@pytest.mark.every(4)
def test_two_runs_are_worth_as_much_as_the_worse_one(first: str, second: str, tmp_path: Path) -> None:
    ledger = tmp_path / "kept.sqlite"
    state(tmp_path / "first", ledger, seed=1, **RUNS[first])
    facts = state(tmp_path / "second", ledger, seed=2, **RUNS[second])
    order = list(LEVELS)
    worse = max(first, second, key=order.index)
    assert facts["guarantee"] == LEVELS[worse]
    assert len(facts["runs_covered"]) == 2
    assert facts["sound"] is ("unsound" not in (first, second))
    assert facts["simulation"] is ("seeded" in (first, second))
    assert facts["randomness"]["mode"] == ("seeded" if "seeded" in (first, second) else "secure")
    fast = {"fast", "seeded"} & {first, second}
    assert facts["arithmetic"]["mode"] == ("fast" if fast else "proven")
    page = (tmp_path / "second" / "PRIVACY.md").read_text()
    assert ("WARNING" in page.splitlines()[2]) is (LEVELS[worse] != "yes")
    if "seeded" in (first, second):
        assert "nothing can be replayed" not in page


def test_the_case_of_the_finding(tmp_path: Path) -> None:
    ledger = tmp_path / "kept.sqlite"
    state(tmp_path / "first", ledger, randomness="seeded", method="moo-paper-batch")
    facts = state(tmp_path / "second", ledger, randomness="secure")
    assert facts["guarantee"] == "nominal"
    assert facts["guarantee_text"].startswith("NOT A GUARANTEE. In run ")
    assert "moo-paper-batch" in facts["guarantee_text"]
    page = (tmp_path / "second" / "PRIVACY.md").read_text()
    assert "NOMINAL" in page.splitlines()[2]
    assert "only while the seed is secret" in page
    assert "nothing can be replayed" not in page
    # What 243f1c8 looked at, this run's own rule and randomness, would still give "yes".
    alone = state(tmp_path / "alone", None, randomness="secure")
    assert alone["guarantee"] == "yes"


def test_rows_that_nobody_described_are_not_taken_for_good(tmp_path: Path) -> None:
    """A ledger of an earlier version: the statement says what is not known."""
    from fulcrum.privacy.events import Gaussian
    from fulcrum.privacy.ledger import Ledger

    ledger = tmp_path / "kept.sqlite"
    state(tmp_path / "zero", ledger, randomness="secure")
    with Ledger.open(ledger) as opened:
        opened.reserve("older", 0, {"party-0": [Gaussian(0.5, 8.0)]})
    facts = state(tmp_path / "run", ledger, randomness="secure")
    assert facts["guarantee"] == "unknown"
    assert "does not say which rule and which random numbers run older used" in facts["guarantee_text"]
    unknown = {"rule": "unknown", "sound": None, "private": None, "randomness": "unknown", "arithmetic": "unknown"}
    assert {"id": "older", **unknown} in facts["runs_covered"]
    assert any("not on record" in warning for warning in facts["warnings"])


def test_the_rows_cannot_be_made_better_afterwards(tmp_path: Path) -> None:
    ledger = tmp_path / "kept.sqlite"
    state(tmp_path / "first", ledger, randomness="secure", method="moo-paper-batch")
    with sqlite3.connect(ledger) as db, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute("UPDATE runs SET record = replace(record, '\"sound\": false', '\"sound\": true')")
