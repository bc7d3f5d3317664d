"""`fulcrum study NAME`: built-in studies, a user's own, and names that are no study."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from fulcrum.cli import main
from fulcrum.errors import ConfigError, RunError
from fulcrum.study.experiment import BUILT_IN_FOLDER, list_study_files
from fulcrum.study.store import load_results
from fulcrum.study.studies import StudyPart, list_stage_jobs, list_study_names, read_study
from support.studies import GRID, experiments

OWN = """
datasets = ["digits"]
epsilons = [4.0]
seeds = [0, 1]
[settings.data]
parties = 2
[settings.train]
rounds = 2
rate = 0.1
[[rows]]
name = "moo"
label = "MOO"
[[rows]]
name = "dp-sgd"
label = "DP-SGD"
"""


STUDIES = ["kept", "no-tuning", "open", "pairwise", "paper", "robustness", "zero-trials"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose experiments/ holds a study of somebody's own, without a search file."""
    place = tmp_path / "experiments"
    place.mkdir()
    (place / "mine.toml").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return place


def test_the_studies_of_the_package_are_found_after_installation(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list_study_files(BUILT_IN_FOLDER) == STUDIES
    assert list_study_names() == [*STUDIES, "protocol", "parties"]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]["fulcrum"]
    assert any(f.parent.name == "experiments" for pattern in data for f in BUILT_IN_FOLDER.parents[1].glob(pattern))


def test_a_study_of_ones_own_runs_by_its_name_and_by_its_path(folder: Path, capsys) -> None:
    assert "mine" in list_study_names()
    end = ["--seeds", "1", "--backend", "sequential", "-q"]
    assert main(["study", "mine", *end]) == 0
    assert "| MOO | example | 2 |" in capsys.readouterr().out
    entries = json.loads(Path("results/mine/table.json").read_text())
    assert {entry["method"] for entry in entries} == {"moo", "dp-sgd"}
    (folder.parent / "elsewhere").mkdir()
    path = (folder / "mine.toml").rename(folder.parent / "elsewhere" / "mine.toml")
    assert main(["study", str(path), "--report-only", *end]) == 0
    assert "| MOO | example | 2 |" in capsys.readouterr().out
    assert main(["study", "prepare", str(path), "--seeds", "1", "--done", "results/mine"]) == 0
    assert "2 jobs, 0 without a result" in capsys.readouterr().err


def test_a_job_with_two_different_results_elsewhere_is_finished(folder: Path, capsys) -> None:
    """Two studies share a job and have run it on different machines: nothing is left to do, and nothing is an error."""
    assert main(["study", "mine", "--seeds", "1", "--backend", "sequential", "-q"]) == 0
    (shard,) = Path("results/mine").glob("*.jsonl")
    other = Path("results/other") / "runs.jsonl"
    other.parent.mkdir()
    records = [json.loads(line) for line in shard.read_text().splitlines()]
    for record in records:
        record["accuracy"] = record["metrics"]["accuracy"] = 0.125
    other.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(RunError, match="keep one with"):
        load_results([shard.parent, other.parent])  # a table must not choose between them by itself
    capsys.readouterr()
    ends = [word for name in ("mine", "other", "not-there") for word in ("--done", f"results/{name}")]
    assert main(["study", "prepare", "mine", "--seeds", "1", *ends]) == 0
    assert "2 jobs, 0 without a result" in capsys.readouterr().err
    assert main(["study", "prepare", "mine", *ends]) == 0
    assert "4 jobs, 2 without a result" in capsys.readouterr().err


def test_a_grid_of_ones_own(folder: Path) -> None:
    (folder / "starts.toml").write_text(GRID)
    jobs, unknown = list_stage_jobs("starts")
    assert ({job.study for job in jobs}, len(jobs), unknown) == ({"starts"}, 8, ())
    assert read_study("starts").results == Path("results/starts")
    with pytest.raises(ConfigError, match="nothing to tune"):
        list_stage_jobs("starts-tune")


def test_a_study_without_a_search_file_cannot_be_tuned(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine-search\.toml does not exist"):
        list_stage_jobs("mine-tune")
    (folder / "broken.toml").write_text("datasets = []")
    with pytest.raises(ConfigError, match=r"broken\.toml has no epsilons"):
        read_study("broken")


def test_stages_are_studies_and_their_trials(tmp_path: Path) -> None:
    place = experiments(tmp_path)
    part = StudyPart(methods=["moo"], epsilons=[4.0], seeds=1)
    studies = {
        stage: {job.study for job in list_stage_jobs(stage, place, part)[0]} for stage in ("paper", "paper-tune")
    }
    assert studies == {"paper": {"paper"}, "paper-tune": {"tune"}}
    studies = {
        stage: {job.study for job in list_stage_jobs(stage, place, part)[0]} for stage in ("protocol", "parties")
    }
    assert studies == {"protocol": {"protocol"}, "parties": {"parties"}}
    assert {job.study for job in list_stage_jobs("protocol-tune", place, part)[0]} == {"tune-protocol"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("study robustnes", "did you mean study robustness?"),
        ("study prepar", "did you mean study prepare?"),
        ("study mien", f"study = 'mien' is not known; choose one of {', '.join(STUDIES)}, mine,"),
        ("study zzz", f"study = 'zzz' is not known; choose one of {', '.join(STUDIES)}, mine,"),
        ("study nowhere/zzz.toml", "nowhere/zzz.toml does not exist"),
        ("study prepare papr", "did you mean 'paper'?"),
        ("study prepare papr-tune", "did you mean 'paper'?"),
        ("study choose --study opn", "did you mean 'open'?"),
    ],
)
def test_names_that_are_no_study_are_refused_with_the_nearest(folder: Path, words: str, said: str, capsys) -> None:
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_help_lists_the_studies_of_the_working_folder(folder: Path, capsys) -> None:
    assert main(["study", "--help"]) == 0
    out = capsys.readouterr().out
    assert "mine" in out
    assert "robustness" in out
