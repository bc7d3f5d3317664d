"""What people read fits: help and plan in 80 columns, lines in a log now and then, no warnings of libraries."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from fulcrum import cli
from fulcrum.cli import failures, options, view
from fulcrum.errors import UserNote


def list_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from list_commands(below, (*path, name))


def test_every_help_fits_and_flags_show_no_type(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = options.hide_flag_types(typer.main.get_command(cli.app))
    paths = list(list_commands(command))
    assert len(paths) > 40
    for path in paths:
        command.main([*path, "--help"], prog_name="fulcrum", standalone_mode=False)
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= 80, path
        assert "<bool>" not in said
        assert "BOOLEAN" not in said
        assert "--help" in said


PLANS = (
    ["--epsilon", "3.6"],
    ["--epsilon", "3.6", "--unit", "client", "--parties", "40"],
    ["--epsilon", "3.6", "--set", "privacy.noise_schedule=growth", "--parties", "25"],
    ["--sigma", "1.1", "--set", "privacy.aggregation=pairwise", "--set", "privacy.colluders=2"],
    ["--method", "none"],
)


@pytest.mark.parametrize("words", PLANS, ids=" ".join)
def test_a_plan_fits_80_columns_in_a_pipe(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "--data", "digits", "--rounds", "9", "--no-timing", *words]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if len(line) > 80] == []
    assert "in words  " in said


def test_columns_that_do_not_fit_follow_below(capsys: pytest.CaptureFixture[str]):
    columns = ("name", "x" * 40, "y" * 40, "z")
    view.print_table(columns, [("a", 1, 2, "long words " * 9)], fit=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["name", "a", "name", "a"]
    assert max(map(len, lines)) <= 80
    view.print_table(columns, [("a", 1, 2, "long words " * 9)])
    assert len(capsys.readouterr().out.splitlines()) == 2


# --- a log ----------------------------------------------------------------------------------------------------


def play(seconds_per_round: float, rounds: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    now = [0.0]
    observer = view.make_line_observer("moo", rounds, lambda: now[0])
    observer.started(None)  # type: ignore[arg-type]
    for number in range(1, rounds + 1):
        now[0] += seconds_per_round
        observer.round(SimpleNamespace(round=number, metrics={"accuracy": 0.5}, C=(1.0,), epsilon=1.23456))  # type: ignore[arg-type]
    return capsys.readouterr().err.splitlines()


def test_a_long_run_prints_a_line_now_and_then(capsys: pytest.CaptureFixture[str]):
    lines = play(1.0, 600, capsys)
    assert 8 <= len(lines) <= 20
    assert lines[0] == "moo: round 10 of 600, accuracy 50.0%, C 1, epsilon 1.235, about 9 min 50 s left"
    assert play(0.1, 50, capsys) == []


def test_a_log_that_nobody_reads_stops_no_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def closed(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(view, "print_message", closed)
    assert play(1.0, 60, capsys) == []


# --- warnings -------------------------------------------------------------------------------------------------


def warn_from(module: str) -> None:
    warnings.warn_explicit("for programmers", UserWarning, f"{module}.py", 1, module=module)


@pytest.mark.parametrize(
    ("module", "shown"), [("torch.nn.modules", False), ("fulcrum.gradients", False), ("torchy", True), ("mine", True)]
)
def test_warnings_of_libraries_do_not_leak(module: str, shown: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.warnoptions", [])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert failures.run_guarded(lambda: warn_from(module), []) == 0
    assert bool(found) is shown


def test_debug_shows_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.warnoptions", [])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        failures.run_guarded(lambda: warn_from("torch"), ["--debug"])
    assert found


def test_a_note_to_the_holder_of_the_data_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.warnoptions", [])

    def note() -> None:
        for _ in range(2):
            warnings.warn_explicit("only you see this.", UserNote, "declared.py", 1, module="fulcrum.data.declared")

    assert failures.run_guarded(note, []) == 0
    assert capsys.readouterr().err == "warning: only you see this.\n" * 2
