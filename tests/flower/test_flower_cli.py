"""The command lines of a federation across machines: one sentence for every mistake, before anything starts."""

from __future__ import annotations

import importlib.util
import stat
import subprocess

import numpy as np
import pytest

from fulcrum.cli import main

HAVE = importlib.util.find_spec("cryptography") is not None
needs_keys = pytest.mark.skipif(not HAVE, reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")


@pytest.fixture
def flower(monkeypatch, tmp_path):
    """A folder to work in, and a Flower that seems to be installed: no test here gets so far as to need it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "flwr" or found(name, *more))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *words: str) -> str:
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("words", [["certs", "--party", "a"], ["serve"], ["terms", "--party", "a", "--sigma", "1"]])
def test_without_flower_it_says_how_to_get_it(capsys, monkeypatch, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    assert "pip install 'fulcrum-fl[flower]'" in refused(capsys, *words)


@needs_keys
def test_certs_makes_an_authority_and_keys_that_only_the_owner_reads(flower, capsys):
    assert main(["certs", "made", "--host", "127.0.0.1", "--host", "example.org", "--party", "a"]) == 0
    made = sorted(path.name for path in (flower / "made").iterdir())
    assert made == ["a", "a.pub", "ca.crt", "ca.key", "server.crt", "server.key"]
    for name in ("a", "ca.key", "server.key"):
        assert stat.S_IMODE((flower / "made" / name).stat().st_mode) == 0o600
    shown = ["openssl", "x509", "-in", "made/server.crt", "-noout", "-ext", "subjectAltName"]
    try:
        words = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        words = "IP Address:127.0.0.1, DNS:example.org"  # no openssl here; the end-to-end test uses the certificate
    assert "IP Address:127.0.0.1" in words
    assert "DNS:example.org" in words
    assert "nothing is overwritten" in refused(capsys, "certs", "made", "--host", "x")
    assert "never overwritten" in refused(capsys, "certs", "made", "--party", "a")
    assert "nothing to make" in refused(capsys, "certs", "made")


@needs_keys
def test_terms_are_written_once_and_can_be_read(flower, capsys):
    words = ["terms", "--party", "a", "--sigma", "2", "--rounds", "5", "--method", "dp-sgd"]
    assert "--classes N: it is never counted in private labels" in refused(capsys, *words)
    words += ["--classes", "10"]
    assert main(words) == 0
    text = (flower / "terms.toml").read_text()
    assert "sigma = 2.0" in text
    assert "rounds = 5" in text
    assert "not overwritten" in refused(capsys, *words)
    assert "not sound" in refused(capsys, "terms", "--party", "a", "--method", "none", "--out", "other.toml")


@needs_keys
def test_terms_carry_the_task_of_the_settings_and_records_outside_it_end_a_party(flower, capsys):
    (flower / "config.toml").write_text(
        '[task]\nname = "classification"\nclasses = 2\nclass_weights = [1.0, 6.0]\n[privacy]\nsigma = 2.0\n'
    )
    assert main(["terms", "config.toml", "--party", "a"]) == 0
    text = (flower / "terms.toml").read_text()
    assert 'name = "classification"\nclasses = 2\nclass_weights = [1.0, 6.0]' in text
    np.savez(flower / "d.npz", x=np.zeros((4, 3)), y=np.array([0, 1, 2, 1]))
    assert "the labels hold 2; with classes = 2" in refused(capsys, *PARTY, "--ca", "x")
    assert not (flower / "l").exists(), "no ledger is opened for records that do not fit"


PARTY = ["party", "--data", "d.npz", "--server", "h:1", "--key", "a", "--ledger", "l/ledger.sqlite"]


@needs_keys
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["party", "--data", "d.npz"], "--server, --key, --ledger missing"),
        ([*PARTY, "--ca", "x", "--insecure"], "not both"),
        (["party", "nowhere.toml"], "cannot be read"),
        ([*PARTY, "--ca", "x"], "there is no terms.toml"),
        (["serve", "--sigma", "1"], "--keys FOLDER"),
        (["serve", "--sigma", "1", "--keys", "k"], "--certificate FILE"),
        (["serve", "--sigma", "1", "--keys", "k", "--insecure"], "not a folder"),
        (["serve", "--sigma", "1", "--keys", "k", "--insecure", "--listen", "9092"], "HOST:PORT"),
        (["serve", "--resume", "nowhere"], "no folder"),
    ],
)
def test_mistakes_are_named(flower, capsys, monkeypatch, words, wanted):
    monkeypatch.setattr("fulcrum.cli.flower.PLAINTEXT_WARNING", "")
    assert main(words) == 2
    assert wanted in capsys.readouterr().err


@needs_keys
def test_plaintext_says_what_it_means(flower, capsys):
    main(["serve", "--sigma", "1", "--keys", "k", "--insecure", "--simulation"])
    said = capsys.readouterr().err
    assert "readable and changeable" in said
    assert "protects nobody" in said
