"""How alike two images are: PSNR and SSIM, for values in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PSNR_LIMIT = 100.0
"""Decibels above which two images count as equal."""
WINDOW, WINDOW_SPREAD = 11, 1.5
"""Of SSIM: side and standard deviation of the Gaussian window (Wang et al. 2004)."""


def compute_psnr(one: Tensor, other: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels, [n], of images [n, c, h, w] in [0, 1]; at most `PSNR_LIMIT`."""
    error = (one - other).square().flatten(1).mean(dim=1)
    return (-10 * torch.log10(error.clamp_min(1e-30))).clamp_max(PSNR_LIMIT)


def compute_ssim(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity, [n], at most 1, of images [n, c, h, w] in [0, 1]; the mean over channels and places."""
    side = min(WINDOW, one.shape[2], one.shape[3])
    place = torch.arange(side, dtype=one.dtype) - (side - 1) / 2
    line = torch.exp(-place.square() / (2 * WINDOW_SPREAD**2))
    window = (line[:, None] * line / line.sum() ** 2)[None, None]
    a, b = (image.reshape(-1, 1, *image.shape[2:]) for image in (one, other))

    def blur(image: Tensor) -> Tensor:
        return functional.conv2d(image, window)

    mean_a, mean_b = blur(a), blur(b)
    spread_a, spread_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    common = blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    found = (2 * mean_a * mean_b + c1) * (2 * common + c2)
    found = found / ((mean_a**2 + mean_b**2 + c1) * (spread_a + spread_b + c2))
    return found.view(len(one), -1).mean(dim=1)


def match_images(originals: Tensor, found: Tensor) -> Tensor:
    """For each original [n, ...] the place of its reconstruction among found [m, ...]: the nearest pair first, [n].

    Each reconstruction is taken once, as long as there are enough.
    """
    distance = torch.cdist(originals.flatten(1), found.flatten(1))
    places = torch.zeros(len(originals), dtype=torch.int64)
    left = distance.clone()
    for _ in range(len(originals)):
        if torch.isinf(left).all():  # fewer reconstructions than originals: the rest share them
            break
        at = int(left.argmin())
        i, j = at // left.shape[1], at % left.shape[1]
        places[i] = j
        left[i], left[:, j] = torch.inf, torch.inf
        distance[i] = torch.inf
    unmatched = torch.isfinite(distance).all(dim=1)
    places[unmatched] = distance[unmatched].argmin(dim=1)
    return places
