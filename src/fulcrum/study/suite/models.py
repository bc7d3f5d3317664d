"""The suite's own models: model.name = "fulcrum.study.suite.models:resnet". All are small."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fulcrum.study.suite.sources import REVIEW_WORDS, TOPIC_WORDS

VOCABULARIES = {24: TOPIC_WORDS, 16: REVIEW_WORDS}
"""Words by the length of a sentence, which tells the two sources apart."""


def small_cnn(input_shape: tuple[int, ...], classes: int, activation: Callable[[], nn.Module]) -> nn.Module:
    """Two convolutions and a linear layer, for pictures of any size."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        activation(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        activation(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a 1x1 convolution beside them where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(4, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(4, outside)
        self.beside = nn.Conv2d(inside, outside, 1, stride=stride) if inside != outside or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inner)) + self.beside(x))


def resnet(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small ResNet with GroupNorm: about 9,000 parameters."""
    stride = 2 if input_shape[1] > 8 else 1
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        ResidualBlock(8, 8, 1),
        ResidualBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def layer_norm_mlp(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two hidden layers with LayerNorm."""
    width = math.prod(input_shape)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(width, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, classes),
    )


class MeanOfWords(nn.Module):
    """Embedding, mean over the words of a sentence, and an MLP."""

    def __init__(self, words: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.hidden = nn.Linear(width, 32)
        self.out = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        present = (x != 0).unsqueeze(-1)
        mean = (self.embedding(x) * present).sum(dim=1) / present.sum(dim=1).clamp_min(1)
        return torch.as_tensor(self.out(torch.relu(self.hidden(mean))))


def mean_of_words(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Embedding + mean + MLP."""
    return MeanOfWords(VOCABULARIES[input_shape[0]], classes)


class Attention(nn.Module):
    """Embedding with positions, one attention head with LayerNorm, mean, linear."""

    def __init__(self, words: int, length: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, classes)
        self.length, self.width = length, width

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.length, device=x.device).expand(x.shape[0], -1)
        inputs = self.embedding(x) + self.position(places)
        normed = self.norm(inputs)
        scores = self.query(normed) @ self.key(normed).transpose(1, 2) / self.width**0.5
        mixed = inputs + torch.softmax(scores, dim=-1) @ self.value(normed)
        return torch.as_tensor(self.out(mixed.mean(dim=1)))


def attention(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One block of attention over the words of a sentence."""
    return Attention(VOCABULARIES[input_shape[0]], input_shape[0], classes)
