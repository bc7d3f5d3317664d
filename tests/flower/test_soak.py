"""A small soak: real parties that are killed, stopped and cut off, a coordinator that is killed twice. Minutes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import soak_parts  # noqa: E402

from fulcrum.privacy.events import Gaussian  # noqa: E402
from fulcrum.privacy.ledger import LedgerEntry  # noqa: E402

pytestmark = pytest.mark.flower


def test_a_small_soak_loses_nothing(tmp_path: Path) -> None:
    words = ["--parties", "4", "--rounds", "60", "--kills", "2", "--causes", "10", "--deadline", "5"]
    words += ["--longest-cause", "8", "--minutes", "8", "--out", str(tmp_path / "soak.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *words],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    log = gzip.decompress((tmp_path / "soak.log.gz").read_bytes()).decode()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + log[-3000:]
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["rounds"] == 60
    assert found["coordinator_kills"] == 2
    assert found["party_kills"] + found["party_stops"] + found["party_cuts"] >= 8
    assert found["ledger_errors"] == 0
    assert found["longest_absence_s"] <= 120
    assert "killed after round" in log


def make_row(t: int, digest: str | None = "d", sigma: float = 1.0) -> LedgerEntry:
    return LedgerEntry("p00", "run", t, 0, (Gaussian(0.5, sigma),), 0.0, digest, None if digest is None else 1.0)


def test_rounds_of_both_ledgers_agree() -> None:
    rows = {t: make_row(t) for t in range(3)}
    assert soak_parts.compare_ledgers(rows, rows, {0, 1, 2}, set()) == []
    # Paid and lost on the way to the coordinator, or reserved there for a party that never answered.
    assert soak_parts.compare_ledgers(rows, {**rows, 2: make_row(2, None)}, {0, 1}, set()) == []


def test_a_repeated_round_may_be_settled_without_being_on_record() -> None:
    rows = {t: make_row(t) for t in range(3)}
    assert soak_parts.compare_ledgers(rows, rows, {0, 1}, {2}) == []
    assert "round 3" in soak_parts.compare_ledgers(rows, rows, {0, 1}, {1})[0]  # nobody interrupted round 3
    assert "did not pay" in soak_parts.compare_ledgers({0: rows[0], 1: rows[1]}, rows, {0, 1}, {2})[0]


@pytest.mark.parametrize(
    ("own", "kept", "error"),
    [
        ({}, {0: make_row(0)}, "did not pay"),
        ({0: make_row(0, None)}, {0: make_row(0)}, "did not pay"),
        ({0: make_row(0)}, {0: make_row(0, "other")}, "something else"),
        ({0: make_row(0)}, {0: make_row(0, sigma=2.0)}, "something else"),
        ({0: make_row(0)}, {}, "did not settle"),
        ({0: make_row(0)}, {0: make_row(0, None)}, "did not settle"),
    ],
)
def test_a_lost_row_is_found(own: dict[int, LedgerEntry], kept: dict[int, LedgerEntry], error: str) -> None:
    assert error in " ".join(soak_parts.compare_ledgers(own, kept, {0}, {0}))


def test_the_last_checkpoint_is_the_round_that_is_repeated(tmp_path: Path) -> None:
    assert soak_parts.read_last_checkpoint(tmp_path) == 0
    (tmp_path / "checkpoints").mkdir()
    for number in (9, 10):
        (tmp_path / "checkpoints" / f"round-{number:06d}.safetensors").touch()
    assert soak_parts.read_last_checkpoint(tmp_path) == 10
