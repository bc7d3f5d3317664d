"""The threat model names code and tests: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/security.md", "SECURITY.md", "docs/privacy/meaning.md")


def find_missing(text: str) -> list[str]:
    """Files and tests that a page names and that are not there."""
    missing = []
    for path, name in re.findall(r"`((?:src|tests)/[\w./]+)(?:::(\w+))?`", text):
        file = ROOT / path
        if not file.exists() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
            missing.append(f"{path}::{name}" if name else path)
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert find_missing(text) == []
    assert "@" not in text  # no address is made up


def test_a_name_that_is_gone_is_noticed():
    assert find_missing("`tests/docs/test_security_page.py::test_that_is_gone`, `src/fulcrum/gone.py`") == [
        "tests/docs/test_security_page.py::test_that_is_gone",
        "src/fulcrum/gone.py",
    ]


def test_every_line_of_the_table_names_code_and_a_test():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = text.split("## What is covered, and which test says so")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| line")]
    assert len(rows) > 15
    for row in rows:
        _, code, tests = row.strip("| ").split(" | ")
        assert "`src/" in code
        assert "`tests/" in tests
        assert "::test_" in tests
