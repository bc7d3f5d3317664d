"""A party's own canaries: its units, its files, and what leaves it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fulcrum.analysis.audit.releases import audit_releases, read_releases
from fulcrum.errors import ConfigError
from fulcrum.flower.array_coding import decode_own_arrays
from fulcrum.flower.party_canaries import PartyCanaries
from support.flower import toy_party, toy_request, toy_settings


def test_a_party_audits_its_own_releases_and_sends_nothing_more(tmp_path):
    settings = toy_settings(rounds=12, rule="fixed")
    with toy_party(tmp_path, settings) as plain:
        units = plain.trainer.units
    for file in tmp_path.glob("party-0.sqlite*"):
        file.unlink()
    with toy_party(tmp_path, settings, canaries=15) as service:
        assert service.trainer.units == units + 15  # they are announced, sampled and paid for as units
        replies = [service.answer(toy_request(service, settings, t)) for t in range(12)]
        for reply in replies:
            assert set(decode_own_arrays(reply.body)) == {"delta", "extra"}  # as without canaries
        spent = service.ledger.epsilon("party-0")
    log = tmp_path / "party-0.sqlite.canaries-run-1.npz"
    found = read_releases(log)
    assert found.projections.shape == (15, 12)
    assert found.epsilon == pytest.approx(spent, rel=1e-6)
    assert found.sampled is not None
    assert 0.05 < found.sampled.mean() < 0.4  # the rate is 0.2
    assert audit_releases(found).passed
    assert (tmp_path / "party-0.sqlite.canaries").stat().st_mode & 0o077 == 0
    assert json.loads(log.with_suffix(".json").read_text())["format"] == "fulcrum-releases-1"


def test_a_process_that_goes_on_has_the_same_canaries_and_another_file(tmp_path):
    settings = toy_settings(rounds=4, rule="fixed")
    coins = []
    for t in range(2):
        with toy_party(tmp_path, settings, canaries=12) as service:
            service.answer(toy_request(service, settings, t))
            assert service.canaries is not None
            coins.append(service.canaries.engines["run-1"].canaries.included)
    assert (coins[0] == coins[1]).all()
    names = sorted(path.name for path in tmp_path.glob("*.npz"))
    assert names == ["party-0.sqlite.canaries-run-1-2.npz", "party-0.sqlite.canaries-run-1.npz"]
    assert np.load(tmp_path / names[1])["projections"].shape == (12, 1)


def test_what_cannot_be_audited_is_said(tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        PartyCanaries(-3, tmp_path / "ledger.sqlite")
    (tmp_path / "ledger.sqlite.canaries").write_text("not a number")
    with pytest.raises(ConfigError, match="edited or damaged"):
        PartyCanaries(3, tmp_path / "ledger.sqlite")._read_seed()
