"""A result in a notebook: it shows itself, gives its rounds as a frame and its charts as figures."""

from __future__ import annotations

import math
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fulcrum
from fulcrum.analysis.report import notebook as look
from fulcrum.errors import ConfigError, RunError
from fulcrum.runs.notebook import lines_to_columns, result_to_html


@pytest.fixture(scope="module")
def result() -> fulcrum.Result:
    return fulcrum.train(data="digits", rounds=4, parties=3, epsilon=4.0, rate=0.2, evaluate_every=2)


def list_elements(text: str) -> set[str]:
    found: set[str] = set()

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.add(tag)

    Elements().feed(text)
    return found


def test_a_run_shows_itself(result: fulcrum.Result) -> None:
    shown = result._repr_html_()
    for words in ("accuracy", "epsilon", "4 for one example", "simulation", "moo"):
        assert words in shown, words
    assert list_elements(shown) == {"div", "p", "table", "tr", "th", "td"}


def test_hostile_names_are_text(result: fulcrum.Result) -> None:
    bad = "<script>alert(1)</script>"
    summary = {**result.summary, "method": bad, "score": bad, "party_metrics": {bad: {bad: 0.5}}, "status": bad}
    assert "script" not in list_elements(result_to_html(summary, bad))


def test_rounds_as_columns(result: fulcrum.Result) -> None:
    columns = lines_to_columns(result.lines)
    assert columns["round"] == [1, 2, 3, 4]
    assert columns["accuracy"][0] is None
    assert columns["accuracy"][3] == pytest.approx(result.accuracy)
    assert columns["epsilon"] == sorted(columns["epsilon"])
    assert set(columns) >= {"C", "loss", "seconds", "participants", "course step", "course noise"}
    assert lines_to_columns([{"round": 1, "epsilon": "inf"}])["epsilon"] == [math.inf]


def test_a_frame(result: fulcrum.Result) -> None:
    pytest.importorskip("pandas", reason="to_frame needs pandas")
    frame = result.to_frame()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame["epsilon"].is_monotonic_increasing
    assert frame["accuracy"].notna().sum() == 2


def test_without_pandas_it_says_what_to_install(result: fulcrum.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RunError, match=r"pip install .fulcrum-fl\[figures\]"):
        result.to_frame()


def test_charts_of_results_and_folders(result: fulcrum.Result, tmp_path: Path) -> None:
    keys = look.charts(result)
    assert {"metric-accuracy", "C", "step", "signal", "epsilon"} <= set(keys)
    assert "tradeoff" in look.charts([look.view(result, "one"), look.view(result, "two")])
    with pytest.raises(ConfigError, match="metric-accuracy"):
        look.figure(result, "metric-acuracy")
    with pytest.raises(RunError, match="there is no folder"):
        look.charts(tmp_path / "nowhere")


def test_a_figure(result: fulcrum.Result) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    drawn = look.figure(result, "metric-accuracy", axis="epsilon")
    assert drawn.axes[0].get_xlabel() == "epsilon spent"
    assert drawn._repr_png_().startswith(b"\x89PNG")
