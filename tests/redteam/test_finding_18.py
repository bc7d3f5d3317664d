"""Finding 18: own data with the default seed 0 was called private, and studies trained on it twelve times unpaid.

At 243f1c8 `privacy.randomness` was seeded for everybody, `plan --ledger` on a spent ledger did not mention it, and
`fulcrum study` on a user's file had neither a ledger nor a word about it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fulcrum
from fulcrum.cli import main
from fulcrum.data import Dataset, from_arrays, load
from fulcrum.data.sources import register_source
from fulcrum.engines.batched import run_many
from fulcrum.errors import ConfigError
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.runs import prepare
from fulcrum.runs.folder import load_summary
from fulcrum.settings.files import dump_settings, settings_from_keywords
from fulcrum.settings.schema import Settings
from fulcrum.study.backends import BackendOptions, run_jobs
from fulcrum.study.calibrate import calibrate_jobs
from fulcrum.study.experiment import list_paper_jobs, read_experiment
from fulcrum.training.loop import federate
from fulcrum.training.problem import uses_proven_arithmetic

QUICK = Settings().replace(
    data={"parties": 2, "min_examples": 2},
    model={"name": "linear"},
    train={"rounds": 2, "rate": 0.5},
    privacy={"sigma": 1.0},
    run={"device": "cpu"},
)
STUDY = """
datasets = ["own.npz"]
epsilons = [8.0]
seeds = [0]
[settings.data]
parties = 2
{public}
[settings.model]
name = "linear"
[settings.train]
rounds = 2
rate = 0.5
[settings.privacy]
delta = 1e-4
[[rows]]
name = "moo"
label = "MOO"
[[rows]]
name = "none"
label = "non-private"
"""


def arrays(n: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n + 20, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return {"x": x[:n], "y": y[:n], "x_test": x[n:], "y_test": y[n:]}


def own(**more: Any) -> Dataset:
    return from_arrays(**arrays(), classes=2, name="own", **more)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    np.savez(tmp_path / "own.npz", **arrays())
    (tmp_path / "sources.py").write_text(
        "import numpy as np\n"
        "from fulcrum.data import from_arrays\n"
        "def arrays():\n"
        "    return dict(np.load('own.npz'))\n"
        "def private():\n"
        "    return from_arrays(**arrays())\n"
        "def public():\n"
        "    return from_arrays(**arrays(), public=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- what is private ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "public"),
    [
        ("digits", True),
        ("own.npz", False),
        ("sources:arrays", False),
        ("sources:private", False),
        ("sources:public", True),
    ],
)
def test_own_data_is_private_unless_declared(here: Path, source: str, public: bool):
    assert load(source).public is public
    assert load(source, public=True).public, "the user may declare any of them"


def test_a_registered_source_is_private_unless_it_says_otherwise(here: Path):
    register_source("ward-18")(lambda: arrays())
    register_source("open-18")(lambda: own(public=True))
    assert not load("ward-18").public
    assert load("open-18").public


def test_private_data_has_secure_randomness_and_proven_bounds_by_default():
    made = prepare(QUICK, own())
    assert isinstance(made.problem.randomness, SecureRandomness)
    assert made.settings.privacy.randomness == "secure"
    assert made.problem.proven
    assert 'randomness = "secure"' in dump_settings(made.settings), "the run's record has plain values"
    public = prepare(QUICK, own(public=True))
    assert isinstance(public.problem.randomness, SeededRandomness)
    assert not uses_proven_arithmetic(public.settings)
    declared = prepare(QUICK.replace(data={"public": True}), own())
    assert isinstance(declared.problem.randomness, SeededRandomness)
    # What 243f1c8 did on any data, seeded by 0: allowed, and called a simulation.
    seeded = prepare(QUICK.replace(privacy={"randomness": "seeded"}), own())
    assert any("This is a simulation" in warning for warning in seeded.problem.dataset.warnings)


def test_a_problem_made_without_prepare_is_secure_too():
    from fulcrum.data import split
    from fulcrum.training.problem import TrainingProblem

    made = prepare(QUICK, own())
    data = QUICK.replace(data={"partition": "iid"}).data
    problem = TrainingProblem.of(QUICK, own(), split(own(), data, 0), made.problem.model)
    assert isinstance(problem.randomness, SecureRandomness)
    assert problem.proven


def test_a_seeded_run_on_own_data_says_so_in_its_outputs(here: Path, capsys: pytest.CaptureFixture[str]):
    words = ["run", "--data", "own.npz", "--model", "linear", "--rounds", "2", "--sigma", "1", "--parties", "2"]
    assert main([*words, "--randomness", "seeded", "--out", "seeded"]) == 0
    assert "This is a simulation" in capsys.readouterr().err
    assert any("This is a simulation" in warning for warning in load_summary(Path("seeded"))["warnings"])
    assert main([*words, "--out", "real"]) == 0
    assert "This is a simulation" not in capsys.readouterr().err
    assert load_summary(Path("real"))["settings"]["privacy"]["randomness"] == "secure"
    assert main([*words, "--public", "--out", "public"]) == 0
    assert load_summary(Path("public"))["settings"]["privacy"]["randomness"] == "seeded"


# --- what is not charged is refused ---------------------------------------------------------------


def write_study(folder: Path, public: str = "") -> None:
    (folder / "experiments").mkdir(exist_ok=True)
    (folder / "experiments" / "mine.toml").write_text(STUDY.format(public=public))


@pytest.mark.slow
def test_a_study_on_private_data_is_refused_before_it_trains(here: Path, capsys: pytest.CaptureFixture[str]):
    write_study(here)
    assert main(["study", "mine", "--backend", "sequential"]) == 2
    said = capsys.readouterr().err
    assert "own.npz is private" in said
    assert "data.public" in said
    assert not list(here.rglob("*.jsonl"))
    jobs = calibrate_jobs(list_paper_jobs(read_experiment(name="mine")))
    for backend in ("sequential", "processes", "stacked"):
        with pytest.raises(ConfigError, match="is private"):
            list(run_jobs(jobs, backend, BackendOptions(device="cpu", workers=2, say=lambda line: None)))


def test_a_study_on_data_that_is_declared_public_runs(here: Path, capsys: pytest.CaptureFixture[str]):
    write_study(here, "public = true")
    assert main(["study", "mine", "--backend", "sequential", "-q"]) == 0
    assert len([line for file in here.rglob("*.jsonl") for line in file.read_text().splitlines()]) == 2


def test_training_without_a_ledger_is_refused_everywhere():
    with pytest.raises(ConfigError, match="own is private"):
        next(federate(prepare(QUICK, own())))
    with pytest.raises(ConfigError, match="own is private"):
        next(run_many([prepare(QUICK, own())]))
    assert next(federate(prepare(QUICK, own(public=True))))[0].round == 1, "the check can pass"


def test_rounds_one_by_one_are_charged(here: Path):
    found = list(fulcrum.rounds(data=own(), model="linear", parties=2, rounds=2, sigma=1.0, ledger="kept.sqlite"))
    assert found[-1].epsilon > 0


# --- plan --ledger --------------------------------------------------------------------------------

RUN = ["--data", "own.npz", "--model", "linear", "--rounds", "2", "--parties", "2", "--ledger", "kept.sqlite"]


def test_a_plan_says_what_is_left_in_the_ledger(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["run", *RUN, "--epsilon", "2", "--out", "first"]) == 0
    capsys.readouterr()
    assert main(["plan", *RUN, "--epsilon", "2"]) == 2, "refused as `run` refuses"
    assert "2 of 2 parties" in capsys.readouterr().err
    assert main(["run", *RUN, "--epsilon", "2", "--out", "second"]) == 2
    capsys.readouterr()
    assert main(["ledger", "kept.sqlite", "--budget", "3"]) == 0
    assert main(["plan", *RUN, "--epsilon", "2"]) in (0, 2)
    capsys.readouterr()
    assert main(["ledger", "kept.sqlite", "--budget", "100"]) == 0
    capsys.readouterr()
    assert main(["plan", *RUN, "--epsilon", "2"]) == 0
    said = capsys.readouterr().out
    assert "left" in said
    assert "100" in said
    assert main(["plan", *RUN, "--epsilon", "2", "--json"]) == 0
    left = json.loads(capsys.readouterr().out)["ledger"]
    assert left["party-0"]["budget"] == 100
    assert left["party-0"]["spent"] > 1.9
    assert left["party-0"]["rounds"] == 2


def test_a_plan_without_a_ledger_says_nothing_of_one(here: Path, capsys: pytest.CaptureFixture[str]):
    made = settings_from_keywords({"data": "own.npz", "sigma": 1.0})
    assert made.run.ledger == ""
    assert main(["plan", "--data", "own.npz", "--model", "linear", "--parties", "2", "--sigma", "1", "--json"]) == 0
    assert "ledger" not in json.loads(capsys.readouterr().out)
