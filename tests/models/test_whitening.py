"""Centred coordinates: the same function, gradients of the moved parameters, in every engine; and back to plain."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fulcrum import models
from fulcrum.cli import main
from fulcrum.clipping.moo import WHITENED_NOISE_FACTOR, init_balanced_moo
from fulcrum.data import Dataset, from_arrays
from fulcrum.data.features.covariance import compute_whitening_matrix
from fulcrum.data.tasks import make_task
from fulcrum.engines.batched import run_many
from fulcrum.engines.batched.runs import group_stackable_runs
from fulcrum.engines.parallel import ParallelEngine
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import StackedEngine
from fulcrum.errors import ConfigError, ModelError, RunError
from fulcrum.gradients import GradientRecorder, record_gradients
from fulcrum.models import pretrain as priors
from fulcrum.models.builtin import initialise_weights
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.pretrain import learn
from fulcrum.models.whitening import (
    CentringLayer,
    centre_model,
    compute_buffer_digest,
    compute_input_means,
    compute_whitening_matrices,
    fold_centring,
    whiten_partially,
)
from fulcrum.rng import SeededRandomness
from fulcrum.runs import execute, prepare, resume, resume_prepared
from fulcrum.settings import schema as config
from fulcrum.settings.checks import check_settings
from fulcrum.settings.schema import Settings
from fulcrum.study.job import job_from_json
from fulcrum.training.federation import make_model_facts
from fulcrum.types import RoundResult
from support.federations import play, toy_problem
from support.rounds import assert_equal, images, request, stacked

TASK = make_task(config.TaskSettings(classes=3), [])

SHAPES = {"mnist-cnn": (1, 28, 28), "cifar-cnn": (3, 32, 32)}


def _net(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers)
    initialise_weights(model, torch.Generator().manual_seed(1))
    return model


def _built(name: str, shape: tuple[int, ...], **more: object) -> nn.Sequential:
    model = models.build_model(config.Model(name=name, **more), shape, 3, 0)  # type: ignore[arg-type]
    assert isinstance(model, nn.Sequential)
    return model


NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mnist-cnn": (lambda: _built("mnist-cnn", (1, 28, 28)), (1, 28, 28)),
    "tempered": (lambda: _built("mnist-cnn", (1, 28, 28), activation="tempered"), (1, 28, 28)),
    "cifar-cnn": (lambda: _built("cifar-cnn", (3, 12, 12)), (3, 12, 12)),
    "scatter-cnn": (lambda: _built("scatter-cnn", (4, 6, 7)), (4, 6, 7)),
    "mlp on images": (lambda: _built("mlp", (1, 4, 5), hidden=(7, 5)), (1, 4, 5)),
    "mlp on vectors": (lambda: _built("mlp", (8,), hidden=(7,), activation="tanh"), (8,)),
    "linear": (lambda: _built("linear", (2, 3, 4)), (2, 3, 4)),
    "odd": (
        lambda: _net(
            nn.Conv2d(2, 4, 3, stride=2, padding=(1, 3), dilation=2),
            nn.Conv2d(4, 5, (2, 3), padding=(0, 1)),
            nn.MaxPool2d(2, stride=1),
            nn.Sigmoid(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(5, 6),
            nn.Linear(6, 3),
        ),
        (2, 12, 13),
    ),
}


def _pair(name: str, mixed: bool, head: bool = True) -> tuple[nn.Sequential, nn.Sequential, torch.Tensor]:
    """A plain net, the same in centred or whitened coordinates, and inputs with a mean far from zero."""
    make, shape = NETS[name]
    plain = make()
    generator = torch.Generator().manual_seed(5)
    pictures, x = (1.0 + torch.randn(count, *shape, generator=generator) for count in (200, 6))
    facts = {**compute_input_means(plain, pictures), **(compute_whitening_matrices(plain, pictures) if mixed else {})}
    return plain, centre_model(plain, facts, head=head), x


def _moved(name: str, mixed: bool) -> nn.Sequential:
    return _pair(name, mixed)[1]


def _inner(model: nn.Sequential) -> int:
    """Layers between the first and the last."""
    return max(0, sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in model) - 2)


both = pytest.mark.parametrize("mixed", [False, True], ids=["centred", "whitened"])


# --- the same functions ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", NETS)
def test_the_function_and_the_names_of_the_parameters_stay(name: str, mixed: bool) -> None:
    plain, moved, x = _pair(name, mixed)
    torch.testing.assert_close(moved(x), plain(x), rtol=1e-3, atol=1e-4)
    assert sum(layer.mix is not None for layer in moved if isinstance(layer, CentringLayer)) == mixed * _inner(plain)
    assert [n for n, _ in moved.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert ParameterLayout.of(moved) == ParameterLayout.of(plain)
    layers = sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in plain)
    assert sum(isinstance(layer, CentringLayer) for layer in moved) == layers
    assert all(float(centre.mean.abs().max()) > 0 for centre in moved if isinstance(centre, CentringLayer))
    kept = _pair(name, mixed, head=False)[1]
    last = list(plain.state_dict())[-1]
    assert torch.equal(kept.state_dict()[last], plain.state_dict()[last]), "a head that was drawn keeps its bias"


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (8, 2, 3)])
def test_a_padded_border_is_that_of_zeros(kernel: int, stride: int, padding: int) -> None:
    """Also where the mean is not that of the data at all."""
    conv = _net(nn.Conv2d(3, 4, kernel, stride=stride, padding=padding))
    moved = centre_model(conv, {"0.mean": torch.tensor([0.5, -2.0, 1.0]).view(3, 1, 1)}, head=True)
    x = torch.rand(2, 3, 9, 10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(moved(x), conv(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(moved[1](x), conv(x)[:, :, : moved[1](x).shape[2], : moved[1](x).shape[3]], atol=1e-2)


@both
@pytest.mark.parametrize("name", NETS)
def test_any_weights_fold_back_into_the_plain_network(name: str, mixed: bool) -> None:
    plain, moved, x = _pair(name, mixed)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    wanted = moved(x)
    plain.load_state_dict(fold_centring(moved))
    torch.testing.assert_close(plain(x), wanted, rtol=1e-3, atol=1e-3)
    plain.load_state_dict(dict(moved.named_parameters()))  # the mean's part forgotten, and the mixing
    assert not torch.allclose(plain(x), wanted, rtol=1e-2, atol=1e-2)
    other = {n: value.detach() + 1 for n, value in moved.named_parameters()}
    for n, value in fold_centring(moved, other).items():
        assert value.shape == other[n].shape
    assert all(torch.equal(value, plain.state_dict()[n]) for n, value in fold_centring(plain).items())


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["book", "vmap"])
@both
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_the_plain_network_in_the_moved_parameters(name: str, mixed: bool, how: str) -> None:
    """By the chain rule from autograd on the plain network, whose weights are W = V M and biases b' - W m."""
    plain, moved, x = _pair(name, mixed)
    y = torch.arange(len(x)) % 3
    own = {n: value.detach().clone().requires_grad_() for n, value in moved.named_parameters()}
    rows = []
    for i in range(len(x)):
        back = dict(own)
        for place, centre in moved.named_children():
            if isinstance(centre, CentringLayer):
                layer = place.removeprefix("centre")
                weight = own[f"{layer}.weight"]
                if centre.mix is not None:
                    weight = torch.einsum("oc...,cd->od...", weight, centre.mix)
                    back[f"{layer}.weight"] = weight
                sums = weight.sum(dim=(2, 3)) if weight.dim() == 4 else weight
                back[f"{layer}.bias"] = own[f"{layer}.bias"] - sums @ centre.mean.flatten()
        loss = nn.functional.cross_entropy(torch.func.functional_call(plain, back, (x[i : i + 1],)), y[i : i + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(own.values()))]))
    layout = ParameterLayout.of(moved)
    tape = record_gradients(moved, layout, layout.flatten(moved), x, y, TASK, how)
    torch.testing.assert_close(tape.matrix(), torch.stack(rows), rtol=1e-3, atol=1e-5)
    ordinary = record_gradients(plain, layout, layout.flatten(plain), x, y, TASK, how).matrix()
    assert not torch.allclose(ordinary, torch.stack(rows), rtol=1e-2, atol=1e-3), "other coordinates, other gradients"


def test_the_input_is_not_written_over() -> None:
    for name, mixed in itertools.product(NETS, (False, True)):
        _, moved, x = _pair(name, mixed)
        before, layout = x.clone(), ParameterLayout.of(moved)
        record_gradients(moved, layout, layout.flatten(moved), x, torch.arange(len(x)) % 3, TASK, "book").norms()
        GradientRecorder(moved, layout, TASK).outputs(layout.flatten(moved), x)
        assert torch.equal(x, before)


# --- engines --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    ("steps", "limit", "native"), [(1, 0, False), (1, 0, True), (2, 0, False), (1, 3, False), (2, 5, True)]
)
@pytest.mark.every(4)
def test_the_stacked_engine_equals_the_reference(name: str, mixed: bool, steps: int, limit: int, native: bool) -> None:
    problem = toy_problem("fixed", images(*NETS[name][1]), 3, model=_moved(name, mixed))
    assert StackedEngine(problem).notes == (), "there is a hand-written program"
    wanted = request(problem, steps, sigma=0.0)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), stacked(problem, wanted, limit, native))


@pytest.mark.every(3)
@both
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_parallel_engine_equals_the_reference(name: str, mixed: bool, steps: int) -> None:
    problem = toy_problem("moo", images(*NETS[name][1]), 3, model=_moved(name, mixed))
    wanted = request(problem, steps)
    replies = list(ParallelEngine(dataclasses.replace(problem, workers=2)).run(wanted))
    assert_equal(list(ReferenceEngine(problem).run(wanted)), replies)


def test_activations_of_half_the_width_come_close() -> None:
    for name, mixed in itertools.product(("mnist-cnn", "cifar-cnn"), (False, True)):
        problem = toy_problem(
            "fixed", images(*NETS[name][1]), 3, randomness=SeededRandomness(4), model=_moved(name, mixed)
        )
        wanted = request(problem, 1, sigma=0.0)
        exact = stacked(problem, wanted)
        for native in (False, True):
            rough = stacked(dataclasses.replace(problem, precision="bf16"), wanted, native=native)
            for a, b in zip(exact, rough, strict=True):
                # whitening magnifies what little features vary by, and so what rounding does to them
                assert float((a.delta - b.delta).norm()) < (0.2 if mixed else 0.1) * float(a.delta.norm())


# --- several runs at once ---------------------------------------------------------------------------


def _settings(**changes: Any) -> Settings:
    settings = Settings().replace(
        privacy={"sigma": 0.5},
        data={"parties": 2, "partition": "iid", "min_examples": 1},
        train={"rounds": 2, "rate": 0.5, "lr": 0.1},
        model={"init": "synthetic", "coordinates": "centred"},
        clip={"rule": "fixed"},
        run={"device": "cpu", "engine": "reference"},
    )
    return settings.replace(**changes)


def _data(shape: tuple[int, ...], n: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x, x_test = (2 * torch.rand((count, *shape), generator=generator) - 1 for count in (n, 10))
    return from_arrays(x, torch.arange(n) % 10, x_test, torch.arange(10) % 10, public=True)


@pytest.mark.parametrize("coordinates", ["centred", "whitened"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.every(4)
def test_stacked_runs_equal_themselves_alone(name: str, steps: int, coordinates: str) -> None:
    data = _data(SHAPES[name])
    settings = _settings(train={"steps": steps}, model={"init": "synthetic", "coordinates": coordinates})
    feds = [prepare(settings.replace(run={"seed": s, "device": "cpu", "engine": "reference"}), data) for s in (0, 1)]
    assert len(group_stackable_runs(feds)) == 1
    rounds = list(run_many(feds))
    for r, federation in enumerate(feds):
        alone = play(federation)
        assert float(rounds[-1].loss[r]) == pytest.approx(alone[-1].loss, rel=1e-3)
        assert rounds[-1].averaged is not None
        torch.testing.assert_close(rounds[-1].averaged[r], alone[-1].averaged, rtol=1e-3, atol=1e-4)


def test_runs_with_other_means_are_not_mixed(tmp_path: Path) -> None:
    data, found = _data(SHAPES["mnist-cnn"]), priors.load_weights("synthetic", "mnist-cnn", "relu")
    priors.save_weights(tmp_path / "same.npz", found)
    priors.save_weights(tmp_path / "other.npz", {**found, "3.mean": found["3.mean"] + 1})
    inits = ["synthetic", str(tmp_path / "same.npz"), str(tmp_path / "other.npz")]
    feds = [prepare(_settings(model={"init": init, "coordinates": "centred"}), data) for init in inits]
    plain = prepare(_settings(model={"coordinates": "plain"}), data)
    assert group_stackable_runs([*feds, plain]) == [[0, 1], [2], [3]]
    assert compute_buffer_digest(plain.problem.model) == ""


# --- from settings to a run's folder ------------------------------------------------------------------


@pytest.mark.parametrize("coordinates", ["centred", "whitened"])
@pytest.mark.parametrize("activation", ["relu", "tempered"])
@pytest.mark.parametrize("name", SHAPES)
def test_painted_weights_have_means_and_compute_the_same_features(name: str, activation: str, coordinates: str) -> None:
    settings = config.Model(name=name, activation=activation, init="synthetic")
    plain, moved = (
        models.build_model(dataclasses.replace(settings, coordinates=c), SHAPES[name], 10, 0)
        for c in ("plain", coordinates)
    )
    assert isinstance(plain, nn.Sequential)
    assert isinstance(moved, nn.Sequential)
    x = _data(SHAPES[name]).x
    *_, mean = moved.buffers()
    torch.testing.assert_close(moved[:-1](x).flatten(1) + mean.flatten(), plain[:-1](x), rtol=1e-3, atol=1e-3)
    for own, drawn in zip(moved[-1].parameters(), plain[-1].parameters(), strict=True):
        assert torch.equal(own, drawn), "the head is the seed's"
    layers = [n for n, layer in plain.named_children() if isinstance(layer, nn.Linear | nn.Conv2d)]
    facts = priors.split_input_statistics(plain, priors.load_weights("synthetic", name, activation))[1]
    assert set(facts) == {f"{n}.mean" for n in layers} | {f"{n}.mix" for n in layers[1:-1]}


def _covariance(size: int = 6) -> torch.Tensor:
    rows = torch.randn(50, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scaled = rows * torch.logspace(0, 1.5, size, dtype=torch.float64)
    return scaled.T @ scaled / len(rows)


@pytest.mark.parametrize("power", [0.5, 0.375, 0.1])
def test_part_of_the_way_to_whitened(power: float) -> None:
    model = _net(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    cov = _covariance()
    facts = {
        "0.mean": torch.zeros(5),
        "2.mean": torch.zeros(6),
        "4.mean": torch.zeros(4),
        "2.mix": compute_whitening_matrix(cov),
    }
    found = whiten_partially(model, facts, power)
    torch.testing.assert_close(found["2.mix"], compute_whitening_matrix(cov, power), rtol=1e-3, atol=1e-4)
    assert torch.allclose(found["2.mix"], compute_whitening_matrix(cov), rtol=1e-2) == (power == 0.5)
    assert {name: found[name] for name in found if name.endswith("mean")}.keys() == facts.keys() - {"2.mix"}


def test_half_whitened_networks_compute_the_same_and_are_told_apart() -> None:
    settings = config.Model(name="cifar-cnn", init="synthetic", coordinates="whitened")
    x = _data(SHAPES["cifar-cnn"]).x
    nets = [
        models.build_model(dataclasses.replace(settings, whiten=w), SHAPES["cifar-cnn"], 10, 0) for w in (0.5, 0.25)
    ]
    torch.testing.assert_close(nets[0](x), nets[1](x), rtol=1e-3, atol=1e-3)
    assert compute_buffer_digest(nets[0]) != compute_buffer_digest(nets[1])
    inner = [net.get_parameter("3.weight") for net in nets]
    assert not torch.allclose(inner[0], inner[1], rtol=0.05)


@pytest.mark.parametrize("value", [0.0, -0.1, 0.51, float("nan")])
def test_how_far_to_whiten_has_bounds(value: float) -> None:
    with pytest.raises(ConfigError, match=r"model\.whiten .* greater than 0 and at most 0\.5"):
        check_settings(Settings().replace(model={"whiten": value}))
    check_settings(Settings().replace(model={"whiten": 0.5}))


def test_means_are_those_of_the_inputs() -> None:
    model = models.build_model(config.Model(name="mnist-cnn", init="synthetic"), SHAPES["mnist-cnn"], 10, 0)
    assert isinstance(model, nn.Sequential)
    pictures = torch.rand(300, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    found = compute_input_means(model, pictures)
    torch.testing.assert_close(found["0.mean"], pictures.mean().view(1, 1, 1))
    torch.testing.assert_close(found["3.mean"], model[:3](pictures).mean(dim=(0, 2, 3)).view(-1, 1, 1))
    torch.testing.assert_close(found["7.mean"], model[:6](pictures).mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["9.mean"], model[:9](pictures).mean(dim=0), rtol=1e-4, atol=1e-5)


def test_a_mix_whitens() -> None:
    model = _built("mnist-cnn", SHAPES["mnist-cnn"])
    pictures = 2 * torch.rand(2000, 1, 28, 28, generator=torch.Generator().manual_seed(0)) - 1
    mix = compute_whitening_matrices(model, pictures)["3.mix"]
    seen = model[:3](pictures).detach().permute(0, 2, 3, 1).flatten(0, 2).double()
    before, after = torch.cov(seen.T), torch.cov((seen @ mix.double()).T)
    spread = [float(v.max() / v.min()) for v in map(torch.linalg.eigvalsh, (before, after))]
    assert spread[0] > 2
    assert spread[1] < 1.1
    sums = [float(torch.trace(v)) for v in (before, after)]
    assert sums[1] == pytest.approx(sums[0], rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_the_means_that_come_along_are_those_of_painted_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of about such pictures: the lesson that made a file may differ from the default."""
    monkeypatch.setattr(learn, "NUM_EVALUATION_IMAGES", 300)
    kept = priors.load_weights("synthetic", name, "relu")

    def apart(init: str) -> list[float]:
        model = models.build_model(config.Model(name=name, init=init), SHAPES[name], 10, 0)
        assert isinstance(model, nn.Sequential)
        found = learn.compute_input_statistics(model, SHAPES[name], learn.PretrainSettings(), torch.device("cpu"))
        return [
            float((kept[n] - value).norm() / (kept[n].norm() + 0.5))
            for n, value in found.items()
            if n.endswith(".mean")
        ]

    assert max(apart("synthetic")) < 0.3
    assert max(apart("random")) > 0.6, "of another network they are not"


def test_a_rule_is_told_the_size_of_the_weights_not_of_the_means() -> None:
    data = _data(SHAPES["mnist-cnn"])
    plain, moved = (make_model_facts(prepare(_settings(model={"coordinates": c}), data)) for c in ("plain", "centred"))
    assert moved.larger == pytest.approx(plain.larger, rel=0.02)
    assert dataclasses.replace(moved, larger=plain.larger) == plain
    mixed = make_model_facts(prepare(_settings(model={"init": "synthetic", "coordinates": "whitened"}), data))
    assert mixed.mixed
    assert not moved.mixed
    steps = [
        float(init_balanced_moo(config.Clip(), dataclasses.replace(s, larger=1.0))["step"]) for s in (moved, mixed)
    ]
    assert steps[1] == pytest.approx(WHITENED_NOISE_FACTOR * steps[0])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("settings", "arrays", "words"),
    [
        ({"init": "random"}, {}, "model.init = 'random' does not hold"),
        ({"name": "linear"}, {"1.bias": np.zeros(10)}, "needs what is known of the layers' inputs"),
        ({"name": "linear"}, {"1.bias": np.zeros(10), "1.mean": np.zeros(7)}, "1.mean (7) is not a finite mean"),
        ({"name": "linear"}, {"1.bias": np.zeros(10), "1.mean": np.full(784, np.nan)}, "not a finite mean"),
        ({"name": "linear"}, {"1.bias": np.zeros(10), "0.mean": np.zeros(7)}, "'0.mean', which the model has not"),
        (
            {"name": "linear", "coordinates": "whitened"},
            {"1.bias": np.zeros(10), "1.mean": np.zeros(784)},
            "needs what is",
        ),
        (
            {"name": "linear", "coordinates": "whitened"},
            {"1.bias": np.zeros(10), "1.mean": np.zeros(784), "1.mix": np.triu(np.ones((784, 784)))},
            "1.mix (784x784) is not a symmetric matrix of the 784 inputs",
        ),
        (
            {"name": "linear", "coordinates": "whitened"},
            {"1.bias": np.zeros(10), "1.mean": np.zeros(784), "1.mix": np.diag(np.arange(784.0))},
            "1.mix has no inverse",
        ),
        (
            {"name": "linear", "coordinates": "whitened", "whiten": 0.25},
            {"1.bias": np.zeros(10), "1.mean": np.zeros(784), "1.mix": np.diag(np.arange(784.0))},
            "1.mix has no inverse",
        ),
        ({"name": "mlp"}, {"1.bias": np.zeros(64), "1.mean": np.zeros(784)}, "there is no 3.mean"),
        ({"name": "test_whitening:Own"}, {"layer.bias": np.zeros(10), "layer.mean": np.zeros(784)}, "nn.Sequential"),
    ],
)
def test_what_cannot_be_centred_is_told_why(
    tmp_path: Path, settings: dict[str, Any], arrays: dict[str, Any], words: str
) -> None:
    np.savez(tmp_path / "w.npz", **arrays)
    given = {"init": str(tmp_path / "w.npz"), "coordinates": "centred", **settings}
    wanted = config.Model(**given)
    with pytest.raises(ModelError) as caught:
        models.build_model(wanted, (1, 28, 28), 10, 0)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((nn.Conv2d(1, 1, 1, bias=False),), "a bias in layer '0'"),
        ((nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),), "padded with zeros"),
        ((nn.Conv2d(1, 1, 1), nn.GroupNorm(1, 1)), "layer '1' is neither"),
        ((nn.ReLU(),), "it has none"),
    ],
)
def test_layers_that_cannot_take_a_mean_up_are_refused(layers: tuple[nn.Module, ...], words: str) -> None:
    with pytest.raises(ModelError, match=r"model\.coordinates") as caught:
        centre_model(nn.Sequential(*layers), {"0.mean": torch.zeros(1, 1, 1)})
    assert words in str(caught.value)


def test_a_model_made_in_python_is_centred_in_python() -> None:
    data = _data(SHAPES["mnist-cnn"])
    plain = models.build_model(config.Model(name="mnist-cnn"), SHAPES["mnist-cnn"], 10, 0)
    assert isinstance(plain, nn.Sequential)
    with pytest.raises(ConfigError, match=r"model\.coordinates"):
        prepare(_settings(), data, plain)
    own = centre_model(plain, compute_input_means(plain, data.x_test))
    assert prepare(_settings(model={"coordinates": "plain"}), data, own).problem.model is own


def test_a_run_leaves_a_plain_network_and_resumes_to_the_bit(tmp_path: Path) -> None:
    data, settings = _data(SHAPES["mnist-cnn"]), _settings(train={"rounds": 3}, run={"checkpoint_every": 1})
    whole = execute(prepare(settings, data), tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    plain = models.build_model(config.Model(name="mnist-cnn"), SHAPES["mnist-cnn"], 10, 0)
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain(data.x_test), whole.model(data.x_test), rtol=1e-3, atol=1e-3)
    again = prepare(_settings(model={"init": str(whole.folder / "model.safetensors"), "coordinates": "plain"}), data)  # type: ignore[operator]
    torch.testing.assert_close(again.problem.model(data.x_test), plain(data.x_test))

    def stop(result: RoundResult) -> None:
        if result.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(prepare(settings, data), tmp_path / "cut", stop)
    other = prepare(settings, data)
    with torch.no_grad():
        next(iter(other.problem.model.buffers())).add_(1e-3)
    with pytest.raises(RunError, match=r"model\.init = 'synthetic'"):
        resume_prepared(other, tmp_path / "cut")
    resume(tmp_path / "cut", dataset=data)
    assert all(torch.equal(value, weights[n]) for n, value in load_file(tmp_path / "cut" / "model.safetensors").items())


@pytest.mark.slow
def test_the_command_line_teaches_means_and_trains_with_them(tmp_path: Path) -> None:
    file, out = tmp_path / "prior.npz", tmp_path / "run"
    assert main(["prior", "mnist-cnn", "--out", str(file), "--kinds", "3", "--steps", "1", "--quiet"]) == 0
    assert {"0.mean", "3.mean", "7.mean", "9.mean", "3.mix", "7.mix"} < set(np.load(file))
    data = _data(SHAPES["mnist-cnn"], 40)
    np.savez(tmp_path / "data.npz", **{n: getattr(data, n).numpy() for n in ("x", "y", "x_test", "y_test")})
    words = ["run", "--data", str(tmp_path / "data.npz"), "--parties", "2", "--partition", "iid", "--rounds", "2"]
    words += ["--sigma", "1", "--out", str(out), "--set", "model.coordinates=whitened", "--set", "data.min_examples=1"]
    assert main([*words, "--set", f"model.init={file}"]) == 0
    plain = models.build_model(config.Model(name="mnist-cnn"), SHAPES["mnist-cnn"], 10, 0)
    plain.load_state_dict(load_file(out / "model.safetensors"))
    assert 'coordinates = "whitened"' in (out / "settings.toml").read_text()


def test_machines_agree_on_the_means(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")
    from fulcrum.flower.messages import compute_model_fingerprint
    from fulcrum.flower.prepare import make_public_problem
    from fulcrum.flower.terms import read_terms_file, terms_to_toml
    from support.flower import toy_terms

    settings = _settings(clip={"rule": "moo"})
    problem = make_public_problem(settings, _data(SHAPES["mnist-cnn"]), torch.device("cpu"))
    party = models.build_model(settings.model, SHAPES["mnist-cnn"], 10, 0)  # as a party builds it
    agreed = compute_model_fingerprint(problem.model, problem.layout)
    assert compute_model_fingerprint(party, ParameterLayout.of(party)) == agreed
    with torch.no_grad():
        next(iter(party.buffers())).add_(1e-3)
    assert compute_model_fingerprint(party, ParameterLayout.of(party)) != agreed
    (tmp_path / "terms.toml").write_text(terms_to_toml(toy_terms(settings)))
    assert read_terms_file(tmp_path / "terms.toml").model.coordinates == "centred"


def test_results_that_were_kept_before_are_still_found() -> None:
    """The id of a plain job is what it was; that of a centred one is another."""
    kept = Path(__file__).parents[2] / "results" / "robustness" / "robustness.jsonl.gz"
    line, *_ = gzip.decompress(kept.read_bytes()).decode().splitlines()
    job = job_from_json(json.loads(line))
    assert job.id == json.loads(line)["id"]
    assert dataclasses.replace(job, settings=job.settings.replace(model={"coordinates": "centred"})).id != job.id
    assert dataclasses.replace(job, settings=job.settings.replace(model={"whiten": 0.25})).id != job.id
