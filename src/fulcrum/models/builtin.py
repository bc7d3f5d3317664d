"""The built-in models: the paper's CNNs, a CNN for scattering features, MLP, linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fulcrum.errors import ModelError
from fulcrum.settings import schema as config

InputShape = tuple[int, ...]


# --- the built-in models --------------------------------------------------------------------------


class TemperedSigmoid(nn.Module):
    """The tempered sigmoid: scale * sigmoid(temperature * x) - offset. With 2, 2, 1 it is tanh."""

    def __init__(self, scale: float, temperature: float, offset: float) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, temperature={self.temperature:g}, offset={self.offset:g}"


ACTIVATIONS: dict[str, Callable[[config.Model], nn.Module]] = {
    "relu": lambda settings: nn.ReLU(),
    "tanh": lambda settings: nn.Tanh(),
    "tempered": lambda settings: TemperedSigmoid(
        settings.temper_scale, settings.temper_temperature, settings.temper_offset
    ),
}

ActivationFactory = Callable[[], nn.Module]


def _check_image_shape(name: str, shape: InputShape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        seen = "x".join(map(str, shape))
        raise ModelError(
            f"model.name = {name!r} needs images (channels, height, width) of at least {smallest}x{smallest} pixels, "
            f"but an example is {seen}; use linear, mlp or your own package.module:factory."
        )
    return shape[0], shape[1], shape[2]


def build_mnist_cnn(settings: config.Model, shape: InputShape, classes: int, act: ActivationFactory) -> nn.Module:
    """The paper's CNN for MNIST and Fashion-MNIST: 26,010 parameters on 1x28x28 and 10 classes."""
    channels, *sides = _check_image_shape("mnist-cnn", shape, 14)
    height, width = (((side + 6 - 8) // 2 + 1 - 1 - 4) // 2 + 1 - 1 for side in sides)
    layers = [nn.Conv2d(channels, 16, 8, stride=2, padding=3), act(), nn.MaxPool2d(2, stride=1)]
    layers += [nn.Conv2d(16, 32, 4, stride=2), act(), nn.MaxPool2d(2, stride=1), nn.Flatten()]
    layers += [nn.Linear(32 * height * width, 32), act(), nn.Linear(32, classes)]
    return nn.Sequential(*layers)


def build_cifar_cnn(settings: config.Model, shape: InputShape, classes: int, act: ActivationFactory) -> nn.Module:
    """The paper's CNN for CIFAR-10: four 3x3 convolutions, average pooling, one linear layer."""
    channels, _, _ = _check_image_shape("cifar-cnn", shape, 8)
    layers: list[nn.Module] = []
    for filters in (32, 64, 64):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), act(), nn.AvgPool2d(2)]
        channels = filters
    layers += [nn.Conv2d(channels, 128, 3, padding=1), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, classes))


def build_scatter_cnn(settings: config.Model, shape: InputShape, classes: int, act: ActivationFactory) -> nn.Module:
    """Two 3x3 convolutions of 64 filters and one linear layer, for scattering features (after Tramer and Boneh 2021).

    187,210 parameters on CIFAR-10's 243x8x8 features and 10 classes, 89,418 on MNIST's 81x7x7.
    """
    channels, height, width = _check_image_shape("scatter-cnn", shape, 2)
    layers = [nn.Conv2d(channels, 64, 3, padding=1), act(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), act()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (height // 2) * (width // 2), classes))


def build_mlp(settings: config.Model, shape: InputShape, classes: int, act: ActivationFactory) -> nn.Module:
    """Fully connected layers of the widths in `hidden`."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for hidden in settings.hidden:
        layers += [nn.Linear(width, hidden), act()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, classes))


def build_linear(settings: config.Model, shape: InputShape, classes: int, act: ActivationFactory) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


BUILTIN_MODELS: dict[str, Callable[[config.Model, InputShape, int, ActivationFactory], nn.Module]] = {
    "linear": build_linear,
    "mlp": build_mlp,
    "mnist-cnn": build_mnist_cnn,
    "cifar-cnn": build_cifar_cnn,
    "scatter-cnn": build_scatter_cnn,
}

AUTO_MODELS: Mapping[InputShape, str] = {(1, 28, 28): "mnist-cnn", (3, 32, 32): "cifar-cnn"}
"""The model that "auto" chooses by the shape of an example; "linear" for any other shape."""


def initialise_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Sets all parameters as PyTorch does by default.

    Linear and Conv layers: uniform within 1 / sqrt(fan in). Embeddings: standard normal, 0 for the padding token. Norm
    layers, whose weight is a vector: weight 1, bias 0.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        with torch.no_grad():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                weight.normal_(generator=generator)
                if module.padding_idx is not None:
                    weight[module.padding_idx].zero_()
                continue
            if weight.dim() < 2:
                for name, parameter in module.named_parameters(recurse=False):
                    parameter.fill_(1.0 if name == "weight" else 0.0)
                continue
            bound = 1.0 / math.sqrt(math.prod(weight.shape[1:]))
            for parameter in module.parameters(recurse=False):
                parameter.uniform_(-bound, bound, generator=generator)
