"""`fulcrum tune` and `fulcrum pareto`: fronts, spaces, proposals, private selection, and the whole search."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fulcrum.analysis.report.tune_page import make_tune_charts, make_tune_page, trials_to_csv
from fulcrum.cli import main
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import convert_rdp_to_epsilon
from fulcrum.privacy.paid_tuning import TrialCount, compute_tuned_epsilon
from fulcrum.runs.choices import check_choices
from fulcrum.settings.files import parse_settings, read_settings
from fulcrum.settings.schema import Settings
from fulcrum.study.front import compute_hypervolume, find_front, find_knee
from fulcrum.study.job import StudyJob
from fulcrum.study.records import StudyScore
from fulcrum.study.search_run import Search, plan_selection, sum_up
from fulcrum.study.selection import compute_trial_rdp
from fulcrum.study.tuning import (
    Choice,
    Range,
    Trial,
    append_trial,
    choose_space,
    find_objectives,
    load_trials,
    parse_space_option,
    refuse_costly_space,
)

BASE = {"data.source": "digits", "data.parties": 3, "train.rounds": 2, "train.rate": 0.2, "privacy.epsilon": 2.0}
MINIMISE, MIXED = (True, True), (True, False)


def make(words: Mapping[str, Any], method: str = "dp-sgd") -> Settings:
    return check_choices(parse_settings({}, {**BASE, **words}, method))


# --- fronts ------------------------------------------------------------------------------------------------


def test_the_front_by_its_definition() -> None:
    draw = random.Random(0)
    for _ in range(50):
        points = [(draw.randrange(6) / 2, draw.randrange(6) / 2) for _ in range(12)]
        front = find_front(points, MIXED)

        def beaten(i: int, points: list[tuple[float, float]] = points) -> bool:
            a, b = points[i]
            return any(x <= a and y >= b and (x, y) != (a, b) for x, y in points)

        assert {points[i] for i in front} == {points[i] for i in range(len(points)) if not beaten(i)}
        assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)
    assert find_front([(math.nan, 1.0), (1.0, math.inf)], MINIMISE) == []


def test_the_hypervolume_by_counting() -> None:
    points = [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0), (3.0, 3.0)]
    steps = [k / 20 for k in range(81)]
    counted = sum(any(x >= a and y >= b for a, b in points) for x, y in itertools.product(steps, steps)) / 20**2
    exact = compute_hypervolume(points, MINIMISE, (4.0, 4.0))
    assert exact == pytest.approx(6.0)
    assert exact == pytest.approx(counted, rel=0.1)
    assert compute_hypervolume([(5.0, 5.0)], MINIMISE, (4.0, 4.0)) == 0.0
    assert compute_hypervolume([(1.0, 0.5)], MIXED, (2.0, 0.0)) == pytest.approx(0.5)
    assert compute_hypervolume([*points, (0.5, 3.5)], MINIMISE, (4.0, 4.0)) > exact, "a new point on the front adds"


def test_the_knee_is_where_the_front_bends() -> None:
    points = [(0.0, 10.0), (1.0, 2.0), (5.0, 1.0), (10.0, 0.0)]
    assert find_knee(points, MINIMISE) == 1
    assert find_knee(points[::-1], MINIMISE) == 2
    assert find_knee([(1.0, 1.0)], MINIMISE) == 0
    assert find_knee([], MINIMISE) is None
    # The scale of an objective does not matter.
    assert find_knee([(a, 1000 * b) for a, b in points], MINIMISE) == 1


# --- spaces and objectives -------------------------------------------------------------------------------------


def test_spaces() -> None:
    assert parse_space_option("clip.C0=0.1:10:log") == ("clip.C0", Range(0.1, 10.0, log=True))
    assert parse_space_option("train.rounds=5:50") == ("train.rounds", Range(5, 50, whole=True))
    assert parse_space_option("train.server=sgd,adam") == ("train.server", Choice(("sgd", "adam")))
    assert parse_space_option("clip.search=true,false") == ("clip.search", Choice((True, False)))
    for wrong in (
        "clip.C0",
        "clip.C00=1:2",
        "clip.C0=1",
        "clip.C0=2:1",
        "clip.C0=0:1:log",
        "clip.C0=1:2:x",
        "clip.C0=a:b",
    ):
        with pytest.raises(ConfigError):
            parse_space_option(wrong)
    assert set(choose_space(make({}), {}, ["score"])) == {"train.lr", "clip.C0"}
    assert set(choose_space(make({}, "moo"), {}, ["score", "rounds"])) == {"clip.balance", "clip.reach", "train.rounds"}


def test_objectives() -> None:
    score, cost = find_objectives(["score", "bytes"], StudyScore("accuracy"))
    settings = make({})
    assert (score.lower_is_better, cost.lower_is_better) == (False, True)
    assert cost.measure(settings, 2.0, 0.5, 100) == 2 * 4 * 100 * 3 * 2, "to three parties and back, twice"
    for wrong in (["x"], ["rounds"], ["score", "rounds", "bytes"], []):
        with pytest.raises(ConfigError):
            find_objectives(wrong, StudyScore("accuracy"))


def test_trials_are_kept(tmp_path: Path) -> None:
    trial = Trial(
        0, {"clip.C0": 0.5, "train.server": "sgd"}, {0: 0.25, 1: 0.75}, {"accuracy": 0.5}, 2.0, 1.0, [[1, 0.5]]
    )
    append_trial(tmp_path, trial)
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"number": 1, "val')
    (read,) = load_trials(tmp_path)
    assert read == trial
    assert read.score == 0.5


# --- private selection -------------------------------------------------------------------------------------------


def test_the_price_of_a_private_selection_is_within_epsilon() -> None:
    search = Search(make, {"train.lr": Range(0.1, 1.0)}, (), trials=10)
    for kind, eta in (("poisson", None), ("geometric", 1.0), ("logarithmic", 0.0)):
        drawn, sigma = plan_selection(search, kind, 10.0, seed=0)
        assert drawn >= 0
        job = StudyJob(make({"privacy.epsilon": None, "privacy.sigma": sigma}), "t", "", "", "", None)
        rdp = compute_trial_rdp([job])
        assert compute_tuned_epsilon(rdp, TrialCount(10.0, eta), 1e-5) <= 2.0 * (1 + 1e-6)
        # A single trial with that noise costs clearly less: the price of choosing is real.
        assert float(convert_rdp_to_epsilon(rdp, 1e-5)) < 1.9
        less = compute_trial_rdp(
            [StudyJob(make({"privacy.epsilon": None, "privacy.sigma": 0.98 * sigma}), "t", "", "", "", None)]
        )
        assert compute_tuned_epsilon(less, TrialCount(10.0, eta), 1e-5) > 2.0, "no noise to spare"
    with pytest.raises(ConfigError, match=r"train\.rounds changes the cost"):
        refuse_costly_space({"train.lr": Range(0.1, 1.0), "train.rounds": Range(1, 5)})


# --- what came out ------------------------------------------------------------------------------------------------


def make_trials(points: list[tuple[float, float]]) -> list[Trial]:
    return [
        Trial(i, {"clip.C0": 0.1 * (i + 1), "train.server": "<b>"}, {0: y}, {"epsilon": x, "accuracy": y}, x)
        for i, (x, y) in enumerate(points)
    ]


def test_summing_up_and_the_page() -> None:
    goals = find_objectives(["epsilon", "score"], StudyScore("accuracy"))
    trials = make_trials([(1.0, 0.5), (2.0, 0.8), (4.0, 0.85), (3.0, 0.6)])
    found = sum_up(trials, goals)
    assert found.front == (0, 1, 2)
    assert found.chosen == 1
    assert found.reference == (4.0, 0.5)
    assert found.hypervolume == pytest.approx((4 - 2) * 0.3)
    page = make_tune_page("<title>", trials, goals, found, "x = 1", ["a note"])
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.split("<main")[1].split("application/json")[0]
    assert {chart.key for chart in make_tune_charts(trials, goals, found)} == {"front", "history", "setting-clip.C0"}
    assert trials_to_csv(trials, goals, found).splitlines()[1].startswith("1,yes,1.0,0.5")
    (best,) = sum_up(trials, goals[1:]).front
    assert best == 2
    with pytest.raises(ConfigError, match="no trial"):
        sum_up([], goals)


# --- with Optuna -----------------------------------------------------------------------------------------------------


def test_without_optuna_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "--data", "digits", "--epsilon", "2"]) == 2
    assert "fulcrum-fl[tune]" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # Optuna's own
def test_proposals_learn_from_trials() -> None:
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    from fulcrum.study.proposals import Proposer

    goals = find_objectives(["score"], StudyScore("accuracy"))
    space = {"clip.C0": Range(0.01, 100.0, log=True)}
    first, again = (Proposer(space, goals, seed=3).ask(4) for _ in range(2))
    assert first == again
    learned, blind = Proposer(space, goals, seed=5), Proposer(space, goals, seed=5, random=True)
    for i in range(40):
        C0 = 10 ** (-2 + 4 * i / 39)
        trial = Trial(i, {"clip.C0": C0}, {0: 0.0}, {"accuracy": -abs(math.log10(C0) - 1)})  # best at C0 = 10
        learned.tell(trial)
        blind.tell(trial)

    def distance(proposer: Proposer) -> float:
        return sum(abs(math.log10(each["clip.C0"]) - 1) for each in proposer.ask(30)) / 30

    assert distance(learned) < 0.5 * distance(blind), "random proposals must not look at trials"


@pytest.mark.filterwarnings("ignore")
def test_a_search_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    out = tmp_path / "out"
    words = ["pareto", "--data", "digits", "--rounds", "2", "--parties", "3", "--method", "dp-sgd", "--epsilons", "1:4"]
    words += ["--backend", "sequential", "--out", str(out)]
    assert main([*words, "--trials", "2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["trials"] == 2
    assert main([*words, "--trials", "4"]) == 0
    said = capsys.readouterr()
    assert "trial 3 of 4" in said.err
    assert "trial 2 of 4" not in said.err, "what is done is not done again"
    assert "hypervolume" in said.out
    settings = read_settings(out / "recommended.toml")
    assert 1.0 <= (settings.privacy.epsilon or 0) <= 4.0
    assert settings.data.validation == 0.0, "the recommended run trains on all records"
    trials = load_trials(out)
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert trials[0].values["clip.C0"] == 1.0, "the first trial is the settings as they are"
    assert len({trial.values["clip.C0"] for trial in trials}) == 4, "no proposal is made twice"
    assert (out / "report.html").stat().st_size
    assert main([*words, "--trials", "4", "--set", "train.rate=0.3"]) == 2
    assert "another search" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_private_selection_and_private_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    import numpy as np

    words = ["tune", "--data", "digits", "--rounds", "2", "--parties", "3", "--method", "dp-sgd", "--epsilon", "2"]
    words += [
        "--backend",
        "sequential",
        "--trials",
        "3",
        "--selection",
        "geometric",
        "--out",
        str(tmp_path / "a"),
        "--json",
    ]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "private selection (geometric, 3 trials on average)" in said.err
    assert json.loads(said.out)["trials"] >= 1
    x = np.zeros((40, 3), dtype=np.float32)
    y = np.arange(40) % 2
    np.savez(tmp_path / "p.npz", x=x, y=y, x_test=x, y_test=y)
    own = ["tune", "--data", str(tmp_path / "p.npz"), "--set", "task.classes=2", "--epsilon", "1", "--parties", "2"]
    own += ["--rounds", "2", "--trials", "2", "--method", "dp-sgd", "--out", str(tmp_path / "b")]
    for more, sentence in (
        ([], "--ledger FILE"),
        (["--selection", "poisson"], "server sees every trial"),
        (["--ledger", str(tmp_path / "l.sqlite")], "allow that much"),
    ):
        assert main([*own, *more]) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "l.sqlite").exists()


def test_made_up_records_have_the_shape_of_the_own_ones_and_none_of_their_values(tmp_path: Path) -> None:
    import numpy as np

    from fulcrum.study.made_up import write_made_up_records

    rng = np.random.default_rng(0)
    own = tmp_path / "own.npz"
    x, y = rng.random((90, 5), dtype=np.float32), rng.integers(0, 3, 90)
    np.savez(own, x=x, y=y, x_test=rng.random((10, 5), dtype=np.float32), y_test=y[:10])
    base = parse_settings(
        {}, {"data.source": str(own), "data.parties": 3, "privacy.epsilon": 4.0, "task.classes": 3}, "dp-sgd"
    )
    words = write_made_up_records(base, tmp_path / "a")
    assert (words["data.public"], words["data.parties"]) == (True, 3)
    made = np.load(words["data.source"])
    assert made["x"].shape == (90, 5)
    assert set(made["y"].tolist()) <= {0, 1, 2}
    assert not set(map(tuple, made["x"].tolist())) & set(map(tuple, x.tolist()))
    # other private values, the same made-up records: nothing of them is looked at
    np.savez(own, x=1 - x, y=2 - y, x_test=rng.random((10, 5), dtype=np.float32), y_test=y[:10])
    again = np.load(write_made_up_records(base, tmp_path / "b")["data.source"])
    assert all(np.array_equal(made[name], again[name]) for name in made.files)
    assert not np.array_equal(made["x"], 1 - x)
