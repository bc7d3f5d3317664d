"""Finding 16: settings.toml is bound to the run.

At 243f1c8 a run could be stopped, its settings.toml edited from seeded to secure, and resumed: the statement then
claimed the system's entropy for all rounds. Now the field that differs is named and the run does not go on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fulcrum.cli import main
from fulcrum.errors import RunError
from fulcrum.runs.binding import compute_settings_digest, list_bound_settings
from fulcrum.settings.schema import Settings
from support.stopped_runs import resume, stop_run

EDITS = {
    "privacy.randomness": ('randomness = "seeded"', 'randomness = "secure"'),
    "privacy.epsilon": ("epsilon = 4.0", "epsilon = 8.0"),
    "privacy.delta": ("delta = 1e-05", "delta = 1e-03"),
    "train.rounds": ("rounds = 8", "rounds = 80"),
    "train.rate": ("rate = 0.5", "rate = 0.1"),
    "clip.C0": ("C0 = 1.0", "C0 = 2.0"),
    "clip.rule": ('rule = "moo"', 'rule = "fixed"'),
    "run.seed": ("seed = 0", "seed = 1"),
    "run.evaluate_every": ("evaluate_every = 0", "evaluate_every = 2"),
    "data.parties": ("parties = 2", "parties = 3"),
}


@pytest.mark.parametrize("field", EDITS)
def test_an_edited_setting_is_named_and_refused(field: str, tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", randomness="seeded")
    file = folder / "settings.toml"
    text = file.read_text()
    assert EDITS[field][0] in text
    file.write_text(text.replace(*EDITS[field], 1))
    said = (folder / "privacy.json").read_text()
    with pytest.raises(RunError, match=rf"settings\.toml was edited: {re.escape(field)} = .*, but the run began with"):
        resume(folder)
    assert (folder / "privacy.json").read_text() == said
    file.write_text(text)
    assert json.loads(said)["randomness"]["mode"] == "seeded"
    assert resume(folder).summary["status"] == "finished"


def test_the_command_says_it_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "digits", "--sigma", "1", "--rounds", "2", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["run", *words]) == 0
    file = tmp_path / "run" / "settings.toml"
    file.write_text(file.read_text().replace('"seeded"', '"secure"'))
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert "privacy.randomness = 'secure', but the run began with 'seeded'" in said


def test_what_does_not_change_a_release_may_change(tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run")
    file = folder / "settings.toml"
    text = file.read_text().replace("checkpoint_every = 10", "checkpoint_every = 3")
    file.write_text(
        text.replace('engine = "auto"', 'engine = "reference"').replace('device = "auto"', 'device = "cpu"')
    )
    assert resume(folder).summary["status"] == "finished"


def test_editing_both_copies_is_noticed_by_the_ledger(tmp_path: Path) -> None:
    """run.json holds the settings too; whoever edits both, with a right digest, still differs from the ledger."""
    folder = stop_run(tmp_path / "run")
    file, facts = folder / "settings.toml", json.loads((folder / "run.json").read_text())
    file.write_text(file.read_text().replace(*EDITS["privacy.epsilon"], 1))
    facts["settings"]["privacy.epsilon"] = 8.0
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=r"run\.json was edited: its settings are not those of its digest"):
        resume(folder)
    facts["settings_digest"] = compute_settings_digest(facts["settings"])
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=r"run\.json was edited: its settings are not those that ledger"):
        resume(folder)


def test_the_digest_in_a_ledger_does_not_give_the_private_seed_away() -> None:
    """A fast digest over a small seed would be a test for guessed seeds."""

    def digest(**sections: dict[str, int]) -> str:
        return compute_settings_digest(list_bound_settings(Settings().replace(**sections)))

    assert digest(run={"seed": 1}) == digest(run={"seed": 2})
    assert digest(privacy={"seed": 1}) == digest(privacy={"seed": 2})
    assert digest(privacy={"seed": 1}, run={"seed": 1}) != digest(privacy={"seed": 1}, run={"seed": 2})
    assert digest(train={"rounds": 1}) != digest(train={"rounds": 2})
