"""The benchmark scripts run; what they measure is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_cpu_benchmark_checks_equality_and_writes_its_files(tmp_path: Path) -> None:
    methods = ["plain", "fulcrum", "fulcrum-fast-secure", "fulcrum-proven"]
    words = ["--quick", "--works", "mnist", "--methods", *methods, "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cpu.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for name in methods[1:]:
        assert f"{name} and its reference: relative difference" in done.stdout
    rows = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert [(row["work"], row["method"]) for row in rows] == [("mnist", name) for name in methods]
    for row in rows:
        assert row["seconds_per_round"] > 0
        assert row["peak_rss_mb"] > 50
    assert rows[0]["ratio_to_plain"] == rows[1]["ratio_to_seeded"] == 1.0
    assert all(row["ratio_to_seeded"] > 0 for row in rows[2:])
    assert "| mnist | fulcrum |" in (tmp_path / "bench-cpu.md").read_text()
