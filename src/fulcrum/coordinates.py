"""Centred coordinates: layers that see their inputs less a public mean. The same networks, other gradients.

A layer W x + b is written W (x - m) + b' with b' = b + W m: as many parameters, the same functions. But an example's
gradient in W is then (gradient of the output) x (input less m): the part that all inputs share no longer fills the
norm that is clipped. m must be public. Why, and what it gains: docs/decisions/0008-centred-coordinates.md.

    model = centred(plain, means(plain, pictures))  # computes what `plain` computes, but for the last layer's bias
    folded(model)  # the parameters of the plain network that computes what `model` computes
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.errors import ModelError

PREFIX = "centre"
"""What a Centre is called: this, and the name of the layer it is for."""
MEAN = ".mean"
"""What a mean is called: the name of the layer that sees inputs less it, and this."""
BATCH = 250
"""Pictures at a time."""


class Centre(nn.Module):
    """Pads images with zeros, then takes a fixed mean off everywhere, the border included.

    mean: without the batch, as large as one example or [C, 1, 1] for all pixels alike. padding: rows and columns of
    zeros on each side. A convolution without padding after it computes what the one with padding did: for its weights
    W, the border's -m and the bias b + sum(W) m come to the same as zeros and b.
    """

    mean: Tensor

    def __init__(self, mean: Tensor, padding: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.padding = padding

    @property
    def sides(self) -> tuple[int, int, int, int]:
        """The padding as `F.pad` takes it."""
        down, across = self.padding
        return across, across, down, down

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, ...], images larger by the padding."""
        return (F.pad(x, self.sides) if any(self.padding) else x) - self.mean

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.mean.shape))}, padding={self.padding}"


# --- to centred coordinates and back ------------------------------------------------------------------


def centred(model: nn.Module, means: Mapping[str, Tensor], head: bool = False) -> nn.Sequential:
    """A copy of a plain sequence in which every Linear and Conv2d sees its input less its mean.

    means: as `means` gives them, e.g. {"0.mean": [C, 1, 1], "7.mean": [C, H, W]}. Parameters keep their names. Biases
    are moved so that all layers compute what they did; the last one's only with `head`: where it is drawn at random it
    may as well stay what it is.
    """
    made = copy.deepcopy(_checked(model, means))
    layers, flattened = list(_weighted(made)), _flattened(made)
    # Before a Flatten, where means are of images: then activations need not be reordered.
    places = {flattened[name] if means[name + MEAN].dim() == 3 else name: name for name in layers if name in flattened}
    places |= {name: name for name in layers if name not in flattened}
    out = nn.Sequential()
    for name, child in made.named_children():
        if name in places:
            owner = places[name]
            layer, weight = made.get_submodule(owner), made.get_parameter(f"{owner}.weight")
            mean = means[owner + MEAN].to(weight)
            padding = (0, 0)
            if isinstance(layer, nn.Conv2d):
                assert not isinstance(layer.padding, str)
                padding, layer.padding = (layer.padding[0], layer.padding[1]), (0, 0)
            out.add_module(PREFIX + owner, Centre(mean, padding))
            if head or owner != layers[-1]:
                with torch.no_grad():
                    made.get_parameter(f"{owner}.bias").add_(_through(layer, weight, mean))
        out.add_module(name, child)
    return out.train(model.training)


def folded(model: nn.Module, params: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The parameters, by name, of the plain network that computes what `model` does: b = b' - W m.

    params: parameters to take in place of the model's own. A model that is not centred has its own, unchanged.
    """
    own = {name: value.detach() for name, value in (params or dict(model.named_parameters())).items()}
    for name, centre in model.named_modules():
        if isinstance(centre, Centre):
            layer = name.removeprefix(PREFIX)
            weight, bias = f"{layer}.weight", f"{layer}.bias"
            own[bias] = own[bias] - _through(model.get_submodule(layer), own[weight], centre.mean)
    return own


@torch.no_grad()
def means(model: nn.Sequential, pictures: Tensor) -> dict[str, Tensor]:
    """The mean input of every Linear and Conv2d of a plain sequence over public pictures [B, C, H, W], as fed to it.

    By name, e.g. "3.mean": [C, 1, 1] before a convolution; [C, H, W] before a Flatten and a Linear; [F] before any
    other Linear. The pictures may be on any device, and must be where the model is.
    """
    flattened = _flattened(model)
    places = {flattened.get(name, name): name for name in _weighted(model)}
    found: dict[str, Tensor] = {}
    *_, last = places
    for batch in pictures.split(BATCH):
        x = batch
        for name, child in model.named_children():
            if name in places:
                key, total = places[name] + MEAN, x.double().sum(dim=0) / len(pictures)
                if isinstance(child, nn.Conv2d):
                    total = total.mean(dim=(1, 2), keepdim=True)
                found[key] = found[key] + total if key in found else total
                if name == last:  # which may be on another device, for nobody needs what it computes
                    break
            x = child(x)
    return {name: value.float() for name, value in found.items()}


def digest(model: nn.Module) -> str:
    """Of a model's buffers, which are not among its parameters but decide what it computes; "" if it has none."""
    held = list(model.named_buffers())
    state = hashlib.sha256()
    for name, value in held:
        state.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        state.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest() if held else ""


def _weighted(model: nn.Sequential) -> Iterator[str]:
    """Names of the layers with weights, in order."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear | nn.Conv2d):
            yield name


def _flattened(model: nn.Sequential) -> dict[str, str]:
    """Linear layers that come right after a Flatten of everything, and its name."""
    pairs = pairwise(model.named_children())
    return {
        name: before
        for (before, flat), (name, layer) in pairs
        if type(flat) is nn.Flatten and (flat.start_dim, flat.end_dim) == (1, -1) and isinstance(layer, nn.Linear)
    }


def _through(layer: Any, weight: Tensor, mean: Tensor) -> Tensor:
    """W m: what a layer's weights make of its mean."""
    if not isinstance(layer, nn.Conv2d):
        return weight @ mean.flatten()
    constant = mean.expand(mean.shape[0], *layer.kernel_size)[None]
    return F.conv2d(constant, weight, groups=layer.groups).flatten()


def _checked(model: nn.Module, means: Mapping[str, Tensor]) -> nn.Sequential:
    """The model, if it can be centred; ModelError unless it is a sequence and there is a mean of the right size for every layer."""
    if type(model) is not nn.Sequential:
        raise ModelError(
            f"model.center = true needs a torch.nn.Sequential, not {type(model).__name__}; set it to false."
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) != len(dict(model.named_parameters())):
        raise ModelError("model.center = true needs parameters that belong to one layer each; set it to false.")
    layers = list(_weighted(model))
    others = sorted({name.rpartition(".")[0] for name in names} - set(layers))
    if others or not layers:
        what = f"layer {others[0]!r} is neither" if others else "it has none"
        raise ModelError(f"model.center = true is for sequences of Linear and Conv2d, but {what}; set it to false.")
    for name in layers:
        layer = model.get_submodule(name)
        given = means.get(name + MEAN)
        if given is None:
            raise ModelError(
                f"model.center = true needs the mean input of layer {name!r}, but there is no {name + MEAN}."
            )
        if layer.bias is None:
            raise ModelError(
                f"model.center = true needs a bias in layer {name!r}, which takes the mean up; give it one."
            )
        if isinstance(layer, nn.Conv2d):
            if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
                raise ModelError(f"model.center = true needs layer {name!r} to be padded with zeros, by numbers.")
            fits = given.shape == (layer.in_channels, 1, 1)
        else:
            assert isinstance(layer, nn.Linear)
            whole = given.dim() == 3 and name in _flattened(model)
            fits = (whole or given.dim() == 1) and given.numel() == layer.in_features
        if not fits or not torch.isfinite(given).all():
            seen = "x".join(map(str, given.shape))
            raise ModelError(f"model.center = true: {name + MEAN} ({seen}) is not a finite mean of what {name!r} sees.")
    return model
