"""A few trials of benchmarks/faults.py, and what it found: each mended, each with a case that fails without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fulcrum
from fulcrum.cli import main
from fulcrum.cli.failures import explain_failure
from fulcrum.errors import RunError
from fulcrum.runs.folder import RunFolder
from support.federations import toy_data
from support.stopped_runs import TERMS, resume, stop_run

ROOT = Path(__file__).parents[2]


def play(tmp_path: Path, *words: str) -> dict:
    """benchmarks/faults.py; returns what it wrote."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "faults.py"), *words, "--out", str(tmp_path / "faults.json")],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "faults.json").read_text())


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = play(tmp_path, "--trials", "12", "--messages", "0", "--only", "kill")
    assert (found["trials"], found["failed"], found["equal_to_the_whole_run"]) == (2, 0, 2)
    exits = {row["exit"] for row in found["rows"]}
    assert -9 in exits  # on a busy machine one of the two may end before it is struck
    assert exits <= {-9, 0}


@pytest.mark.slow
def test_one_trial_of_each_fault(tmp_path: Path) -> None:
    found = play(tmp_path, "--trials", "12", "--messages", "0")
    assert found["trials"] + found["skipped"] == 12
    assert found["failed"] == 0
    assert found["equal_to_the_whole_run"] >= 8, "the first twelve trials are seeded"
    killed = next(row for row in found["rows"] if row["fault"] == "kill at a line")
    assert killed["exit"] == -9


@pytest.mark.slow
def test_many_trials(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="parties sign with keys")
    found = play(tmp_path, "--trials", "72", "--messages", "12", "--seed", "1")
    assert found["failed"] == 0
    assert found["trials"] > 60
    again = play(tmp_path, "--trials", "72", "--messages", "12", "--seed", "1")  # nothing is played twice
    assert again["rows"] == found["rows"]


# --- what the trials found ------------------------------------------------------------------------


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))[-1]


def load_round(folder: Path) -> int:
    opened = RunFolder.open(folder)
    try:
        found = opened.load_last_snapshot(torch.device("cpu"))
    finally:
        opened.close()
    return found.round if found else 0


def test_a_checkpoint_with_one_wrong_bit_is_passed_over_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = fulcrum.train(toy_data(), out=tmp_path / "whole", **TERMS)
    folder = stop_run(tmp_path / "stopped", checkpoint_every=1)
    file = newest(folder)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # within a tensor: the file is well-formed, and one weight is another
    file.write_bytes(content)
    assert load_round(folder) == 4
    resumed = resume(folder)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]
    assert resumed.epsilon == whole.epsilon


@pytest.mark.parametrize("how", ["renamed", "another run's"])
def test_a_checkpoint_of_another_round_or_run_is_passed_over(tmp_path: Path, how: str) -> None:
    folder = stop_run(tmp_path / "stopped", checkpoint_every=1)
    other = stop_run(tmp_path / "other", checkpoint_every=1) if how != "renamed" else folder
    taken = newest(other).read_bytes()
    target = newest(folder)
    if how == "renamed":
        target = target.with_name("round-000007.safetensors")
    target.write_bytes(taken)
    assert load_round(folder) == (5 if how == "renamed" else 4)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("can't allocate memory: 9 GB")]
)
def test_memory_that_runs_out_is_said_in_a_sentence(error: BaseException) -> None:
    code, words = explain_failure(error)
    assert code == 2
    assert words.startswith("error: there is not enough memory")
    assert "resume" in words


def test_a_write_that_fails_without_naming_its_file_is_said_in_a_sentence() -> None:
    code, words = explain_failure(OSError(27, "File too large"))
    assert (code, words) == (2, "error: a file could not be read or written: File too large.")


def test_a_start_that_was_killed_before_its_first_round_is_named(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run").close()  # kill -9 before run.json was written
    with pytest.raises(RunError, match="killed before its first round, when nothing had been released; remove"):
        RunFolder.create(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="exists and is not empty; choose another --out"):
        RunFolder.create(tmp_path / "other")


def test_metrics_that_are_no_text_are_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stop_run(tmp_path / "stopped", checkpoint_every=1)
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b"loss", b"lo\xff\xfe", 1))
    assert main(["resume", str(folder)]) == 2
    assert "metrics.jsonl is damaged in line 1; restore it" in capsys.readouterr().err
