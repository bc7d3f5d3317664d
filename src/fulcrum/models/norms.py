"""BatchNorm in imported networks: converted to a norm of each example alone, or frozen as it is.

    convert_norms(resnet, "group")   # GroupNorm in place of every BatchNorm, its weights carried over
    convert_norms(resnet, "frozen")  # BatchNorm with fixed statistics, the same function as resnet.eval()

BatchNorm computes (x - mu_c) / s_c * w_c + b_c for channel c, in training with the mean and deviation of the batch,
which mixes the examples. A group norm has the mean m and deviation v of one example's group of channels in place of
mu_c and s_c. The weights that are carried over make both the same where an example's statistics are the running ones:

    m = mean of mu_c,  v^2 = mean of (s_c^2 + mu_c^2) - m^2     over the channels of the group
    w'_c = w_c v / s_c,  b'_c = b_c + w_c (m - mu_c) / s_c

An untrained BatchNorm (mu = 0, s = 1) thus keeps its weights as they are. The running statistics are then dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError

BATCH_NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
)
MOST_GROUPS, FEWEST_CHANNELS = 32, 4
"""A group norm has at most so many groups, of at least so many channels each where there are that many."""


def choose_groups(channels: int) -> int:
    """The number of groups of a GroupNorm in place of a BatchNorm over so many channels."""
    most = max(1, min(MOST_GROUPS, channels // FEWEST_CHANNELS))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


GROUP_COUNTS: dict[str, Callable[[int], int]] = {
    "group": choose_groups,
    "layer": lambda channels: 1,
    "instance": lambda channels: channels,
}
"""Number of groups, from the number of channels, for each norm that BatchNorm can be converted to."""

NORM_CHOICES = ("keep", *GROUP_COUNTS, "frozen")
"""Allowed values of model.norm."""


def is_frozen_norm(layer: Any) -> bool:
    """Whether a BatchNorm has fixed statistics: in eval mode with running statistics, it mixes no examples."""
    return not layer.training and getattr(layer, "running_mean", None) is not None


def convert_norms(model: nn.Module, how: str) -> nn.Module:
    """A copy of the model with every BatchNorm converted; the model itself where there is nothing to do.

    how: "keep"; "group", "layer" (one group) or "instance" (a group per channel): a GroupNorm with the weights carried
    over; "frozen": eval mode, with weights that do not train. ModelError for a BatchNorm that cannot be converted.
    """
    if how == "keep":
        return model
    found = [name for name, layer in model.named_modules() if isinstance(layer, BATCH_NORMS)]
    if not found:
        return model
    changed = copy.deepcopy(model)
    replaced: dict[int, nn.Module] = {}
    for name in found:
        try:
            layer = changed.get_submodule(name)
        except AttributeError:  # a second name of a layer that was replaced, inside another one
            continue
        if not isinstance(layer, BATCH_NORMS):
            continue
        if how == "frozen":
            _freeze_norm(name, layer)
            continue
        if id(layer) not in replaced:
            replaced[id(layer)] = _make_group_norm(name, layer, GROUP_COUNTS[how])
        if not name:
            return replaced[id(layer)]
        _replace_everywhere(changed, layer, replaced[id(layer)])
    return changed


def _replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """A layer may have several names in a model."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):  # named_children leaves a second name out
            if child is old:
                setattr(parent, name, new)


def _freeze_norm(name: str, layer: Any) -> None:
    if layer.running_mean is None:
        raise ModelError(
            f"model.norm = 'frozen': layer {name!r} ({type(layer).__name__}) has no running statistics to keep; use "
            "group."
        )
    layer.eval()
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad_(False)


def _make_group_norm(name: str, layer: Any, count_groups: Callable[[int], int]) -> nn.Module:
    """The norm that takes a BatchNorm's place, followed by what a layer such as timm's BatchNormAct2d adds to it."""
    if isinstance(layer.weight, nn.parameter.UninitializedParameter):
        raise ModelError(f"Layer {name!r} has no shape yet; run the model once before handing it over.")
    after = [child for child in layer.children() if not isinstance(child, nn.Identity)]
    own_forward = type(layer).forward is not nn.modules.batchnorm._BatchNorm.forward
    if own_forward and not isinstance(layer, nn.SyncBatchNorm) and not _is_norm_with_activation(layer):
        raise ModelError(
            f"Layer {name!r} ({type(layer).__name__}) is a BatchNorm with a forward of its own, which model.norm "
            "cannot convert; replace it in the model's code."
        )
    channels = int(layer.num_features)
    groups = count_groups(channels)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=bool(layer.affine) or layer.running_mean is not None)
    weight, bias = carry_weights(layer, groups)
    with torch.no_grad():
        if norm.affine:
            norm.weight.copy_(weight)
            norm.bias.copy_(bias)
    for own, old in ((norm.weight, layer.weight), (norm.bias, layer.bias)):
        if own is not None:  # weights of a BatchNorm that has none, or has frozen ones, stay as they are
            own.requires_grad_(old is not None and old.requires_grad)
    norm.to(device=_find_device(layer), dtype=weight.dtype)
    made = nn.Sequential(norm, *after) if after else norm
    return made.train(layer.training)


def _is_norm_with_activation(layer: nn.Module) -> bool:
    """timm's BatchNormAct2d: a norm, then its children `drop` and `act`."""
    return set(dict(layer.named_children())) == {"drop", "act"}


def carry_weights(layer: Any, groups: int) -> tuple[Tensor, Tensor]:
    """(w', b') of the module's docstring, [channels] each; a BatchNorm without statistics keeps its weights."""
    channels = int(layer.num_features)
    ones = torch.ones(channels, dtype=torch.float64)
    weight = ones if layer.weight is None else layer.weight.detach().double().cpu()
    bias = 0 * ones if layer.bias is None else layer.bias.detach().double().cpu()
    if layer.running_mean is not None:
        mean, variance = layer.running_mean.double().cpu(), layer.running_var.double().cpu() + layer.eps
        by_group = (groups, channels // groups)
        common = mean.view(by_group).mean(dim=1, keepdim=True)
        spread = (variance + mean.square()).view(by_group).mean(dim=1, keepdim=True) - common.square()
        spread = spread.clamp_min(layer.eps).expand(by_group).reshape(channels)
        deviation = variance.sqrt()
        bias = bias + weight * (common.expand(by_group).reshape(channels) - mean) / deviation
        weight = weight * spread.sqrt() / deviation
    kind = torch.float32 if layer.weight is None else layer.weight.dtype
    return weight.to(kind), bias.to(kind)


def _find_device(layer: Any) -> torch.device:
    held = next(iter([*layer.parameters(recurse=False), *layer.buffers(recurse=False)]), None)
    return torch.device("cpu") if held is None else held.device
