"""Weights to start from: painted pictures, the lesson, and what a wrong file is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fulcrum import models
from fulcrum.cli import main
from fulcrum.data import from_arrays
from fulcrum.data import synthetic_images as paint
from fulcrum.errors import ModelError
from fulcrum.models import pretrain as priors
from fulcrum.models.pretrain import learn
from fulcrum.runs import prepare
from fulcrum.settings import schema as config
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import make_model_facts

SHAPES = {"mnist-cnn": (1, 28, 28), "cifar-cnn": (3, 32, 32)}


def _pictures(kinds: list[int], channels: int = 1, side: int = 28, seed: int = 0) -> torch.Tensor:
    recipes = paint.sample_recipes(20, channels, torch.Generator().manual_seed(7))
    return paint.render_images(recipes, torch.tensor(kinds), side, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32)])
def test_pictures_are_in_range_repeatable_and_never_twice_the_same(channels: int, side: int) -> None:
    once = _pictures([3, 3, 5], channels, side)
    assert once.shape == (3, channels, side, side)
    assert float(once.min()) >= 0
    assert float(once.max()) <= 1
    assert torch.equal(once, _pictures([3, 3, 5], channels, side))
    assert not torch.equal(once[0], once[1]), "two pictures of one kind differ"


def test_pictures_of_a_kind_are_nearer_to_each_other_than_to_other_kinds() -> None:
    kinds = list(range(20))
    one, other = _pictures(kinds, seed=1).flatten(1), _pictures(kinds, seed=2).flatten(1)
    far = torch.cdist(one, other)
    own, strangers = far.diagonal().mean(), (far.sum() - far.diagonal().sum()) / (20 * 19)
    assert own < 0.9 * strangers
    mixed = torch.cdist(one, other[torch.arange(20).roll(1)])
    assert mixed.diagonal().mean() > 0.9 * strangers, "which a wrong pairing would not show"


def test_a_texture_falls_off_with_frequency_as_asked() -> None:
    generator = torch.Generator().manual_seed(0)
    steep, flat = (paint.sample_textures(torch.full((64,), s), torch.zeros(64), 1, 32, generator) for s in (2.0, 0.0))

    def fine(texture: torch.Tensor) -> float:
        power = torch.fft.rfft2(texture).abs().square().mean(dim=(0, 1))
        return float(power[8:24, 8:].sum() / power.sum())

    assert fine(steep) < 0.05 < 0.2 < fine(flat)


@pytest.mark.slow
def test_a_short_lesson_teaches_something_and_leaves_the_last_layer_alone() -> None:
    model = models.build_model(config.Model(name="mnist-cnn"), (1, 28, 28), 10, 0)
    assert isinstance(model, nn.Sequential)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lesson = learn.PretrainSettings(kinds=4, pool=600, steps=80, batch=64, lr=3e-3, smoothing=0.0)
    global_state = torch.get_rng_state()
    right = learn.pretrain_model(model, (1, 28, 28), lesson, torch.device("cpu"), lambda line: None)
    assert torch.equal(torch.get_rng_state(), global_state), "no global generator is moved"
    assert right > 0.5, "four kinds by chance are 0.25"
    after = model.state_dict()
    assert torch.equal(after["9.weight"], before["9.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])
    assert set(learn.get_trunk_weights(model)) == set(before) - {"9.weight", "9.bias"}


@pytest.mark.parametrize("name", SHAPES)
def test_rescaling_changes_the_size_of_the_features_and_nothing_else(name: str) -> None:
    model = models.build_model(config.Model(name=name), SHAPES[name], 10, 0)
    assert isinstance(model, nn.Sequential)
    x = torch.rand(4, *SHAPES[name], generator=torch.Generator().manual_seed(0))
    body = model[:-1]
    before = body(x).detach().clone()
    learn.rescale_weights(model, 1.5)
    layers = sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in model) - 1
    torch.testing.assert_close(body(x).detach(), 1.5**layers * before)


@pytest.mark.parametrize("activation", ["relu", "tempered"])
@pytest.mark.parametrize("name", SHAPES)
def test_painted_weights_come_along_and_heads_stay_random(name: str, activation: str) -> None:
    def started(seed: int, init: str) -> dict[str, torch.Tensor]:
        return models.build_model(
            config.Model(name=name, activation=activation, init=init), SHAPES[name], 10, seed
        ).state_dict()

    painted, other, plain = started(0, "synthetic"), started(1, "synthetic"), started(0, "random")
    *body, weight, bias = painted
    for key in body:
        assert torch.equal(painted[key], other[key])
        assert not torch.equal(painted[key], plain[key])
    for key in (weight, bias):
        assert torch.equal(painted[key], plain[key])
        assert not torch.equal(painted[key], other[key])


def test_weights_come_back_from_both_kinds_of_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = models.build_model(config.Model(name="linear"), (1, 4, 4), 3, 5)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    priors.save_weights(tmp_path / "w.npz", weights)
    save_file(weights, tmp_path / "w.safetensors")
    for name, close in (("w.npz", 1e-3), ("w.safetensors", 0.0)):
        again = models.build_model(config.Model(name="linear", init=str(tmp_path / name)), (1, 4, 4), 3, 6)
        for key, value in again.named_parameters():
            torch.testing.assert_close(value.detach(), weights[key], rtol=close, atol=close)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"1.weight": np.zeros((3, 15))}, "1.weight is 3x15, but the model's is 3x16"),
        ({"body.weight": np.zeros((3, 16))}, "'body.weight', which the model has not"),
        ({"1.bias": np.array([np.nan, 0.0, 0.0])}, "not finite"),
        ({}, "holds no weights"),
        ({"1.bias": np.array([{}], dtype=object)}, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "w.npz", **arrays)
    with pytest.raises(ModelError, match=r"model\.init") as caught:
        models.build_model(config.Model(name="linear", init=str(tmp_path / "w.npz")), (1, 4, 4), 3, 0)
    assert words in str(caught.value)


@pytest.mark.parametrize("init", ["nowhere.npz", "fancy", "synthetic"])
def test_weights_that_do_not_exist_are_named(init: str) -> None:
    with pytest.raises(ModelError, match=r"model\.init"):
        models.build_model(config.Model(name="linear", init=init), (1, 4, 4), 3, 0)


@pytest.mark.parametrize(("init", "larger"), [("random", False), ("synthetic", True)])
def test_a_rule_is_told_when_weights_are_larger_than_random_ones(init: str, larger: bool) -> None:
    data = from_arrays(*(torch.zeros(40, 1, 28, 28), torch.arange(40) % 10) * 2, public=True)
    settings = Settings().replace(
        privacy={"sigma": 1.0}, model={"init": init}, data={"parties": 2, "partition": "iid"}, train={"server_lr": 0.5}
    )
    shape = make_model_facts(prepare(settings, data))
    assert (shape.larger > 2) == larger
    assert (shape.larger == 1) == (not larger)
    assert shape.first == 0.5
    assert shape.start == pytest.approx((90 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("out", "words"), [("gone/x.npz", "does not exist"), ("there.npz", "exists"), ("x.txt", ".npz")]
)
def test_a_place_that_cannot_be_written_is_refused_before_the_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str, words: str
) -> None:
    (tmp_path / "there.npz").write_bytes(b"mine")
    monkeypatch.setattr(learn, "pretrain_model", lambda *_: pytest.fail("it was taught"))
    assert main(["prior", "mnist-cnn", "--out", str(tmp_path / out)]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "there.npz").read_bytes() == b"mine"
