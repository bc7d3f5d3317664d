"""docs/own-rule.md does what it says: its code runs, is found both ways, trains, and passes the suite."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

import fulcrum
from fulcrum.clipping import RULES, ClipRule, ModelFacts, find_rule
from fulcrum.clipping.rule import resolve_rule_options
from fulcrum.clipping.testing import check_rule
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Clip
from support.federations import toy_data

PAGE = Path(__file__).parents[2] / "docs" / "own-rule.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def cooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClipRule:
    """The page's rule, saved where the page says."""
    (tmp_path / "cooling.py").write_text(blocks()[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cooling", raising=False)
    importlib.invalidate_caches()
    return find_rule("cooling:COOLING")


def test_the_rule_is_ten_lines() -> None:
    lines = [line for line in blocks()[0].splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_pages_own_test_passes_and_can_fail(cooling: ClipRule) -> None:
    names: dict[str, object] = {}
    exec(blocks()[1], names)
    names["test_cooling_keeps_the_contract"]()  # type: ignore[operator]
    with pytest.raises(AssertionError, match="C is not above 0"):
        check_rule(dataclasses.replace(cooling, adapt=lambda state, released: {**state, "C": state["C"] * 0}))


def test_it_trains_by_module_and_name(cooling: ClipRule) -> None:
    result = fulcrum.train(
        toy_data(),
        model="linear",
        sigma=1.0,
        rounds=3,
        parties=2,
        partition="iid",
        clip={"rule": "cooling:COOLING", "eta_C": 0.02},
        data_dir="",
    )
    assert list(result.C) == pytest.approx([1.0, 0.98019867, 0.96078944])
    assert result.sound


class _Point:
    name, module, attr = "cooling", "cooling", "COOLING"


def test_it_is_found_by_its_name_through_an_entry_point(cooling: ClipRule, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'cooling' is not known"):
        find_rule("cooling")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [_Point] if group == "fulcrum.rules" else [])
    assert find_rule("cooling") is cooling
    assert find_rule("moo") is RULES["moo"]
    with pytest.raises(ConfigError, match="did you mean 'cooling'"):
        find_rule("coolin")
    monkeypatch.setattr(_Point, "attr", "nothing")
    with pytest.raises(ConfigError, match="'cooling' cannot be imported"):
        find_rule("cooling")


def test_every_file_the_page_names_exists() -> None:
    for name in re.findall(r"`(clip/\w+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parents[1] / "src" / "fulcrum" / name).is_file(), name


# --- options of a rule's own ---------------------------------------------------------------------


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClipRule:
    """The page's rule with options, saved as hasty.py in the current folder."""
    (tmp_path / "hasty.py").write_text(blocks()[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hasty", raising=False)
    importlib.invalidate_caches()
    return find_rule("hasty:HASTY")


def test_a_rule_finds_its_options_with_their_defaults(hasty: ClipRule) -> None:
    flat = ModelFacts(3, (3,))
    assert float(hasty.init(Clip(), flat)["speed"]) == pytest.approx(0.01)
    assert float(hasty.init(Clip(options={"speed": 2}), flat)["speed"]) == 2.0
    again = dataclasses.replace(hasty, name="again")  # a copy fills in the same options once more
    assert float(again.init(Clip(options={"speed": 0.5}), flat)["speed"]) == 0.5
    by_name = dataclasses.replace(hasty, options={"speed": 0.25, "after": 3})
    seen = resolve_rule_options(by_name, {"after": 4})
    assert seen == {"speed": 0.25, "after": 4}
    check_rule(hasty)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sped": 1.0}, "clip.options.sped is not an option of the rule 'hasty'; did you mean 'speed'?"),
        ({"speed": "fast"}, "clip.options.speed = 'fast' is not a number."),
        ({"speed": True}, "clip.options.speed = True is not a number."),
        ({"after": 1.5}, "clip.options.after = 1.5 is not a whole number."),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(hasty: ClipRule, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_rule_options(hasty, options)
    assert str(caught.value) == said


def test_options_on_the_command_line_and_in_a_file(hasty: ClipRule, tmp_path: Path, capsys) -> None:
    from fulcrum.cli import main

    words = "run --data digits --model linear --rounds 3 --sigma 1 --parties 2 -q --set clip.rule=hasty:HASTY"
    run = words.split()
    assert main([*run, "--set", "clip.options.speed=0.5", "--set", "clip.options.after=0", "--out", "fast"]) == 0
    lines = (tmp_path / "fast" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["C"] for line in lines] == pytest.approx([1.0, 0.60653066, 0.36787944])
    assert main(["run", "fast/settings.toml", "-q", "--out", "again"]) == 0, "the run's own settings run again"
    assert (tmp_path / "again" / "metrics.jsonl").read_text().count('"C":') == 3
    capsys.readouterr()
    assert main([*run, "--set", "clip.options.sped=0.5", "--out", "wrong"]) == 2
    assert "did you mean 'speed'?" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists(), "refused before anything runs"
    assert main(["run", "--set", "clip.options.speed=1", "--sigma", "1", "--out", "wrong"]) == 2
    assert capsys.readouterr().err == "error: clip.options.speed is set, but the rule 'moo' has no options.\n"
    assert main([*run, "--set", "clip.options.speed=[1]", "--out", "wrong"]) == 2
    assert "clip.options holds [1], a list; it must be a table of names with" in capsys.readouterr().err
