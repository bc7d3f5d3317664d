"""Pieces of Markdown as lines, each ending in an empty one; and values as a table's cells hold them."""

from __future__ import annotations

from collections.abc import Iterable


def short(value: float | str | None) -> str:
    """A value in a few letters: five digits of a number, "none" for None, "infinite" for what JSON has as "inf"."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return "infinite" if value == "inf" else value
    return f"{value:d}" if isinstance(value, int) else f"{value:.5g}"


def cell(text: str) -> str:
    """Text that would break a table, made harmless."""
    return text.replace("|", "\\|").replace("\n", " ")


def section(title: str, lines: Iterable[str]) -> list[str]:
    """A heading and what is below it."""
    return [f"## {title}", "", *lines]


def paragraph(text: str) -> list[str]:
    """Text by itself."""
    return [text, ""]


def bullets(items: Iterable[str]) -> list[str]:
    """A list."""
    return [*(f"- {item}" for item in items), ""]


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table."""
    rule = "|".join("---" for _ in header)
    return [f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows), ""]
