"""Randomness as an argument: one named stream per (purpose, round, client, step), no global generator.

`SeededRandomness` is for research: the same key gives the same numbers on every machine, so a run can be
resumed bit for bit. `SecureRandomness` is for real use: numbers come from the operating system's entropy,
keys are ignored, nothing can be replayed. `RecordedRandomness` replays given numbers, so that two engines
can be compared on the same sampling and noise.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

StreamKey = tuple[str | int, ...]
"""Names a stream, purpose first: ("sample", round, client, step)."""


class Randomness(Protocol):
    """Source of all private randomness: Poisson sampling and noise."""

    @property
    def mode(self) -> str:
        """`seeded`, `secure` or `recorded`; written into the privacy statement."""
        ...

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` numbers in [0, 1), float64, on the CPU."""
        ...

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        """`count` standard normal numbers, float32, on the CPU."""
        ...


def derive_stream_seed(seed: int, key: StreamKey) -> int:
    """A 63-bit seed for one stream; different keys give unrelated streams."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator for a public purpose such as initialisation."""
    return torch.Generator().manual_seed(derive_stream_seed(seed, key))


def numpy_generator(seed: int, *key: str | int) -> np.random.Generator:
    """A NumPy generator for a public purpose such as splitting data over parties."""
    return np.random.default_rng(derive_stream_seed(seed, key))


@dataclass(frozen=True)
class SeededRandomness:
    """Reproducible. Anyone who knows the seed can subtract the noise: keep the seed secret, or only simulate."""

    seed: int
    mode: str = "seeded"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        generator = torch_generator(self.seed, *key)
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return torch.randn(count, generator=torch_generator(self.seed, *key))


@dataclass(frozen=True)
class SecureRandomness:
    """The operating system's entropy. Nothing is replayable."""

    mode: str = "secure"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        return torch.from_numpy(_entropy_uniform(count))

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        # The sum of four independent draws, halved: the low bits of one floating-point draw give
        # away more of the noise than its value does (Mironov 2012; Holohan and Braghin 2021).
        pairs = 2 * count
        radius = np.sqrt(-2.0 * np.log1p(-_entropy_uniform(pairs)))
        angle = 2.0 * math.pi * _entropy_uniform(pairs)
        draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return torch.from_numpy(draws.reshape(4, count).sum(axis=0) / 2.0).float()


def _entropy_uniform(count: int) -> np.ndarray:
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class RecordedRandomness:
    """Replays recorded numbers by key; a key that was not recorded is an error."""

    uniforms: Mapping[StreamKey, torch.Tensor]
    normals: Mapping[StreamKey, torch.Tensor]
    mode: str = "recorded"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.uniforms[key][:count]

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.normals[key][:count]


RANDOMNESS: dict[str, Callable[[int], Randomness]] = {
    "seeded": SeededRandomness,
    "secure": lambda seed: SecureRandomness(),
}
"""The choices of privacy.randomness: run's seed -> source of randomness."""


def make_randomness(mode: str, seed: int) -> Randomness:
    """The randomness of a run: mode `seeded` or `secure`."""
    return RANDOMNESS[mode](seed)
