"""Masked sums over the coordinator's and the parties' own code, on a dictionary in place of a network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

import torch

from fulcrum.errors import RunError
from fulcrum.flower.messages import Envelope, read_message_arrays, read_message_header
from fulcrum.flower.terms import PartyTerms, read_terms_file, terms_to_toml
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.pairwise.integers import keep_low_bits, unpack_message
from fulcrum.runs import execute, prepare
from support.federations import toy_data
from support.flower import NAMES, Bus, serve, share_streams, toy_settings, toy_terms
from support.pairwise import federation, kind, masked_settings, pins, size


def flat(result: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in result.model.state_dict().values()])


def messages_of(transcript: list[tuple[int, Envelope]], dim: int) -> list[torch.Tensor]:
    """What the coordinator received as masked messages."""
    spec = {"delta": (torch.uint8, (3 * dim,)), "extra": (torch.float32, (0,))}
    found = [read_message_arrays(reply, spec)["delta"] for _, reply in transcript if kind(reply) == "update"]
    return [keep_low_bits(unpack_message(each, 24), 24) for each in found]


def record_replies(bus: Bus) -> list[tuple[int, Envelope]]:
    transcript: list[tuple[int, Envelope]] = []
    before = bus.tamper

    def tamper(k: int, request: Envelope, reply: Envelope) -> Envelope | None:
        found = before(k, request, reply)
        if found is not None:
            transcript.append((k, found))
        return found

    bus.tamper = tamper
    return transcript


def test_a_simulation_across_machines_is_the_run_in_one_process(tmp_path: Path, monkeypatch: Any) -> None:
    share_streams(monkeypatch)
    settings = masked_settings(weight_decay=0.01)
    with federation(tmp_path, settings) as bus:
        transcript = record_replies(bus)
        there = serve(bus, settings, tmp_path / "there", monkeypatch)
    here = execute(prepare(settings, toy_data(120)), tmp_path / "here")
    torch.testing.assert_close(flat(there), flat(here), rtol=1e-4, atol=1e-5)
    assert there.epsilon == pytest.approx(here.epsilon)
    dim = len(flat(there))
    found = messages_of(transcript, dim)
    assert len(found) == 9
    assert all(size([message]) > 2**21 for message in found)  # each looks uniform
    assert all(size(found[i : i + 3]) < 2**21 for i in (0, 3, 6))


def test_ledgers_and_statements_of_the_parties_say_what_was_masked(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(2)
    with federation(tmp_path, settings, simulation=False) as bus:
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        for k, service in bus.services.items():
            service.write_party_statement(tmp_path / f"statement-{k}")
            assert service._masked.key is None  # forgotten with the end of the run
    facts = json.loads((tmp_path / "statement-0" / "privacy.json").read_text())
    page = (tmp_path / "statement-0" / "PRIVACY.md").read_text()
    assert facts["aggregation"] == "pairwise"
    assert facts["guarantee"] == "yes"
    assert facts["pairwise"]["sigma_eff"] == pytest.approx(1.1)
    assert [row["colluders"] for row in facts["pairwise"]["table"]] == [1, 2]
    assert {key["party"] for key in facts["pairwise"]["keys"]} == {"party-1", "party-2"}
    assert "SHA256:" in page
    assert "2026-11-16" in page
    with Ledger.open(tmp_path / "party-0.sqlite") as ledger:
        assert [run.aggregation for run in ledger.runs().values()] == ["pairwise"]
        assert len(ledger.entries("party-0")) == 2
        assert "masked sums only" in ledger.accounts()["party-0"].population


def test_a_message_that_does_not_come_voids_the_round_and_is_paid_by_who_sent(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(3)
    lost: list[int] = []
    said: list[str] = []
    with federation(tmp_path, settings, simulation=False) as bus:

        def lose_once(k: int, request: Envelope, reply: Envelope) -> Envelope | None:
            header = json.loads(request.header)
            if header["kind"] == "manifest" and header["round"] == 1 and k == 2 and not lost:
                lost.append(k)
                return None
            return reply

        bus.tamper = lose_once
        transcript = record_replies(bus)
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False, said=said)
        paid = {name: len(bus.services[k].ledger.entries(name)) for k, name in enumerate(NAMES)}
        tries = [len(bus.services[0].ledger.list_round_entries("party-0", r, 1)) for r in bus.services[0].ledger.runs()]
    assert lost == [2]
    assert result.summary["rounds"] == 3
    assert paid == {"party-0": 4, "party-1": 4, "party-2": 4}  # the lost message had left too
    assert tries == [2]
    log = (tmp_path / "run" / "parties.jsonl").read_text()
    assert "is void: party-2 sent no message" in log
    found = messages_of(transcript, len(flat(result)))
    assert len(found) == 3 + 2 + 3 + 3
    void, again = found[3:5], found[5:8]
    assert size(void) > 2**21  # nothing is unmasked
    assert size([void[0], -again[0]]) > 2**21  # new masks, sample and noise


def test_a_party_that_is_not_ready_is_left_out_before_anybody_pays(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(3)
    with federation(tmp_path, settings) as bus:

        def away(k: int, request: Envelope, reply: Envelope) -> Envelope | None:
            header = json.loads(request.header)
            return None if k == 1 and header["kind"] == "round" and header["round"] == 1 else reply

        bus.tamper = away
        result = serve(bus, settings, tmp_path / "run", monkeypatch)
        paid = {name: len(bus.services[k].ledger.entries(name)) for k, name in enumerate(NAMES)}
    assert result.summary["rounds"] == 3
    assert paid["party-0"] == 3
    assert paid["party-1"] < 3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["participants"] for row in rows] == [[0, 1, 2], [0, 2], [0, 2]]


def test_peers_that_nobody_pinned_stop_the_round(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(2)
    with (
        federation(tmp_path, settings, left_out=NAMES) as bus,
        pytest.raises(
            RunError, match=r"party-0, party-1, party-2: the other participants' keys .*fulcrum terms --peers"
        ),
    ):
        serve(bus, settings, tmp_path / "run", monkeypatch)
    assert "not those that this party pinned" in (tmp_path / "run" / "parties.jsonl").read_text()
    with federation(tmp_path / "two", settings, left_out=("party-2",)) as bus:  # one unknown, one covered
        assert serve(bus, settings, tmp_path / "two" / "run", monkeypatch).summary["rounds"] == 2


def test_a_proposal_that_covers_fewer_colluders_or_masks_nothing_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(2)
    for other in (masked_settings(2, colluders=0.0), toy_settings(2)):
        folder = tmp_path / f"{other.privacy.aggregation}-{other.privacy.colluders}"
        with federation(folder, settings) as bus, pytest.raises(RunError, match="aggregation is not the agreed one"):
            serve(bus, other, folder / "run", monkeypatch)


def test_a_party_masks_once_per_nonce_and_repeats_only_the_same_bytes(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(2)
    asked: list[tuple[int, Envelope, Envelope]] = []
    with federation(tmp_path, settings) as bus:
        bus.tamper = lambda k, request, reply: asked.append((k, request, reply)) or reply  # type: ignore[func-returns-value]
        serve(bus, settings, tmp_path / "run", monkeypatch)
        manifests = [(request, reply) for k, request, reply in asked if k == 0 and kind(request) == "manifest"]
        service = bus.services[0]
        for request, _ in manifests:  # replayed after the run: the key is gone, and so is what was pending
            answer = service.answer(request)
            assert read_message_header(answer, ("refused",))["code"] == "stale"
        before = len(service.ledger.entries("party-0"))
        rounds = [request for k, request, _ in asked if k == 0 and kind(request) == "round"]
        assert kind(service.answer(rounds[0])) == "ready"  # a rollback: it computes, and draws another nonce
        assert read_message_header(service.answer(manifests[0][0]), ("refused",))["code"] == "stale"
        assert len(service.ledger.entries("party-0")) == before


def test_terms_with_peers_are_written_and_read(tmp_path: Path) -> None:
    terms = toy_terms(masked_settings(), "party-0", peers=pins(tmp_path, "party-0"), pinned="2026-11-16")
    assert terms.colluders == 1
    (tmp_path / "terms.toml").write_text(terms_to_toml(terms))
    assert read_terms_file(tmp_path / "terms.toml") == terms
    with pytest.raises(Exception, match="only one local step"):
        read_terms_file_with(tmp_path, dataclasses.replace(terms, steps=2))
    with pytest.raises(Exception, match="fingerprint"):
        read_terms_file_with(tmp_path, dataclasses.replace(terms, peers={"x": "abc"}))
    with pytest.raises(Exception, match="this party itself"):
        read_terms_file_with(tmp_path, dataclasses.replace(terms, peers={"party-0": "SHA256:" + "A" * 43}))


def read_terms_file_with(folder: Path, terms: PartyTerms) -> PartyTerms:
    (folder / "changed.toml").write_text(terms_to_toml(terms))
    return read_terms_file(folder / "changed.toml")
