"""Runs what the pages of docs/ and README.md show: commands and programs, in order, in one folder.

A comment on the line before a fenced block says what is special about it; readers of the page do not see it.

    <!-- not run: needs a GPU -->      the reason is for people; names of commands and options are checked all the same
    <!-- needs: PIL tokenizers -->     skipped where a package is missing
    <!-- file: mine.py -->             written to that file in place of run
    <!-- exit: 3 -->                   a console block whose commands end with that code
    <!-- page: slow -->                anywhere on a page: the page runs in `make test-slow`

`sh` blocks hold commands, `console` blocks commands after "$ " with what they print, `python` blocks programs that
share their names. Other languages are not run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fulcrum.cli import app, main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"^<!-- (not run|needs|file|exit): (.*) -->$", re.MULTILINE)
RUN = ("sh", "python", "console")
LANGUAGES = (*RUN, "toml", "json", "text", "yaml")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. needs: packages; file: where it is written; reason: why it is not run.

    exit: the exit code of its commands; 0, and 2 where an error is shown, if nothing is said.
    """

    language: str
    text: str
    needs: tuple[str, ...]
    file: str
    reason: str
    exit: int | None = None


def list_pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_page(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def is_slow(text: str) -> bool:
    return "<!-- page: slow -->" in text


def read_blocks(text: str) -> list[Block]:
    """The blocks of a page, with what the comments before them say."""
    found = []
    for comments, language, text_of_block in FENCE.findall(text):
        notes = dict(NOTE.findall(comments))
        needs = tuple(notes.get("needs", "").split())
        code = int(notes["exit"]) if "exit" in notes else None
        found.append(Block(language, text_of_block, needs, notes.get("file", ""), notes.get("not run", ""), code))
    return found


def has_something_to_run(text: str) -> bool:
    return any(block.language in RUN and not block.reason for block in read_blocks(text))


def cut_commands(text: str) -> Iterator[str]:
    """The commands of a shell block: here-documents, quotes and backslashes over several lines stay in one piece."""
    lines = text.splitlines()
    while lines:
        command = lines.pop(0)
        end = re.search(r"<<'?(\w+)'?$", command)
        if end:
            while command.splitlines()[-1] != end[1]:
                command += "\n" + lines.pop(0)
        while not end and command.endswith("\\"):
            command = command[:-1] + lines.pop(0).strip()
        while not end and re.sub(r"#.*", "", command).count('"') % 2:
            command += "\n" + lines.pop(0)
        if command.strip() and not command.startswith("#"):
            yield command


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run one block in the current folder; names: what the page's programs have defined."""
    if block.file:
        Path(block.file).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        run_program(block.text, names)
    elif block.language == "console":
        run_console(block.text, block.exit)
    elif block.language == "sh":
        for command in cut_commands(block.text):
            run_command(command)


def is_runnable(block: Block) -> bool:
    """Whether a block is for running here: a language that runs, no reason against it, its packages installed."""
    missing = any(importlib.util.find_spec(name) is None for name in block.needs)
    return bool(block.file) or (block.language in RUN and not block.reason and not missing)


def run_command(command: str) -> None:
    """One command: fulcrum's own in this process, since a new one takes seconds; others in a shell."""
    if is_own(command):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main(split_words(command)) == 0, command
        return
    if command.startswith("make "):
        targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(split_words(command)) <= set(targets), command
        return
    python = f'export PYTHONPATH={shlex.quote(str(ROOT / "src"))}\npython() {{ {shlex.quote(sys.executable)} "$@"; }}\n'
    done = subprocess.run(["bash", "-ec", python + command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def run_console(text: str, exit_code: int | None = None) -> None:
    """Commands after "$ ", each with what it prints: every line shown must be there, "..." stands for anything."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = main(split_words(command))
        printed = out.getvalue() + err.getvalue()
        wanted = exit_code if exit_code is not None else 2 if shown.startswith("error:") else 0
        assert code == wanted, f"{command}\n{printed}"
        for line in filter(str.strip, shown.splitlines()):
            pattern = ".*".join(re.escape(piece) for piece in line.split("..."))
            assert re.search(pattern, printed), f"{command} does not print: {line}\nbut: {printed}"


def run_program(text: str, names: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what only the data's holder is told; files left to the interpreter
        exec(compile(text, "a program of the page", "exec"), names)


def is_own(command: str) -> bool:
    return command.startswith("fulcrum ") and not re.search(r"[|>&]", re.sub(r"'[^']*'|\"[^\"]*\"", "", command))


def split_words(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


@functools.cache
def get_command_tree() -> Any:
    return typer.main.get_command(app)


def find_unknown_words(command: str) -> list[str]:
    """The names of a `fulcrum ...` command line that Fulcrum does not have: commands and options."""
    words = [word for word in split_words(command.replace("[", "").replace("]", "")) if word != "..."]
    here: Any = get_command_tree()
    while hasattr(here, "commands") and words and not words[0].startswith("-"):
        if here.name == "study" and words[0] not in here.commands:
            return []  # names of studies are open: files of the package and of ./experiments
        if words[0] not in here.commands:
            return [words[0]]
        here = here.commands[words.pop(0)]
    known = {name for parameter in here.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    return [word for word in words if re.match(r"^--?[a-z]", word) and word.partition("=")[0] not in known]
