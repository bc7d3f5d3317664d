"""Every command that takes a run, a ledger or results either reads what version 0.1 wrote, or refuses it in a sentence.

`more-by-243f1c8.tar.gz` was made by that commit: a run whose unit is the client, a run with a rule that pays for its
statistics now and then, a run on own data with secure randomness, and the results of a study. No refusal changes a
byte.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from fulcrum.cli import main
from fulcrum.study import store

HERE = Path(__file__).parent
ARCHIVES = ("written-by-243f1c8.tar.gz", "more-by-243f1c8.tar.gz")
RUNS = ("finished", "client", "refresh", "own")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, unpacked."""
    place = tmp_path_factory.mktemp("old")
    for name in ARCHIVES:
        with tarfile.open(HERE / name) as archive:
            archive.extractall(place, filter="data")
    return place


def read_all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_shown_and_reported(run: str, old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_all(old / run)
    assert main(["show", str(old / run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epsilon"] == json.loads((old / run / "summary.json").read_text())["epsilon"]
    assert main(["report", str(old / run), "--out", str(tmp_path / "page.html"), "--csv", str(tmp_path / "csv")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Not all of this folder" not in page
    assert f"{shown['accuracy'] * 100:.1f}" in page
    assert read_all(old / run) == before


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["resume"], "was begun by an earlier Fulcrum"),
        (["evaluate"], "version 0.1 wrote it"),
        (["export", "--to", "torch", "--out", "never.pt"], "version 0.1 wrote it"),
        (["predict", "--data", "digits", "--out", "never.csv"], "version 0.1 wrote it"),
    ],
)
def test_what_cannot_go_on_is_one_sentence_and_changes_nothing(
    run: str, words: list[str], sentence: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_all(old / run)
    assert main([words[0], str(old / run), *words[1:]]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert read_all(old / run) == before


@pytest.mark.parametrize("run", ["client", "refresh", "own"])
def test_a_ledger_of_a_run_is_read_as_it_was(run: str, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = old / run / "ledger.sqlite"
    before = path.read_bytes()
    assert main(["ledger", str(path), "--json"]) == 0
    parties = json.loads(capsys.readouterr().out)["parties"]
    spent = json.loads((old / run / "summary.json").read_text())["epsilon"]
    # Spends of one run are added at one Renyi order today: what is printed may be a little above, never below.
    assert all(spent * (1 - 1e-6) <= row["epsilon"] <= spent * 1.05 for row in parties)
    assert main(["ledger", str(path), "--verify"]) == 0
    assert "older format" in capsys.readouterr().out
    assert path.read_bytes() == before


@pytest.mark.parametrize("run", ["client", "refresh"])
def test_its_settings_start_a_new_run(run: str, old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(old / run / "settings.toml"), "--rounds", "1", "--no-rehearsal", "--out", str(tmp_path / "new")]
    assert main([*words, "--quiet"]) == 0
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary["unit"] == json.loads((old / run / "summary.json").read_text())["unit"]


def test_results_of_a_study_are_read_and_count_as_done(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = store.load_results(old / "store")
    assert {record["row"] for record in records.values()} == {"none", "dp-sgd"}
    words = ["reproduce", "paper", "--experiments", str(old / "experiments"), "--out", str(old / "store")]
    assert main([*words, "--report-only", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert {cell["method"] for cell in cells} == {"none", "dp-sgd"}
    assert main(["study", "merge", str(old / "store"), "--into", str(tmp_path / "merged")]) == 0
    merged = store.load_results(tmp_path / "merged")
    assert {i: r["accuracy"] for i, r in merged.items()} == {i: r["accuracy"] for i, r in records.items()}
