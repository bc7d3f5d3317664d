"""The programs of examples/loops run; those of Lightning and the Trainer where these are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

LOOPS = Path(__file__).parents[2] / "examples" / "loops"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loops_{name}", LOOPS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    accuracy = load_example("plain").main(epsilon=8.0, epochs=5, seed=1)
    assert accuracy > 0.6
    assert "epoch 5" in capsys.readouterr().out
    assert (tmp_path / "PRIVACY.md").read_text().startswith("# Privacy statement of a simulation")
    assert (tmp_path / "checkpoint.pt").is_file()


def test_accumulation(monkeypatch):
    example = load_example("accumulation")
    monkeypatch.setattr(example, "EPOCHS", 1)
    by_hand, virtual = example.accumulate_by_hand(1), example.virtual_batches(1)
    assert by_hand.step == virtual.step == 6
    assert by_hand.rate == pytest.approx(virtual.rate)
    assert by_hand.epsilon == pytest.approx(virtual.epsilon, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize(("name", "package"), [("with_lightning", "lightning"), ("with_trainer", "transformers")])
def test_in_other_peoples_trainers(name, package, accumulate, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package} accelerate")
    paths = [str(LOOPS.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(LOOPS / f"{name}.py"), "--epochs", "2", "--accumulate", accumulate, "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    epsilon, steps = re.findall(r"epsilon ([\d.]+) after (\d+) steps", done.stdout)[-1]
    assert float(epsilon) == pytest.approx(3.0 if package == "lightning" else 8.0, rel=0.01)
    assert int(steps) == (24 if package == "lightning" else 20)
