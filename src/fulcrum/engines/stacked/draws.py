"""The random numbers of stacked training: drawn by the device, or from the clients' own streams on the host.

Both engines that stack (`stacked.trainer` and the players of `batched`) may have to repeat a round, because a sample
did not fit its place or a sum was not finite. A repeated round gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fulcrum.engines.stacked import sampling
from fulcrum.rng import Randomness, SeededRandomness, StreamKey


class RandomDraws:
    """Fills buffers with random numbers: uniform where they are float64, standard normal where they are float32.

    Where all sources are seeded and the device is a GPU, the device draws, from a generator keyed by the seeds of all
    sources and by `key`: other numbers than on a CPU, the same each time on such a device. Otherwise the numbers come
    from the sources' own streams, on the host. Seeded streams are drawn again when a round is repeated; others cannot
    be, so their numbers are kept until the next round begins.
    """

    def __init__(self, device: torch.device, sources: Sequence[Randomness]) -> None:
        self.device = device
        self.on_device = sampling.can_draw_on_device(device, sources)
        self._seeds = tuple(dict.fromkeys(source.seed for source in sources if isinstance(source, SeededRandomness)))
        self._repeats = all(isinstance(source, SeededRandomness) for source in sources)
        self._generator = torch.Generator(device)
        self._round = -1
        self._kept: dict[StreamKey, list[Tensor]] = {}

    def begin_round(self, t: int) -> None:
        """Round t begins, for the first time or again."""
        if t != self._round:
            self._round = t
            self._kept.clear()

    def fill(
        self, buffers: Sequence[Tensor], key: StreamKey, from_streams: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor] | None:
        """Fill the buffers with the numbers that `key` names within the round.

        from_streams() gives the values of each buffer, or of its first entries, from the sources' streams. Those are
        returned too, for what the host can tell from them; None where the device drew.
        """
        if self.on_device:
            seed = sampling.derive_device_seed(self._seeds[0], (*self._seeds, *_make_round_key(key, self._round)))
            self._generator.manual_seed(seed)
            for buffer in buffers:
                (buffer.uniform_ if buffer.dtype == torch.float64 else buffer.normal_)(generator=self._generator)
            return None
        drawn = self._kept.get(key) or list(from_streams())
        if not self._repeats:
            self._kept[key] = drawn
        for buffer, values in zip(buffers, drawn, strict=True):
            buffer[: len(values)].copy_(values)
        return drawn


def _make_round_key(key: StreamKey, t: int) -> StreamKey:
    """The purpose first, then the round, as streams are named on the host."""
    return (key[0], t, *key[1:])
