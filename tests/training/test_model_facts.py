"""What a rule is told of the initial weights: pretrained ones are larger than random ones; embeddings do not count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulcrum.models.layout import ParameterLayout
from fulcrum.training.federation import PRETRAINED_NORM_RATIO, measure_weights


def measure(model: nn.Module) -> float:
    return measure_weights(ParameterLayout.of(model), model, ())


def test_random_weights_are_as_large_as_random_weights():
    torch.manual_seed(0)
    assert measure(nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20))) == pytest.approx(1.0, abs=0.15)
    with_words = nn.Sequential(nn.Embedding(500, 30), nn.Flatten(), nn.Linear(300, 20))
    assert measure(with_words) < PRETRAINED_NORM_RATIO
    assert nn.Embedding(500, 30).weight.norm() > 50  # which would make it look pretrained
    assert measure(nn.Embedding(5, 3)) < PRETRAINED_NORM_RATIO


def test_trained_weights_are_larger():
    torch.manual_seed(0)
    last = nn.Linear(300, 20)
    model = nn.Sequential(nn.Embedding(500, 30), nn.Flatten(), last)
    with torch.no_grad():
        last.weight.mul_(3.0)
    assert measure(model) > PRETRAINED_NORM_RATIO
