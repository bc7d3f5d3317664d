"""The benchmark scripts run; what they measure is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fulcrum.study.figures import LinePanel, draw_panels

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


@pytest.mark.slow
def test_the_growth_benchmark_fills_every_panel_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    words = [
        "--device",
        "cpu",
        "--families",
        "linear",
        "--methods",
        "plain",
        "fulcrum",
        "--repeat",
        "1",
        "--scale",
        "0.1",
    ]

    def run(seconds: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "benchmarks" / "model_growth.py"),
                *words,
                "--seconds",
                seconds,
                "--out",
                str(tmp_path),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads((tmp_path / "bench-growth.json").read_text())
        return rows

    none = run("0")
    assert {row["word"] for row in none} == {"not run: out of time"}
    rows = run("200")
    assert len(rows) == len(none) == 5 * 3 * 2
    assert all(row["seconds"] > 0 for row in rows)
    assert (tmp_path / "bench-growth.svg").read_text().count("<polyline") == 5 * 2


def test_panels_draw_a_line_for_each_series_and_leave_out_what_cannot_be_drawn() -> None:
    panels = [
        LinePanel("one", "x", {"a": [(1, 10), (10, 100)], "b": [(1, 20)]}),
        LinePanel("two", "x", {"a": [(1, 0.0), (10, 5.0)]}),
        LinePanel("empty", "x", {}),
    ]
    text = draw_panels(panels, "title <1>", 2, order=("a", "b"))
    found = ElementTree.fromstring(text)
    tags = [element.tag.rpartition("}")[2] for element in found.iter()]
    assert (tags.count("polyline"), tags.count("circle"), tags.count("rect")) == (3, 4, 1 + 2)
    assert "title &lt;1&gt;" in text


@pytest.mark.slow
def test_the_loops_benchmark_writes_its_page(tmp_path: Path) -> None:
    words = ["--problems", "cnn", "--seeds", "2", "--without-opacus", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "loops.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "cnn.json").read_text())
    assert row["fulcrum"]["epsilon"] <= 3.0
    assert row["fulcrum"]["score"] > 0.6
    assert row["fulcrum"]["numbers_to_choose"] == 0
    assert "| cnn (" in (tmp_path / "loops.md").read_text()


@pytest.mark.slow
def test_the_audits_shards_merge_and_the_summary_reads_all_parts(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "audit.py"), *words, "--out", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "150 of 300 runs are there" in run("many", "--epsilon", "3.61", "--runs", "300", "--shard", "2/2")
    assert "many-3.61.json" in run("many", "--epsilon", "3.61", "--runs", "300", "--shard", "1/2")
    run("one", "--epsilon", "3.61", "--canaries", "400", "--rounds", "3", "--parties", "2", "--model", "mlp")
    (tmp_path / "planted.json").write_text(json.dumps({"planted": 14, "planted_found": 14, "bugs": []}))
    (tmp_path / "clean.json").write_text(json.dumps({"clean_runs": 500, "false_alarms": 0}))
    run("summary")
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["planted"], told["planted_found"], told["clean_runs"], told["false_alarms"]) == (14, 14, 500, 0)
    assert 0 <= told["lower_over_claimed"] < 1.5
    assert told["one_run_over_claimed"] is not None
