"""The open track from its files to its table: jobs for a bare worker, results merged, labels that say the adversary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fulcrum.cli import app
from fulcrum.study import report, worker
from fulcrum.study.choosing import choose_settings, save_choices
from fulcrum.study.experiment import find_study_folder, list_paper_jobs, list_tuning_jobs, read_experiment
from fulcrum.study.table_cells import make_table_cells
from support.studies import experiments, record

OPEN = """
title = "The open track"
datasets = ["digits"]
epsilons = [8.0]
seeds = [0, 1]
[settings.data]
parties = 2
features = "scattering"
[settings.model]
name = "linear"
[settings.train]
rounds = 2
rate = 0.1
[[rows]]
name = "moo"
label = "MOO, own noise"
[[rows]]
name = "moo-shared"
method = "moo"
label = "MOO, shared noise"
against = "moo-shared"
set = { "privacy.aggregation" = "ideal-secagg" }
[[rows]]
name = "dp-sgd-shared"
method = "dp-sgd"
label = "DP-SGD, shared noise"
against = "moo-shared"
set = { "privacy.aggregation" = "ideal-secagg" }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = experiments(tmp_path)
    (place / "open.toml").write_text(OPEN)
    (place / "open-search.toml").write_text((place / "search.toml").read_text().replace('"train.steps"', '"train.ema"'))
    text = (place / "open-search.toml").read_text().replace("choices = [1, 2]", "choices = [0.5, 0.9]")
    (place / "open-search.toml").write_text(text)
    return place


def test_the_committed_study_is_what_it_says() -> None:
    experiment = read_experiment(find_study_folder(), "open")
    assert experiment.datasets == ("mnist", "fashion-mnist", "cifar10")
    assert (len(experiment.epsilons), len(experiment.seeds), len(experiment.rows)) == (3, 5, 5)
    jobs = list_paper_jobs(experiment)
    assert len({job.id for job in jobs}) == len(jobs) == 225
    for job in jobs:
        settings = job.settings
        painted = job.row.startswith("painted")
        assert settings.data.features == ("none" if painted else "scattering")
        assert (settings.model.name, settings.model.init) == (
            ("auto", "synthetic") if painted else ("linear", "random")
        )
        assert (settings.train.rounds, settings.train.steps, settings.data.parties) == (200, 1, 10)
        assert settings.privacy.accountant == "pld"
        assert (settings.privacy.aggregation == "ideal-secagg") == job.row.endswith("-shared")


@pytest.mark.slow
def test_prepare_work_merge_and_report(folder: Path, tmp_path: Path) -> None:
    words = ["study", "prepare", "open", "--experiments", str(folder), "--pack", str(tmp_path / "data")]
    made = CliRunner().invoke(app, [*words, "--done", str(tmp_path / "open")])
    assert made.exit_code == 0, made.output
    (tmp_path / "jobs.json").write_text(made.stdout)
    assert len(json.loads(made.stdout)["jobs"]) == 6
    # As on a machine that has torch and numpy and little else.
    code = (
        "import sys\n"
        "for name in ('sklearn', 'pydantic', 'typer', 'rich', 'dp_accounting', 'scipy'): sys.modules[name] = None\n"
        "from fulcrum.study.worker import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    place = [str(tmp_path / "jobs.json"), "--out", str(tmp_path / "there"), "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(
        [sys.executable, "-c", code, *place, "--backend", "stacked", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert worker.main([*place, "--backend", "sequential"]) == 0  # nothing is left
    out = str(tmp_path / "open")
    assert CliRunner().invoke(app, ["study", "merge", str(tmp_path / "there"), "--into", out]).exit_code == 0
    words = ["study", "open", "--report-only", "--experiments", str(folder), "--out", out]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "open" / "table.md").read_text()
    for part in ("# The open track", "MOO, shared noise ‡", "server sees sums only, simulated", "ANOTHER ADVERSARY"):
        assert part in page, part
    assert "MOO, own noise |" in page  # no mark there
    entries = json.loads((tmp_path / "open" / "table.json").read_text())
    assert {entry["method"] for entry in entries} == {"moo", "moo-shared", "dp-sgd-shared"}
    assert all(entry["seeds"] == [0, 1] for entry in entries)


def test_rows_are_compared_only_under_the_same_adversary(folder: Path) -> None:
    experiment = read_experiment(folder, "open")
    jobs = list_paper_jobs(experiment)
    done = {job.id: record(job, 0.9 if job.row == "moo-shared" else 0.8) for job in jobs}
    cells = {cell.row: cell for cell in make_table_cells(experiment, jobs, done)}
    ahead = cells["dp-sgd-shared"].ahead
    assert ahead is not None
    assert ahead.mean == pytest.approx(10.0)
    assert cells["moo-shared"].ahead is None  # own noise against shared noise would compare adversaries
    assert cells["moo"].ahead is None
    assert not report.make_table_notes([cells["moo"]], {}) or "ADVERSARY" not in "".join(
        report.make_table_notes([cells["moo"]], {})
    )


def test_its_settings_are_chosen_apart_from_the_papers(folder: Path) -> None:
    experiment = read_experiment(folder, "open")
    trials = list_tuning_jobs(experiment)
    assert {job.study for job in trials} == {"open-tune"}
    done = {job.id: record(job, 0.5 + 0.01 * (job.trial or 0)) for job in trials}
    made, lacking = choose_settings(experiment, done)
    assert (len(made), lacking) == (3, {})
    save_choices(experiment, made)
    assert (folder / "open-chosen.toml").is_file()
    assert not (folder / "chosen.toml").exists()
    assert read_experiment(folder).choices == ()
    assert len(read_experiment(folder, "open").choices) == 3
