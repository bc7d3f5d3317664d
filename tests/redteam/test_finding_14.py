"""Finding 14: a run, its ledger and its statement are one.

At 243f1c8 `resume` opened whatever lay at the ledger's path, and started an empty ledger where nothing lay: the
statement then said epsilon 0 (or what the rest cost), and the budget could be spent again. `run.ledger` was kept as a
relative path, so that resuming from another folder did the same. Every case below is refused in a sentence of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import fulcrum
from fulcrum.errors import InputError, RunError
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs import folder as record
from fulcrum.runs.binding import StoredRun
from support.federations import toy_data
from support.stopped_runs import TERMS, StopAfter, kill_run, resume, stop_run, told_epsilons

Damage = Callable[[Path], None]


def drop_ledger(folder: Path) -> None:
    (folder / "ledger.sqlite").unlink()


def link_to_nothing(folder: Path) -> None:
    drop_ledger(folder)
    (folder / "ledger.sqlite").symlink_to(folder / "elsewhere.sqlite")


def empty_ledger(folder: Path) -> None:
    (folder / "ledger.sqlite").write_bytes(b"")


def new_ledger(folder: Path) -> None:
    drop_ledger(folder)
    Ledger.open(folder / "ledger.sqlite").close()


def other_runs_ledger(folder: Path) -> None:
    other = stop_run(folder.with_name("other"))
    shutil.copy(other / "ledger.sqlite", folder / "ledger.sqlite")


def not_a_ledger(folder: Path) -> None:
    (folder / "ledger.sqlite").write_text("nothing")


def edit_run_id(folder: Path) -> None:
    change_run_json(folder, id="f00d")


def edit_ledger_identity(folder: Path) -> None:
    facts = json.loads((folder / "run.json").read_text())
    change_run_json(folder, ledger={**facts["ledger"], "identity": "0" * 32})


def drop_ledger_entry(folder: Path) -> None:
    change_run_json(folder, ledger=None)


def drop_run_json(folder: Path) -> None:
    (folder / "run.json").unlink()


def longer_metrics(folder: Path) -> None:
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "round": last["round"] + 1}) + "\n")


def change_run_json(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, **changes}))


DAMAGES: dict[Damage, str] = {
    drop_ledger: r"ledger .*ledger\.sqlite of run .* is missing; bring it back",
    link_to_nothing: r"ledger .*ledger\.sqlite of run .* is missing",
    empty_ledger: r"is empty now, and was not when the run stopped",
    new_ledger: r"is another ledger \(",
    other_runs_ledger: r"is another ledger \(",
    not_a_ledger: r"is not a Fulcrum ledger",
    edit_run_id: r"does not know run f00d",
    edit_ledger_identity: r"is another ledger \(.*\) than the one that this run was charged to \(000",
    drop_ledger_entry: r"run\.json was edited or damaged: it names no ledger",
    drop_run_json: r"has no run\.json",
    longer_metrics: r"has 6 rounds on record, and ledger .* knows of 5 of them",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("randomness", ["seeded", "secure"])
def test_a_run_without_its_ledger_does_not_go_on(damage: Damage, randomness: str, tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", randomness=randomness)
    said = (folder / "PRIVACY.md").read_text()
    damage(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(RunError, match=DAMAGES[damage]) as refusal:
        resume(folder)
    assert str(refusal.value).count(". ") == 0, "one sentence"
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before, "a refusal changes nothing"
    assert (folder / "PRIVACY.md").read_text() == said


@pytest.mark.parametrize("randomness", ["seeded", "secure"])
def test_an_undamaged_run_does_go_on_and_all_its_files_agree(randomness: str, tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", randomness=randomness)
    result = resume(folder)
    assert result.summary["status"] == "finished"
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        assert told_epsilons(folder, result) == {max(ledger.epsilons().values())}


def test_an_older_copy_of_the_ledger_is_noticed(tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", rounds=2, randomness="secure")
    shutil.copy(folder / "ledger.sqlite", tmp_path / "old.sqlite")
    with pytest.raises(RunError, match="can be continued"):
        resume(folder, observers=[StopAfter(6)])
    shutil.copy(tmp_path / "old.sqlite", folder / "ledger.sqlite")
    with pytest.raises(RunError, match=r"was rolled back: it has \d+ rows, and this run knows \d+"):
        resume(folder)


def test_an_older_copy_is_noticed_between_checkpoints_too(tmp_path: Path) -> None:
    """Killed after round 6 with a checkpoint every 4 rounds: the ledger of round 5 contains the head on file."""
    young, folder = kill_run(tmp_path / "run", 5, 6, run={"checkpoint_every": 4})
    assert record.load_run_json(folder, "ledger-head.json")["round"] == 4
    shutil.copy(young / "ledger.sqlite", folder / "ledger.sqlite")
    with pytest.raises(RunError, match=r"has 6 rounds on record, and ledger .* knows of 5 of them"):
        resume(folder)
    assert resume(young).summary["status"] == "finished"


def test_a_ledger_whose_rows_were_exchanged_is_noticed(tmp_path: Path) -> None:
    """A history that diverged from the one on file: as long or longer, and not the same rows."""
    folder = stop_run(tmp_path / "run", rounds=4, randomness="secure")
    fork = tmp_path / "fork"
    shutil.copytree(folder, fork)
    for each in (folder, fork):
        with pytest.raises(RunError, match="can be continued"):
            resume(each, observers=[StopAfter(6)])
    shutil.copy(fork / "ledger.sqlite", folder / "ledger.sqlite")
    with pytest.raises(RunError, match="was rewritten: its row"):
        resume(folder)


def test_a_relative_ledger_is_the_same_one_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    folder = stop_run(tmp_path / "run", ledger="kept.sqlite")
    assert StoredRun.read(folder).ledger_path == tmp_path / "a" / "kept.sqlite"
    monkeypatch.chdir(tmp_path / "b")
    result = resume(folder)
    assert not (tmp_path / "b" / "kept.sqlite").exists()
    with Ledger.open(tmp_path / "a" / "kept.sqlite") as ledger:
        assert told_epsilons(folder, result) == {max(ledger.epsilons().values())}


def test_a_kept_ledger_that_is_gone_is_refused(tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", ledger=str(tmp_path / "kept.sqlite"))
    (tmp_path / "kept.sqlite").rename(tmp_path / "moved.sqlite")
    with pytest.raises(RunError, match="is missing; bring it back"):
        resume(folder)
    assert not (tmp_path / "kept.sqlite").exists(), "no new one is started"
    (tmp_path / "kept.sqlite").symlink_to(tmp_path / "moved.sqlite")
    assert resume(folder).summary["status"] == "finished"


def test_a_folder_that_moved_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert resume(Path("elsewhere")).summary["status"] == "finished"


def test_a_ledger_that_is_taken_away_while_a_run_goes_on_stops_it(tmp_path: Path) -> None:
    class Thief(fulcrum.Observer):
        def round(self, result: fulcrum.RoundResult) -> None:
            if result.round == 3:
                os.rename(tmp_path / "run" / "ledger.sqlite", tmp_path / "taken.sqlite")

    with pytest.raises(
        (RunError, InputError), match=r"ledger .*(removed or replaced while the run went on|cannot|failed)"
    ):
        fulcrum.train(toy_data(), out=tmp_path / "run", observers=[Thief()], **TERMS)
    with pytest.raises(RunError, match="is missing"):
        resume(tmp_path / "run")
    os.rename(tmp_path / "taken.sqlite", tmp_path / "run" / "ledger.sqlite")
    assert resume(tmp_path / "run").summary["status"] == "finished"


def test_two_resumes_at_once(tmp_path: Path) -> None:
    folder = stop_run(tmp_path / "run", rounds=2, randomness="secure")
    found: list[object] = []

    def go_on() -> None:
        try:
            found.append(resume(folder).summary["status"])
        except RunError as error:
            found.append(str(error))

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "finished" in found
    assert all(each == "finished" or "in use by another process" in str(each) for each in found)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        assert [entry.attempt for entry in ledger.entries("party-0")] == [0] * 8


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    ledger = str(tmp_path / "kept.sqlite")
    fulcrum.train(toy_data(), out=tmp_path / "first", ledger=ledger, budget=9.0, **TERMS)
    with pytest.raises(InputError, match="private seed of this run was used"):
        fulcrum.train(toy_data(), out=tmp_path / "second", ledger=ledger, budget=9.0, **{**TERMS, "rounds": 3})
    assert not (tmp_path / "second").exists()
