"""An imported network made ready for private training: BatchNorm converted, adapters added, the rest frozen."""

from __future__ import annotations

import copy

from torch import nn

from fulcrum.models.lora import add_adapters
from fulcrum.models.norms import convert_norms
from fulcrum.models.trained import choose_trained
from fulcrum.settings import schema as config


def adapt_model(model: nn.Module, settings: config.Model, seed: int) -> nn.Module:
    """The model as the settings change it (model.norm, lora, train); a copy where anything changes.

    The weights must be loaded before: what is converted carries them over. The seed decides new adapters' weights.
    """
    made = convert_norms(model, settings.norm)
    if settings.lora:
        made = add_adapters(made, settings.lora, settings.lora_alpha, settings.lora_targets, seed)
    if settings.train != "auto" or settings.lora:
        made = copy.deepcopy(made) if made is model else made
        choose_trained(made, settings.train)
    return made
