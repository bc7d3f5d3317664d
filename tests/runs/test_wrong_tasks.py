"""Task settings, metrics and study rows that make no sense are refused in one sentence before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fulcrum
from fulcrum.cli import main
from fulcrum.data import from_arrays
from fulcrum.errors import ConfigError, DataError
from fulcrum.study.experiment import read_experiment

X, Y = np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.linspace(0, 1, 60)


@pytest.mark.parametrize(
    "wrong",
    [
        "task.scale=nan",
        "task.scale=-5",
        "task.huber_width=-1",
        "task.threshold=7",
        "task.classes=-3",
        "task.loss=squred",
    ],
)
def test_settings_of_a_task_have_ranges(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    words = ["run", "--data", str(tmp_path / "d.npz"), "--task", "regression", "--epsilon", "4", "--rounds", "1"]
    assert main([*words, "--set", wrong, "--out", str(tmp_path / "out")]) == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


def test_a_ready_made_task_does_not_ignore_metrics_and_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from fulcrum.data.tasks import task_from_loss\nTASK = task_from_loss(lambda o, t: (o[..., 0] - t) ** 2)\n"
    (tmp_path / "ready_task.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", x=X, y=Y.astype("float32"), x_test=X, y_test=Y.astype("float32"))
    given: dict[str, Any] = {
        "data": "d.npz",
        "epsilon": 4.0,
        "rounds": 1,
        "parties": 2,
        "method": "dp-sgd",
        "public": True,
    }
    with pytest.raises(ConfigError, match="brings its own metrics"):
        fulcrum.train(**given, task={"name": "ready_task:TASK", "score": "nope"})
    assert "loss" in fulcrum.train(**given, task={"name": "ready_task:TASK", "score": "loss"}).metrics


def test_a_metric_must_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_metric.py").write_text("def three(context):\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", x=X, y=Y)
    with pytest.raises(ConfigError, match="must return a fulcrum Metric"):
        fulcrum.train(data="d.npz", epsilon=4.0, task={"name": "regression", "metrics": ["bad_metric:three"]})


def test_tokens_beyond_the_vocabulary_are_found_before_anything_is_paid() -> None:
    from fulcrum.settings.schema import TaskSettings

    tokens = np.zeros((4, 5), dtype=np.int64)
    wrong = tokens.copy()
    wrong[0, 0] = 99  # never a target
    settings = TaskSettings("next-token", classes=12)
    assert from_arrays(tokens, None, tokens, None, task=settings).task.outputs == 12
    with pytest.raises(DataError, match=r"x_test holds token 99; .* 0\.\.11"):
        from_arrays(tokens, None, wrong, None, task=settings)


def test_rows_of_a_study_need_a_name_and_nothing_unknown(tmp_path: Path) -> None:
    head = 'datasets = ["digits"]\nepsilons = [4.0]\nseeds = [0]\n[[rows]]\n'
    (tmp_path / "mine.toml").write_text(head + 'name = "moo"\n')
    assert read_experiment(tmp_path, "mine").rows[0].label == "moo"
    (tmp_path / "mine.toml").write_text(head + 'name = "moo"\nlbel = "x"\n')
    with pytest.raises(ConfigError, match="did you mean 'label'"):
        read_experiment(tmp_path, "mine")
    (tmp_path / "mine.toml").write_text(head + 'label = "x"\n')
    with pytest.raises(ConfigError, match="a row has no name"):
        read_experiment(tmp_path, "mine")
    (tmp_path / "mine.toml").write_text(head + 'name = "mooo"\n')
    with pytest.raises(ConfigError, match="did you mean 'moo'"):
        read_experiment(tmp_path, "mine")
