"""Other coordinates for the same networks: layers whose inputs are centred, or centred and whitened.

A layer W x + b is written V M (x - m) + b' with V M = W and b' = b + W m: as many parameters, the same functions. But
an example's gradient in V is (gradient of the output) x (M (x - m)). The common part m of all inputs no longer
dominates the clipped norm. With M = (covariance of x)^-1/2, neither do the few directions with the largest
variance; the noise is spread over the features by their variance. m and M must be public. Reasons and results:
docs/decisions/0008-coordinates.md.

    facts = {**compute_input_means(plain, images), **compute_whitening_matrices(plain, images)}
    model = centre_model(plain, facts)  # same function as `plain`, except for the last layer
    fold_centring(model)  # parameters of the plain network with the same function as `model`

Without the whitening matrices the model is only centred.
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

from fulcrum.data.features.covariance import compute_whitening_matrix
from fulcrum.errors import ModelError

CENTRING_PREFIX = "centre"
"""Prefix of a CentringLayer's name; the name of its layer follows."""
MEAN_SUFFIX = ".mean"
"""Suffix of a mean's name, after the name of its layer."""
MIX_SUFFIX = ".mix"
"""Suffix of a whitening matrix's name, after the name of its layer."""
IMAGE_BATCH_SIZE = 250
"""Number of images per batch."""


class CentringLayer(nn.Module):
    """Pads images with zeros, subtracts a fixed mean (border included), then multiplies channels or features by M.

    mean: of one example's shape, or [C, 1, 1] for all pixels. padding: rows and columns of
    zeros on each side. A convolution without padding after this layer equals the original with padding: for its
    weights W, -m in the border and the bias b + sum(W) m give the same result as zeros and b. mix: a
    symmetric [C, C] over the channels of images or [F, F] over flat features; None: no multiplication.
    """

    mean: Tensor
    mix: Tensor | None

    def __init__(self, mean: Tensor, padding: tuple[int, int] = (0, 0), mix: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("mix", None if mix is None else mix.detach().clone())
        self.padding = padding

    @property
    def pad_amounts(self) -> tuple[int, int, int, int]:
        """The padding in the order of `F.pad`."""
        down, across = self.padding
        return across, across, down, down

    def mixed(self, x: Tensor) -> Tensor:
        """x [B, C, H, W] or [B, F] times M. It is also its own backward, since M is symmetric."""
        if self.mix is None:
            return x
        if x.dim() == 2:
            return x @ self.mix
        return (x.permute(0, 2, 3, 1) @ self.mix).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, ...], images larger by the padding."""
        return self.mixed((F.pad(x, self.pad_amounts) if any(self.padding) else x) - self.mean)

    def extra_repr(self) -> str:
        mixed = "" if self.mix is None else ", mixed"
        return f"{'x'.join(map(str, self.mean.shape))}, padding={self.padding}{mixed}"


# --- to centred coordinates and back ------------------------------------------------------------------


def centre_model(model: nn.Module, facts: Mapping[str, Tensor], head: bool = False) -> nn.Sequential:
    """A copy of a plain sequence with centred inputs of every Linear and Conv2d, whitened where M is given.

    facts: from `compute_input_means` and `compute_whitening_matrices`, e.g.
    {"0.mean": [C, 1, 1], "7.mean": [C, H, W], "7.mix": [F, F]}.
    Parameters keep their names. Weights and biases are changed so that all layers compute the same functions; the last
    layer only with `head`: a random last layer need not be changed.
    """
    made = copy.deepcopy(_check_can_be_centred(model, facts))
    layers, flattened = list(_weighted_layers(made)), _layers_after_flatten(made)
    # Before a Flatten where means have image shape: activations need no reordering. Whitened features are flat.
    early = {name for name in flattened if facts[name + MEAN_SUFFIX].dim() == 3 and name + MIX_SUFFIX not in facts}
    places = {flattened[name] if name in early else name: name for name in layers}
    out = nn.Sequential()
    for name, child in made.named_children():
        if name in places:
            owner = places[name]
            layer, weight = made.get_submodule(owner), made.get_parameter(f"{owner}.weight")
            mean, mix = facts[owner + MEAN_SUFFIX].to(weight), facts.get(owner + MIX_SUFFIX)
            if owner in flattened and owner not in early:
                mean = mean.flatten()
            padding = (0, 0)
            if isinstance(layer, nn.Conv2d):
                assert not isinstance(layer.padding, str)
                padding, layer.padding = (layer.padding[0], layer.padding[1]), (0, 0)
            centre = CentringLayer(mean, padding, None if mix is None else mix.to(weight))
            out.add_module(CENTRING_PREFIX + owner, centre)
            if head or owner != layers[-1]:
                with torch.no_grad():
                    made.get_parameter(f"{owner}.bias").add_(_multiply_mean(layer, weight, mean))
                    if centre.mix is not None:
                        weight.copy_(_multiply_inputs(layer, weight, torch.linalg.inv(centre.mix.double())))
        out.add_module(name, child)
    return out.train(model.training)


COORDINATE_CHOICES = ("plain", "centred", "whitened")
"""Allowed values of model.coordinates."""


def select_statistics(facts: Mapping[str, Tensor], coordinates: str) -> dict[str, Tensor]:
    """The statistics that "centred" or "whitened" coordinates need; empty if some are missing."""
    if coordinates == "whitened" and not any(name.endswith(MIX_SUFFIX) for name in facts):
        return {}
    return {name: value for name, value in facts.items() if coordinates == "whitened" or name.endswith(MEAN_SUFFIX)}


def whiten_partially(model: nn.Module, facts: Mapping[str, Tensor], power: float) -> dict[str, Tensor]:
    """The facts with every M = s cov^-1/2 changed to a smaller power, as in `compute_whitening_matrix(cov, power)`.

    power: above 0 and at most 0.5, which changes nothing. model: the plain sequence of the facts.
    """
    if power == 0.5:
        return dict(facts)
    _check_can_be_centred(model, facts)
    found = dict(facts)
    for name, mix in facts.items():
        if name.endswith(MIX_SUFFIX):
            # M already includes the variance floor.
            found[name] = compute_whitening_matrix(torch.linalg.inv(mix.double() @ mix.double()), power, floor=0.0).to(
                mix.device
            )
    return found


def fold_centring(model: nn.Module, params: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The parameters, by name, of the plain network that computes what `model` does: W = V M, b = b' - W m.

    params: parameters to use instead of the model's own. For a model without centring they are returned unchanged.
    """
    given = dict(model.named_parameters()) if params is None else params
    out_of = {**dict(model.named_parameters()), **given}
    out = {name: value.detach() for name, value in given.items()}
    for place, centre in find_centred_biases(model).items():
        name = place.removesuffix(".bias")
        layer, weight, bias = model.get_submodule(name), out_of[f"{name}.weight"].detach(), out_of[place].detach()
        if centre.mix is not None:
            weight = out[f"{name}.weight"] = _multiply_inputs(layer, weight, centre.mix.double()).to(weight.dtype)
        out[place] = (bias - _multiply_mean(layer, weight, centre.mean)).to(bias.dtype)
    return out


def find_centred_biases(model: nn.Module) -> dict[str, CentringLayer]:
    """The biases that are b + W m instead of b, by name, each with its CentringLayer; empty for a plain model."""
    return {
        f"{name.removeprefix(CENTRING_PREFIX)}.bias": child
        for name, child in model.named_children()
        if isinstance(child, CentringLayer) and name.startswith(CENTRING_PREFIX)
    }


@torch.no_grad()
def compute_input_means(model: nn.Sequential, pictures: Tensor) -> dict[str, Tensor]:
    """The mean input of every Linear and Conv2d of a plain sequence over public images [B, C, H, W].

    By name, e.g. "3.mean": [C, 1, 1] before a convolution; [C, H, W] before a Flatten and a Linear; [F] before any
    other Linear. The images must be on the model's device.
    """
    flattened = _layers_after_flatten(model)
    places = {flattened.get(name, name): name for name in _weighted_layers(model)}
    found: dict[str, Tensor] = {}
    *_, last = places
    for batch in pictures.split(IMAGE_BATCH_SIZE):
        x = batch
        for name, child in model.named_children():
            if name in places:
                key, total = places[name] + MEAN_SUFFIX, x.double().sum(dim=0) / len(pictures)
                if isinstance(child, nn.Conv2d):
                    total = total.mean(dim=(1, 2), keepdim=True)
                found[key] = found[key] + total if key in found else total
                if name == last:  # its output is not needed, and it may be on another device
                    break
            x = child(x)
    return {name: value.float() for name, value in found.items()}


@torch.no_grad()
def compute_whitening_matrices(model: nn.Sequential, pictures: Tensor) -> dict[str, Tensor]:
    """The whitening matrix of the input of every layer of a plain sequence except the first and the last: "3.mix".

    M = (covariance over public images [B, C, H, W])^-1/2, times a factor that keeps the sum of all
    variances: [C, C] over channels before a convolution, [F, F] before a Linear. Whitening the inputs of the first
    and the last layer brought no gain: the first has few channels, the last has features trained to be separable.
    """
    layers = list(_weighted_layers(model))
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    centre = compute_input_means(model, pictures)
    for batch in pictures.split(IMAGE_BATCH_SIZE):
        x = batch
        for name, child in model.named_children():
            if name in layers[1:-1]:
                flat = x.permute(0, 2, 3, 1).flatten(0, 2) if isinstance(child, nn.Conv2d) else x
                flat = flat.double() - centre[name + MEAN_SUFFIX].to(flat.device).double().flatten()
                sums[name] = sums.get(name, 0) + flat.T @ flat
                counts[name] = counts.get(name, 0) + len(flat)
            if name == layers[-1]:
                break
            x = child(x)
    return {name + MIX_SUFFIX: compute_whitening_matrix(sums[name] / counts[name]) for name in sums}


def compute_buffer_digest(model: nn.Module) -> str:
    """Digest of a model's buffers and frozen parameters, which affect its outputs but do not train; "" if none."""
    held = [*model.named_buffers(), *((n, p) for n, p in model.named_parameters() if not p.requires_grad)]
    state = hashlib.sha256()
    for name, value in held:
        state.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        state.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest() if held else ""


def _weighted_layers(model: nn.Sequential) -> Iterator[str]:
    """Names of the layers with weights, in order."""
    for name, child in model.named_children():
        if type(child) in (nn.Linear, nn.Conv2d):  # a subclass may compute something else
            yield name


def _layers_after_flatten(model: nn.Sequential) -> dict[str, str]:
    """Linear layers directly after a full Flatten -> the name of that Flatten."""
    pairs = pairwise(model.named_children())
    return {
        name: before
        for (before, flat), (name, layer) in pairs
        if type(flat) is nn.Flatten and (flat.start_dim, flat.end_dim) == (1, -1) and type(layer) is nn.Linear
    }


def _multiply_mean(layer: Any, weight: Tensor, mean: Tensor) -> Tensor:
    """W m: a layer's weights times the mean of its input."""
    weight, mean = weight.double(), mean.to(weight.device).double()  # a GPU may round products of float32
    if not isinstance(layer, nn.Conv2d):
        return weight @ mean.flatten()
    constant = mean.expand(mean.shape[0], *layer.kernel_size)[None]
    return F.conv2d(constant, weight, groups=layer.groups).flatten()


def _multiply_inputs(layer: Any, weight: Tensor, mix: Tensor) -> Tensor:
    """Weights times a matrix on the input side: over all features, or over the channels of each pixel."""
    if not isinstance(layer, nn.Conv2d):
        return weight.double() @ mix.to(weight.device)
    return torch.einsum("ocij,cd->odij", weight.double(), mix.to(weight.device))


def _check_can_be_centred(model: nn.Module, facts: Mapping[str, Tensor]) -> nn.Sequential:
    """The model; raises ModelError unless it can be centred and every layer has a mean of the right size."""
    if type(model) is not nn.Sequential:
        raise ModelError(f"model.coordinates needs a torch.nn.Sequential, not {type(model).__name__}; set it to plain.")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) != len(dict(model.named_parameters())):
        raise ModelError("model.coordinates needs parameters that belong to one layer each; set it to plain.")
    layers = list(_weighted_layers(model))
    others = sorted({name.rpartition(".")[0] for name in names} - set(layers))
    if others or not layers:
        what = f"layer {others[0]!r} is neither" if others else "it has none"
        raise ModelError(f"model.coordinates is for sequences of Linear and Conv2d, but {what}; set it to plain.")
    for name in layers:
        layer = model.get_submodule(name)
        given = facts.get(name + MEAN_SUFFIX)
        if given is None:
            raise ModelError(
                f"model.coordinates needs the mean input of layer {name!r}, but there is no {name + MEAN_SUFFIX}."
            )
        if layer.bias is None:
            raise ModelError(f"model.coordinates needs a bias in layer {name!r}, which takes the mean up; give it one.")
        if isinstance(layer, nn.Conv2d):
            if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
                raise ModelError(f"model.coordinates needs layer {name!r} to be padded with zeros, by numbers.")
            fits = given.shape == (layer.in_channels, 1, 1)
        else:
            assert isinstance(layer, nn.Linear)
            whole = given.dim() == 3 and name in _layers_after_flatten(model)
            fits = (whole or given.dim() == 1) and given.numel() == layer.in_features
        if not fits or not torch.isfinite(given).all():
            seen = "x".join(map(str, given.shape))
            raise ModelError(
                f"model.coordinates: {name + MEAN_SUFFIX} ({seen}) is not a finite mean of what {name!r} sees."
            )
        _check_whitening_matrix(name, layer, facts.get(name + MIX_SUFFIX))
    return model


def _check_whitening_matrix(name: str, layer: Any, mix: Tensor | None) -> None:
    if mix is None:
        return
    inputs = layer.in_channels if isinstance(layer, nn.Conv2d) else layer.in_features
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        raise ModelError(f"model.coordinates = whitened cannot mix the channels of layer {name!r}, which has groups.")
    square = mix.shape == (inputs, inputs) and bool(torch.isfinite(mix).all())
    if not square or not torch.allclose(mix, mix.T, rtol=1e-3, atol=1e-6 * float(mix.abs().max())):
        seen = "x".join(map(str, mix.shape))
        raise ModelError(
            f"model.coordinates = whitened: {name + MIX_SUFFIX} ({seen}) is not a symmetric matrix of the "
            f"{inputs} inputs of "
            f"{name!r}."
        )
    sizes = torch.linalg.eigvalsh(mix.double()).abs()
    if float(sizes.min()) <= 1e-9 * float(sizes.max()):
        raise ModelError(
            f"model.coordinates = whitened: {name + MIX_SUFFIX} has no inverse, so {name!r} would lose inputs."
        )
