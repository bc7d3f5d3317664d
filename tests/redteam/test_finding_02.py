"""Finding 2: a seeded stream on the CPU had 32 bits, and the public initial weights came from the same streams.

At 243f1c8 torch's CPU generator dropped the upper half of a 63-bit seed. 2^32 seeds can be searched in an hour, and
streams of 200 rounds by 1000 parties collided. Now a stream is ChaCha20 under a 256-bit key.
"""

from __future__ import annotations

import torch

from fulcrum.rng import SecureRandomness, SeededRandomness, derive_stream_seed, torch_generator


def test_the_upper_half_of_a_key_matters_now() -> None:
    low = derive_stream_seed(0, ("noise", 0, 0, 0)) & 0xFFFFFFFF
    old = [torch.randn(16, generator=torch.Generator().manual_seed(low | upper << 32)) for upper in (0, 1, 77)]
    assert torch.equal(old[0], old[1])  # what torch does
    assert torch.equal(old[0], old[2])
    source = SeededRandomness(0)
    key, _ = source.locate_stream(("noise", 0, 0, 0))
    assert len(key) == 32
    for byte in range(32):
        changed = bytearray(key)
        changed[byte] ^= 1
        from fulcrum.rng.chacha import draw_words

        assert not torch.equal(draw_words(bytes(changed), (0, 0, 0), 4), draw_words(key, (0, 0, 0), 4))


def test_no_two_releases_of_a_large_federation_have_the_same_noise() -> None:
    """200 rounds by 1000 parties, the first word of each stream: 2^64 values, no collision (2^32 had seven)."""
    source, seen = SeededRandomness(5), set()
    for t in range(200):
        seen |= {int(source.words(("noise", t, k, 0), 1)) for k in range(0, 1000, 4)}
    assert len(seen) == 200 * 250
    old = {derive_stream_seed(5, ("noise", t, k, 0)) & 0xFFFFFFFF for t in range(200) for k in range(1000)}
    assert len(old) < 200 * 1000  # 243f1c8's streams, as torch keeps them


def test_private_streams_do_not_follow_from_public_ones() -> None:
    """Initial weights, splits and invitations come from `derive_stream_seed`; private keys never do."""
    for name in (("noise", 0, 0, 0), ("sample", 0, 0, 0)):
        public = torch.randn(8, generator=torch_generator(3, *name), dtype=torch.float64)
        assert not torch.equal(public, SeededRandomness(3).normal(name, 8))
        assert not torch.equal(SeededRandomness(3).normal(name, 8), SecureRandomness().normal(name, 8))
