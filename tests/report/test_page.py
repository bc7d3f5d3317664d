"""The page: whole in one file, nothing loaded, nothing of a folder run as code, small."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fulcrum.analysis.report.attack_charts import find_meaning, make_attack_charts
from fulcrum.analysis.report.charts import find_front, make_charts
from fulcrum.analysis.report.html import Html, make_json_block, make_table, tag
from fulcrum.analysis.report.meaning import VERDICTS
from fulcrum.analysis.report.model import read_run
from fulcrum.analysis.report.numbers import (
    chart_to_csv,
    describe_chart,
    guard,
    parties_to_csv,
    rounds_to_csv,
    runs_to_csv,
)
from fulcrum.analysis.report.page import make_page
from fulcrum.analysis.report.seeds import average_columns, group_by_seed
from support.run_folders import make_run_folder

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'onmouseover='alert(1)",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "javascript:alert(1)",
    "\u202egnp.exe",
    "{{7*7}}${7*7}",
]


class Elements(HTMLParser):
    """Collects the elements and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((name, dict(attributes)))


def list_elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """All elements of a page, but those in its own scripts."""
    parser = Elements()
    parser.feed(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))
    return parser.found


def test_hostile_names_are_text(tmp_path: Path) -> None:
    plain = list_elements(make_page([read_run(make_run_folder(tmp_path / "plain", parties=len(HOSTILE)))]))
    folder = make_run_folder(
        tmp_path / "<b>run",
        names=HOSTILE,
        parties=len(HOSTILE),
        method=HOSTILE[0].replace('"', ""),
        source=HOSTILE[1],
        changes={
            "run.json": {
                "version": HOSTILE[0],
                "score": HOSTILE[1],
                "created": HOSTILE[2],
                "unit": HOSTILE[2],
                "id": HOSTILE[0],
            },
            "summary.json": {
                "status": HOSTILE[0],
                "guarantee": HOSTILE[1],
                "evaluated_on": HOSTILE[2],
                "warnings": HOSTILE,
            },
            "privacy.json": {"guarantee_text": HOSTILE[1], "adversary": HOSTILE[0], "not_covered": HOSTILE},
            "environment.json": {"python": HOSTILE[0], "platform": HOSTILE[2]},
        },
    )
    (folder / "parties.jsonl").write_text(
        "".join(json.dumps({"time": x, "party": x, "what": x}) + "\n" for x in HOSTILE)
    )
    run = read_run(folder)
    for page in (make_page([run]), make_page([run, run], title=HOSTILE[0])):
        elements = list_elements(page)
        assert {name for name, _ in elements} - {name for name, _ in plain} <= {
            "select",
            "input",
            "ul",
            "li",
            "details",
            "summary",
        }
        assert not [name for name, own in elements for key in own if key.startswith("on")]
        assert not [own for _, own in elements if "javascript:" in str(own.get("href"))]
        assert page.count("<script") == 4  # three of our own, one block of data
        assert "\u202e" not in page
        block = page.split('id="data">')[1].split("</script>")[0]
        assert set("<>&") & set(block) == set()
        assert json.loads(block)["charts"]


def test_what_is_not_escaped_would_be_noticed() -> None:
    assert list_elements("<p><img src=x onerror=alert(1)></p>")[1] == ("img", {"src": "x", "onerror": "alert(1)"})


def test_the_builder_escapes_all_but_its_own_markup() -> None:
    assert tag("p", "<b>", Html("<i>x</i>"), class_='a"b') == '<p class="a&quot;b">&lt;b&gt;<i>x</i></p>'
    assert tag("p", None, ["a", 1], hidden=True, title=None) == "<p hidden>a1</p>"
    assert "\\u003c/script" in make_json_block("x", "</script>")
    assert json.loads(make_json_block("x", [math.nan, math.inf, 1.0, 0.1234567]).split(">")[1].split("<")[0]) == [
        *(None, None, 1, 0.12346)
    ]
    with pytest.raises(AssertionError):
        tag("p onclick=x", "y")
    assert 'data-sort="1.5"' in make_table(("a",), [[("<x>", 1.5)]], "c")


def test_the_page_loads_nothing_and_runs_its_own_scripts_only(tmp_path: Path) -> None:
    page = make_page([read_run(make_run_folder(tmp_path / "run"))])
    elements = list_elements(page)
    assert not [own for name, own in elements if "src" in own or (name == "link")]
    policy = next(own["content"] for _, own in elements if own.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 3
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy


@pytest.mark.parametrize(("parties", "rounds", "limit"), [(10, 200, 3e6), (1000, 200, 6e6)])
def test_size(tmp_path: Path, parties: int, rounds: int, limit: float) -> None:
    folder = make_run_folder(tmp_path / "run", parties=parties, rounds=rounds)
    size = len(make_page([read_run(folder)]).encode())
    assert size < limit / 3, "well below the bar, so that nobody has to think of it"


def test_very_many_parties_are_summed_up(tmp_path: Path) -> None:
    page = make_page([read_run(make_run_folder(tmp_path / "run", parties=5000, rounds=2))])
    assert "The first 2000 of 5000 parties are listed" in page
    assert len(page) < 3e6


# --- what it says ------------------------------------------------------------------------------------------


def test_headline_and_words(tmp_path: Path) -> None:
    page = make_page([read_run(make_run_folder(tmp_path / "run"))])
    for words in ("90.0%", "simulation", "What epsilon = 4 means", "A curious server.", "fulcrum run", "Seeded."):
        assert words in page, words


@pytest.mark.parametrize("guarantee", ["nominal", "none", "unknown"])
def test_no_promise_is_made_of_an_epsilon_that_does_not_hold(tmp_path: Path, guarantee: str) -> None:
    page = make_page([read_run(make_run_folder(tmp_path / "run", guarantee=guarantee))])
    assert VERDICTS[guarantee].long in page
    assert "What epsilon = " not in page


def test_the_page_says_what_an_attacker_can_reach(tmp_path: Path) -> None:
    run = read_run(make_run_folder(tmp_path / "run", guarantee="yes", epsilon=math.log(3)))
    page, told = make_page([run]), find_meaning(run)
    assert told["holds"] is True
    # Of an older run only (epsilon, delta) is known: randomised response's belief, a little more for ten deltas.
    assert "50% sure beforehand" in page
    assert "77% sure afterwards" in page
    (chart,) = make_attack_charts(run)
    bound, chance = chart.series
    assert all(high > low for high, low in zip(bound.y[:-1], chance.y[:-1], strict=True))
    assert max(bound.y) == 1.0
    simulated = read_run(make_run_folder(tmp_path / "seeded", guarantee="simulation"))
    assert find_meaning(simulated)["holds"] is False
    assert "this does NOT hold here" in make_page([simulated])


def make_audit(bounds: dict[str, dict[str, int]], passed: bool = True) -> dict[str, Any]:
    """audit.json as docs/audit.md has it: one party's bounds by method."""
    rows = [{"epsilon": 0.4, "method": method, "assumes": "", "numbers": numbers} for method, numbers in bounds.items()]
    party = {"name": "a", "claimed": 2.0, "canaries": 200, "included": 100, "bounds": rows}
    measured = {"epsilon": 0.4, "claimed": 2.0, "method": "one-run", "assumes": "", "party": "a"}
    return {"passed": passed, "confidence": 0.95, "measured": measured, "parties": [party], "together": None}


def test_the_audits_points_are_in_the_chart_and_broken_ones_are_not(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "run", guarantee="yes")
    counts = {"true_positives": 30, "members": 100, "false_positives": 10, "others": 200}
    guessed = {"canaries": 200, "guesses": 40, "correct": 24, "sides": 2}
    wrong = {"true_positives": 30, "members": 10, "false_positives": 10, "others": 0}
    audit = make_audit({"clopper-pearson": counts, "one-run": guessed, "broken": wrong, "empty": {}})
    (folder / "audit.json").write_text(json.dumps(audit))
    run = read_run(folder)
    points = {each.name: (each.x["false_positives"][0], each.y[0]) for each in make_attack_charts(run)[0].series[2:]}
    assert points == {"audit, clopper-pearson, a": (0.05, 0.3), "audit, one-run, a": (0.08, 0.12)}
    assert "The audit measured an epsilon of at least 0.4 (one-run, 95% confidence)" in make_page([run])
    (folder / "audit.json").write_text(json.dumps(make_audit({}, passed=False)))
    assert "IT CONTRADICTS THE CLAIM" in make_page([read_run(folder)])
    for broken in (
        {"parties": 3},
        {"measured": {"epsilon": "x"}, "together": {"bounds": [1]}},
        {"parties": [{"bounds": 1}]},
    ):
        (folder / "audit.json").write_text(json.dumps(broken))
        assert "The audit measured" not in make_page([read_run(folder)])
    (folder / "audit.json").write_text("[")
    assert any("audit.json is damaged" in each for each in read_run(folder).problems)


def test_an_edited_meaning_is_made_anew(tmp_path: Path) -> None:
    wrong = [{"beliefs": [{"prior": 0.5}]}, {"text": []}, {"roc": [[2, 3]]}, {"guess": "x"}]
    for place, change in enumerate(wrong):
        folder = make_run_folder(tmp_path / str(place), guarantee="yes", changes={"privacy.json": {"meaning": change}})
        assert find_meaning(read_run(folder))["source"] == "epsilon"
        assert "50% sure beforehand" in make_page([read_run(folder)])


# --- charts and numbers --------------------------------------------------------------------------------------


def test_charts_of_one_run_and_of_several(tmp_path: Path) -> None:
    runs = [
        read_run(make_run_folder(tmp_path / f"{eps}", epsilon=eps, score=0.8 + eps / 50)) for eps in (1.0, 2.0, 4.0)
    ]
    alone = {chart.key: chart for chart in make_charts(runs[:1])}
    assert {"metric-accuracy", "metric-loss", "C", "step", "objective", "signal", "epsilon", "labels"} <= set(alone)
    assert "tradeoff" not in alone
    # Signal and noise in units of C: 0.2 and 0.1 long at C = 1 / t.
    signal, noise = alone["signal"].series
    assert signal.y[3] == pytest.approx(4 * math.sqrt(0.2**2 - 0.1**2))
    assert noise.y[3] == pytest.approx(0.4)
    several = {chart.key: chart for chart in make_charts(runs)}
    front = several["tradeoff"].series[0]
    assert front.x["epsilon"] == (1.0, 2.0, 4.0)
    assert [each.name for each in several["C"].series] == ["1.0", "2.0", "4.0"]
    assert "labels" not in several


def test_the_front_holds_what_nothing_beats() -> None:
    points = [(1.0, 0.5), (2.0, 0.4), (2.0, 0.7), (4.0, 0.7), (3.0, 0.9)]
    assert find_front(points, (True, False)) == [0, 2, 4]
    assert find_front(points, (True, True)) == [0, 1]


def test_runs_that_differ_in_their_seed_are_averaged(tmp_path: Path) -> None:
    runs = [read_run(make_run_folder(tmp_path / f"{s}", seed=s, score=0.8 + 0.02 * s)) for s in range(3)]
    other = read_run(make_run_folder(tmp_path / "other", epsilon=1.0))
    (group, alone) = group_by_seed([*runs, other])
    assert [run.name for run in group.runs] == ["0", "1", "2"]
    assert alone.runs == (other,)
    columns, low, high = average_columns(group.runs, "metric:accuracy")
    assert columns["metric:accuracy"][-1] == pytest.approx(0.82)
    assert (low[-1], high[-1]) == (pytest.approx(0.8), pytest.approx(0.84))
    assert group_by_seed([runs[0], other]) == []
    page = make_page([*runs, other])
    assert "3 seeds" in page


def test_csv_holds_the_numbers_and_no_formula(tmp_path: Path) -> None:
    folder = make_run_folder(
        tmp_path / "run", names=["=1+1", "@x", "-2", "plain", "a,b"], changes={"privacy.json": {"guarantee": "yes"}}
    )
    run = read_run(folder)
    rounds = list(csv.DictReader(io.StringIO(rounds_to_csv(run))))
    assert float(rounds[-1]["metric:accuracy"]) == pytest.approx(0.9)
    parties = list(csv.DictReader(io.StringIO(parties_to_csv(run))))
    assert [row["party"] for row in parties] == ["'=1+1", "'@x", "'-2", "plain", "a,b"]
    assert "run," in runs_to_csv([run])
    for chart in make_charts([run]):
        assert len(chart_to_csv(chart).splitlines()) > 1
        assert len(describe_chart(chart)) > 5
    assert guard("x") == "x"


def test_what_the_rehearsal_chose(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "run")
    assert "What the rehearsal chose" not in make_page([read_run(folder)])
    content = {
        "candidate": {"mode": "moo", "C": 1.0, "step": 2.0},
        "regrets": {"<i>plain": 2.5, "moo: first step 2": 1.5},
    }
    (folder / "rehearsal.json").write_text(json.dumps(content))
    page = make_page([read_run(folder)])
    assert "What the rehearsal chose" in page
    assert page.index("moo: first step 2") < page.index("&lt;i&gt;plain"), "the smallest regret first"


def test_a_run_of_the_first_versions(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "run.json").write_text('{"id": "x"}')
    lines = [
        {"round": t, "accuracy": t / 10, "loss": 1.0, "C": 1.0, "epsilon": 0.1 * t, "seconds": 1} for t in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.columns["metric:accuracy"] == (0.1, 0.2, 0.3)
    assert "not known" in make_page([run])
