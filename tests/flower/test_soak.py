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
