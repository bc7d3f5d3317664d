"""Jobs and results: ids, resuming, shards, merging, conflicts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fulcrum import runs as api
from fulcrum.clipping import find_rule
from fulcrum.clipping.rule import ModelFacts
from fulcrum.data import load
from fulcrum.errors import ConfigError, RunError
from fulcrum.settings.schema import Clip, Settings
from fulcrum.study import backends, store, worker
from fulcrum.study import run_job as play
from fulcrum.study.calibrate import calibrate_jobs, calibrate_noise
from fulcrum.study.experiment import list_paper_jobs, list_tuning_jobs, read_experiment
from fulcrum.study.job import (
    CLIP_SETTINGS_READ,
    JobShard,
    StudyJob,
    compute_job_id,
    drop_duplicate_jobs,
    job_from_json,
    parse_shard,
    settings_from_json,
)
from fulcrum.study.search import find_choice
from support.studies import experiments, record, small

EXPERIMENTS = Path(__file__).parents[2] / "src" / "fulcrum" / "study" / "experiments"

SOURCE = Path(__file__).parents[2] / "src"


def job(**sections: dict[str, object]) -> StudyJob:
    base = Settings().replace(privacy={"epsilon": 4.0}, train={"rounds": 2})
    return StudyJob(base.replace(**sections), "paper", "digits/4/moo", "digits", "moo", 4.0)


# --- ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "idle",
    [
        {"run": {"device": "cuda:1"}},
        {"run": {"engine": "reference"}},
        {"run": {"evaluate_every": 7}},
        {"data": {"dir": "/somewhere"}},
        {"privacy": {"epsilon": None, "sigma": 1.23}},
    ],
)
def test_an_id_does_not_depend_on_where_and_how_a_job_runs(idle):
    assert job(**idle).id == job().id
    assert dataclasses.replace(job(), settings=dataclasses.replace(job().settings, method="renamed")).id == job().id


@pytest.mark.parametrize(
    "matters",
    [
        {"run": {"seed": 1}},
        {"train": {"lr": 1.5}},
        {"data": {"validation": 0.1}},
        {"data": {"parties": 6}},
        {"clip": {"C0": 2.0}},
        {"privacy": {"delta": 1e-6}},
        {"model": {"activation": "tanh"}},
    ],
)
def test_an_id_depends_on_what_decides_the_result(matters):
    assert job(**matters).id != job().id


def test_an_id_depends_on_target_and_revision():
    assert dataclasses.replace(job(), epsilon=5.0).id != job().id
    assert dataclasses.replace(job(), revision=1).id != job().id
    given = [dataclasses.replace(job(privacy={"epsilon": None, "sigma": s}), epsilon=None).id for s in (1.0, 2.0)]
    assert given[0] != given[1], "without a target, sigma is what was asked for"


def test_an_id_survives_json_and_another_process():
    plain = json.loads(json.dumps(job(train={"lr": 2.0, "decay_rounds": (3, 4)}).to_json()))
    plain["settings"]["train"]["lr"] = 2  # as other writers of JSON may have it
    again = job_from_json(plain)
    assert again == job(train={"lr": 2.0, "decay_rounds": (3, 4)})
    assert again.id == plain["id"]
    code = "import json,sys; from fulcrum.study.job import job_from_json; print(job_from_json(json.load(sys.stdin)).id)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-c", code]
    told = subprocess.run(words, input=json.dumps(plain), env=environment, capture_output=True, text=True, timeout=120)
    assert told.stdout.strip() == plain["id"], told.stderr


def test_settings_of_another_version_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"clip\.brand_new"):
        settings_from_json({"clip": {"brand_new": 1}})
    with pytest.raises(ConfigError, match="novel"):
        settings_from_json({"novel": {}})


def test_jobs_with_one_id_are_one():
    assert drop_duplicate_jobs([job(), job(run={"device": "cpu"}), job(run={"seed": 1})]) == [
        job(),
        job(run={"seed": 1}),
    ]


def test_shards_share_all_jobs_without_overlap(tmp_path):
    jobs = list_paper_jobs(small(tmp_path))
    parts = [[j.id for j in jobs if JobShard(i, 3).contains_job(j)] for i in range(3)]
    assert sorted(i for part in parts for i in part) == sorted(j.id for j in jobs)
    assert parse_shard("2/3") == JobShard(2, 3)
    for wrong in ("3/3", "1", "a/b", "-1/2"):
        with pytest.raises(ConfigError, match="shard"):
            parse_shard(wrong)


# --- running, resuming ------------------------------------------------------------------------


def test_a_job_gives_what_the_api_gives(tmp_path):
    one = calibrate_jobs([j for j in list_paper_jobs(small(tmp_path, rounds=3)) if j.row == "dp-fedavg"][:1])
    one += calibrate_jobs([j for j in list_paper_jobs(small(tmp_path, rounds=3)) if j.row == "moo"][:1])
    for ready, result in backends.run_jobs(one, "sequential"):
        # The calibrated settings: a run that asks for epsilon in place of sigma is another run, with other noise.
        whole = api.execute(api.prepare(ready.settings))
        assert result.value == whole.accuracy
        assert result.C[-1][1] == pytest.approx(whole.C[-1], rel=1e-3)
        assert whole.epsilon == pytest.approx(ready.accounted)
        assert ready.epsilon is not None
        assert ready.accounted is not None
        assert 0.98 * ready.epsilon < ready.accounted <= ready.epsilon


def test_calibration_meets_every_target_from_below(tmp_path):
    jobs = calibrate_jobs(list_tuning_jobs(small(tmp_path)))
    assert len(jobs) == 3 * (1 + 3 * 2)
    for j in jobs:
        if j.epsilon is None:
            assert j.row == "none"
            assert j.accounted is None
        else:
            assert j.accounted is not None
            assert 0.98 * j.epsilon < j.accounted <= j.epsilon
    sigma = jobs[-1].settings.privacy.sigma
    assert sigma is not None
    ratio = calibrate_noise(jobs[-1].settings.replace(privacy={"epsilon": 4.0, "sigma": None}))[0] / sigma
    assert ratio == pytest.approx(1)


def test_an_uncalibrated_job_is_refused():
    with pytest.raises(ConfigError, match="no sigma"):
        list(backends.run_jobs([job()], "sequential"))


def test_an_interrupted_study_runs_nothing_twice(tmp_path, monkeypatch):
    jobs = calibrate_jobs(list_paper_jobs(small(tmp_path).only(methods=["moo"])))
    assert len(jobs) == 4
    played: list[str] = []
    real = backends.train_to_end

    def counting(federation, on_round=None):
        if len(played) == 2:
            raise KeyboardInterrupt
        played.append(repr(federation.settings))
        return real(federation, on_round)

    how = backends.BackendOptions(say=lambda _: None)
    monkeypatch.setattr(backends, "train_to_end", counting)
    with pytest.raises(KeyboardInterrupt):
        worker.run_missing_jobs(jobs, tmp_path / "out", "sequential", how)
    assert len(store.load_results(tmp_path / "out")) == 2
    played.append("")  # let it pass the point where it was interrupted
    assert worker.run_missing_jobs(jobs, tmp_path / "out", "sequential", how) == 0
    played.remove("")
    assert len(played) == len(set(played)) == 4
    assert worker.run_missing_jobs(jobs, tmp_path / "out", "sequential", how) == 0
    assert len(played) == 4, "a finished study runs nothing"
    assert {r["id"] for r in store.load_results(tmp_path / "out").values()} == {j.id for j in jobs}


def test_time_that_is_up_leaves_jobs_undone_and_says_so(tmp_path):
    jobs = calibrate_jobs(list_paper_jobs(small(tmp_path).only(methods=["dp-sgd"])))
    said: list[str] = []
    how = backends.BackendOptions(clock=backends.TimeBudget(1e-9), say=said.append)
    assert worker.run_missing_jobs(jobs, tmp_path / "out", "sequential", how) == len(jobs)
    assert "4 jobs left" in said[-1]
    assert not list((tmp_path / "out").glob("*.jsonl")), "no empty shard"


def test_the_clock_stops_a_job_that_will_not_end_in_time(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(backends.time, "monotonic", lambda: now[0])
    clock = backends.TimeBudget(100.0)

    def rounds(each: float, total: int, since: float) -> None:
        now[0] = since + 40  # loading data and recording programs
        for done in range(1, total):
            clock.check_time_left(done, total, since)
            now[0] += each

    rounds(1.0, 40, 1000.0)
    clock.began = now[0]
    with pytest.raises(play.TimeBudgetExceeded):
        rounds(5.0, 40, now[0])  # 200 s, of which 60 are left
    clock.began = now[0]
    clock.record_duration("slow", 500.0)
    clock.record_duration("slow", 95.0)  # the first also loaded
    assert clock.fits("other")
    assert not clock.fits("slow", 2)
    assert not backends.TimeBudget(100.0, now[0], {"slow": 95.0}).fits("slow")


@pytest.mark.slow
@pytest.mark.rehearsal  # other processes rehearse too
def test_processes_give_the_same_as_one_process(tmp_path):
    jobs = calibrate_jobs(list_paper_jobs(small(tmp_path).only(methods=["dp-sgd"], epsilons=[4.0])))
    how = backends.BackendOptions(workers=2)
    found = {j.id: r.value for j, r in backends.run_jobs(jobs, "processes", how)}
    assert found == {j.id: r.value for j, r in backends.run_jobs(jobs, "sequential", how)}


def test_a_stack_gives_the_same_as_one_after_the_other(tmp_path):
    part = small(tmp_path).only(methods=["dp-sgd", "moo", "dp-fedavg"], epsilons=[4.0], seeds=1)
    jobs = calibrate_jobs(list_paper_jobs(part))
    how = backends.BackendOptions(device="cpu", stack=2, say=lambda _: None)
    stacked = {j.id: r for j, r in backends.run_jobs(jobs, "stacked", how)}
    alone = {j.id: r for j, r in backends.run_jobs(jobs, "sequential", how)}
    assert stacked.keys() == alone.keys() == {j.id for j in jobs}
    for i, result in stacked.items():
        assert result.value == pytest.approx(alone[i].value, abs=0.02)
        assert result.C[-1][1] == pytest.approx(alone[i].C[-1][1], rel=1e-3)


def test_client_level_jobs_are_stacked_with_as_many_parties(tmp_path):
    def client(parties, **clip):
        return job(data={"parties": parties}, privacy={"unit": "client"}, clip={"rule": "fixed", **clip})

    assert backends.can_stack_runs(client(10).settings)
    assert not backends.can_stack_runs(client(10, rule="median").settings)  # looks at all updates together
    assert backends.make_batch_key(client(10)) != backends.make_batch_key(client(20))
    assert backends.make_batch_key(client(10)) == backends.make_batch_key(client(10, C0=2.0))
    assert backends.make_batch_key(job(data={"parties": 10})) == backends.make_batch_key(job(data={"parties": 20}))


def test_runs_that_differ_in_their_transform_are_not_stacked_together(tmp_path):
    jobs = [
        dataclasses.replace(job(clip={"rule": "wav", "shrink": shrink}, data={"parties": 2}), epsilon=4.0)
        for shrink in (0.0, 2.0)
    ]
    jobs = calibrate_jobs(jobs)
    how = backends.BackendOptions(device="cpu", say=lambda _: None)
    stacked = {j.id: r.metrics["loss"] for j, r in backends.run_jobs(jobs, "stacked", how)}
    alone = {j.id: r.metrics["loss"] for j, r in backends.run_jobs(jobs, "sequential", how)}
    assert stacked == pytest.approx(alone, rel=1e-4)
    first, second = alone.values()
    assert first != pytest.approx(second, rel=1e-3)


def test_a_rule_that_fails_costs_the_others_nothing(tmp_path, monkeypatch):
    jobs = calibrate_jobs(list_paper_jobs(small(tmp_path).only(methods=["dp-sgd", "moo"], epsilons=[4.0], seeds=1)))
    said: list[str] = []
    how = backends.BackendOptions(device="cpu", say=said.append)

    def broken(federations, check):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(backends, "_run_stack", broken)
    found = {j.row for j, _ in backends.run_jobs(jobs, "stacked", how)}
    assert found == {"dp-sgd", "moo"}
    assert sum("one by one" in line for line in said) == 2
    real = backends.train_to_end

    def fussy(federation, on_round=None):
        if federation.problem.rule.name == "moo":
            raise RuntimeError("diverged")
        return real(federation, on_round)

    monkeypatch.setattr(backends, "train_to_end", fussy)
    assert worker.run_missing_jobs(jobs, tmp_path / "out", "sequential", how) == 1
    assert any("FAILED" in line and "diverged" in line for line in said)


def test_unknown_backends_are_named():
    with pytest.raises(ConfigError, match="backend = 'quantum'"):
        list(backends.run_jobs([], "quantum"))


def test_tuning_never_sees_test_data(tmp_path, monkeypatch):
    experiment = small(tmp_path)
    trials, finals = list_tuning_jobs(experiment), list_paper_jobs(experiment)
    trials += list_tuning_jobs(experiment, protocol=True)
    assert all(j.settings.data.validation == 0.1 for j in trials)
    assert all(j.settings.data.validation == 0 for j in finals)
    assert not {j.seed for j in trials} & {j.seed for j in finals}
    assert not {j.id for j in trials} & {j.id for j in finals}
    federation = play.prepare_job(calibrate_jobs(trials[:1])[0], play.DatasetCache())
    whole = load("digits")
    assert len(federation.problem.dataset.x_test) == round(0.1 * len(whole.x))
    assert len(federation.problem.dataset.x) == len(whole.x) - round(0.1 * len(whole.x))
    test_rows = {row.numpy().tobytes() for row in whole.x_test} - {row.numpy().tobytes() for row in whole.x}
    seen = {row.numpy().tobytes() for part in ("x", "x_test") for row in getattr(federation.problem.dataset, part)}
    assert test_rows
    assert not test_rows & seen


# --- the worker, where little is installed -------------------------------------------------------


BLOCKED = ["pydantic", "typer", "rich", "sklearn", "dp_accounting", "tomli_w", "scipy", "platformdirs"]


def run_worker(words: list[str], blocked: list[str] = BLOCKED) -> subprocess.CompletedProcess[str]:
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from fulcrum.study import worker
sys.exit(worker.main({words!r}))
"""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=SOURCE, timeout=300)


@pytest.mark.slow
@pytest.mark.rehearsal  # other processes rehearse too
def test_the_worker_needs_torch_numpy_and_safetensors_alone(tmp_path):
    part = small(tmp_path).only(methods=["moo", "dp-fedavg", "none"], epsilons=[4.0], seeds=1)
    jobs = (
        calibrate_jobs(list_paper_jobs(part)) + calibrate_jobs(list_tuning_jobs(part.only(methods=["dp-fedavg"])))[:1]
    )
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": [j.to_json() for j in jobs]}))
    words = [str(tmp_path / "jobs.json"), "--out", str(tmp_path / "out"), "--data-dir", str(tmp_path)]
    done = run_worker([*words, "--backend", "sequential"])
    assert done.returncode == 0, done.stderr
    found = store.load_results(tmp_path / "out")
    here = {j.id: r.value for j, r in backends.run_jobs(jobs, "sequential")}
    assert {i: r["accuracy"] for i, r in found.items()} == here, "the digits need no other package"
    again = run_worker(words)
    assert again.returncode == 0
    assert "nothing to do" in again.stderr


def test_the_block_works(tmp_path):
    done = run_worker(["x.json", "--out", str(tmp_path)], ["torch"])
    assert "blocked: torch" in done.stderr


def test_a_wrong_job_file_is_one_sentence(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("[1]")
    assert worker.main([str(tmp_path / "bad.json"), "--out", str(tmp_path)]) == 2
    assert worker.main([str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


# --- results --------------------------------------------------------------------------------------


def write(folder: Path, name: str, *records: dict[str, object]) -> None:
    with store.ShardWriter(folder, name) as writer:
        for one in records:
            writer.add(one)


def test_results_come_back_and_a_torn_line_is_dropped(tmp_path):
    jobs = list_paper_jobs(small(tmp_path))[:2]
    write(tmp_path, "a", record(jobs[0], 0.5), record(jobs[1], 0.6))
    file = tmp_path / "a.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    assert set(store.load_results(tmp_path)) == {jobs[0].id}
    write(tmp_path, "a", record(jobs[1], 0.6))
    assert set(store.load_results(tmp_path)) == {j.id for j in jobs}
    file.write_text("not json\n" + file.read_text())
    with pytest.raises(RunError, match="line 1"):
        store.load_results(tmp_path)


def test_a_shard_has_one_writer(tmp_path):
    with store.ShardWriter(tmp_path, "a"), pytest.raises(RunError, match="another process"):
        store.ShardWriter(tmp_path, "a")


def test_ids_are_computed_from_the_settings_in_the_line(tmp_path):
    one = list_paper_jobs(small(tmp_path))[0]
    old = record(one, 0.5, id="stale")
    del old["settings"]["clip"]["shrink"]  # as if it had been written before this setting existed
    write(tmp_path, "a", old)
    assert set(store.load_results(tmp_path)) == {one.id}
    unknown = record(one, 0.5, id="fromthefuture")
    unknown["settings"]["clip"]["brand_new"] = 1
    write(tmp_path, "b", unknown)
    assert set(store.load_results(tmp_path)) == {one.id, "fromthefuture"}


def test_large_merged_results_are_gzipped_and_read_like_others(tmp_path, monkeypatch):
    jobs = list_paper_jobs(small(tmp_path).only(methods=["dp-sgd"]))[:2]
    write(tmp_path / "a", "x", record(jobs[0], 0.5))
    write(tmp_path / "b", "y", record(jobs[1], 0.6))
    target = tmp_path / "all"
    study = jobs[0].study
    store.merge_results([tmp_path / "a"], target)
    plain = target / f"{study}.jsonl"
    assert store.list_shards(target) == [plain]
    monkeypatch.setattr(store, "GZIP_THRESHOLD_BYTES", 10)
    store.merge_results([tmp_path / "b"], target)
    packed = target / f"{study}.jsonl.gz"
    assert store.list_shards(target) == [packed], "the plain file has gone"
    assert {i: r["accuracy"] for i, r in store.load_results(target).items()} == {jobs[0].id: 0.5, jobs[1].id: 0.6}
    before = packed.read_bytes()
    store.merge_results([tmp_path / "a"], target)
    assert packed.read_bytes() == before, "the same runs are the same bytes"
    packed.write_bytes(before[:-9])
    with pytest.raises(RunError, match=r"jsonl\.gz is damaged"):
        store.load_results(target)
    packed.write_bytes(b"no gzip at all")
    with pytest.raises(RunError, match=r"jsonl\.gz is damaged"):
        store.load_results(target)


def test_shards_of_two_machines_merge_by_id(tmp_path):
    jobs = list_paper_jobs(small(tmp_path))[:4]
    here, there, both = tmp_path / "here", tmp_path / "there", tmp_path / "both"
    write(here, "runs-a-0of2", record(jobs[0], 0.1), record(jobs[1], 0.2))
    write(there, "runs-b-1of2", record(jobs[1], 0.2, date="later", seconds=3), record(jobs[2], 0.3))
    write(both, "runs-old", record(jobs[3], 0.4, study="other"))
    assert store.merge_results([here, there], both) == {"other": 1, "paper": 3}
    assert sorted(file.name for file in both.iterdir()) == ["other.jsonl", "paper.jsonl"]
    assert {i: r["accuracy"] for i, r in store.load_results(both).items()} == {
        j.id: a for j, a in zip(jobs, (0.1, 0.2, 0.3, 0.4), strict=True)
    }
    assert store.merge_results([here], both) == {"other": 1, "paper": 3}, "merging again changes nothing"
    with pytest.raises(RunError, match="no folder"):
        store.merge_results([tmp_path / "nowhere"], both)


def test_two_results_of_one_job_are_a_conflict(tmp_path):
    one = list_paper_jobs(small(tmp_path))[0]
    write(tmp_path, "a", record(one, 0.5, date="2026-01-01"))
    write(tmp_path, "b", record(one, 0.6, date="2026-01-02"))
    with pytest.raises(RunError, match=r"0\.5000 .*0\.6000"):
        store.load_results(tmp_path)
    assert store.load_results(tmp_path, "earliest")[one.id]["accuracy"] == 0.5
    assert store.load_results(tmp_path, "latest")[one.id]["accuracy"] == 0.6
    store.merge_results([], tmp_path, "latest")
    assert store.load_results(tmp_path)[one.id]["accuracy"] == 0.6
    with pytest.raises(ConfigError, match="keep"):
        store.load_results([tmp_path, tmp_path], "best")


def test_the_study_of_the_repository_is_whole():
    from fulcrum.study.experiment import list_protocol_jobs

    experiment = read_experiment(EXPERIMENTS)
    assert experiment.datasets == ("mnist", "fashion-mnist", "cifar10")
    assert experiment.epsilons == (6.38, 3.61, 1.64)
    assert len(experiment.seeds) == 5
    jobs = list_paper_jobs(experiment)
    assert len(jobs) == len({j.id for j in jobs}) == 3 * 5 * (1 + 3 * (len(experiment.rows) - 1))
    for j in jobs:
        settings = j.settings
        assert (settings.train.rounds, settings.privacy.delta, settings.data.alpha) == (200, 1e-5, 0.5)
        assert settings.data.parties == (1000 if j.row == "dp-fedavg-k1000" else 10)
        assert settings.model.activation == ("tempered" if j.row == "tempered" else "relu")
    assert {j.settings.clip.C0 for j in list_protocol_jobs(experiment)} == {1.0}
    for row in experiment.rows:
        counts = {len(experiment.search.make_row_trials(row.name, d)) for d in experiment.datasets}
        assert counts == {experiment.search.trials}
    assert find_choice(experiment.choices, "nowhere", 1.0, "moo") is None


def test_new_painted_weights_make_new_runs_of_the_data_sets_that_use_them() -> None:
    experiment = read_experiment(EXPERIMENTS)
    later = dataclasses.replace(experiment, weights={**experiment.weights, "cifar10": 99})
    for old, new in zip(list_paper_jobs(experiment), list_paper_jobs(later), strict=True):
        assert (old.id != new.id) == (old.dataset == "cifar10"), old.cell
    bare = {**experiment.settings, "model": {**experiment.settings["model"], "init": "random"}}
    plain = [list_paper_jobs(dataclasses.replace(e, settings=bare)) for e in (experiment, later)]
    assert [j.id for j in plain[0]] == [j.id for j in plain[1]], "random weights do not come from the files"


def test_painted_files_are_those_that_the_experiment_counts() -> None:
    from fulcrum.models import pretrain as priors

    for name, entry in tomllib.loads((EXPERIMENTS / "paper.toml").read_text())["weights"].items():
        for activation in ("relu", "tempered"):
            file = priors.find_shipped_weights(entry["model"], activation)
            found = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
            assert found == entry[activation], f"{file.name} has changed: raise the number of weights.{name}"


def test_experiments_are_found_or_asked_for(tmp_path, monkeypatch):
    from fulcrum.study.experiment import find_study_folder

    place = experiments(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_study_folder() == Path("experiments")
    assert find_study_folder(place) == place
    with pytest.raises(ConfigError, match=r"paper\.toml"):
        find_study_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"did you mean 'robustness'\?"):
        find_study_folder(place, "robustnes")
    monkeypatch.chdir(place)
    assert find_study_folder() == EXPERIMENTS, "what is installed, where the working folder has none"


def test_chosen_settings_are_written_to_the_working_folder_and_win_there(tmp_path, monkeypatch):
    from fulcrum.study import choosing

    monkeypatch.chdir(tmp_path)
    kept = (EXPERIMENTS / "chosen.toml").read_bytes()
    packaged = read_experiment()
    assert packaged.folder == EXPERIMENTS
    assert packaged.choices
    changed = dataclasses.replace(packaged.choices[0], settings={"train.lr": 0.123})
    choosing.save_choices(packaged, [changed])
    assert (EXPERIMENTS / "chosen.toml").read_bytes() == kept, "nothing is written into an installed package"
    assert Path("experiments/chosen.toml").is_file()
    again = read_experiment()
    assert again.folder == EXPERIMENTS, "the study itself is still the package's"
    assert changed in again.choices
    assert len(again.choices) == len(packaged.choices)


@pytest.mark.parametrize("name", sorted(CLIP_SETTINGS_READ))
def test_the_settings_that_count_for_an_id_are_those_a_rule_reads(name: str) -> None:
    seen: set[str] = set()

    class Watched:
        def __getattr__(self, field: str) -> object:
            seen.add(field)
            return getattr(Clip(), field)

    find_rule(name).init(Watched(), ModelFacts(10, (4, 6)))  # type: ignore[arg-type]
    assert seen <= {"groups", *CLIP_SETTINGS_READ[name]}
    assert find_rule(name).init(Clip(), ModelFacts(10, (4, 6))).keys(), "and the rule does start"


def test_an_unread_setting_leaves_an_id_and_a_read_one_changes_it() -> None:
    plain = Settings().replace(clip={"rule": "fixed"})
    assert compute_job_id(plain, 1.0) == compute_job_id(plain.replace(clip={"beta": 0.5}), 1.0)
    assert compute_job_id(plain, 1.0) != compute_job_id(plain.replace(clip={"C0": 0.5}), 1.0)
    assert compute_job_id(Settings(), 1.0) != compute_job_id(Settings().replace(clip={"beta": 0.5}), 1.0)


def test_a_split_that_is_left_to_the_data_has_the_id_of_the_split_it_was():
    settings = Settings().replace(privacy={"sigma": 1.0})
    ids = {
        name: compute_job_id(settings.replace(data={"partition": name}), None) for name in ("auto", "dirichlet", "iid")
    }
    assert settings.data.partition == "auto"
    assert ids["auto"] == ids["dirichlet"] != ids["iid"]
