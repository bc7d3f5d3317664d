"""Sources of random numbers that tests record, silence or watch."""

from __future__ import annotations

import dataclasses

import torch

from fulcrum.rng import Randomness, SeededRandomness, StreamKey


class Silent:
    """Randomness without noise: what is released is the mean itself."""

    mode = "recorded"

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float64)

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return torch.zeros(count)


class Recorder:
    """Seeded numbers, written down as they are drawn."""

    def __init__(self, seed: int) -> None:
        self.inner, self.mode = SeededRandomness(seed), "recorded"
        self.uniforms: dict[StreamKey, torch.Tensor] = {}
        self.normals: dict[StreamKey, torch.Tensor] = {}

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.uniforms.setdefault(key, self.inner.uniform(key, count))

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.normals.setdefault(key, self.inner.normal(key, count))


@dataclasses.dataclass(frozen=True)
class Once:
    """Numbers that cannot be drawn a second time: not a cipher's, which can."""

    inner: Randomness
    seen: set[StreamKey]
    mode: str = "recorded"

    def _first(self, key: StreamKey) -> StreamKey:
        assert key not in self.seen
        self.seen.add(key)
        return key

    def uniform(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.inner.uniform(self._first(key), count)

    def normal(self, key: StreamKey, count: int) -> torch.Tensor:
        return self.inner.normal(self._first(key), count)
