"""The site's pages: links lead to files, the reference has every command and public name, nothing is fetched."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import fulcrum

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import hooks  # noqa: E402
import reference  # noqa: E402
import stage  # noqa: E402


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    stage.stage(folder)
    return folder


def test_links_and_pictures_lead_to_files(pages: Path) -> None:
    """`make site` checks anchors too; this needs no package beyond the tests' own."""
    count = 0
    for page in pages.rglob("*.md"):
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for _, address, _ in stage.LINK.findall(text):
            if not stage.ELSEWHERE.match(address):
                count += 1
                assert (page.parent / address.partition("#")[0]).is_file(), f"{page.name}: {address}"
    assert count > 300


def test_a_broken_link_is_named() -> None:
    page = ROOT / "docs" / "moo.md"
    _, linked, missing = stage.turn_links(page, "[a](nowhere.md) [b](../README.md#x) [c](https://a.b) `[d](e.md)`")
    assert linked == [ROOT / "README.md"]
    assert missing == ["docs/moo.md links to nowhere.md, which is not there"]


def test_links_are_turned_to_where_things_are_in_the_site() -> None:
    page = ROOT / "docs" / "privacy" / "README.md"
    text, _, _ = stage.turn_links(page, "[a](../moo.md#the-rehearsal) [b](../../results/paper/table.md)")
    assert text == "[a](../moo.md#the-rehearsal) [b](../repository/results/paper/table.md)"


def test_the_reference_names_every_command_option_and_public_name(pages: Path) -> None:
    from fulcrum.cli import app

    root = reference.typer.main.get_command(app)
    for path, command in reference.walk_commands(root, ()):
        text = (pages / "commands" / f"{'-'.join(path)}.md").read_text(encoding="utf-8")
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert f"`{parameter.opts[0]}`" in text
    api = (pages / "api" / "fulcrum.md").read_text(encoding="utf-8")
    assert {name for name in fulcrum.__all__ if name != "__version__"} == set(
        re.findall(r"^## (\w+)$", api, re.MULTILINE)
    )


def test_every_page_is_in_the_navigation(pages: Path) -> None:
    """Pages of docs/ itself by name in mkdocs.yml; those of folders with an index come by themselves."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w/.-]+\.md)$", nav, re.MULTILINE))
    assert {page.name for page in pages.glob("*.md")} <= named, "add it to nav in mkdocs.yml"
    assert not [name for name in named if not (pages / name).is_file()]
    assert set(hooks.FOLDERS) <= named
    expanded = hooks.list_files([hooks.expand({"Proofs": "privacy/README.md"}, pages)])
    assert "privacy/ledger.md" in expanded


def test_nothing_is_fetched_from_elsewhere(pages: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "use_directory_urls: false" in settings
    assert "http" not in settings
    for asset in (pages / "assets").iterdir():
        assert "http" not in asset.read_text(encoding="utf-8")
