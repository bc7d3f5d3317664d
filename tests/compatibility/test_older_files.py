"""What version 0.1 (commit 243f1c8) wrote is still read: run folders, kept ledgers, settings, a party's terms.

`written-by-243f1c8.tar.gz` was made by that commit: a finished run with a kept ledger, a run that was interrupted after
2 of 4 rounds, a settings file with words that have since been renamed, and the terms of a party.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
import torch

import fulcrum
from fulcrum.cli import main
from fulcrum.privacy.ledger import Ledger
from fulcrum.settings import files as settings_files

ARCHIVE = Path(__file__).parent / "written-by-243f1c8.tar.gz"
WEIGHTS = "20fb634b9c16cf8f6572d069455cf57fd7f2f5ffe0b252d6f1a5a801effa7fd4"
"""SHA-256 of the weights that 243f1c8 gives when the interrupted run is not interrupted."""


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


def test_an_interrupted_run_continues_to_the_same_bits(old: Path) -> None:
    result = fulcrum.resume(old / "interrupted")
    weights = torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])
    assert hashlib.sha256(weights.numpy().tobytes()).hexdigest() == WEIGHTS
    assert result.epsilon == pytest.approx(3.9997184312414573, rel=1e-12)
    lines = (old / "interrupted" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]


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
