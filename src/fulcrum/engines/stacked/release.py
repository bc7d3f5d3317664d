"""The releases of many tasks' sums on a device that is waited for once; one by one it would be waited for at each.

Every release is that of `mechanism.release_with_noise`: its functions decide, and the integers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulcrum.engines.stacked.draws import WORDS_AT_ONCE
from fulcrum.engines.stacked.sampling import can_draw_on_device
from fulcrum.privacy.events import Unprotected
from fulcrum.privacy.exact_noise import GridRelease, choose_grid, release_on_grid, round_with_margin
from fulcrum.privacy.mechanism import ChargedNoiseScale, refuse_unnoised_statistics, release_with_noise
from fulcrum.rng import CipherRandomness, Randomness, StreamKey
from fulcrum.rng.chacha import draw_many_words
from fulcrum.rng.normals import NormalDraws, count_normal_words, words_to_normals


@dataclass(frozen=True)
class NoisyRelease:
    """One task's release: its noise and event, its source, and its place (round, client, step) in names of streams."""

    scale: ChargedNoiseScale
    randomness: Randomness
    place: StreamKey


def release_tasks(clipped: Tensor, extra: Tensor, releases: Sequence[NoisyRelease]) -> tuple[Tensor, Tensor]:
    """What may leave of sums [T, m] and statistics [T, J], float32; rows without a release are padding, and zeros."""
    total, statistics = (torch.zeros(value.shape, device=value.device) for value in (clipped, extra))
    together = can_draw_on_device(clipped.device, [own.randomness for own in releases])
    if not together or any(isinstance(own.scale.event, Unprotected) for own in releases):
        for i, own in enumerate(releases):
            total[i], statistics[i] = release_with_noise(clipped[i], extra[i], own.scale, own.randomness, own.place)
        return total, statistics
    _release_rows(total, clipped, "noise", {i: float(own.scale.sum) for i, own in enumerate(releases)}, releases)
    asked = {i: float(own.scale.extra) for i, own in enumerate(releases) if own.scale.asked and extra.shape[1]}
    for on_extra in asked.values():
        refuse_unnoised_statistics(on_extra)
    _release_rows(statistics, extra, "noise-extra", asked, releases)
    return total, statistics


def _release_rows(
    out: Tensor, sums: Tensor, purpose: str, scales: dict[int, float], releases: Sequence[NoisyRelease]
) -> None:
    """Released numbers of the rows in `scales` into the same rows of `out`."""
    rows = list(scales)
    step = max(1, WORDS_AT_ONCE // max(1, sums.shape[1]))
    for first in range(0, len(rows), step):
        chosen = rows[first : first + step]
        keys: list[StreamKey] = [(purpose, *releases[i].place) for i in chosen]
        sources = [own for i in chosen if isinstance(own := releases[i].randomness, CipherRandomness)]
        found = release_many_on_grid([sums[i] for i in chosen], [scales[i] for i in chosen], sources, keys)
        for i, released in zip(chosen, found, strict=True):
            out[i] = released.values.float()


def release_many_on_grid(
    sums: Sequence[Tensor], scales: Sequence[float], sources: Sequence[CipherRandomness], keys: Sequence[StreamKey]
) -> list[GridRelease]:
    """`release_on_grid` of several sums [m] of one length: the cipher is called once, and so is the host.

    A sum with a coordinate that float64 cannot be sure of goes through `release_on_grid` itself.
    """
    count, device = sums[0].numel(), sums[0].device
    streams = [source.locate_stream(key) for source, key in zip(sources, keys, strict=True)]
    draws = words_to_normals(draw_many_words(streams, count_normal_words(count), device), count)
    grids = [choose_grid(scale) for scale in scales]
    found, unsure = [], []
    for i, (clipped, scale, grid) in enumerate(zip(sums, scales, grids, strict=True)):
        x = torch.nan_to_num(clipped.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)
        own = NormalDraws(draws.values[i], draws.words[i], draws.radius[i], draws.uniform[i])
        integers, doubtful = round_with_margin(x, scale, grid, own)
        found.append(integers)
        unsure.append(doubtful.any())
    again: list[bool] = torch.stack(unsure).tolist()  # the one wait
    return [
        release_on_grid(sums[i], scales[i], sources[i], keys[i]) if again[i] else GridRelease(found[i], grids[i])
        for i in range(len(sums))
    ]
