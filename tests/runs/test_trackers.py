"""Trackers with the real packages, against local folders; and what is sent to them."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fulcrum
from fulcrum.errors import ConfigError
from fulcrum.runs import RunInfo, find_observer, prepare
from fulcrum.runs.trackers.values import list_round_values, list_settings_sent
from fulcrum.settings.files import parse_settings
from fulcrum.types import RoundResult

FAST: dict[str, Any] = {"data": "digits", "rounds": 3, "parties": 3, "epsilon": 4.0, "rate": 0.2}
NAMES = {"metrics/accuracy", "metrics/loss", "privacy/epsilon", "clipping/C", "course/step", "time/seconds"}
# What other people's packages warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_info(**changes: Any) -> RunInfo:
    words = {"data.source": "digits", "data.parties": 3, "privacy.epsilon": 4.0, "run.seed": 918273645}
    federation = prepare(parse_settings({}, words, "moo"))
    return RunInfo("id", federation.settings, None, federation.plan, "accuracy", public=True, **changes)


def make_round(**changes: Any) -> RoundResult:
    nothing = torch.zeros(1)
    made = RoundResult(
        *(1, 3, nothing, nothing, (3.0, 4.0), 0.5, (), (0, 2), 0.1),
        metrics={"accuracy": 0.5, "loss": float("nan")},
        party_metrics={"north": {"accuracy": 0.4}},
        diagnostics={"clip_fraction": 0.123},
        course={"step": 2.0},
    )
    return dataclasses.replace(made, **changes)


# --- what is sent ------------------------------------------------------------------------------------------


def test_values_of_a_round() -> None:
    found = list_round_values(make_info(), make_round())
    assert found == {
        "metrics/accuracy": 0.5,
        "mean_over_parties/accuracy": 0.4,
        "privacy/epsilon": 0.5,
        "clipping/C": 5.0,
        "course/step": 2.0,
        "parties/participants": 2.0,
        "time/seconds": 0.1,
        "party/north/accuracy": 0.4,
    }, "no diagnostics, which no epsilon covers; nothing that is not a number"


def test_durations_at_client_level_are_not_sent() -> None:
    info = make_info()
    secret = dataclasses.replace(info, public=False, settings=info.settings.replace(privacy={"unit": "client"}))
    assert "time/seconds" not in list_round_values(secret, make_round(participants=None))
    assert "time/seconds" in list_round_values(dataclasses.replace(info, public=False), make_round())


def test_the_seed_of_private_data_is_not_sent() -> None:
    info = make_info()
    assert list_settings_sent(info)["run.seed"] == 918273645
    private = dataclasses.replace(info, public=False)
    assert "918273645" not in str(list_settings_sent(private))
    apart = dataclasses.replace(private, settings=info.settings.replace(privacy={"seed": 5}))
    assert "privacy.seed" not in list_settings_sent(apart)
    assert list_settings_sent(apart)["run.seed"] == 918273645, "the public seed decides no noise there"


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_package_is_one_sentence(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="pip install"):
        find_observer(name)


# --- the real packages ---------------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `track`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fulcrum.train(**FAST, out=tmp_path / "run", observers=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= NAMES
    accuracy = events.Scalars("metrics/accuracy")
    assert [each.step for each in accuracy] == [1, 2, 3]
    assert accuracy[-1].value == pytest.approx(result.accuracy, abs=1e-6)


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `track`")
    from fulcrum.runs.trackers.mlflow import RUN_TAG, MlflowTracker

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    try:
        tracker = MlflowTracker(uri)
        tracker._client.search_experiments()
    except Exception as error:
        pytest.skip(f"this MLflow has no store for {uri}: {error}")
    tracker._client.create_experiment("fulcrum", artifact_location=(tmp_path / "artifacts").as_uri())
    result = fulcrum.train(**FAST, out=tmp_path / "run", observers=[tracker])
    client = mlflow.MlflowClient(tracking_uri=uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == "fulcrum"]
    (made,) = client.search_runs([experiment.experiment_id])
    assert made.info.status == "FINISHED"
    assert made.data.tags[RUN_TAG] == result.summary["run"]
    assert made.data.tags["fulcrum.guarantee"] == "simulation"
    assert made.data.params["privacy.epsilon"] == "4.0"
    history = client.get_metric_history(made.info.run_id, "metrics/accuracy")
    assert [each.step for each in history] == [1, 2, 3]
    assert history[-1].value == pytest.approx(result.accuracy)
    assert "PRIVACY.md" in {each.path for each in client.list_artifacts(made.info.run_id)}


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra `track`")
    from fulcrum.runs.trackers.wandb import WandbTracker

    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    result = fulcrum.train(**FAST, out=tmp_path / "run", observers=[WandbTracker(folder=tmp_path)])
    (file,) = (tmp_path / "wandb").rglob(f"run-{result.summary['run']}.wandb")
    end = time.monotonic() + 60  # its own process writes the file, a little later
    while b"final/epsilon" not in file.read_bytes():
        assert time.monotonic() < end, "nothing was written"
        time.sleep(0.1)
    content = file.read_bytes()
    for word in (b"metrics/accuracy", b"privacy/epsilon", b"course/step", b"clip.rule"):
        assert word in content, word
    assert file.parent.name.startswith("offline-run")


def test_an_interrupted_run_is_ended_and_goes_on_in_the_same_place(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `track`")
    from fulcrum.runs.trackers.mlflow import MlflowTracker

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    try:
        tracker = MlflowTracker(uri, artifacts=False)
        tracker._client.search_experiments()
    except Exception as error:
        pytest.skip(f"this MLflow has no store for {uri}: {error}")

    def stop(result: RoundResult) -> None:
        if result.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fulcrum.train(**FAST, out=tmp_path / "run", observers=[tracker], on_round=stop)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == "fulcrum"]
    (made,) = client.search_runs([experiment.experiment_id])
    assert made.info.status == "KILLED"
    fulcrum.resume(tmp_path / "run", observers=[MlflowTracker(uri, artifacts=False)])
    (made,) = client.search_runs([experiment.experiment_id])
    assert made.info.status == "FINISHED"
    steps = {each.step for each in client.get_metric_history(made.info.run_id, "privacy/epsilon")}
    assert max(steps) == 3
