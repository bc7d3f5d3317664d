"""`fulcrum theory` from the command line."""

from __future__ import annotations

import json

import pytest

from fulcrum.cli import main

SMALL = ["--data", "digits", "--epsilon", "4", "--parties", "3", "--rounds", "6", "--set", "clip.rehearse=false"]


def test_check_compares_with_the_page_and_fails_where_it_differs(tmp_path, capsys) -> None:
    page = tmp_path / "theory.md"
    page.write_text("<!-- derivative -->\n**Status: fails as printed.** x\n<!-- end derivative -->\n")
    assert main(["theory", "check", "derivative", "--page", str(page)]) == 0
    page.write_text(page.read_text().replace("fails as printed", "holds"))
    assert main(["theory", "check", "derivative", "--page", str(page)]) == 1
    assert "derivative" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["check", "lemma-9"], "'lemma-9' is no statement"),
        (["check", "--page", "nowhere.md"], "nowhere.md is not there"),
        (["objective", *SMALL, "--at", "0,x"], "--at '0,x' must be whole numbers"),
        (["objective", *SMALL, "--at", "7"], "must be from 0 to 6"),
        (["objective", *SMALL, "--draws", "1"], "--draws 1 must be at least 2"),
        (["constants", *SMALL, "--set", "privacy.unit=client"], "privacy.unit"),
    ],
)
def test_wrong_words_get_a_sentence(words, told, capsys) -> None:
    assert main(["theory", *words]) == 2
    assert told in capsys.readouterr().err


def test_private_records_are_refused(tmp_path, capsys) -> None:
    import numpy as np

    file = tmp_path / "own.npz"
    rng = np.random.default_rng(0)
    np.savez(file, x=rng.random((60, 4), dtype=np.float32), y=rng.integers(0, 2, 60))
    words = ["--data", str(file), "--epsilon", "4", "--parties", "3", "--rounds", "4", "--set", "task.classes=2"]
    assert main(["theory", "objective", *words, "--set", "clip.rehearse=false"]) == 2
    assert "in the clear" in capsys.readouterr().err


def test_objective_constants_and_prediction_as_json(tmp_path, capsys) -> None:
    out = tmp_path / "objective.json"
    assert main(["theory", "objective", *SMALL, "--at", "0,3", "--draws", "2", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [entry["round"] for entry in told] == [0, 3]
    assert json.loads(out.read_text())["moments"][0]["points"][0]["C"] == pytest.approx(0.001)
    assert main(["theory", "constants", *SMALL, "--at", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["smoothness"] > 0
    assert main(["theory", "predict", *SMALL, "--json"]) == 0
    assert {"step", "end", "wrong", "rounds"} <= set(json.loads(capsys.readouterr().out))
