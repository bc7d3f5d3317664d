"""Tasks other than classification, over three parties, privately and beside the same training without privacy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fulcrum
from fulcrum.cli import main
from fulcrum.data import Dataset, from_arrays
from fulcrum.errors import ConfigError, ModelError
from fulcrum.runs import prepare
from fulcrum.runs.folder import load_summary
from fulcrum.settings.files import settings_from_keywords
from fulcrum.settings.schema import TaskSettings
from fulcrum.training.evaluate import evaluate_model

N, TEST, LENGTH, TOKENS = 360, 120, 6, 8
QUICK: dict[str, Any] = {"parties": 3, "rounds": 30, "rate": 0.2, "lr": 0.5, "device": "cpu"}
PRIVATE: dict[str, Any] = {"method": "dp-sgd", "epsilon": 8.0}
OPEN: dict[str, Any] = {"method": "none", "public": True}

MODULE = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 6), nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.table(x)))

def tagger(outputs, task):
    assert task.name == "tokens" and task.outputs == outputs
    return Tagger(outputs)

class TwoInputs(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 6), nn.Linear(6, outputs)

    def forward(self, ids, mask):
        return self.head((self.table(ids) * mask[..., None]).sum(dim=1))

def two_inputs(input_shape, classes):
    assert input_shape == {"ids": (6,), "mask": (6,)}
    return TwoInputs(classes)
"""


def regression() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N + TEST, 5)).astype(np.float32)
    y = (x @ rng.normal(size=5) + 0.1 * rng.normal(size=N + TEST)).astype(np.float32)
    return {"x": x[:N], "y": y[:N], "x_test": x[N:], "y_test": y[N:]}


def multilabel() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N + TEST, 5)).astype(np.float32)
    y = (x @ rng.normal(size=(5, 3)) > 0).astype(np.int64)
    return {"x": x[:N], "y": y[:N], "x_test": x[N:], "y_test": y[N:]}


def tokens() -> dict[str, Any]:
    """The tag of each position is the token there modulo 4; some positions do not count."""
    rng = np.random.default_rng(2)
    x = rng.integers(0, TOKENS, size=(N + TEST, LENGTH))
    y = np.where(rng.random(x.shape) < 0.1, -100, x % 4)
    return {"x": x[:N], "y": y[:N], "x_test": x[N:], "y_test": y[N:]}


TASKS = {
    "regression": (regression, "linear", "rmse"),
    "multilabel": (multilabel, "linear", "auc"),
    "tokens": (tokens, "my_task_models:tagger", "perplexity"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own, with models and one .npz file per task."""
    (tmp_path / "my_task_models.py").write_text(MODULE)
    for name, (make, _, _) in TASKS.items():
        np.savez(tmp_path / f"{name}.npz", **make())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def untrained_score(task: str, **names: object) -> float:
    federation = prepare(settings_from_keywords({**QUICK, **OPEN, **names, "task": task}))
    problem = federation.problem
    return evaluate_model(problem, problem.layout.flatten(problem.model))[problem.task.score]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.every(3)
def test_every_kind_of_task_trains_privately_from_the_command_line(here: Path, task: str, capsys) -> None:
    _, model, score = TASKS[task]
    before = untrained_score(task, data=f"{task}.npz", model=model)
    found = {}
    for name, words in (("private", ["--method", "dp-sgd", "--epsilon", "8"]), ("open", ["--method", "none"])):
        options = [f"--{key}={value}" for key, value in QUICK.items()]
        what = ["--data", f"{task}.npz", "--public", "--task", task, "--model", model]  # public: it can be repeated
        run = ["run", *what, *options, *words, "--out", name]
        assert main(run) == 0
        said = capsys.readouterr()
        summary = load_summary(here / name)
        assert summary["score"] == score
        assert summary["metrics"][score] is not None
        assert summary["accuracy"] == summary["metrics"].get("accuracy")
        assert summary["settings"]["data"]["partition"] == "iid"
        assert any("data.partition = iid" in words for words in summary["warnings"])
        assert "data.partition = iid" in said.err
        assert score in said.out
        found[name] = summary["metrics"][score]
    better = (lambda a, b: a > b) if summary["higher_is_better"] else (lambda a, b: a < b)
    assert better(found["private"], before), (found, before)
    assert better(found["open"], before)
    kept = (found["private"] - before) / (found["open"] - before)
    assert kept > 0.9, f"beside the same training without privacy: {found}, before {before}"
    assert load_summary(here / "private")["epsilon"] == pytest.approx(8, rel=0.02)
    assert "epsilon = " in (here / "private" / "PRIVACY.md").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_python_and_the_command_line_train_alike(here: Path, task: str) -> None:
    make, model, score = TASKS[task]
    names: dict[str, Any] = {**QUICK, **PRIVATE, "rounds": 3, "model": model, "public": True}
    from_file = fulcrum.train(data=f"{task}.npz", task=task, **names)
    from_values = fulcrum.train(data=from_arrays(**make(), task=task), **names)
    assert from_file.metrics == from_values.metrics
    assert math.isfinite(from_file.metrics[score])


def test_several_inputs_reach_the_model_by_name(here: Path) -> None:
    rng = np.random.default_rng(3)
    ids, mask = rng.integers(0, TOKENS, size=(N, LENGTH)), rng.random((N, LENGTH)).astype(np.float32)
    y = ((ids == 3).sum(axis=1) > 0).astype(int)
    arrays = {"x.ids": ids, "x.mask": mask, "y": y, "x_test.ids": ids[:60], "x_test.mask": mask[:60], "y_test": y[:60]}
    np.savez(here / "two.npz", **arrays)
    result = fulcrum.train(
        data="two.npz", model="my_task_models:two_inputs", public=True, **{**QUICK, **PRIVATE, "rounds": 2}
    )
    assert 0 <= result.accuracy <= 1
    with pytest.raises(ModelError, match="several inputs"):
        prepare(settings_from_keywords({"data": "two.npz", **QUICK, **OPEN}))


def test_a_run_without_a_test_set_trains_and_says_so(here: Path, capsys) -> None:
    arrays = {name: value for name, value in regression().items() if "test" not in name}
    np.savez(here / "training.npz", **arrays)
    options = [f"--{key}={value}" for key, value in {**QUICK, "rounds": 2}.items()]
    run = ["run", "--data", "training.npz", "--task", "regression", "--method", "none", *options, "--out", "r"]
    assert main(run) == 0
    said = capsys.readouterr()
    summary = json.loads((here / "r" / "summary.json").read_text())
    assert (summary["metrics"], summary["accuracy"]) == ({}, None)
    assert "training.npz has no test set" in said.err
    assert "rmse" not in said.out
    assert "accuracy" not in said.out
    assert main(["run", "--data", "regression.npz", "--task", "regression", "--method", "none", *options]) == 0
    assert "rmse" in capsys.readouterr().out, "with a test set the score is there"


def test_numbers_for_labels_are_refused_with_the_option_that_helps(here: Path, capsys) -> None:
    assert main(["run", "--data", "regression.npz", "--method", "none"]) == 2
    assert "--task regression" in capsys.readouterr().err


@pytest.mark.parametrize("partition", ["dirichlet", "shards"])
def test_a_split_by_class_needs_classes(here: Path, partition: str) -> None:
    wanted = {"data": "regression.npz", "task": "regression", **QUICK, **OPEN}
    with pytest.raises(ConfigError, match=f"data.partition = '{partition}' splits by class"):
        prepare(settings_from_keywords({**wanted, "partition": partition}))
    assert prepare(settings_from_keywords({**wanted, "partition": "quantity"})).settings.data.partition == "quantity"


def test_the_default_split_of_classes_is_dirichlet(here: Path) -> None:
    names = {"data": "digits", "parties": 3, "method": "none", "device": "cpu"}
    chosen, named = (prepare(settings_from_keywords({**names, **more})) for more in ({}, {"partition": "dirichlet"}))
    assert chosen.settings == named.settings
    assert torch.equal(chosen.problem.partition.order, named.problem.partition.order)
    assert not any("partition" in words for words in chosen.problem.dataset.warnings)
    even = prepare(settings_from_keywords({**names, "partition": "iid"}))
    assert not torch.equal(chosen.problem.partition.order, even.problem.partition.order)


# --- which task a data set gets -------------------------------------------------------------------


def data(**more: Any) -> Dataset:
    return from_arrays(**regression(), **more)


def task_of(dataset: Dataset, **names: object) -> Dataset:
    return prepare(settings_from_keywords({**QUICK, **OPEN, **names}), dataset).problem.dataset


def test_a_dataset_keeps_its_task_unless_the_settings_say_otherwise() -> None:
    bounded = data(task=TaskSettings("regression", low=-1.0, high=1.0))
    assert task_of(bounded).task is bounded.task
    more = task_of(bounded, task={"metrics": ["loss"], "score": "mae"})
    assert (more.task.name, more.task.score) == ("regression", "mae")
    assert float(more.y.abs().max()) <= 1, "what the data declares still holds"
    whole = from_arrays(np.ones((40, 2)), np.arange(40) % 2, np.ones((4, 2)), np.arange(4) % 2)
    assert task_of(whole, task="regression").task.name == "regression"
    assert task_of(whole, task="binary").task.outputs == 1
    own = from_arrays(**regression(), task=bounded.task)
    with pytest.raises(ConfigError, match=r"task.score is set, but arrays brings a task of its own"):
        task_of(own, task={"score": "mae"})


def test_a_task_of_ones_own_is_found_in_the_current_folder(here: Path) -> None:
    (here / "my_tasks.py").write_text(
        "import dataclasses\n"
        "from fulcrum.data.tasks import TASKS\n"
        "def task(settings, targets):\n"
        "    made = TASKS.find('regression')(settings, targets)\n"
        "    return dataclasses.replace(made, name='mine', score='mae')\n"
    )
    result = fulcrum.train(data="regression.npz", task="my_tasks:task", **{**QUICK, **PRIVATE, "rounds": 2})
    assert result.summary["score"] == "mae"


def test_a_model_whose_outputs_do_not_fit_the_task_is_refused() -> None:
    settings, flat = settings_from_keywords({**QUICK, **OPEN}), nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    with pytest.raises(ModelError, match=r"outputs of shape \[2\] for 2 examples; the task 'regression' needs"):
        prepare(settings, data(task="regression"), flat)
    with pytest.raises(ModelError, match=r"needs \[2, 1\]"):
        prepare(settings, data(task="regression"), nn.Linear(5, 2))
    prepare(settings, data(task="regression"), nn.Linear(5, 1))


# --- integers -------------------------------------------------------------------------------------


def test_built_in_models_take_integers_as_numbers() -> None:
    whole = np.random.default_rng(0).integers(0, 5, size=(60, 4))
    y = np.arange(60) % 2
    as_integers, as_floats = (from_arrays(x, y, x[:9], y[:9]) for x in (whole, whole.astype(np.float32)))
    assert as_integers.x.dtype == torch.int64
    prepared = task_of(as_integers)
    assert prepared.x.dtype == torch.float32
    assert prepared.fingerprint == as_floats.fingerprint != as_integers.fingerprint
    with pytest.raises(ModelError, match="save x as float32"):
        prepare(settings_from_keywords({**QUICK, **OPEN}), as_integers, nn.Linear(4, 2))
    prepare(settings_from_keywords({**QUICK, **OPEN}), as_floats, nn.Linear(4, 2))
