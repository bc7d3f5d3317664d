"""What version 0.1 (commit 243f1c8) wrote is still read: run folders, kept ledgers, settings, a party's terms.

`written-by-243f1c8.tar.gz` was made by that commit: a finished run with a kept ledger, a run that was interrupted after
2 of 4 rounds, a settings file with words that have since been renamed, and the terms of a party.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import fulcrum
from fulcrum.cli import main
from fulcrum.errors import RunError
from fulcrum.privacy.ledger import Ledger
from fulcrum.settings import files as settings_files

ARCHIVE = Path(__file__).parent / "written-by-243f1c8.tar.gz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The archive, unpacked."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_finished_run_is_shown(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(old / "finished")]) == 0
    shown = capsys.readouterr().out
    assert "39.2" in shown
    assert "epsilon" in shown
    assert main(["show", str(old / "finished"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(0.392, abs=1e-3)


def test_an_interrupted_run_is_refused_in_one_sentence_and_kept_as_it_is(old: Path) -> None:
    """Its random numbers cannot be drawn again, and nothing ties it to its ledger: going on would be unsound."""
    folder = old / "interrupted"
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    with pytest.raises(RunError, match=r"was begun by an earlier Fulcrum.*finish it with that version, or start a new"):
        fulcrum.resume(folder)
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
    assert main(["resume", str(folder)]) == 2


def test_an_interrupted_run_is_shown_and_its_settings_start_a_new_one(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(old / "interrupted")]) == 0
    assert "rounds done     2" in capsys.readouterr().out
    settings = settings_files.read_settings(old / "interrupted" / "settings.toml")
    result = fulcrum.train(settings=settings, out=old / "new")
    assert result.summary["rounds"] == 4
    assert result.epsilon <= 4.0


def test_a_new_run_in_an_old_kept_ledger_does_not_take_its_rows_for_good(old: Path) -> None:
    from support.federations import toy_data

    names: dict[str, Any] = {"partition": "given", "rounds": 2, "rate": 0.5, "sigma": 2.0, "model": "linear"}
    data = toy_data(party=["new-a"] * 30 + ["new-b"] * 30)
    fulcrum.train(data, out=old / "run", ledger=str(old / "kept.sqlite"), randomness="secure", **names)
    facts = json.loads((old / "run" / "privacy.json").read_text())
    assert facts["guarantee"] == "unknown"
    assert [run["sound"] for run in facts["runs_covered"]] == [None, True]
    assert "an earlier version of Fulcrum wrote those rows" in facts["guarantee_text"]


def test_a_kept_ledger_opens_with_what_was_spent(old: Path) -> None:
    with Ledger.open(old / "kept.sqlite") as ledger:
        assert set(ledger.accounts()) == {"party-0", "party-1", "party-2"}
        assert all(3.99 < ledger.epsilon(name) <= 4.0 for name in ledger.accounts())


def test_words_that_were_renamed_are_read(old: Path) -> None:
    settings = settings_files.read_settings(old / "old-words.toml")
    plain = json.dumps(json.loads(json.dumps(settings, default=lambda value: vars(value))))
    assert settings.clip.rule == "quantile"
    assert '"clipped"' in plain
    assert "0.5" in plain


def test_a_partys_terms_are_read(old: Path) -> None:
    pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")
    from fulcrum.flower.terms import read_terms_file

    assert read_terms_file(old / "terms.toml").party == "site-a"
