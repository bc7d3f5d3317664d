"""Lays out the pages of the site: `python docs/site/stage.py FOLDER`; `make site` builds them with MkDocs.

docs/ becomes the root of the site. Files elsewhere in the repository that a page links to (results, examples, the
changelog) come along under repository/, and links are turned to where things then are, so the site can be read
without a network and without the repository. The reference of commands and of the Python API is generated.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
ELSEWHERE = re.compile(r"^(https?:|mailto:|#)")


class BrokenLinkError(Exception):
    """A link of a page to a file that is not there."""


def stage(folder: Path) -> list[Path]:
    """Write all pages below a new folder; returns them."""
    if folder.exists():
        shutil.rmtree(folder)
    waiting = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "site" not in path.relative_to(ROOT).parts]
    done: dict[Path, Path] = {}
    broken: list[str] = []
    while waiting:
        source = waiting.pop(0)
        if source in done:
            continue
        target = folder / place_file(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        done[source] = target
        if source.suffix != ".md":
            shutil.copyfile(source, target)
            continue
        text, linked, missing = turn_links(source, hide_notes(source.read_text(encoding="utf-8")))
        target.write_text(text, encoding="utf-8")
        broken += missing
        waiting += linked
    if broken:
        raise BrokenLinkError("; ".join(broken))
    for name in ("local.css", "iframe-worker.js"):
        target = folder / "assets" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(__file__).parent / name, target)
    write_reference(folder)
    return list(done.values())


def place_file(source: Path) -> PurePosixPath:
    """Where a file of the repository lies in the site."""
    path = PurePosixPath(source.relative_to(ROOT).as_posix())
    return path.relative_to("docs") if path.parts[0] == "docs" else PurePosixPath("repository") / path


def turn_links(source: Path, text: str) -> tuple[str, list[Path], list[str]]:
    """The text with its links as they are in the site, the files it links to, and what is missing."""
    linked: list[Path] = []
    missing: list[str] = []
    here = place_file(source).parent

    def turn(match: re.Match[str]) -> str:
        address, _, anchor = match[2].partition("#")
        if ELSEWHERE.match(match[2]) or not address:
            return match[0]
        file = Path(os.path.normpath(source.parent / address))
        if file.is_dir() and (file / "README.md").is_file():
            file = file / "README.md"
        if not file.is_file() or not file.is_relative_to(ROOT):
            missing.append(f"{source.relative_to(ROOT)} links to {match[2]}, which is not there")
            return match[0]
        linked.append(file)
        found = os.path.relpath(place_file(file), here).replace(os.sep, "/")
        return f"{match[1]}{found}{'#' + anchor if anchor else ''}{match[3]}"

    parts = re.split(r"(^```.*?^```$|`[^`\n]*`)", text, flags=re.MULTILINE | re.DOTALL)
    turned = [part if number % 2 else LINK.sub(turn, part) for number, part in enumerate(parts)]
    return "".join(turned), linked, missing


def hide_notes(text: str) -> str:
    """The text without the comments that are for tests and programs, which would part a list from its items."""
    return re.sub(r"^<!-- (not run|needs|file|exit|page): [^\n]* -->\n", "", text, flags=re.MULTILINE)


def write_reference(folder: Path) -> None:
    from reference import make_api_pages, make_command_pages

    for name, pages in (("commands", make_command_pages()), ("api", make_api_pages())):
        (folder / name).mkdir(parents=True)
        for file, text in pages.items():
            (folder / name / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        print(f"{len(stage(Path(sys.argv[1])))} files")
    except BrokenLinkError as error:
        sys.exit(f"error: {error}")
