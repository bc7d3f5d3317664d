"""Thousands of rounds: neither memory nor the cost of a round grows (benchmarks/long_run.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger
from fulcrum.training.run_account import RunAccount

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import long_run  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(("words", "rounds"), [((), 5000), (("--messages",), 2000)])
def test_thousands_of_rounds_do_not_grow(words: tuple[str, ...], rounds: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "long_run.py"), "--rounds", str(rounds), *words]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "long.json")], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize(("ms", "mb"), [(0.5, 0.0), (0.0, 1.0)])
def test_growth_is_seen(ms: float, mb: float) -> None:
    windows = long_run.Windows(1, say=lambda words: None)
    windows.rows = [{"round": t, "ms_per_round": 10 + ms * t, "memory_mb": 300 + mb * t} for t in range(1, 51)]
    found = windows.compare()
    assert found["slowdown"] > long_run.MAX_SLOWDOWN or found["memory_growth_mb"] > long_run.MAX_GROWTH_MB


def test_the_ledger_reads_new_rows_by_their_number_however_many_there_are() -> None:
    """To group them, SQLite would otherwise walk an index over all rows, in every round."""
    with Ledger.open(":memory:") as ledger:
        ledger.enroll("a", None, 1e-3, "rdp", "example", "toy")
        plans: list[str] = []
        ledger._store.db.set_trace_callback(plans.append)
        ledger.reserve("r", 0, {"a": (Gaussian(0.5, 1.0, 1),)})
        ledger._store.db.set_trace_callback(None)
        (query,) = {sql for sql in plans if "GROUP BY party, run, events" in sql}
        steps = [row[3] for row in ledger._store.db.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert any("USING INTEGER PRIMARY KEY (rowid>?)" in step for step in steps), steps


def test_a_run_keeps_no_past_per_round() -> None:
    with Ledger.open(":memory:") as ledger:
        for party in ("a", "b"):
            ledger.enroll(party, None, 1e-3, "rdp", "example", "toy")
        account = RunAccount(ledger, "r")
        for t in range(300):
            ledger.reserve("r", t, dict.fromkeys(("a", "b") if t % 3 else ("a",), (Gaussian(0.01, 5.0, 1),)))
            account.read_rounds_until(t + 1)
            assert len(account._pasts) < 120
        assert account.largest == ledger.epsilon("a", "r")
        assert len(ledger._pricer._prices) <= 501
