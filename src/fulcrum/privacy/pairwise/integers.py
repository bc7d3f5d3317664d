"""A party's message: integers on a grid that all participants share, hidden by masks modulo 2^32.

    n_k = round((a_k x_k + N(0, s_k^2)) / g),        message_k = n_k + sum over neighbours j of (+ or -) u_kj   mod 2^32

x_k is the party's clipped sum, a_k the weight with which it enters the mean, s_k its own noise (`shares`), g a power of
two with g <= s_j / 16 for every participant j, and u_kj the keystream of a key that only k and j have: k adds it and j
takes it off, k before j in the order of the participants. In the sum over all participants the masks cancel bit for
bit. A sum of 2^31 g or more wraps around, which costs accuracy and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from fulcrum.privacy.exact_noise import release_rows_on_grid
from fulcrum.rng import CipherRandomness, Randomness, StreamKey
from fulcrum.rng.chacha import Nonce, draw_words, open_stream
from fulcrum.types import MessageTerms

COARSEST = 16
"""s_k / g is at least this. The sum of the rounded values then is, up to a total variation below 1e-1000, a function of
the sum of the unrounded ones (docs/pairwise.md)."""
FINEST_BITS = 20
"""s_k / g is below 2^21 for every participant, as for releases that are not masked: the certified rounding needs it."""
SHORT_BITS, WHOLE_BITS = 24, 32
"""A message travels in its low 24 bits where every possible sum fits into them, else in all 32: 2^24 divides 2^32, so
the low bits of messages add up to the low bits of their sum."""


def choose_shared_grid(scales: Sequence[float], reach: float) -> tuple[float, int]:
    """The grid g of a round, a public power of two, and how many bits of each integer are sent. scales: s_k of all.

    reach: the largest possible absolute value of a coordinate of the sum, noise included. g is never above
    min s_k / 16, never below max s_k / 2^21, and as fine as the bits allow: reach stays below a quarter of their range.
    """
    least, most = min(scales), max(scales)
    if not 0 < least <= most < math.inf:
        raise ValueError(f"a grid needs noise of finite scales above 0, not {least!r} to {most!r}")
    exponent = math.frexp(least)[1] - 1  # 2^exponent <= least < 2^(exponent + 1)
    coarsest, finest = exponent - COARSEST.bit_length() + 1, math.frexp(most)[1] - 1 - FINEST_BITS
    if finest > coarsest:
        raise ValueError(f"no grid serves noise of scales {least!r} to {most!r}: they are too far apart")
    size = math.ceil(math.log2(reach)) if reach > 0 else -math.inf
    bits = SHORT_BITS if size - coarsest <= SHORT_BITS - 2 else WHOLE_BITS
    return math.ldexp(1.0, int(min(max(size - (bits - 2), finest), coarsest))), bits


def round_to_message(
    clipped: Tensor, scale: float, terms: MessageTerms, source: tuple[Randomness, StreamKey]
) -> Tensor:
    """n_k modulo 2^32, int32 [m], before masks. clipped x [m]; scale: of the noise on x, s_k / a_k.

    source: the randomness, and the release's place (round, client, step). Numbers that are not finite count as 0.
    """
    return round_rows_to_messages(clipped[None], [scale], [terms], [source])[0]


def round_rows_to_messages(
    clipped: Tensor,
    scales: Sequence[float],
    terms: Sequence[MessageTerms],
    sources: Sequence[tuple[Randomness, StreamKey]],
) -> Tensor:
    """`round_to_message` of several parties: sums [T, m] -> int32 [T, m]; rows beyond the scales are padding, zeros."""
    messages = torch.zeros(clipped.shape, dtype=torch.int32, device=clipped.device)
    for i, (scale, own, (randomness, place)) in enumerate(zip(scales, terms, sources, strict=True)):
        noise = scale * own.weight
        if not noise >= COARSEST * own.grid:
            raise ValueError(f"a grid of {own.grid!r} is too coarse for noise of scale {noise!r}")
        x = clipped[i].double() * own.weight  # one rounding per coordinate: see docs/pairwise.md, step 6
        name = ("noise", *place)
        if isinstance(randomness, CipherRandomness):
            found = release_rows_on_grid(x[None], [noise], [(randomness, name)], [own.grid])[0].units
        else:  # recorded numbers, for tests
            drawn = randomness.normal(name, len(x)).to(x.device, torch.float64)
            found = torch.round((torch.nan_to_num(x, 0.0, 0.0, 0.0) + drawn * noise) / own.grid).long()
        messages[i] = wrap(found)
    return messages


def wrap(integers: Tensor) -> Tensor:
    """Integers modulo 2^32 as int32: the low 32 bits."""
    if integers.dtype == torch.int32:
        return integers
    low = integers.long() & 0xFFFFFFFF
    return (low - ((low >> 31) << 32)).to(torch.int32)


def keep_low_bits(integers: Tensor, bits: int) -> Tensor:
    """Integers modulo 2^bits as int32 between -2^(bits - 1) and 2^(bits - 1) - 1."""
    if bits == WHOLE_BITS:
        return wrap(integers)
    low = integers.long() & ((1 << bits) - 1)
    return (low - ((low >> (bits - 1)) << bits)).to(torch.int32)


def pack_message(message: Tensor, bits: int) -> Tensor:
    """What travels of a message int32 [m]: its low bits, uint8 [m * bits / 8], least byte first."""
    raw = message.detach().cpu().contiguous().numpy().astype("<i4", copy=False).view(np.uint8).reshape(-1, 4)
    return torch.from_numpy(np.ascontiguousarray(raw[:, : bits // 8]).reshape(-1))


def unpack_message(content: Tensor, bits: int) -> Tensor:
    """The message int32 [m], modulo 2^bits, that `pack_message` packed."""
    given = content.numpy().reshape(-1, bits // 8)
    whole = np.zeros((len(given), 4), dtype=np.uint8)
    whole[:, : bits // 8] = given
    return torch.from_numpy(whole.reshape(-1).view("<i4").astype(np.int32))


def add_keystreams(message: Tensor, streams: Iterable[tuple[bool, bytes]]) -> Tensor:
    """The message int32 [m] with the masks of these keys, as `add_masks` and `draw_mask` make them at nonce (0, 0, 0).

    streams: (whether the mask is added, else taken off; its key). One buffer serves all masks.
    """
    total = message.detach().cpu().contiguous().numpy().view(np.uint32).copy()
    words = torch.empty(-(-len(total) // 2), dtype=torch.int64)
    own = words.numpy().view(np.uint32)[: len(total)]
    for added, key in streams:
        open_stream(key, (0, 0, 0))(words)
        (np.add if added else np.subtract)(total, own, out=total)
    return torch.from_numpy(total.view(np.int32)).to(message.device)


def draw_mask(key: bytes, nonce: Nonce, count: int, device: torch.device | str = "cpu") -> Tensor:
    """u, int32 [count]: the keystream of ChaCha20 in 32-bit pieces. One key and nonce serve one message only."""
    words = draw_words(key, nonce, -(-count // 2), "cpu")
    return torch.from_numpy(words.numpy().view(np.int32)[:count]).to(device)


def add_masks(message: Tensor, masks: Iterable[tuple[bool, Tensor]]) -> Tensor:
    """The message int32 [m] with its masks, modulo 2^32. masks: (whether it is added, else taken off; u int32 [m])."""
    total = message.detach().cpu().contiguous().numpy().view(np.uint32).copy()  # unsigned numbers wrap by definition
    for added, mask in masks:
        own = mask.cpu().contiguous().numpy().view(np.uint32)
        if added:
            total += own
        else:
            total -= own
    return torch.from_numpy(total.view(np.int32)).to(message.device)


def sum_messages(messages: Iterable[Tensor]) -> Tensor:
    """The sum of messages int32 [m] modulo 2^32, int32 [m]. With all participants' messages the masks are gone."""
    total: Tensor | None = None
    for message in messages:
        total = message.long() if total is None else total + message.long()
    if total is None:
        raise ValueError("there is no message to add up")
    return wrap(total)


def read_sum(total: Tensor, grid: float, bits: int = WHOLE_BITS) -> Tensor:
    """The noised weighted sum that integers [m] stand for, float32 [m]. bits: how many of each were sent."""
    return (keep_low_bits(total, bits).double() * grid).float()
