"""A proof page fails its test when the code it speaks of changes without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import proofs  # noqa: E402

PAGES = sorted(proofs.PAGES.glob("*.md"))
MECHANISMS = (
    *("random-numbers", "gaussian-release", "bounded-contributions", "sampled-gaussian", "statistics", "client-level"),
    *("shared-noise", "pairwise", "evaluation", "composition", "ledger"),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_speaks_of_the_code_as_it_is(page: Path) -> None:
    outdated = proofs.find_outdated(page.read_text(encoding="utf-8"))
    assert not outdated, f"{', '.join(outdated)} changed: read {page.name} again, correct it, then run make proofs"


def test_every_mechanism_has_a_page_with_functions_and_a_section_for_each_question() -> None:
    assert {page.stem for page in PAGES} >= {*MECHANISMS, "README", "sharp-edges"}
    for name in MECHANISMS:
        text = (proofs.PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert proofs.list_rows(text), f"{name}.md names no function"
        for heading in ("## What is claimed", "## Assumed", "## What would be wrong"):
            assert heading in text, f"{name}.md has no section {heading}"
    index = (proofs.PAGES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.md)" in index for name in (*MECHANISMS, "sharp-edges"))


def first(x: int) -> int:
    """One docstring."""
    return x + 1  # a comment


def second(x: int) -> int:
    """One docstring."""
    return x + 2


def test_words_and_layout_do_not_change_a_digest_but_code_does() -> None:
    assert proofs.compute_code_digest(first) != proofs.compute_code_digest(second)
    sources = [
        'def f(x):\n    """One."""\n    return x + 1  # why\n',
        "def f(x):\n    return (\n        x + 1\n    )\n",
    ]
    assert len({proofs.digest_source(source) for source in sources}) == 1
    assert proofs.digest_source(sources[0].replace("1", "2")) != proofs.digest_source(sources[0])
    page = f"| `fulcrum.rng.normals.bound_error` | `{proofs.compute_code_digest(first)}` |\n"
    assert proofs.find_outdated(page) == ["fulcrum.rng.normals.bound_error"]  # the check can fail
    assert proofs.find_outdated(proofs.update_page(page)) == []
