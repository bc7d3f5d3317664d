"""The how-to pages of docs/: their commands and programs run, in order, in an empty folder."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulcrum.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("tables.md", "images.md", "text.md", "changing-data.md")
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. requires: packages that it needs; file: where a program is written in place of run."""

    language: str
    text: str
    requires: tuple[str, ...]
    file: str


def read_blocks(page: str) -> list[Block]:
    """The blocks of a page: ```sh or ```python, with `requires PACKAGE` and `file=NAME` after the language."""
    found = []
    for language, options, text in FENCE.findall(page):
        words = options.split()
        names = tuple(word for before, word in itertools.pairwise(words) if before == "requires")
        file = next((word.removeprefix("file=") for word in words if word.startswith("file=")), "")
        found.append(Block(language, text, names, file))
    return found


def cut_commands(text: str) -> Iterator[str]:
    """The commands of a shell block: here-documents and quotes over several lines stay in one piece."""
    lines = text.splitlines()
    while lines:
        command = lines.pop(0)
        end = re.search(r"<<'?(\w+)'?$", command)
        if end:
            while command.splitlines()[-1] != end[1]:
                command += "\n" + lines.pop(0)
        while not end and command.count('"') % 2:
            command += "\n" + lines.pop(0)
        if command.strip():
            yield command


def run_command(command: str) -> None:
    """One command: fulcrum's own in this process, since a new one takes seconds; others in a shell."""
    words = shlex.split(command) if command.startswith("fulcrum ") else []
    if words:
        assert main(words[1:]) == 0, command
        return
    python = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n'
    done = subprocess.run(["bash", "-ec", python + command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def run_program(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what only the data's holder is told
        warnings.simplefilter("ignore", ResourceWarning)  # short programs leave files to the interpreter
        exec(compile(text, "a program of the page", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / ".key"))
    ran = 0
    for block in read_blocks((DOCS / page).read_text(encoding="utf-8")):
        if any(importlib.util.find_spec(name) is None for name in block.requires):
            continue
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            run_program(block.text)
        else:
            for command in cut_commands(block.text):
                run_command(command)
        ran += 1
    if not ran:
        pytest.skip("the packages of this page are not installed")


def test_blocks_are_found_and_cut():
    page = "words\n```python requires PIL file=a.py\nx = 1\n```\n```sh\ncat > a <<'END'\nb\nEND\necho \"c\nd\"\n```\n"
    program, shell = read_blocks(page)
    assert (program.requires, program.file) == (("PIL",), "a.py")
    assert list(cut_commands(shell.text)) == ["cat > a <<'END'\nb\nEND", 'echo "c\nd"']


def test_a_command_that_fails_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for wrong in ("fulcrum run --data none.csv --epsilon 1", "cat none", "fulcrum data describe none.csv"):
        with pytest.raises(AssertionError):
            run_command(wrong)


def test_every_page_has_commands_and_is_linked():
    start = (DOCS / "own-data.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"({page})" in start
        blocks = read_blocks((DOCS / page).read_text(encoding="utf-8"))
        assert any(
            command.startswith("fulcrum ") for b in blocks if b.language == "sh" for command in cut_commands(b.text)
        )
