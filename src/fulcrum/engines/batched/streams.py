"""Random numbers of runs whose streams lie on the host: drawn once a round, also where a round is repeated."""

from __future__ import annotations

from torch import Tensor

from fulcrum.rng import Key, Randomness, Seeded


class Streams:
    """The numbers of the round at hand. Seeded ones are drawn anew each time; others cannot be, and are kept."""

    def __init__(self) -> None:
        self._round = -1
        self._kept: dict[tuple[int, Key], Tensor] = {}

    def begin(self, t: int) -> None:
        """Round t, for the first time or again."""
        if t != self._round:
            self._round = t
            self._kept.clear()

    def draw(self, source: Randomness, owner: int, key: Key, count: int) -> Tensor:
        """`count` numbers of the stream `key` of an owner's source: uniform for a sample, else standard normal."""
        draw = source.uniform if key[0] == "sample" else source.normal
        if isinstance(source, Seeded):
            return draw(key, count)
        if (owner, key) not in self._kept:
            self._kept[owner, key] = draw(key, count)
        return self._kept[owner, key]
