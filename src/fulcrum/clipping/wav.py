"""WAV-style clipping: each gradient is clipped level by level in a Haar wavelet basis, and noised there.

The parameters form one row (one row per layer with clip.groups = layer), padded with zeros to a
power of two and transformed by the orthonormal Haar transform. Each level l of coefficients is clipped to C_l
with sum of C_l^2 = C^2, so a unit still changes the sum by at most C; clipping every level to C itself would
need noise for C sqrt(levels). Half of C^2 is split equally over the levels, half by their number of coefficients: an
equal split alone gives too little to the finest level, which has half of the coefficients.

Orthonormal Haar with one group, with isotropic noise, is plain DP-SGD in
other coordinates. Clipping by level can help, and so can shrinking the noised coefficients towards zero
before the inverse transform (clip.shrink): a soft threshold in standard deviations of the noise, estimated from the
median coefficient of the finest level. It uses only released values, and costs no privacy.

Named after DP-SGD-WAV (Ranaweera et al. 2023), whose details were not available: hence WAV-style.
"""

from __future__ import annotations

import torch

from fulcrum.clipping.fixed import bound_C, clip_to_C
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.gradients.haar import haar_level_norms, haar_level_sums, haar_transform, inverse_haar_transform
from fulcrum.settings.schema import Clip
from fulcrum.types import RuleState, Transform, View

NORMAL_ABS_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""


def _init_wav(settings: Clip, shape: ModelFacts) -> RuleState:
    owner = torch.repeat_interleave(
        torch.tensor(shape.groups or (0,) * len(shape.tensors)), torch.tensor(shape.tensors)
    )  # [d]: the row of each parameter
    sizes = torch.bincount(owner)
    length = 1 << (int(sizes.max()) - 1).bit_length()  # row length: the next power of two
    place = torch.empty(shape.dim, dtype=torch.int64)  # [d]: position of each parameter in the rows
    for row in range(len(sizes)):
        mine = torch.nonzero(owner == row).flatten()
        place[mine] = row * length + torch.arange(len(mine))
    take = torch.full((len(sizes) * length,), shape.dim)  # [m]: the parameter at each position; d for padding
    take[place] = torch.arange(shape.dim)

    levels = length.bit_length()  # levels of one row: 1, 1, 2, 4, ... coefficients
    level = torch.repeat_interleave(torch.tensor([1, *(1 << n for n in range(levels - 1))]))
    rows = torch.arange(len(sizes))[:, None] * levels + level  # [rows, length]: every level of every row separately
    counts = torch.bincount(rows.flatten()).float()
    squares = 0.5 / len(counts) + 0.5 * counts / counts.sum()
    return {
        "C": settings.C0 * squares.sqrt(),
        "level": rows,
        "place": place,
        "take": take,
        "shrink": torch.tensor(settings.shrink),
    }


def _to_wavelet_domain(gradients: torch.Tensor, state: RuleState) -> torch.Tensor:
    padded = torch.cat([gradients, gradients.new_zeros((len(gradients), 1))], dim=1)
    return haar_transform(padded[:, state["take"]].unflatten(1, tuple(state["level"].shape))).flatten(1)


def _shrink_and_invert(noised: torch.Tensor, state: RuleState) -> torch.Tensor:
    rows = noised.unflatten(0, tuple(state["level"].shape))
    sd = (
        rows[:, rows.shape[1] // 2 :].abs().median() / NORMAL_ABS_MEDIAN
    )  # standard deviation of the noise: the finest level is mostly noise
    kept = torch.sign(rows) * (rows.abs() - state["shrink"] * sd).clamp_min(0.0)
    return inverse_haar_transform(kept).flatten()[state["place"]]


def _view_wavelet_levels(state: RuleState, t: int, rounds: int) -> View:
    rows, length = state["level"].shape
    levels = length.bit_length() if rows == 1 else 0  # one row keeps its order; several rows are rearranged
    return View(
        transform=Transform(
            forward=lambda gradients: _to_wavelet_domain(gradients, state),
            inverse=lambda noised: _shrink_and_invert(noised, state),
            groups=state["level"].flatten(),
            norms=(lambda gradients: haar_level_norms(gradients, levels)) if levels else None,
            own=(lambda sums: haar_level_sums(sums, levels)) if levels else None,
            haar=levels,
        )
    )


WAV = ClipRule(
    name="wav",
    init=_init_wav,
    view=_view_wavelet_levels,
    clip=clip_to_C,
    bounds=bound_C,
    moves=(),
    summary="clips each level of a Haar transform apart (WAV-style)",
    reference="after Ranaweera et al. 2023",
)
