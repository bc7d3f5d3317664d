"""The ordinary network inside a trained model: plain coordinates, no adapters, complete."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fulcrum.models.lora import merge_adapters
from fulcrum.models.prepared import unwrap_model
from fulcrum.models.whitening import CentringLayer, find_centred_biases, fold_centring


def make_plain_model(model: nn.Module) -> nn.Module:
    """A copy of a model as an ordinary network in eval mode, with the same function.

    What the engines put around it is taken off, adapters are merged into their layers, and centred or whitened
    coordinates are undone. Frozen weights and buffers are those of the model.
    """
    plain = copy.deepcopy(unwrap_model(model)).cpu()
    plain = undo_centring(merge_adapters(plain))
    return plain.eval()


def undo_centring(model: nn.Module) -> nn.Module:
    """The plain sequence that computes what a centred one does (`whitening.centre_model`); other models as they are."""
    if not find_centred_biases(model):
        return model
    weights = fold_centring(model)
    out = nn.Sequential()
    padding = (0, 0)
    for name, child in model.named_children():
        if isinstance(child, CentringLayer):
            padding = child.padding
            continue
        if isinstance(child, nn.Conv2d) and any(padding):
            child.padding = padding
        if not isinstance(child, nn.Flatten):  # a centring before a Flatten has no padding, and its layer follows
            padding = (0, 0)
        out.add_module(name, child)
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            parameter.copy_(weights[name])
    return out.train(model.training)


def list_complete_weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, frozen ones too, and persistent buffers of a plain model, by name: its state_dict.

    A tensor with two names (tied weights) is under both of them, as in a state_dict, with a copy each.
    """
    return {
        name: value.detach().cpu().clone().contiguous()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def compute_model_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of weights: names in order, types, shapes and bytes. The same in every export of one model."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
