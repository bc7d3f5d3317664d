"""Bodies are coded without loss, in fewer bytes, and nothing that is read can grow beyond what is expected."""

from __future__ import annotations

import zlib

import pytest
import torch
from safetensors.torch import load, save

from fulcrum.flower.array_coding import HIGH, LOW, decode_arrays, decode_own_arrays, encode_arrays
from fulcrum.flower.messages import (
    BadMessage,
    Envelope,
    PackedBody,
    compute_max_body_bytes,
    pack_envelope,
    read_message_arrays,
)

SPEC = {"params": (torch.float32, (50, 100)), "C": (torch.float32, (1,)), "count": (torch.int64, (3,))}


def arrays(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "params": torch.randn(50, 100, generator=generator) * 1e-3,
        "C": torch.ones(1),
        "count": torch.arange(3),
    }


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-3, 3e38])
def test_every_number_comes_back_bit_for_bit(scale):
    given = arrays()
    given["params"] = given["params"].double().mul(scale * 1e3 if scale < 1 else 1e2).float()
    given["params"][0, :4] = torch.tensor([0.0, -0.0, 1e-45, -3.4e38])
    body = encode_arrays(given)
    found = decode_arrays(body, SPEC)
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert found[name].shape == value.shape
        assert found[name].numpy().tobytes() == value.numpy().tobytes()
    assert decode_own_arrays(body)["params"].numpy().tobytes() == given["params"].reshape(-1).numpy().tobytes()
    assert encode_arrays(given) == body, "the same bytes again"


def test_noise_travels_in_less_than_its_bytes_and_never_much_more():
    noise = {"params": torch.randn(100_000, generator=torch.Generator().manual_seed(1))}
    assert len(encode_arrays(noise)) < 0.86 * 400_000
    worst = (
        torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(1))
        .int()
        .view(torch.float32)
    )
    assert len(encode_arrays({"params": worst})) <= compute_max_body_bytes({"params": (torch.float32, (100_000,))})


def tampered(change) -> bytes:
    parts = load(encode_arrays(arrays()))
    change(parts)
    return save({name: value.clone() for name, value in parts.items()})


def deflated(content: bytes) -> torch.Tensor:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    return torch.frombuffer(bytearray(coder.compress(content) + coder.flush()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.update({"params" + HIGH: deflated(b"\0" * 5001)}),
        lambda parts: parts.update({"params" + HIGH: deflated(b"\0" * 50_000_000)}),
        lambda parts: parts.update({"params" + HIGH: deflated(b"\0" * 4999)}),
        lambda parts: parts.update({"params" + HIGH: torch.zeros(100, dtype=torch.uint8)}),
        lambda parts: parts.update(
            {"params" + HIGH: torch.cat([parts["params" + HIGH], torch.zeros(9, dtype=torch.uint8)])}
        ),
        lambda parts: parts.update({"params" + LOW: parts["params" + LOW][:-1]}),
        lambda parts: parts.update({"params" + LOW: parts["params" + LOW].float()}),
        lambda parts: parts.pop("params" + HIGH),
        lambda parts: parts.update({"C" + LOW: torch.zeros((1, 3), dtype=torch.uint8), "C" + HIGH: deflated(b"\0")}),
        lambda parts: parts.update({"params": torch.zeros(50, 100)}),
    ],
)
def test_a_tampered_body_is_refused_in_fixed_words(change):
    with pytest.raises(BadMessage):
        read_message_arrays(Envelope(b"{}", tampered(change)), SPEC)
    assert read_message_arrays(Envelope(b"{}", tampered(lambda parts: None)), SPEC)


def test_only_the_weights_and_what_moves_travel_to_a_party():
    """moo's memory, its step and its settings stay with the coordinator; moo-scalar's direction is needed."""
    from fulcrum import runs as api
    from fulcrum.flower.coordinator import pack_round_body
    from fulcrum.training.snapshot import make_first_snapshot
    from fulcrum.types import RoundRequest
    from support.federations import toy_data
    from support.flower import toy_settings

    names = {}
    for rule in ("moo", "fixed", "moo-scalar"):
        federation = api.prepare(toy_settings(2, rule), toy_data(120))
        snapshot = make_first_snapshot(federation)
        request = RoundRequest(0, 2, snapshot.params, (), ())
        names[rule] = set(load(pack_round_body(federation.problem, request, snapshot.rule).content))
    assert names["moo"] == {"params", "state.C"}
    assert names["fixed"] == {"params"}
    assert names["moo-scalar"] == {"params", "state.C", "state.memory"}


def test_a_shared_body_gives_the_same_message():
    given = arrays()
    alone = pack_envelope({"kind": "round"}, given)
    shared = pack_envelope({"kind": "round"}, body=PackedBody(encode_arrays(given)))
    assert alone == shared
    assert alone.digest == shared.digest == Envelope(shared.header, shared.body).digest
    assert Envelope(shared.header, shared.body + b"x").digest != shared.digest
