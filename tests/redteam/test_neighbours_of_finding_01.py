"""Neighbours of finding 1: what decides a release and was not in the run's id, so that two runs shared their noise.

The model's layers, its frozen weights and buffers, the arithmetic, the public seed (who is invited), and records that
were replaced by `Dataset.with_changes`, which kept the old fingerprint.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from fulcrum.data import Dataset
from fulcrum.errors import RunError
from fulcrum.runs import execute, prepare
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate
from support.federations import CLASSES, FEATURES, toy_data, toy_model, toy_settings


def network(activation: nn.Module) -> nn.Module:
    model = toy_model()
    model[1] = activation  # type: ignore[operator]
    return model


class Own(nn.Module):
    """A model whose forward follows an attribute."""

    def __init__(self, squared: bool) -> None:
        super().__init__()
        self.layer, self.squared = nn.Linear(FEATURES, CLASSES), squared
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.square() if self.squared else x)
        return out


def frozen(size: float) -> nn.Module:
    model = network(nn.Tanh())
    first = next(model.parameters())
    with torch.no_grad():
        first.mul_(size)
    first.requires_grad_(False)
    return model


def run_id(model: nn.Module | None = None, data: Dataset | None = None, **sections: dict[str, object]) -> str:
    settings = toy_settings(**{"privacy": {"sigma": 5.0, "seed": 9}, **sections})  # type: ignore[arg-type]
    name = prepare(settings, data or toy_data(), model or toy_model()).problem.randomness.run  # type: ignore[attr-defined]
    return str(name)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (network(nn.ReLU()), network(nn.Tanh())),
        (network(nn.LeakyReLU(0.1)), network(nn.LeakyReLU(0.2))),
        (Own(True), Own(False)),
        (frozen(1.0), frozen(2.0)),
    ],
    ids=("activation", "attribute", "own", "frozen"),
)
def test_other_models_with_the_same_weights_have_other_streams(one: nn.Module, other: nn.Module) -> None:
    assert run_id(one) == run_id(one) != run_id(other)


def test_the_difference_of_two_models_releases_keeps_its_noise() -> None:
    """The attack: the same weights and seed, another activation; without the cure the difference had no noise left."""
    settings = toy_settings(privacy={"sigma": 5.0}, run={"engine": "reference"})
    federations = [prepare(settings, toy_data(), network(each)) for each in (nn.ReLU(), nn.Tanh())]
    start = federations[0].problem.layout.flatten(federations[0].problem.model).detach()
    one, other = (next(federate(each))[0].params for each in federations)
    assert float((one - other).norm()) > 0.5 * float((one - start).norm())


def test_the_public_seed_and_the_arithmetic_are_in_the_id() -> None:
    assert run_id(toy_model()) != run_id(toy_model(), run={"seed": 1})  # it invites other parties
    assert run_id() != run_id(privacy={"sigma": 5.0, "seed": 9, "arithmetic": "proven"})  # it scales sums by 1 - eta


def test_changed_records_have_another_fingerprint() -> None:
    data = toy_data()
    labels = data.y.clone()
    labels[0] = (labels[0] + 1) % CLASSES
    changed = data.with_changes(y=labels)
    assert changed.fingerprint != data.fingerprint == data.with_changes(y=data.y).fingerprint
    assert run_id(data=data) != run_id(data=changed)


def test_secure_noise_does_not_serve_other_settings_under_the_same_run() -> None:
    federation = prepare(toy_settings(privacy={"sigma": 1.0, "randomness": "secure"}), toy_data())

    def play(each: Federation) -> None:
        execute(each, facts={"id": "one"})

    play(federation)
    changed = dataclasses.replace(federation, settings=federation.settings.replace(clip={"C0": 2.0}))
    with pytest.raises(RunError, match="prepare it again"):
        play(changed)
