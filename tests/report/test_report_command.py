"""`fulcrum report` from the command line, and its figure files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fulcrum.analysis.report import figures
from fulcrum.analysis.report.charts import make_charts
from fulcrum.analysis.report.model import read_run
from fulcrum.cli import main
from support.run_folders import make_run_folder


def test_a_page_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        make_run_folder(tmp_path / "runs" / f"seed-{seed}", seed=seed)
    out, numbers = tmp_path / "deep" / "page.html", tmp_path / "numbers"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out), "--csv", str(numbers), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["page"] == str(out)
    assert len(said["runs"]) == 2
    assert all(Path(file).stat().st_size for file in said["files"])
    assert {"runs.csv", "chart-tradeoff.csv", "rounds-1-seed-0.csv"} <= {file.name for file in numbers.iterdir()}
    assert main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0  # a page may be written anew
    assert "2 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "there is no folder"),
        (["run", "--out", "."], "is a folder"),
        (["run", "--out", "run/settings.toml"], "exists and is no HTML page"),
        (["run", "--formats", "gif"], "'gif' is not known"),
        ([], "RUN"),
    ],
)
def test_wrong_input_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run_folder(tmp_path / "run", rounds=2)
    before = (tmp_path / "run" / "settings.toml").read_text()
    assert main(["report", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert (tmp_path / "run" / "settings.toml").read_text() == before


def test_a_broken_run_among_others_is_shown_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run_folder(tmp_path / "good", rounds=2)
    (make_run_folder(tmp_path / "bad", rounds=2) / "summary.json").write_text("{")
    out = tmp_path / "page.html"
    assert main(["report", *(str(tmp_path / name) for name in ("good", "bad", "gone")), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "warning: bad: summary.json is damaged" in said
    assert "warning: gone: there is no folder" in said
    assert "is damaged" in out.read_text()


def test_figures_without_matplotlib_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    make_run_folder(tmp_path / "run", rounds=2)
    words = ["report", str(tmp_path / "run"), "--out", str(tmp_path / "p.html"), "--figures", str(tmp_path / "f")]
    assert main(words) == 2
    assert "pip install 'fulcrum-fl[figures]'" in capsys.readouterr().err


def test_figures_of_every_kind_of_chart_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figure files need the extra `figures`")
    names = ["$x$", "<b>", "a" * 100, "ü", "\\frac"]
    run = read_run(make_run_folder(tmp_path / "run", names=names))
    several = make_charts([run, read_run(make_run_folder(tmp_path / "other", epsilon=1.0))])
    wanted = ("metric-accuracy", "epsilon", "sizes", "labels")
    charts = [*several[:1], *(chart for chart in make_charts([run]) if chart.key in wanted)]
    assert {chart.kind for chart in charts} == {"line", "bars", "heat", "dots"}
    first = figures.write_figures(tmp_path / "one", charts, ("svg",))
    again = figures.write_figures(tmp_path / "two", charts, ("svg",))
    assert len(first) == len(charts)
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in again]
    assert figures.write_figures(tmp_path / "three", charts[:1], ("png", "pdf"))[0].read_bytes()[:4] == b"\x89PNG"


def test_the_page_and_the_figures_have_one_palette() -> None:
    from fulcrum.analysis.report.page import _read_asset

    light = _read_asset("page.css").partition("@media")[0]
    assert [f"--c{i}: {colour};" in light for i, colour in enumerate(figures.PALETTE)] == [True] * 8
