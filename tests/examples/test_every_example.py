"""Each program of examples/ runs in a test: those with pages in test_examples.py, the others here or where it says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_IN = {
    "adult/choose.py": "examples/test_every_example.py",
    "adult/run.py": "examples/test_examples.py",
    "flower-app/fulcrum_app.py": "examples/test_every_example.py",
    "heart/choose.py": "examples/test_every_example.py",
    "heart/flamby_cost.py": "examples/test_examples.py",
    "heart/run.py": "examples/test_examples.py",
    "hospitals.py": "examples/test_every_example.py",
    "imported_models.py": "models/test_imported.py",
    "loops/accumulation.py": "integrations/test_loop_examples.py",
    "loops/plain.py": "integrations/test_loop_examples.py",
    "loops/with_lightning.py": "integrations/test_loop_examples.py",
    "loops/with_trainer.py": "integrations/test_loop_examples.py",
    "regression/run.py": "examples/test_examples.py",
    "series/run.py": "examples/test_examples.py",
    "text/run.py": "examples/test_examples.py",
}


def test_every_program_has_a_test_that_runs_it() -> None:
    programs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert programs == set(RUN_IN)
    for program, test in RUN_IN.items():
        text = (EXAMPLES.parent / "tests" / test).read_text(encoding="utf-8")
        assert program in text or Path(program).stem in text or Path(program).parts[0] in text, program


def test_hospitals_share_no_record(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "hospitals.py"), str(tmp_path / "made")]
    subprocess.run(words, check=True, timeout=120)
    with np.load(tmp_path / "made/public.npz") as public:
        assert public["x_test"].shape == (360, 1, 8, 8)
    total = 0
    for name in "abc":
        with np.load(tmp_path / f"made/{name}.npz") as part:
            assert set(part.files) == {"x", "y", "classes"}
            total += len(part["y"])
    assert total == 1437, "each of the training records is at one hospital"


def test_the_flower_app_names_what_is_there() -> None:
    pytest.importorskip("flwr", reason="a Flower app needs Flower: make test-flower")
    told = tomllib.loads((EXAMPLES / "flower-app/pyproject.toml").read_text(encoding="utf-8"))
    module = load("flower-app/fulcrum_app.py")
    for place in told["tool"]["flwr"]["app"]["components"].values():
        file, _, name = place.partition(":")
        assert file == "fulcrum_app"
        assert hasattr(module, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:only you see this")
@pytest.mark.parametrize(("name", "words"), [("heart", ["--repeats", "1"]), ("adult", ["--seeds", "0"])])
def test_a_choice_is_made_as_its_program_says(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One candidate in place of all: how the settings were chosen can be done again."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    choose = load(f"{name}/choose.py")
    first = next(iter(choose.CANDIDATES))
    monkeypatch.setattr(choose, "CANDIDATES", {first: choose.CANDIDATES[first]})
    monkeypatch.setattr(sys, "argv", ["choose.py", *words, "--out", str(tmp_path / "chosen.json")])
    choose.main()
    made = json.loads((tmp_path / "chosen.json").read_text())
    assert {"real", "commit", "date"} <= set(made)
    assert first in (made.get("accuracy") or made["mean_over_parties"])
    sys.modules.pop("run", None)


def load(path: str) -> ModuleType:
    """A program of the examples as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
