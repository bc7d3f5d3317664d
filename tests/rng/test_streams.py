"""The cipher is ChaCha20, its three implementations agree, and streams with different names share nothing."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from scipy import stats as scistats

from fulcrum.rng import CipherRandomness, SecureRandomness, SeededRandomness, StreamKey, chacha, name_stream
from fulcrum.rng.normals import words_to_uniforms

CPU = torch.device("cpu")


def as_table(key: bytes, nonce: chacha.Nonce) -> torch.Tensor:
    return torch.tensor([[*struct.unpack("<8I", key), *nonce]], dtype=torch.int64).to(torch.int32)


def as_bytes(words: torch.Tensor) -> bytes:
    return bytes(words.numpy().astype("<i8").tobytes())


def test_keystream_of_rfc_8439() -> None:
    """Section 2.3.2 and appendix A.1 of the RFC: block 1 of a counting key, blocks 0 and 1 of a zero key."""
    key, nonce = bytes(range(32)), struct.unpack("<3I", bytes.fromhex("000000090000004a00000000"))
    block_one = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    zero_block_0 = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    for draw in (
        lambda key, nonce, count: chacha.draw_words(key, nonce, count),
        lambda key, nonce, count: chacha.draw_keyed_words(as_table(key, nonce), count)[0],
    ):
        assert as_bytes(draw(key, nonce, 16))[64:] == block_one
        assert as_bytes(draw(bytes(32), (0, 0, 0), 8)) == zero_block_0
        assert as_bytes(draw(key, (nonce[0], nonce[1] ^ 1, nonce[2]), 16))[64:] != block_one  # the check can fail


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100, 4097])
def test_openssl_and_torch_give_the_same_words(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [(bytes([n] * 32), (n, 2**32 - 1 - n, 7)) for n in range(3)]
    fast = chacha.draw_many_words(streams, count, CPU)
    assert fast.shape == (3, count)
    monkeypatch.setattr(chacha, "_openssl", lambda: None)
    slow = chacha.draw_many_words(streams, count, CPU)
    assert torch.equal(fast, slow)
    table = torch.cat([as_table(*stream) for stream in streams])
    assert torch.equal(chacha.draw_keyed_words(table, count), fast)


def test_every_part_of_a_name_and_the_run_and_the_secret_change_the_whole_stream() -> None:
    base = CipherRandomness(bytes(32), "run")
    names: list[StreamKey] = [
        *(("noise", t, k, step) for t in range(3) for k in range(3) for step in range(3)),
        *(("sample", t, k, step) for t in range(2) for k in range(2) for step in range(2)),
        *(
            ("noise", t, k, step, attempt)
            for t in range(2)
            for k in range(2)
            for step in range(2)
            for attempt in (1, 2)
        ),
        *(("noise-extra", 0, 0, 0), ("cohort", 0), ("cohort", 1), ("noise", "central", 0), ("noise", "central", 1)),
        *(
            ("noise", 1),
            ("noise", 1, 0),
            ("noise", 1, 0, 0, 0),
            ("noise", "1", 0, 0),
            ("noise", 11, 1),
            ("noise", 1, 11),
        ),
    ]
    sources = [base, CipherRandomness(bytes(32), "ruN"), CipherRandomness(bytes([1] + [0] * 31), "run")]
    found = [as_bytes(source.words(name, 4)) for source in sources for name in names]
    assert len(set(found)) == len(found)
    again = [as_bytes(source.words(name, 4)) for source in sources for name in names]
    assert again == found
    assert as_bytes(base.words(("noise", 1, 2, 3), 4)) == as_bytes(base.words(("noise", 1, 2, 3), 100)[:4])


def test_a_name_that_would_not_fit_the_nonce_is_refused() -> None:
    for key in (("noise", 1, -1), ("noise", 1, 2**32), ("noise", 1, 0, 0, 0, 0), ("noise", 1, "x")):
        with pytest.raises(ValueError, match="does not name a stream"):
            SeededRandomness(0).words(key, 1)


def test_attempts_have_streams_of_their_own() -> None:
    assert name_stream("noise", 3, 1, 0) == ("noise", 3, 1, 0)
    assert name_stream("noise", 3, 1, 0, attempt=2) == ("noise", 3, 1, 0, 2)
    source = SecureRandomness()
    assert torch.equal(source.words(("noise", 3, 1, 0), 8), source.words(("noise", 3, 1, 0), 8))
    assert not torch.equal(source.words(("noise", 3, 1, 0), 8), source.words(("noise", 3, 1, 0, 1), 8))


def test_uniform_numbers_use_all_53_bits_and_never_reach_one() -> None:
    words = torch.tensor([0, -1, 2**11 - 1, 2**11, -(2**63), 2**63 - 1])
    assert words_to_uniforms(words).tolist() == [0.0, 1 - 2.0**-53, 0.0, 2.0**-53, 0.5, 0.5 - 2.0**-53]
    low = (words_to_uniforms(SeededRandomness(1).words(("sample", 0), 100_000)) * 2.0**53).to(torch.int64) % 256
    counts = np.bincount(low.numpy(), minlength=256)
    assert scistats.chisquare(counts).pvalue > 1e-6
    assert scistats.chisquare(np.bincount((low & ~1).numpy(), minlength=256)).pvalue < 1e-6  # a lost bit shows


def test_a_secret_is_never_shown() -> None:
    source = SecureRandomness()
    assert source.secret.hex() not in repr(source)
    assert "secret" not in repr(source)
    assert len(source.secret) == 32
    assert SecureRandomness().secret != source.secret
