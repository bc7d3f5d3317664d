"""Finding 17: what was spent has one source, the ledger.

At 243f1c8 a secure run whose checkpoints were lost drew its rounds anew and paid for them twice; the ledger and
PRIVACY.md said 4, the terminal and summary.json added up the rounds on its metrics and said 2.715.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fulcrum.cli import main
from fulcrum.errors import RunError
from fulcrum.privacy.accounting import Spend, format_epsilon
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs import folder as record
from support.stopped_runs import TERMS, resume, stop_run, told_epsilons


def lose_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()


def test_lost_checkpoints_of_a_secure_run_are_said_before_anything_is_paid_twice(tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", randomness="secure")
    lose_checkpoints(folder)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        before = ledger.head()
    with pytest.raises(
        RunError, match=r"lost its checkpoint after round 5 .*pay for rounds 1 to 5 a second time with --repeat"
    ):
        resume(folder)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        assert ledger.head() == before


@pytest.mark.parametrize("terms", [{"epsilon": 4.0}, {"epsilon": None, "sigma": 1.0}], ids=["budget", "sigma"])
def test_repeated_rounds_are_paid_and_every_file_says_so(terms: dict[str, Any], tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", randomness="secure", **terms)
    lose_checkpoints(folder)
    result = resume(folder, repeat=True)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        truth = max(ledger.epsilons().values())
        entries = ledger.entries("party-0")
        account = ledger.accounts()["party-0"]
    assert {entry.attempt for entry in entries} == {0, 1}
    assert told_epsilons(folder, result) == {truth}
    assert any("paid a second time" in warning for warning in result.summary["warnings"])
    assert any(
        "paid a second time" in warning for warning in json.loads((folder / "privacy.json").read_text())["warnings"]
    )
    assert f"epsilon = {format_epsilon(truth)} (RDP" in (folder / "PRIVACY.md").read_text()
    if terms["epsilon"] is not None:  # the budget was for eight rounds, and five were paid twice
        assert result.summary["status"].startswith("stopped")
        assert account.budget is not None
        assert truth <= account.budget
        # What 243f1c8 said: the cost of one attempt at each round on the metrics. It is less than the truth.
        once = Spend.empty().add_events(
            [
                event
                for entry in entries
                if entry.round < result.summary["rounds"] and entry.attempt == 0
                for event in entry.events
            ]
        )
        assert once.epsilon(1e-5) < truth


def test_the_terminal_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "digits", "--epsilon", "4", "--rounds", "6", "--randomness", "secure", "--parties", "2"]
    assert main(["run", *words, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    lose_checkpoints(tmp_path / "run")
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 2
    assert "--repeat" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run"), "--quiet", "--repeat"]) == 0
    said = capsys.readouterr()
    assert "paid a second time" in said.err
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        truth = max(ledger.epsilons().values())
    assert f"epsilon   {format_epsilon(truth)} for one example" in said.out
    assert told_epsilons(tmp_path / "run") == {truth}


def test_a_seeded_run_repeats_lost_rounds_for_nothing(tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", randomness="seeded")
    lose_checkpoints(folder)
    result = resume(folder)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        assert {entry.attempt for entry in ledger.entries("party-0")} == {0}
        assert told_epsilons(folder, result) == {max(ledger.epsilons().values())}
    assert result.summary["status"] == "finished"


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_run_that_ends_in_one_go_agrees_too(accountant: str, tmp_path: Path) -> None:
    import fulcrum
    from support.federations import toy_data

    result = fulcrum.train(toy_data(), out=tmp_path / "run", accountant=accountant, participation=0.7, **TERMS)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert told_epsilons(tmp_path / "run", result) == {max(ledger.epsilons().values())}
    lines = record.load_metrics(tmp_path / "run")
    assert all(earlier["epsilon"] <= later["epsilon"] for earlier, later in itertools.pairwise(lines))


@pytest.mark.parametrize("randomness", ["seeded", "secure"])
def test_an_unfinished_run_is_shown_with_what_the_ledger_says(
    randomness: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stop_run(tmp_path / "run", randomness=randomness)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        truth = max(ledger.epsilons().values())
    assert main(["show", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"epsilon so far  {format_epsilon(truth)} for one example" in said
    assert ("SIMULATION" in said) is (randomness == "seeded")
    assert json.loads((folder / "privacy.json").read_text())["epsilon"] == truth
    (folder / "ledger.sqlite").unlink()
    assert main(["show", str(folder)]) == 0
    again = capsys.readouterr()
    assert "epsilon so far  - for one example" in again.out
    assert "is missing" in again.err
