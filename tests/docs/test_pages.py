"""README.md and the pages of docs/: their commands and programs run, in order, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from support.pages import (
    LANGUAGES,
    ROOT,
    RUN,
    cut_commands,
    find_unknown_words,
    has_something_to_run,
    is_runnable,
    is_slow,
    list_pages,
    read_blocks,
    read_page,
    run_block,
    run_command,
    run_console,
)

PAGES = list_pages()
RUN_PAGES = [page for page in PAGES if has_something_to_run(read_page(page))]
SLOW = pytest.mark.slow


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


def mark_page(page: Path) -> Any:
    return pytest.param(page, id=name_page(page), marks=[SLOW] if is_slow(read_page(page)) else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [mark_page(page) for page in RUN_PAGES])
def test_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / ".key"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for folder in ("examples", "benchmarks"):
        os.symlink(ROOT / folder, tmp_path / folder)
    modules = set(sys.modules)
    blocks = [block for block in read_blocks(read_page(page)) if is_runnable(block)]
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with torch.random.fork_rng():
            for block in blocks:
                run_block(block, names)
    finally:
        for name in set(sys.modules) - modules:  # files of one page must not be found by another
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    if not blocks:
        pytest.skip("the packages of this page are not installed")


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    text = read_page(page)
    fences = re.findall(r"^```(\w*)", text, re.MULTILINE)
    assert len(fences) % 2 == 0, "a fence is open"
    assert all(fences[::2]), "a fence without a language: sh, console, python, toml, json or text"
    for block in read_blocks(text):
        assert block.language in LANGUAGES, f"a block of {block.language}: {block.text[:80]}"
        if block.language not in RUN or block.file:
            continue
        if block.reason:
            assert re.match(r"(needs|takes|writes|is) \w", block.reason), f"why is it not run? {block.text[:80]}"
        if block.language == "sh":
            for command in cut_commands(block.text):
                if command.startswith("fulcrum "):
                    assert not find_unknown_words(command), f"{command}: {find_unknown_words(command)}"


def test_no_command_hides_in_an_indented_block() -> None:
    """Two lines of the README are the exception: `make run` and `make test`."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", read_page(page), flags=re.MULTILINE | re.DOTALL)
        hidden = [line for line in text.splitlines() if re.match(r"^    (fulcrum|python|pip|make) ", line)]
        assert not [line for line in hidden if not line.startswith(("    make run", "    make test"))], page


def test_blocks_are_found_and_cut() -> None:
    page = (
        "words\n<!-- needs: PIL -->\n<!-- file: a.py -->\n```python\nx = 1\n```\n\n"
        "<!-- not run: needs a GPU -->\n```sh\ncat > a <<'END'\nb\nEND\necho \"c\nd\"\n"
        "fulcrum run \\\n  --epsilon 1\n```\n"
    )
    program, shell = read_blocks(page)
    assert (program.needs, program.file, program.reason) == (("PIL",), "a.py", "")
    assert shell.reason == "needs a GPU"
    assert list(cut_commands(shell.text)) == ["cat > a <<'END'\nb\nEND", 'echo "c\nd"', "fulcrum run --epsilon 1"]


def test_what_is_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ("fulcrum run --data none.csv --epsilon 1", "cat none", "make tea"):
        with pytest.raises(AssertionError):
            run_command(wrong)
    for shown in ("error: another sentence\n", "no error at all\n"):
        with pytest.raises(AssertionError):
            run_console(f"$ fulcrum run --set clip.kapa=0.01\n{shown}")
    assert find_unknown_words("fulcrum run x.toml --epsilonn 3 --set a.b=1") == ["--epsilonn"]
    assert find_unknown_words("fulcrum trainn") == ["trainn"]
    assert find_unknown_words("fulcrum data list   # a comment") == []


def test_the_readme_quotes_what_is_measured() -> None:
    """The figure's numbers, the table's, and the line count."""
    readme = read_page(ROOT / "README.md")
    assert len(readme.splitlines()) < 120
    assert readme.splitlines()[4].startswith("    make run ")
    assert readme.splitlines()[5].startswith("    make test ")
    ends = {
        name: {values[-1] for values in curves.values()}
        for name, curves in json.loads((ROOT / "docs/pictures/five-starts.json").read_text()).items()
    }
    assert len(ends["moo"]) == 1, "five starts, one end"
    shown = float(re.findall(r"^accuracy  ([\d.]+)% ", readme, re.MULTILINE)[0])
    assert shown == pytest.approx(ends["moo"].pop(), abs=0.05)
    cells = {
        (cell["dataset"], cell["method"], cell["epsilon"]): cell["mean"]
        for cell in json.loads((ROOT / "results/paper/table.json").read_text())
    }
    for title, dataset in (("MNIST", "mnist"), ("Fashion-MNIST", "fashion-mnist"), ("CIFAR-10 (JPEG copy)", "cifar10")):
        row = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", readme, re.MULTILINE)[0].split("|")
        for column, method in ((0, "moo"), (1, "dp-sgd")):
            for number, epsilon in zip(row[column].split("/"), (6.38, 3.61, 1.64), strict=True):
                assert float(number) == pytest.approx(cells[dataset, method, epsilon], abs=0.0501)


def test_the_install_page_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = read_page(ROOT / "docs" / "install.md")
    table = page[page.index("| extra |") : page.index("A GPU needs")]
    assert set(re.findall(r"`([a-z]+)`", table)) == set(extras)


@pytest.mark.rehearsal
def test_the_first_command_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its rehearsal, and so the accuracy of `make run`; another processor may round a digit apart."""
    monkeypatch.chdir(tmp_path)
    readme = read_page(ROOT / "README.md")
    command = re.findall(r"^fulcrum run .*$", readme, re.MULTILINE)[0]
    run_command(command)
    printed = capsys.readouterr().out.strip().splitlines()
    shown = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)[0].strip().splitlines()
    assert [line.split("  ")[0] for line in printed] == [line.split("  ")[0] for line in shown]
    first, second = (float(re.findall(r"([\d.]+)%", lines[2])[0]) for lines in (printed, shown))
    assert first == pytest.approx(second, abs=1.5)
    same = [number for number, line in enumerate(shown) if not line.startswith(("accuracy", "C ", "epsilon"))]
    assert [printed[number] for number in same] == [shown[number] for number in same]
