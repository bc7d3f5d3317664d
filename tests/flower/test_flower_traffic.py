"""The bytes that a plan promises are those of the messages that a served round sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum import runs as api
from fulcrum.errors import ConfigError
from fulcrum.flower.messages import Envelope
from fulcrum.flower.traffic import SEALED_BYTES, SIGNATURE_BYTES, measure_message_traffic
from support.federations import toy_data
from support.flower import NAMES, serve, toy_federation, toy_settings

# DER writes the two numbers of an ECDSA signature without leading zeros: each further byte is missing
# with probability 1/256, so a signature is shorter by more than this many bytes about once in 2^40.
SHORTER = 6


@pytest.mark.parametrize("rule", ["moo", "quantile", "oso"])
def test_messages_are_as_long_as_planned(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = toy_settings(2, rule)
    federation = api.prepare(settings, toy_data(120))
    sizes: dict[tuple[int, int], tuple[Envelope, Envelope]] = {}

    def watch(k: int, request: Envelope, reply: Envelope) -> Envelope:
        if request.body:  # a round's request
            sizes[k, sum(key[0] == k for key in sizes)] = (request, reply)
        return reply

    with toy_federation(tmp_path, settings, simulation=False) as bus:
        bus.tamper = watch
        serve(bus, settings, tmp_path / "served", monkeypatch, simulation=False)
    assert len(sizes) == 2 * len(NAMES)
    for k in range(len(NAMES)):
        said = measure_message_traffic(federation, k)
        request, reply = sizes[k, 0]
        assert said.down - SEALED_BYTES == request.size - len(request.signature)
        assert abs(len(request.signature) - SEALED_BYTES) <= 2 * SHORTER
        assert said.up - SIGNATURE_BYTES == reply.size - len(reply.signature)
        assert abs(len(reply.signature) - SIGNATURE_BYTES) <= SHORTER
        later, answer = sizes[k, 1]
        assert abs(later.size - said.down) <= 32
        assert abs(answer.size - said.up) <= 32
    larger = dataclasses.replace(settings, model=dataclasses.replace(settings.model, name="mlp"))
    assert measure_message_traffic(api.prepare(larger, toy_data(120))).down != sizes[0, 0][0].size


def test_what_is_not_served_is_said() -> None:
    settings = toy_settings().replace(privacy={"aggregation": "ideal-secagg"})
    with pytest.raises(ConfigError, match="is a simulation: no secure aggregation is there"):
        measure_message_traffic(api.prepare(settings, toy_data(120)))
    with pytest.raises(ConfigError, match="not sound and private"):
        measure_message_traffic(api.prepare(toy_settings(rule="none"), toy_data(120)))
