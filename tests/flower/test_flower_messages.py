"""What travels between machines: whatever arrives is either exactly what was agreed, or refused in fixed words."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.flower import keys
from fulcrum.flower.messages import (
    HEADER_SCHEMAS,
    MESSAGE_VERSION,
    UNSENT_FIELDS,
    BadMessage,
    Envelope,
    assignment_from_table,
    assignment_to_table,
    events_agree,
    events_from_rows,
    events_to_rows,
    pack_envelope,
    read_message_arrays,
    read_message_header,
)
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.types import Assignment

WANTED = {"delta": (torch.float32, (4,)), "extra": (torch.float32, (0,)), "on": (torch.bool, ())}
ARRAYS = {"delta": torch.arange(4.0), "extra": torch.zeros(0), "on": torch.tensor(True)}
HEADER = {"kind": "update", "nonce": "n", "run": "r", "party": "p", "request": "d", "round": 1, "events": []}


def test_a_message_comes_back_as_it_went():
    envelope = pack_envelope(HEADER, ARRAYS)
    assert read_message_header(envelope, ("update",)) == HEADER
    for name, value in read_message_arrays(envelope, WANTED).items():
        assert torch.equal(value, ARRAYS[name])


def test_the_same_content_gives_the_same_bytes_whatever_the_order():
    other = pack_envelope(dict(reversed(HEADER.items())), dict(reversed(ARRAYS.items())))
    assert pack_envelope(HEADER, ARRAYS) == other
    assert pack_envelope({**HEADER, "round": 2}, ARRAYS).digest != other.digest


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    envelope = pack_envelope(HEADER, {**ARRAYS, "delta": torch.tensor([0.0, value, 0.0, 0.0])})
    with pytest.raises(BadMessage, match="not finite"):
        read_message_arrays(envelope, WANTED)


@pytest.mark.parametrize(
    "arrays",
    [
        {**ARRAYS, "delta": torch.zeros(5)},
        {**ARRAYS, "delta": torch.zeros(2, 2)},
        {**ARRAYS, "delta": torch.zeros(4, dtype=torch.float64)},
        {**ARRAYS, "more": torch.zeros(1)},
        {"delta": ARRAYS["delta"], "extra": ARRAYS["extra"]},
        {},
    ],
    ids=["length", "shape", "type", "more", "less", "nothing"],
)
def test_arrays_must_be_exactly_those_that_were_agreed(arrays):
    with pytest.raises(BadMessage):
        read_message_arrays(pack_envelope(HEADER, arrays), WANTED)


def forged(shape: list[int], data: bytes) -> Envelope:
    """A body whose table claims more than it holds."""
    table = json.dumps({"delta": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * int(np.prod(shape))]}})
    return Envelope(b"", struct.pack("<Q", len(table)) + table.encode() + data)


def test_a_forged_table_cannot_ask_for_terabytes():
    wanted = {"delta": (torch.float32, (4,))}
    honest = forged([4], b"\0" * 16)
    assert torch.equal(read_message_arrays(honest, wanted)["delta"], torch.zeros(4))
    for shape in ([1 << 40], [1 << 20, 1 << 20], [1 << 62, 1 << 62]):
        with pytest.raises(BadMessage):
            read_message_arrays(forged(shape, b"\0" * 16), wanted)
    with pytest.raises(BadMessage, match="larger"):
        read_message_arrays(Envelope(b"", b"\0" * 200_000), wanted)
    with pytest.raises(BadMessage):
        read_message_arrays(Envelope(b"", struct.pack("<Q", 1 << 60) + b"{}"), wanted)


def test_neither_a_pickle_nor_an_npy_file_is_read():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was run",))

    npy = io.BytesIO()
    np.save(npy, np.array([Bomb()], dtype=object), allow_pickle=True)
    for body in (pickle.dumps(Bomb()), npy.getvalue()):
        with pytest.raises(BadMessage, match="not a readable"):
            read_message_arrays(Envelope(b"", body), WANTED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"round": -1}, "round"),
        ({"round": 1.5}, "round"),
        ({"round": True}, "round"),
        ({"party": 3}, "party"),
        ({"party": "p" * 300}, "party"),
        ({"more": 1}, "unknown"),
        ({"kind": "hello"}, "kind"),
        ({"v": 1}, "version"),
    ],
)
def test_header_fields_must_be_of_their_types(change, words):
    text = json.dumps({"v": MESSAGE_VERSION, **HEADER, **change}).encode()
    with pytest.raises(BadMessage, match=words):
        read_message_header(Envelope(text), ("update",))


def test_a_header_cannot_smuggle_in_numbers_that_are_not_finite():
    text = json.dumps({"v": MESSAGE_VERSION, **HEADER}).replace('"round": 1', '"round": NaN').encode()
    with pytest.raises(BadMessage, match="JSON"):
        read_message_header(Envelope(text), ("update",))


@settings(max_examples=200, deadline=None)
@given(header=st.binary(max_size=200), body=st.binary(max_size=400))
def test_any_bytes_are_refused_and_nothing_else_happens(header, body):
    with pytest.raises(BadMessage):
        read_message_header(Envelope(header), tuple(HEADER_SCHEMAS))
    with pytest.raises(BadMessage):
        read_message_arrays(Envelope(b"", body), WANTED)


def test_events_travel_as_they_write_themselves():
    events = (Gaussian(0.1, 2.0, 3), Gaussian(0.1, 2.5))
    assert events_to_rows(events) == [event.to_json() for event in events]
    assert events_from_rows(events_to_rows(events)) == events
    wrong = ([0.1, 2.0], [0.1, "2", 1], [0.1, 2.0, 0], [0.1, 2.0, -1], [0.1, 2.0, 1.5], [0.1, float("inf"), 1])
    lists: list[list[Any]] = [[["gaussian", *row]] for row in wrong]
    for rows in (*lists, [[0.1, 2.0, 1]], ["x"], [["unheard-of", 1]], [[]]):
        with pytest.raises(BadMessage):
            events_from_rows(rows)
    with pytest.raises(BadMessage, match="without noise"):
        events_to_rows((Unprotected(),))


def test_events_agree_however_they_are_counted_together():
    one, other = Gaussian(0.1, 2.0), Gaussian(0.1, 2.5)
    assert events_agree((one, other, one), (one.with_count(2), other))
    assert not events_agree((one, other), (one.with_count(2), other))
    assert not events_agree((one, one), (one, other))


TASK = Assignment(client=3, rate=0.2, sigma=1.1, steps=2, lr=0.5, statistics_interval=5, noise_parties=4)


def test_an_assignment_travels_with_every_field():
    table = json.loads(json.dumps(assignment_to_table(TASK)))
    assert assignment_from_table(table) == TASK
    assert set(table) == {field.name for field in dataclasses.fields(Assignment)} - set(UNSENT_FIELDS)
    for name in table:
        with pytest.raises(BadMessage, match="missing"):
            assignment_from_table({other: value for other, value in table.items() if other != name})
        for value in (None, "x", True, [1]):
            with pytest.raises(BadMessage, match=name):
                assignment_from_table({**table, name: value})
    with pytest.raises(BadMessage, match="unknown"):
        assignment_from_table({**table, "more": 1})
    with pytest.raises(BadMessage, match="steps"):
        assignment_from_table({**table, "steps": 1.5})


def test_a_signature_is_over_every_byte_and_from_one_key(tmp_path):
    for name in ("a", "b"):
        keys.make_key_pair(tmp_path, name)
    mine, other = (keys.load_public_key(tmp_path / f"{name}.pub") for name in ("a", "b"))
    envelope = keys.sign_envelope(keys.load_private_key(tmp_path / "a"), pack_envelope(HEADER, ARRAYS))
    assert keys.has_valid_signature(mine, envelope)
    assert not keys.has_valid_signature(other, envelope)
    assert not keys.has_valid_signature(mine, Envelope(envelope.header, envelope.body))
    for header, body in ((envelope.header + b" ", envelope.body), (envelope.header, envelope.body[:-1] + b"\2")):
        assert not keys.has_valid_signature(mine, Envelope(header, body, envelope.signature))
    # Moving a byte from the header to the body must not leave the digest as it was.
    moved = Envelope(envelope.header[:-1], envelope.header[-1:] + envelope.body, envelope.signature)
    assert not keys.has_valid_signature(mine, moved)


def test_keys_are_private_and_never_overwritten(tmp_path):
    private, _ = keys.make_key_pair(tmp_path, "a")
    assert private.stat().st_mode & 0o077 == 0
    with pytest.raises(keys.ConfigError, match="never overwritten"):
        keys.make_key_pair(tmp_path, "a")
    with pytest.raises(keys.ConfigError, match="not usable"):
        keys.make_key_pair(tmp_path, "../a")
    (tmp_path / "b.pub").write_bytes((tmp_path / "a.pub").read_bytes())
    with pytest.raises(keys.ConfigError, match="two names"):
        keys.load_public_keys(tmp_path)
    (tmp_path / "b.pub").write_text("nonsense")
    with pytest.raises(keys.ConfigError, match="not a public key"):
        keys.load_public_keys(tmp_path)
