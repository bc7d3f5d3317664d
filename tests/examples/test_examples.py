"""Each example runs as its page says; on real data heart and adult reach what their pages claim, for any seeds."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fulcrum.study.repeats import find_example_file

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "heart": "heart.md",
    "adult": "adult.md",
    "text": "example-text.md",
    "regression": "example-regression.md",
    "series": "example-series.md",
}


def load(name: str, file: str = "run.py") -> ModuleType:
    """The example's program as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / name / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> dict[str, Any]:
    patch.setattr(sys, "argv", [f"examples/{name}/run.py", *words])
    load(name).main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.filterwarnings("ignore:only you see this")
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.every(3)
def test_an_example_ends_with_one_line_of_json(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "made.json"
    found = run_main(name, ["--json", "--quick", "--seeds", "3", "--out", str(out)], capsys, monkeypatch)
    assert {"epsilon", "delta", "accuracy"} <= set(found)
    assert 0 < found["epsilon"] <= {"heart": 1, "adult": 1, "text": 2, "regression": 4, "series": 2}[name]
    assert found["seeds"] == [3]
    assert ("mean_over_parties" in found) == (name in ("heart", "text", "series"))
    if name == "regression":
        assert found["accuracy"] is None
        assert found["r2"] > 0.2
        assert found["rmse"] < found["baseline"]
    else:
        assert 0 <= found["baseline"] <= 1
    made = json.loads(out.read_text())
    assert {"commit", "command", "hardware", "version", "seeds"} <= set(made)


@pytest.mark.slow
def test_a_program_prints_its_line_last() -> None:
    words = [sys.executable, str(ROOT / "examples/heart/run.py"), "--json", "--made-up", "--seeds", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["example"] == "heart"


@pytest.mark.parametrize(("name", "page"), EXAMPLES.items())
def test_each_example_has_a_page_that_names_its_command(name: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert f"python examples/{name}/run.py --json" in text
    for command in re.findall(r"python (examples/\S+\.py)", text):
        assert (ROOT / command).is_file(), command
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link


def test_the_page_says_what_flambys_runs_cost() -> None:
    """The table of docs/heart.md is what the command computes."""
    module = load("heart", "flamby_cost.py")
    text = (ROOT / "docs/heart.md").read_text(encoding="utf-8")
    for name, records in module.HOSPITALS.items():
        row = module.account_hospital(records, 1.0, 1e-4, "pld")
        assert row["nominal"] == pytest.approx(1.0, abs=0.01)
        assert row["poisson"] > 1.4, "more steps were run than the noise was calibrated for"
        line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        numbers = [float(cell.replace(",", "")) for cell in line.split("|")[2:-1]]
        assert numbers == pytest.approx(
            [records, row["planned"], 1500, row["sigma"], 1.0, row["poisson"], row["shuffled"]], abs=0.011
        )


def test_choices_are_made_without_test_rows() -> None:
    """The candidates of heart/choose.py are scored on training rows only."""
    sys.path.insert(0, str(ROOT / "examples/heart"))
    try:
        choose = load("heart", "choose.py")
    finally:
        sys.path.remove(str(ROOT / "examples/heart"))
        sys.modules.pop("run", None)
    data = load("heart").make_hospitals()
    rows = {row.numpy().tobytes() for row in data.x}
    for part in choose.split_training_rows(data, 0):
        assert all(row.numpy().tobytes() in rows for row in part.x_test)
        assert len(part.y) + len(part.y_test) == len(data.y)


def need(*parts: str) -> None:
    if find_example_file(*parts) is None:
        pytest.skip(f"FULCRUM_DATA has no {'/'.join(parts)}: the claim is about real data")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(10), range(500, 510)])
def test_heart_reaches_its_claim(
    seeds: range, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need("heart", "flamby-split.npz")
    found = run_main("heart", ["--json", "--seeds", *map(str, seeds)], capsys, monkeypatch)
    assert found["epsilon"] <= 1.0
    assert found["delta"] == 1e-4
    assert found["mean_over_parties"] >= 0.805, "the bar is 0.795"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:only you see this")
@pytest.mark.parametrize("seed", [0, 77])
def test_adult_reaches_its_claim(
    seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need("adult", "adult.data.gz")
    found = run_main("adult", ["--json", "--seeds", str(seed)], capsys, monkeypatch)
    assert found["epsilon"] <= 1.0
    assert found["delta"] == 1e-5
    assert found["accuracy"] >= 0.855, "the bar is 0.85"
    assert found["auc"] > 0.9
