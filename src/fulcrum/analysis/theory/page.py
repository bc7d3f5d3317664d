"""docs/theory.md: its statuses and tables, made from findings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulcrum.analysis.theory.findings import Finding, Statement

PAGE = Path("docs/theory.md")


def make_block(statement: Statement, finding: Finding) -> str:
    """The part of the page that `fulcrum theory check` writes for one statement."""
    rows = "\n".join(f"| {what} | {value} |" for what, value in finding.rows)
    return (
        f"<!-- {statement.name} -->\n**Status: {finding.status}.** "
        f"Shown by `fulcrum theory check {statement.name}`.\n\n"
        f"| measured | value |\n|---|---|\n{rows}\n<!-- end {statement.name} -->"
    )


def write_blocks(page: Path, statements: Sequence[Statement], findings: Mapping[str, Finding]) -> None:
    """Put fresh blocks into the page, in place of those of the same names."""
    text = page.read_text()
    for statement in statements:
        block = make_block(statement, findings[statement.name])
        replacement = block.replace("\\", r"\\")
        pattern = re.compile(f"<!-- {statement.name} -->.*?<!-- end {statement.name} -->", re.S)
        if not pattern.search(text):
            raise ValueError(f"{page} has no block {statement.name}; add <!-- {statement.name} --><!-- end ... -->")
        text = pattern.sub(replacement, text)
    page.write_text(text)


def read_statuses(page: Path) -> dict[str, str]:
    """The status of each statement as the page says it."""
    found = re.findall(r"<!-- ([a-z0-9-]+) -->\n\*\*Status: ([^.*]+)\.\*\*", page.read_text())
    return dict(found)
