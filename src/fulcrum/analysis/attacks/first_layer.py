"""Analytic inversion: the gradient of a linear first layer holds its inputs.

For one record, row j of the layer's gradient is delta_j x and its bias's is delta_j: their ratio is the record.

    ratio     the weights as agreed: exact for one record, mixtures for several
    imprint   engineered weights: every row measures the same brightness, with biases at its quantiles, and the next
              layer treats all rows alike. Rows j and j + 1 then differ by the records between two quantiles only, and
              each difference is one record wherever one record lies there (after Fowl et al. 2022; Boenisch et al.
              2023). The server sends these weights in place of the agreed ones.

Where there is noise, its size is public: `Candidates.shrink` moves each estimate towards the mean of public images, as
the best linear estimate does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulcrum.analysis.attacks.server_view import ServerView
from fulcrum.errors import ModelError
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import torch_generator


def find_first_linear(model: nn.Module) -> str:
    """The name of the first layer with parameters; ModelError where it is not linear with a bias."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        if isinstance(module, nn.Linear) and module.bias is not None:
            return str(name)
        raise ModelError(
            f"the analytic attack reads a linear first layer, and {name or 'the model'} is {type(module).__name__}; "
            "use model.name = mlp or linear."
        )
    raise ModelError("the analytic attack reads a linear first layer, and the model has no parameters.")


@dataclass(frozen=True, eq=False)
class Candidates:
    """Images x [m, ...] that records may have been, and the variance of the noise in each one's pixels, [m]."""

    x: Tensor
    noise: Tensor

    def shrink(self, public: Tensor) -> Tensor:
        """Images [m, ...] moved towards the mean of public records [n, ...] by how much of each pixel is noise."""
        mean, spread = public.mean(dim=0), public.var(dim=0)
        noise = self.noise.view(-1, *[1] * mean.dim())
        return mean + (self.x - mean) * (spread + 1e-12) / (spread + 1e-12 + noise)


def invert_by_ratio(view: ServerView) -> Candidates:
    """The least-squares ratio of all rows; for several records, also the rows of largest bias."""
    weight, bias = _read_first_layer(view)
    noise = _find_noise(view)
    power = bias.square().sum().clamp_min(1e-20)
    found = [(bias[:, None] * weight).sum(dim=0) / power]
    spread = [noise / _take_noise_off(power, len(bias) * noise)]
    if view.count > 1:
        rows = bias.abs().argsort(descending=True)[: 2 * view.count]
        chosen = _away_from_zero(bias[rows])
        found += list(weight[rows] / chosen[:, None])
        spread += list(noise / _take_noise_off(chosen.square(), noise))
    return Candidates(torch.stack(found).view(-1, *view.x.shape[1:]), torch.stack(spread))


def invert_by_imprint(view: ServerView) -> Candidates:
    """Differences of neighbouring rows, those of the largest bias first."""
    weight, bias = _read_first_layer(view)
    weight = torch.cat([weight[:-1] - weight[1:], weight[-1:]])  # records between two quantiles; above the last
    bias = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
    rows = bias.abs().argsort(descending=True)[: max(1, 2 * view.count)]
    chosen = _away_from_zero(bias[rows])
    images = (weight[rows] / chosen[:, None]).view(-1, *view.x.shape[1:])
    noise = 2 * _find_noise(view)
    return Candidates(images, noise / _take_noise_off(chosen.square(), noise))


def make_imprint_weights(model: nn.Module, layout: ParameterLayout, public: Tensor, seed: int = 0) -> Tensor:
    """Weights [d] for an mlp with one hidden layer of ReLUs. public [n, ...]: records that show usual brightness."""
    first = find_first_linear(model)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if len(linears) != 2 or not any(isinstance(module, nn.ReLU) for module in model.modules()):
        raise ModelError("engineered weights are for an mlp with one hidden layer of ReLUs: model.hidden = [64].")
    parts = {name: value.clone() for name, value in layout.unflatten(layout.flatten(model)).items()}
    rows, width = parts[f"{first}.weight"].shape
    brightness = public.flatten(1).mean(dim=1)
    levels = torch.quantile(brightness, torch.arange(rows, dtype=brightness.dtype) / rows)
    parts[f"{first}.weight"][:] = 1.0 / width
    parts[f"{first}.bias"][:] = -levels
    head = torch.randn(parts[f"{linears[1]}.bias"].shape, generator=torch_generator(seed, "attack", "imprint"))
    parts[f"{linears[1]}.weight"][:] = head[:, None] / rows**0.5
    parts[f"{linears[1]}.bias"][:] = 0.0
    return torch.cat([parts[name].flatten() for name in layout.names])


def _read_first_layer(view: ServerView) -> tuple[Tensor, Tensor]:
    """The released gradient of the first layer: weight [m, k], bias [m]."""
    first, parts = find_first_linear(view.model), view.layout.unflatten(view.total)
    return parts[f"{first}.weight"], parts[f"{first}.bias"]


def _find_noise(view: ServerView) -> float:
    """Variance of the noise in each coordinate of the release."""
    return (view.sigma * view.C) ** 2 if view.sigma else 0.0


def _take_noise_off(power: Tensor, noise: float) -> Tensor:
    """The power of a signal from that of signal and noise; a small part of it where noise could be all."""
    return torch.maximum(power - noise, 1e-3 * power)


def _away_from_zero(values: Tensor) -> Tensor:
    return torch.where(values.abs() < 1e-12, torch.full_like(values, 1e-12), values)


ANALYTIC: dict[str, Callable[[ServerView], Candidates]] = {"ratio": invert_by_ratio, "imprint": invert_by_imprint}
