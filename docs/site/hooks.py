"""For MkDocs: pages that are many (commands, API, proofs, decisions) join the navigation by folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FOLDERS = ("commands/index.md", "api/index.md", "privacy/README.md", "decisions/README.md")


def on_config(config: Any) -> Any:
    """Each index of a folder becomes a section with the pages beside it; pages that are nowhere come under More.

    An entry whose page is not written yet is left out.
    """
    pages = Path(config["docs_dir"])
    config["nav"] = [expand(entry, pages) for entry in config["nav"] if is_there(entry, pages)]
    named = set(list_files(config["nav"]))
    left = [page.name for page in sorted(pages.glob("*.md")) if page.name not in named]
    if left:
        config["nav"].append({"More": left})
    return config


def expand(entry: Any, pages: Path) -> Any:
    """An entry of the navigation, with the folders' pages put in."""
    if isinstance(entry, list):
        return [expand(each, pages) for each in entry if is_there(each, pages)]
    if isinstance(entry, dict):
        return {title: expand(value, pages) for title, value in entry.items()}
    if entry in FOLDERS:
        folder = (pages / entry).parent
        others = [page for page in sorted(folder.glob("*.md")) if page.name != Path(entry).name]
        return [entry, *({read_title(page): page.relative_to(pages).as_posix()} for page in others)]
    return entry


def is_there(entry: Any, pages: Path) -> bool:
    return any((pages / file).is_file() for file in list_files(entry))


def read_title(page: Path) -> str:
    """A short title: the first heading up to a colon or comma, without the number and the command's own name."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    title = found[1] if found else page.stem
    title = re.sub(r"^(\d{4}[.:]? |fulcrum (?=\w))", "", title)
    return re.split(r"[:;,] ", title)[0].strip()


def list_files(nav: Any) -> list[str]:
    if isinstance(nav, dict):
        return [file for value in nav.values() for file in list_files(value)]
    if isinstance(nav, list):
        return [file for value in nav for file in list_files(value)]
    return [nav]
