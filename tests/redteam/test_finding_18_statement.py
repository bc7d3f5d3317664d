"""Finding 18, the statement's part: a run whose noise follows from a seed is called a simulation in every output.

At 243f1c8 `fulcrum run --data own.npz` used seed 0 and wrote "guarantee": "yes" without a warning.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fulcrum.cli import main


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's own file."""
    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(80, 4)).astype(np.float32), chance.integers(0, 3, 80)
    np.savez(tmp_path / "own.npz", x=x[:60], y=y[:60], x_test=x[60:], y_test=y[60:])
    return tmp_path / "own.npz"


def outputs(own: Path, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What a run says: in the terminal, its summary, its statement, and when it is shown again."""
    terms = ["--sigma", "2", "--rounds", "2", "--parties", "2", "--out", str(folder)]
    assert main(["run", "--data", str(own), *terms, *words]) == 0
    found = {"terminal": capsys.readouterr().out}
    assert main(["show", str(folder)]) == 0
    found["show"] = capsys.readouterr().out
    return found | {
        name: (folder / name).read_text() for name in ("summary.json", "privacy.json", "PRIVACY.md", "run.json")
    }


def test_a_seeded_run_on_own_data_is_a_simulation_everywhere(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = outputs(own, tmp_path / "run", capsys, "--randomness", "seeded")
    assert json.loads(said["privacy.json"])["guarantee"] == "simulation"
    assert json.loads(said["summary.json"])["guarantee"] == "simulation"
    assert json.loads(said["run.json"])["simulation"] is True
    for name in ("terminal", "show", "PRIVACY.md"):
        assert "SIMULATION" in said[name], name
    assert said["PRIVACY.md"].splitlines()[0] == "# Privacy statement of a simulation"


def test_own_data_has_secure_randomness_unless_told_otherwise(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = outputs(own, tmp_path / "run", capsys)
    facts = json.loads(said["privacy.json"])
    assert (facts["guarantee"], facts["randomness"]["mode"], facts["simulation"]) == ("yes", "secure", False)
    assert facts["random_numbers"]["key"] == "operating system"
    for name in said:
        assert "SIMULATION" not in said[name], name
    assert facts["evaluation"]["kind"] == "public"
    assert "count as public" in said["PRIVACY.md"]


def test_public_data_is_simulated_on_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = outputs(Path("digits"), tmp_path / "run", capsys)
    assert json.loads(said["privacy.json"])["guarantee"] == "simulation"
    assert "SIMULATION" in said["terminal"]
