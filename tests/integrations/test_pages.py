"""The code blocks of docs/own-loop.md and docs/parts.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def read_blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "least"), [("parts.md", 6), ("own-loop.md", 6)])
def test_the_blocks_of_a_page_run(page, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "key"))
    blocks = read_blocks(page)
    assert len(blocks) >= least
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, block {number + 1}", "exec"), names)


def test_a_broken_block_would_be_noticed():
    with pytest.raises(NameError):
        exec(compile("undefined_name", "block", "exec"), {})
