"""No public name disappears without a decision: tests/compatibility/public-names.txt is the frozen list."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def test_no_public_name_has_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that must go: docs/stability.md, a line in CHANGELOG.md, then python tools/public_names.py --write."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import public_names

    gone, _ = public_names.compare_with_frozen()
    assert gone == []
    longer = tmp_path / "public-names.txt"
    longer.write_text(public_names.FROZEN.read_text() + "python fulcrum.train(epsilom)\n")
    assert public_names.compare_with_frozen(longer)[0] == ["python fulcrum.train(epsilom)"], "a loss is noticed"
    sys.modules.pop("public_names")


def test_the_list_has_names_of_every_kind() -> None:
    lines = (Path(__file__).parent / "public-names.txt").read_text(encoding="utf-8").splitlines()
    for line in (
        *("python fulcrum.train", "python fulcrum.train(out)", "python fulcrum.data.from_arrays(public)"),
        *(
            "python fulcrum.Result.epsilon",
            "setting clip.C0",
            "setting privacy.budget",
            "method moo",
            "metric accuracy",
        ),
        *("error ConfigError is a InputError", "data source digits", "accountant pld"),
    ):
        assert line in lines, line
