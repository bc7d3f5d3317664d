"""The no-tuning suite: its list, which half is set aside, how the best fixed cell is chosen and scored."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fulcrum.errors import ConfigError
from fulcrum.study.calibrate import calibrate_jobs
from fulcrum.study.run_job import DatasetCache, prepare_job, train_to_end
from fulcrum.study.suite import sources
from fulcrum.study.suite.jobs import list_starts, list_suite_jobs, make_suite_job
from fulcrum.study.suite.scenarios import FAILING_CLASSES, Suite, read_suite, select_part, select_set_aside
from fulcrum.study.suite.summary import find_all, judge, score_best_cell
from fulcrum.study.worker import run_missing_jobs


@pytest.fixture(scope="module")
def suite() -> Suite:
    return read_suite()


LISTS = {"first": slice(0, 56), "second": slice(56, 112), "third": slice(112, None)}
"""Places of the three lists; the set-aside halves of the first two have been looked at."""
DIGESTS = {"first": "9984d5a86afd3362", "second": "78c2ceb8c181e1e6", "third": "76759aaf6af73e2e"}
"""Of the names: a scenario that is renamed, added or taken away moves others between the halves."""


def _sort_by_digest(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def _digest(names: list[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def test_the_first_half_by_digest_is_set_aside(suite: Suite) -> None:
    names = [s.name for s in suite.scenarios]
    lists = {word: _sort_by_digest(names[where]) for word, where in LISTS.items()}
    halves = {word: set(own[: len(own) // 2]) for word, own in lists.items()}
    assert len(lists["third"]) >= 48
    assert suite.set_aside == halves["third"]
    assert suite.looks == {"first-look": halves["first"], "second-look": halves["second"]}
    # What has been looked at is never set aside again.
    assert not suite.set_aside & {*lists["first"], *lists["second"]}
    assert {word: _digest(own) for word, own in lists.items()} == DIGESTS


@pytest.mark.parametrize("word", ["first-look", "second-look"])
def test_what_was_looked_at_is_a_word_of_its_own_and_development(suite: Suite, word: str) -> None:
    part = select_part(suite, [word])
    assert {s.name for s in part.scenarios} == suite.looks[word]
    assert suite.looks[word] < {s.name for s in select_part(suite, ["development"]).scenarios}
    assert len(part.scenarios) == 28
    assert len(select_part(suite, ["set-aside"]).scenarios) == 24


@pytest.mark.parametrize(("new", "old"), [("second", "first"), ("third", "first"), ("third", "second")])
def test_no_later_scenario_is_an_earlier_one_with_one_value_changed(suite: Suite, new: str, old: str) -> None:
    def describe(scenario: object) -> dict[str, object]:
        return {name: value for name, value in vars(scenario).items() if name not in ("name", "seeds")}

    for later in map(describe, suite.scenarios[LISTS[new]]):
        for earlier in map(describe, suite.scenarios[LISTS[old]]):
            assert sum(later[name] != earlier[name] for name in later) >= 3, later


def test_each_failing_class_has_three_scenarios_on_both_sides(suite: Suite) -> None:
    for name in FAILING_CLASSES:
        own = [scenario.name in suite.set_aside for scenario in suite.scenarios if name in scenario.kinds]
        assert min(own.count(True), own.count(False)) >= 3, name


@pytest.mark.parametrize("which", LISTS)
def test_the_scenarios_cover_what_federations_look_like(suite: Suite, which: str) -> None:
    suite = dataclasses.replace(suite, scenarios=suite.scenarios[LISTS[which]])

    def values(name: str) -> list[float]:
        return [getattr(scenario, name) for scenario in suite.scenarios]

    assert (min(values("rounds")), max(values("rounds"))) == (5, 2000)
    assert (min(values("steps")), max(values("steps"))) == (1, 32)
    assert (min(values("parties")), max(values("parties"))) == (1, 1000)
    assert (min(values("rate")), max(values("rate"))) == (0.001, 1.0)
    assert (min(values("epsilon")), max(values("epsilon"))) == (0.3, 50.0)
    assert {s.data for s in suite.scenarios} == set(sources.BUILDERS)
    assert {"momentum", "adam", "sgd"} == {s.server for s in suite.scenarios}
    assert {"resnet", "layer_norm_mlp", "mean_of_words", "attention"} < {s.model for s in suite.scenarios}
    assert all(len(suite.list_seeds(s)) >= (20 if s.rounds <= 50 else 6) for s in suite.scenarios)
    assert len(list_starts(suite, "dp-sgd")) == 25
    assert list_starts(suite, suite.default)[0] == (1.0, 1.0)
    assert set(list_starts(suite, suite.default)[1:]) == {(C, lr) for C in (0.01, 100) for lr in (1 / 16, 16)} | {
        (0.01, 1.0)
    }


def test_halves_do_not_depend_on_order_and_a_part_keeps_them(suite: Suite) -> None:
    names = [s.name for s in suite.scenarios]
    assert select_set_aside(names[LISTS["third"]][::-1]) == suite.set_aside
    assert select_set_aside(names[::-1]) == select_set_aside(names) != frozenset(names[: len(names) // 2])
    part = select_part(suite, ["development"])
    assert {s.name for s in part.scenarios} == set(names) - suite.set_aside
    assert part.set_aside == suite.set_aside
    with pytest.raises(ConfigError, match="not of the suite"):
        select_part(suite, ["developmnt"])


def test_the_best_cell_is_scored_on_seeds_that_did_not_choose_it() -> None:
    generator = np.random.default_rng(0)
    equal = {(C, lr): {seed: 50 + generator.normal() for seed in range(6)} for C in range(5) for lr in range(5)}
    fair = [
        np.mean(list(score_best_cell(_shuffle_seeds(equal, np.random.default_rng(i)))[0].values())) for i in range(40)
    ]
    assert abs(np.mean(fair) - 50) < 0.25
    greedy = max(np.mean(list(scores.values())) for scores in equal.values())
    assert greedy - 50 > 0.5  # what the best of 25 equal cells would be taken for
    clear = {(1.0, 1.0): dict.fromkeys(range(4), 90.0), (1.0, 4.0): dict.fromkeys(range(4), 80.0)}
    assert score_best_cell(clear) == (dict.fromkeys(range(4), 90.0), ((1.0, 1.0), (1.0, 1.0)))


def _shuffle_seeds(grid, generator):
    return {cell: dict(enumerate(generator.permutation(list(scores.values())))) for cell, scores in grid.items()}


@pytest.fixture(scope="module")
def tiny(suite: Suite) -> Suite:
    part = select_part(suite, ["tiny"])
    scenarios = tuple(s for s in part.scenarios if s.data == "digits")[:1]
    return dataclasses.replace(part, scenarios=scenarios, default="moo", rivals=("dp-sgd",))


def test_a_tiny_suite_runs_and_is_summarised(tiny: Suite, tmp_path: Path) -> None:
    from fulcrum.study.backends import BackendOptions
    from fulcrum.study.store import load_results
    from fulcrum.study.suite.report import write_suite_report

    jobs = calibrate_jobs(list_suite_jobs(tiny))
    left = run_missing_jobs(jobs, tmp_path, "stacked", BackendOptions(device="cpu", say=lambda line: None))
    assert left == 0
    findings = write_suite_report(tmp_path, tiny, load_results(tmp_path))
    (entry,) = json.loads((tmp_path / "summary.json").read_text())
    wanted = {"scenario", "set_aside", "seeds", "best_fixed", "default", "worst_start", "interval", "commit", "command"}
    assert set(entry) == wanted
    assert entry["seeds"] == 2
    assert not entry["set_aside"]
    assert 0 < entry["default"] <= 100
    assert judge(findings).count == 1
    assert "Development half" in (tmp_path / "summary.md").read_text()
    assert entry["scenario"] in (tmp_path / "figures" / "regrets.svg").read_text()
    assert find_all(tiny, {}) == []


def test_the_summary_of_made_up_rows_is_what_they_say(suite: Suite, tmp_path: Path) -> None:
    """Two scenarios, one of them set aside, with scores by formula: every number of summary.json is known."""
    from fulcrum.study.suite.report import write_suite_report

    names = (min(suite.set_aside), min({s.name for s in suite.scenarios} - suite.set_aside))
    part = dataclasses.replace(select_part(suite, names, ["default"], seeds=4), rivals=())
    done = {}
    for job in list_suite_jobs(part):
        C0, lr = job.settings.clip.C0, job.settings.train.lr
        score = 60.0 if job.row == part.fixed else 58.0 - (3.0 if (C0, lr) == (0.01, 16.0) else 0.0)
        if job.row == part.fixed and (C0, lr) == (0.1, 4.0):
            score = 70.0 + job.seed  # the best cell on either half of the seeds
        machine = {"device": "cpu", "processor": "x", "cores": 1, "python": "3", "torch": "2", "backend": "b"}
        done[job.id] = {
            **{**job.to_json(), "seed": job.seed, "metrics": {"accuracy": score / 100}, "score": "accuracy"},
            **{"higher_is_better": True, "notes": [], "machine": machine, "date": "2026-01-01", "seconds": 1.0},
            **{"commit": "abc", "command": "there"},
        }
    write_suite_report(tmp_path, part, done)
    found = {entry["scenario"]: entry for entry in json.loads((tmp_path / "summary.json").read_text())}
    assert [found[name]["set_aside"] for name in names] == [True, False]
    for entry in found.values():
        numbers = {name: entry[name] for name in ("seeds", "best_fixed", "default", "worst_start")}
        assert numbers == pytest.approx({"seeds": 4, "best_fixed": 71.5, "default": 58.0, "worst_start": 55.0})
        assert entry["interval"] == pytest.approx(2.054, abs=1e-3)  # t(3) times the deviation of 70..73, over 2
    cells = json.loads((tmp_path / "cells.json").read_text())["scenarios"]
    assert all(cell["runs_by"] == {"commit": "abc", "command": "there"} for cell in cells)
    assert all(name in (tmp_path / "figures" / "regrets.svg").read_text() for name in names)
    first = next(iter(done))
    del done[first]  # a scenario with a run missing is left out, never summed up from what is there
    write_suite_report(tmp_path, part, done)
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 1


def test_a_derived_federation_trains_as_one_that_was_prepared_by_itself(tiny: Suite) -> None:
    scenario = tiny.scenarios[0]
    cells = [make_suite_job(tiny, scenario, "moo", start, 0) for start in ((1.0, 1.0), (0.1, 4.0))]
    first, second = calibrate_jobs(cells)
    shared = DatasetCache()
    prepare_job(first, shared, "cpu")
    known = len(shared.prepared)
    derived = prepare_job(second, shared, "cpu")
    alone = prepare_job(second, DatasetCache(), "cpu")
    assert derived.settings == alone.settings
    assert len(shared.prepared) == known
    assert torch.equal(derived.problem.partition.order, alone.problem.partition.order)
    assert train_to_end(derived).metrics == train_to_end(alone).metrics
    other = prepare_job(first, shared, "cpu")
    assert train_to_end(other).metrics != train_to_end(derived).metrics


def test_made_up_sentences_are_the_same_everywhere_and_can_be_learned() -> None:
    once, again = sources.build_reviews(""), sources.build_reviews("")
    assert all(np.array_equal(once[name], again[name]) for name in once)
    good = ((once["x"] >= 9) & (once["x"] < 69)).sum(axis=1) - ((once["x"] >= 69) & (once["x"] < 129)).sum(axis=1)
    told = np.mean((good > 0) == (once["y"] == 1))
    assert 0.6 < told < 0.95  # words alone tell much, negations the rest
    assert 0.4 < once["y"].mean() < 0.6


def test_a_source_that_is_not_there_says_what_it_needs(tmp_path: Path, monkeypatch) -> None:
    from fulcrum.errors import DataError

    monkeypatch.setenv("FULCRUM_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"adult/adult\.data\.gz"):
        sources.census(str(tmp_path))
