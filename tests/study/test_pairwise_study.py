"""The study of aggregations: its nine cells, what table.json holds, and parts that merge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from fulcrum.engines.stacked.table import get_resident_examples
from fulcrum.study import store, worker
from fulcrum.study.job import StudyJob
from fulcrum.study.run_job import DatasetCache, prepare_job
from fulcrum.study.studies import StudyPart, read_study
from support.scripts import load_script

KEYS = {"dataset", "epsilon", "aggregation", "colluders", "mean", "ci95", "behind_ideal", "behind_ideal_ci95", "seeds"}


def record(job: StudyJob, accuracy: float) -> dict[str, Any]:
    machine = {"device": "cpu", "processor": "x", "cores": 1, "python": "3", "torch": "2", "backend": "b"}
    return {
        **job.to_json(),
        **{"seed": job.seed, "accuracy": accuracy, "metrics": {"accuracy": accuracy}, "score": "accuracy"},
        **{"higher_is_better": True, "notes": [], "machine": machine, "date": "2026-01-01"},
        **{"commit": "abc", "command": f"python -m fulcrum.study.worker jobs.json --shard {job.seed % 2}/2"},
    }


def test_the_study_has_nine_cells_of_five_aggregations_and_ten_seeds() -> None:
    jobs = read_study("pairwise").jobs()
    assert len({(job.dataset, job.epsilon) for job in jobs}) == 9
    assert len(jobs) == len({job.id for job in jobs}) == 9 * 5 * 10
    assert {(job.settings.privacy.aggregation, job.settings.privacy.colluders) for job in jobs} == {
        *{("plain", 1.0), ("ideal-secagg", 1.0)},
        *{("pairwise", 0.0), ("pairwise", 1.0), ("pairwise", 5.0)},
    }
    assert all(job.settings.clip.rule == "moo" and not job.settings.clip.rehearse for job in jobs)
    assert all(job.settings.data.parties == 10 and job.settings.train.steps == 1 for job in jobs)


def test_the_table_compares_with_the_ideal_seed_by_seed(tmp_path: Path) -> None:
    study = read_study("pairwise", part=StudyPart(datasets=("mnist",), epsilons=(1.64,), seeds=3))
    behind = {"ideal-secagg": 0.0, "pairwise-1": 0.002, "pairwise-0": 0.0, "pairwise-5": 0.01, "plain": 0.05}
    jobs = study.jobs()
    records = {job.id: record(job, 0.9 + 0.01 * job.seed - behind[job.row]) for job in jobs}
    study.write(tmp_path, records)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert all(set(row) >= KEYS and {"commit", "command"} <= set(row) for row in rows)
    found = {(row["aggregation"], row["colluders"]): row for row in rows}
    assert set(found) == {("plain", 9), ("ideal-secagg", 0), ("pairwise", 0), ("pairwise", 1), ("pairwise", 5)}
    one = found["pairwise", 1]
    assert one["mean"] == pytest.approx(90.8)
    assert (one["behind_ideal"], one["behind_ideal_ci95"]) == pytest.approx((0.2, 0.0), abs=1e-6)
    assert one["ci95"] > 1  # the seeds differ more than the aggregations: pairs tell these apart
    assert one["seeds"] == [0, 1, 2]
    assert one["runs_by"] == {
        "commit": "abc",
        "command": [f"python -m fulcrum.study.worker jobs.json --shard {shard}/2" for shard in (0, 1)],
    }
    assert "pairwise" in (tmp_path / "table.md").read_text()


def test_a_row_says_so_where_its_runs_name_no_commit(tmp_path: Path) -> None:
    study = read_study("pairwise", part=StudyPart(datasets=("mnist",), epsilons=(1.64,), seeds=1))
    old = {job.id: {**record(job, 0.9), "commit": "", "command": ""} for job in study.jobs()}
    study.write(tmp_path, old)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert all(row["runs_by"] == {"commit": "unknown", "command": "unknown"} for row in rows)


def test_a_worker_writes_commit_and_command_into_each_run(tmp_path: Path) -> None:
    job = read_tiny_jobs()[0]
    job = dataclasses.replace(
        job, settings=job.settings.replace(privacy={"epsilon": None, "sigma": 1.0}, train={"rounds": 2})
    )
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"jobs": [job.to_json()]}, default=list))
    words = [str(file), "--out", str(tmp_path / "out"), "--backend", "sequential", "--commit", "abc123"]
    assert worker.main(words) == 0
    (found,) = store.load_results(tmp_path / "out").values()
    assert found["commit"] == "abc123"
    assert found["command"].startswith("python -m fulcrum.study.worker")
    assert "--commit abc123" in found["command"]


def test_parts_of_two_machines_merge(tmp_path: Path) -> None:
    study = read_study("pairwise", part=StudyPart(datasets=("mnist",), epsilons=(1.64,), seeds=2))
    for part, jobs in enumerate((study.jobs()[::2], study.jobs()[1::2])):
        with store.ShardWriter(tmp_path / f"part{part}", f"runs-{part}") as writer:
            for job in jobs:
                writer.add(record(job, 0.9))
    store.merge_results([tmp_path / "part0", tmp_path / "part1"], tmp_path / "whole")
    study.write(tmp_path / "whole", store.load_results(tmp_path / "whole"))
    rows = json.loads((tmp_path / "whole" / "table.json").read_text())
    assert [len(row["seeds"]) for row in rows] == [2] * 5


def test_jobs_that_differ_in_their_plan_share_data_split_and_model() -> None:
    jobs = [
        dataclasses.replace(job, settings=job.settings.replace(privacy={"epsilon": None, "sigma": sigma}))
        for sigma, job in zip((1.0, 2.0, 3.0), read_tiny_jobs(), strict=True)
    ]
    cache = DatasetCache("")
    shared = [prepare_job(job, cache, "cpu") for job in jobs]
    alone = [prepare_job(job, DatasetCache(""), "cpu") for job in jobs]
    assert shared[1].problem.model is shared[0].problem.model
    for one, other in zip(shared, alone, strict=True):
        assert one.settings == other.settings
        assert one.plan.assignments(range(3), 0, 1.0) == other.plan.assignments(range(3), 0, 1.0)
        assert one.plan.colluders == other.plan.colluders
        assert one.problem.randomness == other.problem.randomness  # the same noise as prepared by itself
        assert one.problem.partition.names == other.problem.partition.names


def test_stacks_of_several_seeds_share_one_copy_of_the_records_on_the_device() -> None:
    """A preparation adds notes to its data set: the copy on the device must not be made anew for each of them."""
    jobs = [
        dataclasses.replace(
            job, settings=job.settings.replace(privacy={"epsilon": None, "sigma": 1.0}, run={"seed": i})
        )
        for i, job in enumerate(read_tiny_jobs()[:2])
    ]
    cache = DatasetCache("")
    one, other = (prepare_job(job, cache, "cpu").problem.dataset for job in jobs)
    other = dataclasses.replace(other, warnings=("a note",))
    place = torch.device("cpu")
    first, second = (get_resident_examples(each, "x", None, place)[0] for each in (one, other))
    assert first is second
    changed = other.with_changes(x=one.x + 1)
    assert get_resident_examples(changed, "x", None, place)[0] is not first
    assert get_resident_examples(one, "x_test", None, place)[0] is not first


def read_tiny_jobs() -> list[StudyJob]:
    """One job of three rows, on digits with a linear model."""
    jobs = read_study("pairwise", part=StudyPart(datasets=("mnist",), epsilons=(1.64,), seeds=1)).jobs()[:3]
    small: dict[str, dict[str, Any]] = {
        "data": {"source": "digits", "parties": 3},
        "model": {"init": "random", "coordinates": "plain", "name": "linear"},
    }
    return [dataclasses.replace(job, settings=job.settings.replace(**small)) for job in jobs]


def test_the_page_and_its_figure_hold_what_the_results_say() -> None:
    """docs/pairwise.md quotes table.json and bench-pairwise.json; another number there would be found."""
    figures = load_script("docs/pairwise_figures.py")
    assert figures.main(False) == 0
    rows = figures.read_rows()
    place = ("cifar10", 1.64, "pairwise", 1)
    changed = {**rows, place: {**rows[place], "mean": 66.0}}
    assert figures.make_accuracy_table(changed) != figures.make_accuracy_table(rows)
    ElementTree.fromstring(figures.draw_figure(rows))
