"""Studies of tasks other than classification: a made-up .npz, run in every way, with tables headed by the score."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from fulcrum.cli import main
from fulcrum.errors import DataError
from fulcrum.study.backends import BackendOptions, run_jobs
from fulcrum.study.calibrate import calibrate_jobs
from fulcrum.study.experiment import list_paper_jobs, read_experiment
from fulcrum.study.run_job import DatasetCache, prepare_job
from fulcrum.study.store import load_results

N, TEST = 240, 120
STUDY = """
title = "Made-up numbers"
datasets = ["made/up.npz"]
epsilons = [8.0]
seeds = [0, 1]
[settings.task]
name = "{task}"
[settings.data]
parties = 2
partition = "iid"
public = true
[settings.train]
rounds = 4
rate = 0.2
lr = 0.5
[settings.privacy]
delta = 1e-4
[[rows]]
name = "moo"
set = {{ "clip.rehearse" = false }}
label = "MOO"
[[rows]]
name = "dp-sgd"
label = "DP-SGD"
[[rows]]
name = "none"
label = "non-private"
"""
SEARCH = """
trials = 2
seed = 1
validation = 0.2
run_seed = 77
[space]
"train.lr" = { low = 0.1, high = 1.0 }
"""
GRID = """
C0 = [0.3, 1.0]
lr = [0.1, 0.5]
default_lr = 0.5
epsilons = [8.0]
seeds = [0]
default = "moo"
fixed = "dp-sgd"
rules = ["dp-sgd", "moo"]
[settings.task]
name = "regression"
[settings.data]
public = true
[settings.train]
rounds = 2
rate = 0.2
[settings.privacy]
delta = 1e-4
[datasets."made/up.npz".data]
parties = 2
"""
SCORES = {"regression": ("rmse", False), "binary": ("auc", True)}


def write_study(folder: Path, task: str) -> None:
    """up.npz and experiments/mine.toml, with a search beside it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N + TEST, 4)).astype(np.float32)
    signal = x @ np.array([1.0, -1.0, 0.5, 0.0]) + 0.1 * rng.normal(size=N + TEST)
    y = signal.astype(np.float32) if task == "regression" else (signal > 1).astype(np.int64)
    (folder / "made").mkdir()
    np.savez(folder / "made" / "up.npz", x=x[:N], y=y[:N], x_test=x[N:], y_test=y[N:])
    (folder / "experiments").mkdir()
    (folder / "experiments" / "mine.toml").write_text(STUDY.format(task=task))
    (folder / "experiments" / "mine-search.toml").write_text(SEARCH)
    (folder / "experiments" / "grid.toml").write_text(GRID)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("task", SCORES)
def test_a_study_of_any_task_gives_the_same_in_every_way_of_running(folder: Path, task: str) -> None:
    write_study(folder, task)
    score, higher = SCORES[task]
    jobs = calibrate_jobs(list_paper_jobs(read_experiment(name="mine")))
    found = {}
    for backend in ("sequential", "stacked") if task == "binary" else ("sequential", "processes", "stacked"):
        said: list[str] = []
        outcomes = {
            job.id: result for job, result in run_jobs(jobs, backend, BackendOptions(workers=2, say=said.append))
        }
        assert len(outcomes) == len(jobs)
        assert not said, "nothing failed, and every run that can be stacked was"
        found[backend] = outcomes
    for backend, outcomes in found.items():
        for job in jobs:
            one, other = found["sequential"][job.id], outcomes[job.id]
            assert (other.score.name, other.score.higher_is_better) == (score, higher)
            assert set(other.metrics) == set(one.metrics)
            if backend == "processes":
                assert other.metrics == one.metrics
            elif job.row == "none":  # noise of a stack is drawn otherwise
                assert other.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-4)


def test_a_regression_study_from_the_command_line_is_judged_by_its_error(folder: Path, capsys) -> None:
    write_study(folder, "regression")
    assert main(["study", "mine", "--backend", "sequential"]) == 0
    said = capsys.readouterr()
    assert "Test rmse (lower is better), mean over seeds" in said.out
    assert "By how much `moo` is ahead in rmse" in said.out
    assert "rmse" in said.err
    assert "accuracy" not in said.out + said.err
    assert "%" not in "".join(line for line in said.out.splitlines() if line.startswith("|"))
    records = load_results(Path("results/mine")).values()
    assert all(set(record["metrics"]) == {"rmse", "mae", "r2", "loss"} for record in records)
    assert {(record["score"], record["higher_is_better"]) for record in records} == {("rmse", False)}
    means = {cell["method"]: cell["mean"] for cell in json.loads(Path("results/mine/table.json").read_text())}
    values = [record["metrics"]["rmse"] for record in records if record["row"] == "moo"]
    assert means["moo"] == pytest.approx(sum(values) / 2, rel=1e-5)
    ahead = json.loads(Path("results/mine/table-cells.json").read_text())["cells"][1]["moo_ahead"]["mean"]
    assert ahead == pytest.approx(means["dp-sgd"] - means["moo"], rel=1e-3), "a lower error is ahead"
    assert list(Path("results/mine/figures").glob("table-up-8-rmse.svg"))


def test_trials_of_a_regression_are_chosen_by_the_lower_error(folder: Path, capsys) -> None:
    write_study(folder, "regression")
    jobs = folder / "jobs.json"
    assert main(["study", "prepare", "mine-tune", "--methods", "dp-sgd"]) == 0
    jobs.write_text(capsys.readouterr().out)
    from fulcrum.study import worker

    assert worker.main([str(jobs), "--out", "results/mine", "--backend", "sequential"]) == 0
    assert main(["study", "choose", "--study", "mine", "--methods", "dp-sgd"]) == 0
    choice = read_experiment(name="mine").choices[0]
    errors = {record["trial"]: record["metrics"]["rmse"] for record in load_results(Path("results/mine")).values()}
    assert len(errors) == 2
    assert choice.trial == min(errors, key=errors.__getitem__)
    assert choice.worst == pytest.approx(max(errors.values()), abs=1e-4)


def test_a_grid_of_a_regression_has_gaps_in_its_own_units(folder: Path, capsys) -> None:
    write_study(folder, "regression")
    assert main(["study", "grid", "--backend", "sequential", "-q"]) == 0
    out = capsys.readouterr().out
    assert "Test rmse (lower is better)" in out
    assert "point" not in out
    entries = json.loads(Path("results/grid/summary.json").read_text())
    errors = [r["metrics"]["rmse"] for r in load_results(Path("results/grid")).values() if r["row"] == "dp-sgd"]
    assert entries[0]["best_fixed"] == pytest.approx(min(errors), rel=1e-5)
    assert entries[0]["worst_gap_grid"] == pytest.approx(max(errors) - min(errors), rel=1e-4)


def test_a_study_without_a_test_set_is_refused_in_a_sentence(folder: Path) -> None:
    write_study(folder, "regression")
    with np.load("made/up.npz") as arrays:
        kept = {name: arrays[name] for name in ("x", "y")}
    np.savez("made/up.npz", **kept)
    job = calibrate_jobs(list_paper_jobs(read_experiment(name="mine"))[:1])[0]
    with pytest.raises(DataError, match="has no test set"):
        prepare_job(job, DatasetCache(), "cpu")
    held = dataclasses.replace(job, settings=job.settings.replace(data={"validation": 0.2}))
    assert prepare_job(held, DatasetCache(), "cpu").problem.dataset.test is not None
