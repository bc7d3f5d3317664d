"""Fixed features of each record, computed before training: a public map of one record at a time, free of cost."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from fulcrum.config import Data
from fulcrum.data.dataset import Dataset
from fulcrum.data.scattering import CHANNELS, scatter
from fulcrum.errors import ConfigError, DataError

CHUNK = {"cpu": 32, "cuda": 1024}
"""Records at a time."""


def featured(dataset: Dataset, settings: Data, device: torch.device) -> Dataset:
    """The data set with data.features in place of its records: x [n, channels, height, width] float32, on the CPU.

    They are computed in pieces on `device`. Each record's channels are then brought to mean 0 and variance 1 in
    `data.feature_groups` groups (as nn.GroupNorm does, within the record): what a record becomes depends on no
    other record, so it is public like a change of units. With "none" the data set comes back as it is.
    """
    if settings.features == "none":
        return dataset
    channels = dataset.shape[0] * CHANNELS if len(dataset.shape) == 3 else CHANNELS
    if settings.feature_groups and channels % settings.feature_groups:
        raise ConfigError(
            f"data.feature_groups = {settings.feature_groups} does not divide the {channels} channels that "
            f"{dataset.name} has as {settings.features}; use a divisor, such as 27, or 0 to leave them as they are."
        )
    words = f"{settings.features}|{settings.feature_groups}"
    return dataclasses.replace(
        dataset,
        x=_all(dataset.x, settings, device),
        x_test=_all(dataset.x_test, settings, device),
        # Both are functions of the old records alone: hashing gigabytes of new ones would say no more.
        fingerprint=hashlib.blake2b(f"{dataset.fingerprint}|{words}".encode(), digest_size=8).hexdigest(),
    )


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"scattering": scatter}
"""From records [B, ...] to features [B, channels, height, width], each from its own record alone."""


def _all(x: Tensor, settings: Data, device: torch.device) -> Tensor:
    found: Tensor | None = None
    for start in range(0, len(x), CHUNK.get(device.type, CHUNK["cuda"])):
        piece = x[start : start + CHUNK.get(device.type, CHUNK["cuda"])].to(device)
        made = FEATURES[settings.features](piece)
        if settings.feature_groups:
            made = torch.nn.functional.group_norm(made, settings.feature_groups)
        if found is None:  # filled in place: two copies of them all might not fit
            found = torch.empty((len(x), *made.shape[1:]))
        found[start : start + len(made)] = made.cpu()
    if found is None:
        raise DataError("there are no records to make features of; at least one is needed.")
    return found
