"""docs/own-model.md: its commands and programs run, in their order, in one folder."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from fulcrum.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "own-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, flags=re.S | re.M)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) > 5
    for language, code in BLOCKS:
        named = re.match(r"# (\w+\.py)\n", code)
        needed = re.match(r"# needs: (\w+)\n", code)
        if named:
            (tmp_path / named[1]).write_text(code)
        elif language == "python" and (needed is None or importlib.util.find_spec(needed[1])):
            exec(compile(code, "docs/own-model.md", "exec"), {})
        elif language == "sh":
            for line in code.splitlines():
                program, *words = shlex.split(line)
                assert program == "fulcrum"
                assert main([*words, *(["-q"] if words[0] == "run" else [])]) == 0, f"{line}\n{capsys.readouterr().err}"
    assert (tmp_path / "predictions.csv").read_text().startswith("prediction,")
    assert "GroupNorm" in (tmp_path / "model.safetensors.card.md").read_text()
    assert "starts from" not in (tmp_path / "second" / "PRIVACY.md").read_text(), "digits are public"
