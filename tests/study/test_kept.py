"""Old and new rows of the default, and the row without trials: scripts that judge and fill two studies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fulcrum.study.experiment import list_paper_jobs, read_experiment
from fulcrum.study.store import ShardWriter
from support.scripts import load_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def make_records(change: float, jitter: float) -> list[dict[str, Any]]:
    """Runs of the digits cells: the new row is `change` points from the old one, give or take `jitter` by seed."""
    machine = {"device": "cpu", "processor": "x", "cores": 1, "python": "3", "torch": "2", "backend": "b"}
    found = []
    for job in list_paper_jobs(read_experiment(None, "kept").only(datasets=["digits"])):
        moved = change + jitter * (job.seed % 2 * 2 - 1) if job.row == "moo" else 0.0
        score = (90.0 + 0.1 * job.seed + moved) / 100
        found.append(
            {
                **{**job.to_json(), "seed": job.seed, "metrics": {"accuracy": score}, "score": "accuracy"},
                **{"higher_is_better": True, "notes": [], "machine": machine, "date": "2026-01-01"},
                **{"commit": "abc", "command": "here"},
            }
        )
    return found


@pytest.mark.parametrize(
    ("change", "jitter", "fallen"), [(0.0, 0.5, False), (-0.2, 0.1, False), (-0.6, 0.1, True), (-0.6, 2.0, False)]
)
def test_a_cell_has_fallen_only_beyond_its_interval(change: float, jitter: float, fallen: bool) -> None:
    kept = load_script("benchmarks/kept.py")
    rows = kept.compare_rows({record["id"]: record for record in make_records(change, jitter)})
    assert [row["fallen"] for row in rows] == [fallen] * 3
    assert all(row["change"] == pytest.approx(change) and row["seeds"] == 10 for row in rows)


@pytest.mark.slow
def test_the_verdict_is_printed_and_decides_the_exit_code(tmp_path: Path) -> None:
    for name, change, code in (("good", 0.1, 0), ("bad", -1.0, 1)):
        with ShardWriter(tmp_path / name, "runs") as writer:
            for record in make_records(change, 0.05):
                writer.add(record)
        words = [sys.executable, str(BENCHMARKS / "kept.py"), "--results", str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert f"{3 * code} of 3 cells fell" in done.stdout
        assert "0 of its moo cells would be rehearsed" in done.stdout


def test_advice_becomes_the_settings_of_the_row_without_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("benchmarks/zero_trials.py")
    cells = script.list_cells("", 200)
    assert [(cell["dataset"], cell["epsilon"]) for cell in cells][:3] == [("mnist", e) for e in (1.64, 3.61, 6.38)]
    assert all(cell["settings"].model.init == "random" for cell in cells)
    advice = tmp_path / "advice.json"
    chosen = {
        "train.rate": 0.1,
        "train.rounds": 50,
        "train.server": "momentum",
        "clip.step": 2.5,
        "clip.rehearse": True,
    }
    advice.write_text(json.dumps([{"dataset": "mnist", "epsilon": 1.64, "chosen": chosen}]))
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "zero-trials.toml").write_text(
        (Path(read_experiment(None, "zero-trials").folder) / "zero-trials.toml").read_text()
    )
    script.take(advice, folder)
    (job, *_) = list_paper_jobs(read_experiment(folder, "zero-trials").only(datasets=["mnist"], epsilons=[1.64]))
    assert (job.settings.train.rate, job.settings.train.rounds, job.settings.train.server) == (0.1, 50, "momentum")
    assert job.settings.clip.step == 2.5
    assert job.settings.data.parties == 10
