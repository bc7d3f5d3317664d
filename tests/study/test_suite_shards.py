"""The no-tuning suite in shards: a pack expands to the suite's own jobs, shards share it whole, results go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulcrum.runs.rehearsal import Candidate, Rehearsed, apply
from fulcrum.study import backends
from fulcrum.study.store import load_results
from fulcrum.study.suite import shards
from fulcrum.study.suite.jobs import list_scenario_jobs
from fulcrum.study.suite.scenarios import read_suite

SCENARIO = "census-linear-2000x1-k1-q0.001-e2"


@pytest.fixture(scope="module")
def pack() -> shards.Pack:
    return shards.make_pack(SCENARIO, "bars", seeds=4)


def test_a_pack_expands_to_the_jobs_of_the_suite(pack: shards.Pack) -> None:
    suite = read_suite()
    scenario = next(s for s in suite.scenarios if s.name == SCENARIO)
    wanted = {job.id: job.cell for job in list_scenario_jobs(suite, scenario) if job.row in ("moo", "dp-sgd")}
    found = {job.id: job for entry in pack for job in shards.expand_entry(entry)}
    assert len(found) == 4 * (25 + 6)
    assert all(wanted[name] == job.cell for name, job in found.items())
    assert all(job.is_calibrated for job in found.values())
    rehearsed = {job.row: job.settings.clip.rehearse for job in found.values()}
    assert rehearsed == {"moo": True, "dp-sgd": False}


def test_parts_of_a_pack_and_several_scenarios() -> None:
    pack = shards.make_pack(f"{SCENARIO},digits-linear-12x8-k8-q0.2-e4", "rehearsed", seeds=2)
    assert {(entry["scenario"], entry["job"]["row"]) for entry in pack} == {
        (name, row) for name in (SCENARIO, "digits-linear-12x8-k8-q0.2-e4") for row in ("moo", "dp-sgd-rehearsed")
    }
    assert all([run[1:] for run in entry["runs"]] == [[1.0, 1.0, 0], [1.0, 1.0, 1]] for entry in pack)
    grid = shards.make_pack(SCENARIO, "grid", seeds=2)
    assert {entry["job"]["row"] for entry in grid} == {"dp-sgd"}
    assert sum(len(entry["runs"]) for entry in grid) == 25 * 2


def test_shards_share_a_pack_and_the_dearest_entries_come_first(pack: shards.Pack) -> None:
    many = [{**entry, "cost": cost, "runs": [[str(cost)]]} for cost, entry in enumerate(pack * 4, start=1)]
    parts = [shards.assign_entries(many, i, 3) for i in range(3)]
    assert sorted(e["cost"] for part in parts for e in part) == sorted(e["cost"] for e in many)
    assert all(part == sorted(part, key=lambda entry: -entry["cost"]) for part in parts)
    loads = [sum(entry["cost"] for entry in part) for part in parts]
    assert max(loads) < 1.5 * min(loads)


def test_a_shard_goes_on_where_it_stopped_and_a_failure_costs_nobody_else(tmp_path: Path) -> None:
    pack = shards.make_pack("digits-linear-20x1-k5-q0.2-e3.61", "default", seeds=2)
    pack[0]["job"]["settings"]["train"]["rounds"] = 2
    pack[0]["job"]["settings"]["clip"]["rehearse"] = False
    broken = json.loads(json.dumps(pack[0]))
    broken["job"]["settings"]["data"]["source"] = "nowhere:nothing"
    file = tmp_path / "pack.json"
    file.write_text(json.dumps([{**broken, "cost": 9}, pack[0]]))
    words = ["run", str(file), "--out", str(tmp_path / "out"), "--device", "cpu", "--precision", "float32"]
    assert shards.main(words) == 3  # the broken entry is left
    done = load_results(tmp_path / "out")
    assert sorted(record["seed"] for record in done.values()) == [0, 1]
    file.write_text(json.dumps(pack))
    assert shards.main(words) == 0
    assert load_results(tmp_path / "out") == done


@pytest.mark.rehearsal
def test_starts_that_a_rehearsal_makes_the_same_run_are_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal chooses C and the learning rate: six starts are one run; without it they are six."""
    entry = shards.make_pack("digits-linear-20x1-k5-q0.2-e3.61", "bars", seeds=2)[-1]
    assert entry["job"]["row"] == "moo"
    assert len(entry["runs"]) == 6 * 2
    entry["job"]["settings"]["train"]["rounds"] = 2
    chosen = Rehearsed(Candidate("plain", 0.3, 0.7), "0" * 16)
    monkeypatch.setattr(apply, "recall_or_rehearse", lambda *given: chosen)
    monkeypatch.setattr(apply, "estimate_minutes", lambda federation: 0.0)
    played: list[int] = []
    real = backends._run_stack

    def counted(federations, check, say=None):  # type: ignore[no-untyped-def]
        played.append(len(federations))
        return real(federations, check, say)

    monkeypatch.setattr(backends, "_run_stack", counted)
    how = backends.BackendOptions(device="cpu", say=lambda line: None)
    scores: dict[int, set[float]] = {}
    for job, outcome in backends.run_jobs(shards.expand_entry(entry), "stacked", how):
        scores.setdefault(job.seed, set()).add(outcome.metrics["loss"])
    assert played == [2]
    assert [len(each) for each in scores.values()] == [1, 1]
    entry["job"]["settings"]["clip"]["rehearse"] = False
    outcomes = list(backends.run_jobs(shards.expand_entry(entry), "stacked", how))
    assert played == [2, 12]
    assert len({outcome.metrics["loss"] for _, outcome in outcomes}) > 2
