"""A finished run's model: loaded without the data, scored, exported and read back where there is no Fulcrum."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fulcrum
from fulcrum.cli import main
from fulcrum.data import from_arrays
from fulcrum.errors import ConfigError, RunError
from fulcrum.models.checkpoints import read_origin
from fulcrum.runs import load_trained
from fulcrum.runs.afterwards import predict, score_model
from fulcrum.runs.export import export_model
from fulcrum.settings.schema import TaskSettings

SETTINGS: dict[str, Any] = {"parties": 3, "epsilon": 8.0, "rounds": 2, "rate": 0.2, "partition": "iid"}
NO_FULCRUM = "import sys; sys.modules['fulcrum'] = None\n"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    fulcrum.train("digits", out=folder, model={"name": "mlp", "activation": "tempered"}, **SETTINGS)
    return folder


def run_elsewhere(code: str, folder: Path) -> Any:
    """What a program without Fulcrum prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_FULCRUM + code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("form", "name"), [("torch", "m.pt"), ("safetensors", "m.safetensors"), ("torchscript", "m.ts")]
)
@pytest.mark.every(3)
def test_exports_give_the_same_outputs_in_a_process_without_fulcrum(
    form: str, name: str, digits: Path, tmp_path: Path
) -> None:
    trained = load_trained(digits)
    x = torch.rand(4, 1, 8, 8)
    np.save(tmp_path / "x.npy", x.numpy())
    done = export_model(trained, form, tmp_path / name)
    code = "import numpy, json\n" + "\n".join(done.usage[1]).replace(
        "outputs = ", "x = torch.from_numpy(numpy.load('x.npy'))\noutputs = "
    )
    found = run_elsewhere(code + "\nprint(json.dumps(outputs.tolist()))", tmp_path)
    torch.testing.assert_close(torch.tensor(found), trained.model(x), rtol=1e-5, atol=1e-5)
    card = done.card.read_text()
    assert trained.sha256 in card
    assert "epsilon = 8" in card
    with pytest.raises(RunError, match="exists"):
        export_model(trained, form, tmp_path / name)


def test_a_program_of_torch_export(digits: Path, tmp_path: Path) -> None:
    trained, x = load_trained(digits), torch.rand(5, 1, 8, 8)
    with pytest.raises(ConfigError, match=r"must end in \.pt2"):
        export_model(trained, "program", tmp_path / "m.bin")
    export_model(trained, "program", tmp_path / "m.pt2")
    again: Callable[..., Tensor] = torch.export.load(str(tmp_path / "m.pt2")).module()
    torch.testing.assert_close(again(x), trained.model(x), rtol=1e-5, atol=1e-5)


def test_onnx_needs_its_extra_or_gives_the_same_outputs(digits: Path, tmp_path: Path) -> None:
    trained = load_trained(digits)
    try:
        import onnxscript  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        with pytest.raises(RunError, match=r"pip install 'fulcrum-fl\[onnx\]'"):
            export_model(trained, "onnx", tmp_path / "m.onnx")
        assert not (tmp_path / "m.onnx").exists()
        return
    export_model(trained, "onnx", tmp_path / "m.onnx")  # compares outputs itself


def test_an_export_that_differs_is_refused_and_removed(digits: Path, tmp_path: Path) -> None:
    class Counted(nn.Module):
        """The number of examples decides, which a trace does not see."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: Any) -> Any:
            return self.layer(x.flatten(1)) * {2: 1.0}.get(len(x), 3.0)

    trained = dataclasses.replace(load_trained(digits), model=Counted())
    with pytest.raises(RunError, match="gives other outputs than this one for 3 examples"):
        export_model(trained, "torchscript", tmp_path / "m.ts")
    assert not (tmp_path / "m.ts").exists()


@pytest.mark.parametrize("coordinates", ["centred", "whitened"])
def test_whitened_coordinates_and_synthetic_weights_are_undone(coordinates: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(60, 1, 28, 28), torch.arange(60) % 10
    data = from_arrays(x, y, x[:10], y[:10], public=True)
    model = {"name": "mnist-cnn", "init": "synthetic", "coordinates": coordinates, "whiten": 0.3}
    from fulcrum.runs import execute, prepare
    from fulcrum.settings.files import settings_from_keywords

    federation = prepare(settings_from_keywords({**SETTINGS, "model": model}), data)
    done = execute(federation, tmp_path / "run")
    last = federation.problem.layout
    inside = federation.problem.model
    last.write(inside, load_last_average(tmp_path / "run"))
    wanted = inside(x[:5])
    assert [type(layer) for layer in done.model] == [type(layer) for layer in fulcrum.load(tmp_path / "run")]  # type: ignore[attr-defined]
    assert "fulcrum" not in "".join(type(layer).__module__ for layer in done.model.modules())
    torch.testing.assert_close(done.model(x[:5]), wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(fulcrum.load(tmp_path / "run")(x[:5]), done.model(x[:5]))
    for form, name in (("torchscript", "m.ts"), ("torch", "m.pt"), ("program", "m.pt2")):
        export_model(load_trained(tmp_path / "run"), form, tmp_path / name)


def load_last_average(folder: Path) -> Tensor:
    newest = sorted((folder / "checkpoints").glob("*.safetensors"))[-1]
    tensors = load_file(newest)
    return next(value for name, value in tensors.items() if "average" in name)


def test_the_command_line(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(digits), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = json.loads((digits / "summary.json").read_text())
    assert found["metrics"]["accuracy"] == pytest.approx(summary["accuracy"])
    assert found["sha256"] == summary["model_sha256"]
    np.savez(tmp_path / "new.npz", x=np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32))
    assert main(["predict", str(digits), "--data", str(tmp_path / "new.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("prediction,probability_0")
    assert len(lines) == 4
    assert main(["predict", str(digits), "--data", str(tmp_path / "new.npz"), "--out", str(tmp_path / "p.npz")]) == 0
    with np.load(tmp_path / "p.npz") as held:
        assert held["probability"].shape == (3, 10)
    assert main(["export", str(digits), "--to", "torch", "--out", str(tmp_path / "m.pt"), "-q"]) == 0
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 5), dtype=np.float32))
    assert main(["predict", str(digits), "--data", str(tmp_path / "odd.npz")]) == 2
    assert main(["export", str(digits), "--to", "tarball", "--out", str(tmp_path / "m")]) == 2
    assert main(["evaluate", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "records of shape (5,), and the model takes (1, 8, 8)" in said
    assert "choose one of torch, safetensors" in said


TASKS: dict[str, dict[str, Any]] = {
    "binary": {"y": lambda x: (x[:, 0] > 0).long(), "task": "binary"},
    "regression": {"y": lambda x: x[:, 0] * 3, "task": TaskSettings("regression", low=-9.0, high=9.0)},
    "two numbers": {"y": lambda x: x[:, :2], "task": TaskSettings("regression", scale=1.0)},
    "multilabel": {"y": lambda x: (x[:, :3] > 0).long(), "task": TaskSettings("multilabel", classes=3)},
}


@pytest.mark.parametrize("kind", TASKS)
def test_predictions_are_in_the_targets_own_units(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(80, 5)
    y, task = TASKS[kind]["y"](x), TASKS[kind]["task"]
    data = from_arrays(x[20:], y[20:], x[:20], y[:20], task=task, public=True)
    done = fulcrum.train(data, out=tmp_path / "run", model={"name": "linear"}, **SETTINGS)
    trained = load_trained(tmp_path / "run")
    assert trained.task is not None
    assert trained.task.name == data.task.name
    found = predict(trained, x[:20])
    assert torch.equal(found.values, data.task.predict(done.model(x[:20]).detach()))
    assert len(found.to_columns()["prediction" if y.dim() == 1 else "prediction_0"]) == 20
    metrics = score_model(trained, dataclasses.replace(data, train=None))["metrics"]
    for name, value in metrics.items():
        assert value == pytest.approx(done.metrics[name], rel=1e-5, abs=1e-6)


def test_edited_weights_are_noticed(digits: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(digits, tmp_path / "copy")
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    from safetensors.torch import save_file

    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "copy" / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors was edited or damaged"):
        fulcrum.load(tmp_path / "copy")


def test_a_tables_schema_goes_with_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    ages = np.random.default_rng(0).uniform(20, 80, 150)  # all different
    rows = [f"{age},{'yes' if age > 50 else 'no'}" for age in ages]
    (tmp_path / "t.csv").write_text("\n".join(["age,outcome", *rows[:120]]) + "\n")
    (tmp_path / "public.csv").write_text("\n".join(["age,outcome", *rows[120:]]) + "\n")
    (tmp_path / "new.csv").write_text("age\n30\n70\n")
    (tmp_path / "t.schema.toml").write_text(
        'target = "outcome"\n[columns.age]\nkind = "number"\nlow = 0\nhigh = 110\n[columns.outcome]\nkind = "yes-no"\n'
    )
    words = ["--data", "t.csv", "--parties", "2", "--epsilon", "8", "--rounds", "4", "--set", "table.test=public.csv"]
    assert main(["run", *words, "--out", "run", "-q"]) == 0
    (tmp_path / "t.csv").unlink()  # the private data is not needed any more
    capsys.readouterr()
    assert main(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["auc"] == pytest.approx(
        json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["auc"]
    )
    assert main(["predict", "run", "--data", "new.csv"]) == 0
    assert {line.split(",")[0] for line in capsys.readouterr().out.splitlines()[1:]} <= {"yes", "no"}
    assert main(["export", "run", "--to", "torch", "--out", "m.pt", "-q"]) == 0
    assert (tmp_path / "m.pt.schema.toml").read_text() == (tmp_path / "run" / "schema.toml").read_text()
    assert main(["evaluate", "run", "--data", "new.csv"]) == 2
    assert "no column 'outcome'" in capsys.readouterr().err


# --- a new run from an old model ----------------------------------------------------------------------


def private_data(shift: float = 0.0) -> fulcrum.Dataset:
    torch.manual_seed(3)
    x = torch.randn(100, 6) + shift
    y = (x[:, 0] > 0).long()
    return from_arrays(x[10:], y[10:], x[:10], y[:10], classes=2)


def start(folder: Path, **more: Any) -> fulcrum.Result:
    return fulcrum.train(private_data(), out=folder, **{**SETTINGS, "partition": "hashed", **more})


def test_the_spend_of_the_first_run_is_added_to_that_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    first = start(tmp_path / "first", epsilon=2.0)
    origin = read_origin(tmp_path / "first")
    assert origin is not None
    assert origin.epsilon == pytest.approx(first.epsilon)
    second = start(tmp_path / "second", epsilon=3.0, model={"init": str(tmp_path / "first")})
    told = json.loads((tmp_path / "second" / "privacy.json").read_text())
    assert told["epsilon"] == pytest.approx(first.epsilon + second.epsilon)
    assert told["delta"] == pytest.approx(2e-5)
    assert told["start"]["added"]
    assert [run["id"] for run in told["runs_covered"]] == [origin.run, second.summary["run"]]
    page = (tmp_path / "second" / "PRIVACY.md").read_text()
    assert f"starts from the model of run {origin.run}" in page
    third = start(tmp_path / "third", epsilon=1.0, model={"init": str(tmp_path / "second" / "model.safetensors")})
    told = json.loads((tmp_path / "third" / "privacy.json").read_text())
    assert told["epsilon"] == pytest.approx(first.epsilon + second.epsilon + third.epsilon)
    assert len(told["runs_covered"]) == 3
    with pytest.raises(ConfigError, match=r"was paid in another ledger than run\.ledger"):
        start(tmp_path / "fourth", ledger=str(tmp_path / "l.sqlite"), model={"init": str(tmp_path / "first")})
    with pytest.raises(ConfigError, match=r"protects one example, and privacy\.unit = 'client'"):
        start(tmp_path / "fifth", unit="client", model={"init": str(tmp_path / "first")})


def test_a_kept_ledger_adds_both_runs_up_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    ledger, budget = str(tmp_path / "l.sqlite"), {"budget": 9.0}
    start(tmp_path / "first", epsilon=2.0, ledger=ledger, privacy=budget)
    start(tmp_path / "second", epsilon=2.0, ledger=ledger, privacy=budget, model={"init": str(tmp_path / "first")})
    told = json.loads((tmp_path / "second" / "privacy.json").read_text())
    assert not told["start"]["added"]
    assert told["scope"]["kind"] == "ledger"
    assert 2.0 < told["epsilon"] <= 4.0 + 1e-6
    assert told["delta"] == pytest.approx(1e-5)


def test_a_model_of_public_data_costs_nothing(digits: Path, tmp_path: Path) -> None:
    origin = read_origin(digits)
    assert origin is not None
    assert origin.public
    again = fulcrum.train(
        "digits",
        out=tmp_path / "again",
        model={"name": "mlp", "activation": "tempered", "init": str(digits)},
        **SETTINGS,
    )
    told = json.loads((tmp_path / "again" / "privacy.json").read_text())
    assert "start" not in told
    assert told["epsilon"] == pytest.approx(again.epsilon)
