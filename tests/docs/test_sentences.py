"""One sentence per line in the sources of the pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import sentences  # noqa: E402


@pytest.mark.parametrize("page", sentences.list_sources(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_one_sentence_per_line(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert sentences.format_text(text) == text, "run: make docs"


def test_paragraphs_and_items_are_cut_and_the_rest_is_kept() -> None:
    text = (
        "# A title. With two\n\nOne sentence. Another, e.g. this one,\ngoes on. `code. Not` cut (nor. Here).\n\n"
        "* First. Second of\n  the item.\n* Next.\n\n| a. B | c |\n\n```text\nx. Y\n```\n\n    indented. Code\n"
    )
    wanted = (
        "# A title. With two\n\nOne sentence.\nAnother, e.g. this one, goes on.\n`code. Not` cut (nor. Here).\n\n"
        "* First.\n  Second of the item.\n* Next.\n\n| a. B | c |\n\n```text\nx. Y\n```\n\n    indented. Code\n"
    )
    assert sentences.format_text(text) == wanted
    assert sentences.format_text(wanted) == wanted


def test_what_programs_write_is_left_to_them() -> None:
    text = "<!-- table -->\nOne. Two.\n<!-- end table -->\n\nThree. Four.\n"
    assert sentences.format_text(text) == "<!-- table -->\nOne. Two.\n<!-- end table -->\n\nThree.\nFour.\n"
    page = "# Page\n\nWritten by a program; do not edit.\n\nOne. Two.\n"
    assert sentences.format_text(page) == page
