"""Parties that start again between masked rounds: nobody pays twice for that, and nobody is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

from fulcrum.flower.messages import Envelope
from fulcrum.flower.pairwise.party import MaskedRounds
from support.flower import Bus, serve
from support.pairwise import federation, masked_settings


def restart_before_round(bus: Bus, party: int, round: int, noticed: bool) -> None:
    """A party's process is a new one when it is asked for a round: no key of the run, and nobody else's keys.

    noticed: whether the transport says so (a process that was killed), or not (one that signed off and came back).
    """
    send, done = bus.send, list[int]()

    def watched(node: int, envelope: Envelope, *more: Any) -> str:
        header = json.loads(envelope.header)
        if header["kind"] == "round" and header["round"] == round and not done:
            done.append(round)
            service = bus.services[party]
            service._masked = MaskedRounds(service.name, service.key)
        return send(node, envelope, *more)

    online = bus.online

    def look() -> set[int]:  # the coordinator looks who is there before each round
        if noticed and len(done) == 0 and any(json.loads(e.header).get("round") == round - 1 for _, e in bus.sent):
            bus.back.add(party)
        return online()

    bus.send, bus.online = watched, look  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("noticed", [False, True])
def test_a_party_that_starts_again_between_rounds_costs_nobody_a_message(
    tmp_path: Path, monkeypatch: Any, noticed: bool
) -> None:
    """It knows nobody's keys any more, so it is told all of them again; its own new key tells the coordinator so."""
    settings = masked_settings(3)
    with federation(tmp_path, settings, simulation=False) as bus:
        restart_before_round(bus, party=1, round=1, noticed=noticed)
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        rows = [len(service.ledger.entries(service.name)) for service in bus.services.values()]
    assert result.summary["rounds"] == 3
    assert rows == [3, 3, 3]
    log = (tmp_path / "run" / "parties.jsonl").read_text()
    assert "is void" not in log
    assert "was not ready" not in log


def test_a_party_that_starts_again_while_others_compute_is_left_out_before_anybody_pays(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """It had said that it is ready, and what it had computed is gone: a set with it would be void, and paid."""
    settings = masked_settings(3)
    with federation(tmp_path, settings, simulation=False) as bus:
        collect, done = bus.collect, list[int]()

        def slowly(ids: set[str]) -> Any:
            asked = {number: json.loads(bus._open[number][1].header) for number in ids & bus._open.keys()}
            first = {number for number, header in asked.items() if header.get("round") == 1}
            if not done and {header["kind"] for header in asked.values()} == {"round"} and first:
                done.append(1)
                found = collect({number for number in first if bus._open[number][0] == 0})
                service = bus.services[0]
                service._masked = MaskedRounds(service.name, service.key)
                bus.back.add(0)
                return found
            return collect(ids)

        bus.collect = slowly  # type: ignore[method-assign]
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        rows = [len(service.ledger.entries(service.name)) for service in bus.services.values()]
    assert done == [1]
    assert result.summary["rounds"] == 3
    assert rows[1:] == [3, 3]
    assert "is void" not in (tmp_path / "run" / "parties.jsonl").read_text()
