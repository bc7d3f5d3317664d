"""Fixed features of each record, computed before training: a public map per record, without privacy cost."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable

import torch
from torch import Tensor

from fulcrum.data.dataset import Dataset
from fulcrum.data.features.covariance import compute_whitening_matrix
from fulcrum.data.features.scattering import SCATTERING_CHANNELS, compute_scattering
from fulcrum.data.records import Records
from fulcrum.data.synthetic_images import render_images, sample_recipes
from fulcrum.errors import ConfigError, DataError
from fulcrum.rng import torch_generator
from fulcrum.settings.schema import Data

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"scattering": compute_scattering}
"""From records [B, ...] to features [B, channels, height, width], each from its own record alone."""
FEATURE_BATCH_SIZE = {"cpu": 32, "cuda": 1024}
"""Number of records per batch."""
NUM_NOISE_IMAGES = 1000
"""Number of noise images whose mean features are subtracted (data.feature_center)."""
NUM_SYNTHETIC_IMAGES, NUM_SYNTHETIC_KINDS, SYNTHETIC_BATCH_SIZE = 4000, 2000, 500
"""Number of synthetic images for the mean and covariance of data.feature_whiten; number of their classes; number per
rendered batch, which affects the backgrounds of scenes."""
FEATURE_VARIANCE_FLOOR = 1e-3
"""Minimum variance relative to the largest: directions with almost no variance are not amplified."""


def compute_features(dataset: Dataset, settings: Data, device: torch.device) -> Dataset:
    """The data set with data.features instead of its inputs: x [n, channels, height, width] float32, on the CPU.

    They are computed in batches on `device`. Each record's channels are then normalised to mean 0 and variance 1 in
    `data.feature_groups` groups (as nn.GroupNorm does, within the record). A record's features depend on no
    other record, so the map is public, like a change of units. data.feature_whiten maps features x to M (x - m), see
    `fit_feature_whitening`; m and M come from synthetic images only. With "none" the data set is returned unchanged.
    """
    if settings.features == "none":
        return dataset
    channels = dataset.shape[0] * SCATTERING_CHANNELS if len(dataset.shape) == 3 else SCATTERING_CHANNELS
    if settings.feature_groups and channels % settings.feature_groups:
        raise ConfigError(
            f"data.feature_groups = {settings.feature_groups} does not divide the {channels} channels that "
            f"{dataset.name} has as {settings.features}; use a divisor, such as 27, or 0 to leave them as they are."
        )
    center = mix = None
    if settings.feature_whiten:
        center, mix = fit_feature_whitening(
            _compute_all_features(make_synthetic_images(dataset.shape), settings, device), settings.feature_whiten
        )
    elif settings.feature_center:
        center = _compute_all_features(make_noise_images(dataset.shape), settings, device).mean(dim=0)
    words = json.dumps(feature_signature(settings))

    def made(records: Records | None) -> Records | None:
        if records is None:
            return None
        return dataclasses.replace(
            records, x=_compute_all_features(get_image_inputs(records), settings, device, center, mix)
        )

    return dataclasses.replace(
        dataset,
        train=made(dataset.train),
        test=made(dataset.test),
        held_out=made(dataset.held_out),
        # The features depend only on the old records: hashing gigabytes of features would add no information.
        fingerprint=hashlib.blake2b(f"{dataset.fingerprint}|{words}".encode(), digest_size=8).hexdigest(),
    )


def get_image_inputs(records: Records) -> Tensor:
    """The one input of records that are images."""
    if not isinstance(records.x, Tensor):
        raise DataError(f"data.features is for records with one input; these have {', '.join(records.x)}.")
    return records.x.float()


def feature_signature(settings: Data) -> tuple[str | float | bool, ...]:
    """The settings that determine the features: equal for settings with the same features."""
    if settings.features == "none":
        return ("none",)
    made = (settings.features, settings.feature_groups, settings.feature_mirror, settings.feature_center)
    # Newer than stored results: if it is off, their fingerprints are unchanged.
    return (*made, settings.feature_whiten) if settings.feature_whiten else made


def make_noise_images(shape: tuple[int, ...], count: int = NUM_NOISE_IMAGES) -> Tensor:
    """Noise images [count, C, H, W] in [-1, 1] with the 1/f spectrum of photographs, always the same.

    Colour channels are strongly correlated, as in photographs; the rest is blue-yellow and red-green contrast.
    """
    if len(shape) != 3:
        raise DataError(f"data.feature_center needs images, and a record has shape {list(shape)}; set it to false.")
    colours, height, width = shape
    spectrum = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)[None]).clamp_min(1 / height)
    white = torch.randn((count, *shape), generator=torch_generator(0, "made-up"))
    images = torch.fft.ifft2(torch.fft.fft2(white) / spectrum).real
    images = images / images.std(dim=(1, 2, 3), keepdim=True)
    if colours == 3:
        mixed = torch.tensor([[1.0, 0.3, 0.1], [1.0, 0.0, -0.2], [1.0, -0.3, 0.1]])
        images = torch.einsum("ij,njhw->nihw", mixed, images)
    scaled: Tensor = 0.5 * images / images.std()
    return scaled.clamp(-1.0, 1.0)


def make_synthetic_images(shape: tuple[int, ...], count: int = NUM_SYNTHETIC_IMAGES) -> Tensor:
    """Synthetic images [count, C, H, W] in [-1, 1], the same on every machine.

    Images that are not square are the centre crop of square ones.
    """
    if len(shape) != 3:
        raise DataError(f"data.feature_whiten needs images, and a record has shape {list(shape)}; set it to 0.")
    colours, height, width = shape
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    recipes, generator = (
        sample_recipes(NUM_SYNTHETIC_KINDS, colours, torch.Generator().manual_seed(5)),
        torch.Generator().manual_seed(7),
    )
    pictures = torch.empty((count, *shape))
    for piece in pictures.split(SYNTHETIC_BATCH_SIZE):  # views: filled in place
        kinds = torch.randint(NUM_SYNTHETIC_KINDS, (len(piece),), generator=generator)
        whole = render_images(recipes, kinds, side, generator, jitter=1.0, scene=0.0 if colours == 1 else 0.5)
        piece.copy_(whole[..., top : top + height, left : left + width] * 2 - 1)
    return pictures


def fit_feature_whitening(found: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """Mean m [C, H, W] and matrix M [C, C] from public features [n, C, H, W]: M (x - m) has more equal variances.

    M = s cov^-power, with cov [C, C] the covariance of channels over images and positions, and s such that the sum
    of the variances is unchanged. A direction's variance v becomes about s^2 v^(1 - 2 power): 0.5 whitens, 0.25 goes
    halfway. The minimum variance is FEATURE_VARIANCE_FLOOR times the largest.
    """
    means = found.mean(dim=(0, 2, 3), keepdim=True, dtype=torch.float64)
    cov = torch.zeros(found.shape[1], found.shape[1], dtype=torch.float64)
    for piece in found.split(SYNTHETIC_BATCH_SIZE):  # in pieces: all of them as float64 take gigabytes
        flat = (piece - means).transpose(0, 1).flatten(1)
        cov += flat @ flat.T
    cov /= found.numel() / found.shape[1]
    return found.mean(dim=0), compute_whitening_matrix(cov, power, FEATURE_VARIANCE_FLOOR)


def _compute_all_features(
    x: Tensor, settings: Data, device: torch.device, center: Tensor | None = None, mix: Tensor | None = None
) -> Tensor:
    """Features of all records in batches, minus `center` [C, H, W], channels multiplied by `mix` [C, C], if given."""
    make, step = FEATURE_MAPS[settings.features], FEATURE_BATCH_SIZE.get(device.type, FEATURE_BATCH_SIZE["cuda"])
    found: Tensor | None = None
    for start in range(0, len(x), step):
        piece = x[start : start + step].to(device)
        made = make(piece)
        if settings.feature_mirror:
            made = 0.5 * (made + make(piece.flip(-1)))
        if settings.feature_groups:
            made = torch.nn.functional.group_norm(made, settings.feature_groups)
        made = made.cpu() if center is None else made.cpu() - center
        if mix is not None:
            made = torch.einsum("ij,njhw->nihw", mix, made)
        if found is None:  # filled in place: two copies might not fit in memory
            found = torch.empty((len(x), *made.shape[1:]))
        found[start : start + len(made)] = made
    if found is None:
        raise DataError("there are no records to make features of; at least one is needed.")
    return found
