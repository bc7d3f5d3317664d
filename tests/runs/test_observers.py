"""Observers: what they are told and when, by which names they are found, and that one that fails loses nothing."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fulcrum
from fulcrum.cli import main
from fulcrum.errors import ConfigError, RunError
from fulcrum.runs import OBSERVERS, Observer, RunInfo, find_observer
from fulcrum.runs import folder as record
from fulcrum.runs.observers import ProgressLines
from fulcrum.training.snapshot import Snapshot
from support.federations import toy_data

WORDS: dict[str, Any] = {"model": "linear", "sigma": 1.0, "rounds": 5, "parties": 3, "partition": "iid"}


class Notes(Observer):
    """Writes down what it is told; raises in one of its methods where that is asked."""

    def __init__(self, fails_in: str = "", at: int = 3, error: BaseException | None = None) -> None:
        self.seen: list[Any] = []
        self.fails_in, self.at, self.error = fails_in, at, error or ZeroDivisionError("by\nzero")

    def _note(self, method: str, value: Any) -> None:
        self.seen.append((method, value))
        if method == self.fails_in and (method in ("started", "ended") or value == self.at):
            raise self.error

    def started(self, run: RunInfo) -> None:
        self.run = run
        self._note("started", run.id)

    def snapshot(self, snapshot: Snapshot) -> None:
        self._note("snapshot", snapshot.round)

    def round(self, result: fulcrum.RoundResult) -> None:
        self._note("round", result.round)

    def ended(self, result: fulcrum.Result | None) -> None:
        self.result = result
        self._note("ended", result is not None)


NOTES = Notes()


def train(*observers: Any, **more: Any) -> fulcrum.Result:
    return fulcrum.train(toy_data(60), **WORDS, observers=observers, **more)


def test_an_observer_is_told_of_the_start_of_every_round_and_of_the_end(tmp_path: Path) -> None:
    notes = Notes()
    result = train(notes, out=tmp_path / "run")
    rounds = [("snapshot", 1), ("round", 1), ("snapshot", 2), ("round", 2)]
    assert notes.seen[:5] == [("started", notes.run.id), *rounds]
    assert notes.seen[-1] == ("ended", True)
    assert len(notes.seen) == 2 + 2 * 5
    assert notes.result is result
    assert notes.run.folder == tmp_path / "run"
    assert notes.run.parties == ("party-0", "party-1", "party-2")
    assert notes.run.plan.rounds == notes.run.settings.train.rounds == 5


def test_observers_change_nothing_and_need_to_know_nothing(tmp_path: Path) -> None:
    watched, alone = train(Observer(), Notes()), train()
    assert all(torch.equal(a, b) for a, b in zip(watched.model.parameters(), alone.model.parameters(), strict=True))
    seen: list[int] = []
    train(on_round=lambda result: seen.append(result.round))
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("method", ["started", "snapshot", "round"])
def test_one_that_raises_stops_the_run_which_goes_on_later_as_if_nothing_had_been(method: str, tmp_path: Path) -> None:
    whole = train(out=tmp_path / "whole")
    first, bad, last = Notes(), Notes(method), Notes()
    with pytest.raises(RunError, match=rf"observer .*Notes failed in {method} \(ZeroDivisionError: by zero\)") as error:
        train(first, bad, last, out=tmp_path / "cut")
    assert "can be continued" in str(error.value)
    assert "\n" not in str(error.value)
    assert first.seen[-1] == ("ended", False)  # interrupted, and everybody who was started knows
    assert ("ended", False) in bad.seen or method == "started"
    assert (last.seen == []) == (method == "started")
    assert not (tmp_path / "cut" / "summary.json").exists()
    again = Notes()
    result = fulcrum.resume(tmp_path / "cut", dataset=toy_data(60), observers=[again])
    assert again.seen[0] == ("started", first.run.id)
    assert result.epsilons == whole.epsilons
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), whole.model.parameters(), strict=True))
    cut, uncut = (
        [{**line, "seconds": 0} for line in record.load_metrics(tmp_path / name)] for name in ("cut", "whole")
    )
    assert cut == uncut


def test_an_interrupt_is_passed_on_and_a_failure_at_the_end_hides_nothing(tmp_path: Path) -> None:
    notes, clumsy = Notes(), Notes("ended")
    with pytest.raises(KeyboardInterrupt):
        train(clumsy, notes, Notes("round", error=KeyboardInterrupt()), out=tmp_path / "cut")
    assert notes.seen[-1] == ("ended", False)
    with pytest.raises(RunError, match=r"failed in ended .* is complete"):
        train(clumsy, notes, out=tmp_path / "run")
    assert notes.seen[-1] == ("ended", True)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_what_on_round_raises_comes_out_as_it_is(tmp_path: Path) -> None:
    def stop(result: fulcrum.RoundResult) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(on_round=stop)


def test_observers_have_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(find_observer("lines"), ProgressLines)
    assert find_observer("test_observers:NOTES") is NOTES
    assert isinstance(find_observer("test_observers:Notes"), Notes)
    with pytest.raises(ConfigError, match="did you mean 'lines'"):
        find_observer("line")
    with pytest.raises(ConfigError, match=r"must be a fulcrum\.Observer"):
        find_observer("test_observers:toy_data_maker")
    point = importlib.metadata.EntryPoint("notes", "test_observers:Notes", "fulcrum.observers")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if "observers" in group else [])
    assert isinstance(find_observer("notes"), Notes)
    assert "notes" in OBSERVERS.names()
    train("lines")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert said[0].startswith("round 1/5  accuracy ")


def toy_data_maker() -> int:
    return 7


def test_a_wrong_name_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--observe = 'nobody'"):
        train("nobody", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_takes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--data", "digits", "--epsilon", "4", "--rounds", "3", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*words, "--observe", "nobody"]) == 2
    assert "choose one of lines" in capsys.readouterr().err
    assert main([*words, "--observe", "lines", "--observe", "test_observers:NOTES"]) == 0
    assert "round 3/3  accuracy" in capsys.readouterr().err
    assert NOTES.seen[-1] == ("ended", True)
    assert main(["resume", str(tmp_path / "run"), "--observe", "test_observers:NOTES"]) == 0


def test_metrics_by_name_are_in_the_folder_beside_the_old_words(tmp_path: Path) -> None:
    result = train(out=tmp_path / "run", run={"evaluate_every": 2})
    lines = record.load_metrics(tmp_path / "run")
    assert [bool(line["metrics"]) for line in lines] == [False, True, False, True, True]
    assert lines[0]["accuracy"] is lines[0]["loss"] is None
    for kept in (lines[-1], json.loads((tmp_path / "run" / "summary.json").read_text())):
        assert kept["metrics"] == result.metrics
        assert (kept["accuracy"], kept["loss"]) == (kept["metrics"]["accuracy"], kept["metrics"]["loss"])
    assert (kept["score"], kept["higher_is_better"]) == ("accuracy", True)
    assert kept["metrics"][kept["score"]] == result.accuracy
