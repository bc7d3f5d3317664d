"""docs/own-rule.md does what it says: its code runs, is found both ways, trains, and passes the suite."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

import fulcrum
from fulcrum.clipping import RULES, ClipRule, find_rule
from fulcrum.clipping.testing import check_rule
from fulcrum.errors import ConfigError
from helpers import toy_data

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
    import dataclasses

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
    with pytest.raises(ConfigError, match="did you mean cooling"):
        find_rule("coolin")
    monkeypatch.setattr(_Point, "attr", "nothing")
    with pytest.raises(ConfigError, match="'cooling' cannot be imported"):
        find_rule("cooling")


def test_every_file_the_page_names_exists() -> None:
    for name in re.findall(r"`(clip/\w+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parents[1] / "src" / "fulcrum" / name).is_file(), name
