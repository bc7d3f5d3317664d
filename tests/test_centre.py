"""Centred coordinates: the same function, gradients of the moved parameters, in every engine; and back to plain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fulcrum import config, models, priors
from fulcrum.api import prepare, resume, train
from fulcrum.config import Settings
from fulcrum.coordinates import Centre, centred, digest, folded, means
from fulcrum.data import Dataset, from_arrays
from fulcrum.engine.parallel import ParallelEngine
from fulcrum.engine.reference import ReferenceEngine
from fulcrum.engine.stacked import StackedEngine
from fulcrum.errors import ModelError
from fulcrum.evaluate import evaluate
from fulcrum.grads import record
from fulcrum.many import _group, run_many
from fulcrum.models import Layout, initialise
from fulcrum.priors import learn
from helpers import toy_problem
from test_federate import play
from test_stacked import assert_equal, images, request, stacked

SHAPES = {"mnist-cnn": (1, 28, 28), "cifar-cnn": (3, 32, 32)}


def _net(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers)
    initialise(model, torch.Generator().manual_seed(1))
    return model


def _built(name: str, shape: tuple[int, ...], **more: object) -> nn.Sequential:
    model = models.build(config.Model(name=name, **more), shape, 3, 0)  # type: ignore[arg-type]
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


def _pair(name: str, head: bool = True) -> tuple[nn.Sequential, nn.Sequential, torch.Tensor]:
    """A plain net, the same in centred coordinates, and inputs with a mean far from zero."""
    make, shape = NETS[name]
    plain = make()
    generator = torch.Generator().manual_seed(5)
    pictures, x = (1.0 + torch.randn(count, *shape, generator=generator) for count in (20, 6))
    return plain, centred(plain, means(plain, pictures), head=head), x


def _centred(name: str) -> nn.Sequential:
    return _pair(name)[1]


# --- the same functions ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_the_function_and_the_names_of_the_parameters_stay(name: str) -> None:
    plain, moved, x = _pair(name)
    torch.testing.assert_close(moved(x), plain(x), rtol=1e-4, atol=1e-5)
    assert [n for n, _ in moved.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert Layout.of(moved) == Layout.of(plain)
    layers = sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in plain)
    assert sum(isinstance(layer, Centre) for layer in moved) == layers
    assert all(float(centre.mean.abs().max()) > 0 for centre in moved if isinstance(centre, Centre))
    kept = _pair(name, head=False)[1]
    last = list(plain.state_dict())[-1]
    assert torch.equal(kept.state_dict()[last], plain.state_dict()[last]), "a head that was drawn keeps its bias"


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (8, 2, 3)])
def test_a_padded_border_is_that_of_zeros(kernel: int, stride: int, padding: int) -> None:
    """Also where the mean is not that of the data at all."""
    conv = _net(nn.Conv2d(3, 4, kernel, stride=stride, padding=padding))
    moved = centred(conv, {"0.mean": torch.tensor([0.5, -2.0, 1.0]).view(3, 1, 1)}, head=True)
    x = torch.rand(2, 3, 9, 10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(moved(x), conv(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(moved[1](x), conv(x)[:, :, : moved[1](x).shape[2], : moved[1](x).shape[3]], atol=1e-2)


@pytest.mark.parametrize("name", NETS)
def test_any_weights_fold_back_into_the_plain_network(name: str) -> None:
    plain, moved, x = _pair(name)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9))
    wanted = moved(x)
    plain.load_state_dict(folded(moved))
    torch.testing.assert_close(plain(x), wanted, rtol=1e-4, atol=1e-4)
    plain.load_state_dict(dict(moved.named_parameters()))  # the mean's part forgotten
    assert not torch.allclose(plain(x), wanted, rtol=1e-2, atol=1e-2)
    other = {n: value.detach() + 1 for n, value in moved.named_parameters()}
    for n, value in folded(moved, other).items():
        assert value.shape == other[n].shape
    assert all(torch.equal(value, plain.state_dict()[n]) for n, value in folded(plain).items())


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["book", "vmap"])
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_the_plain_network_in_the_moved_parameters(name: str, how: str) -> None:
    """By the chain rule from autograd on the plain network, whose bias is b' - W m: nothing of `Centre` in it."""
    plain, moved, x = _pair(name)
    y = torch.arange(len(x)) % 3
    own = {n: value.detach().clone().requires_grad_() for n, value in moved.named_parameters()}
    rows = []
    for i in range(len(x)):
        back = dict(own)
        for place, centre in moved.named_children():
            if isinstance(centre, Centre):
                layer = place.removeprefix("centre")
                weight = own[f"{layer}.weight"]
                sums = weight.sum(dim=(2, 3)) if weight.dim() == 4 else weight
                back[f"{layer}.bias"] = own[f"{layer}.bias"] - sums @ centre.mean.flatten()
        loss = nn.functional.cross_entropy(torch.func.functional_call(plain, back, (x[i : i + 1],)), y[i : i + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(own.values()))]))
    layout = Layout.of(moved)
    tape = record(moved, layout, layout.flatten(moved), x, y, how=how)
    torch.testing.assert_close(tape.matrix(), torch.stack(rows), rtol=1e-3, atol=1e-5)
    ordinary = record(plain, layout, layout.flatten(plain), x, y, how=how).matrix()
    assert not torch.allclose(ordinary, torch.stack(rows), rtol=1e-2, atol=1e-3), "other coordinates, other gradients"


def test_the_input_is_not_written_over() -> None:
    for name in NETS:
        _, moved, x = _pair(name)
        before, layout = x.clone(), Layout.of(moved)
        record(moved, layout, layout.flatten(moved), x, torch.arange(len(x)) % 3, how="book").norms()
        evaluate(moved, layout, layout.flatten(moved), x, torch.arange(len(x)) % 3)
        assert torch.equal(x, before)


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    ("steps", "limit", "native"), [(1, 0, False), (1, 0, True), (2, 0, False), (1, 3, False), (2, 5, True)]
)
def test_the_stacked_engine_equals_the_reference(name: str, steps: int, limit: int, native: bool) -> None:
    problem = toy_problem("fixed", images(*NETS[name][1]), 3, model=_centred(name))
    assert StackedEngine(problem).notes == (), "there is a hand-written program"
    wanted = request(problem, steps, sigma=0.0)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), stacked(problem, wanted, limit, native))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_parallel_engine_equals_the_reference(name: str, steps: int) -> None:
    problem = toy_problem("moo", images(*NETS[name][1]), 3, model=_centred(name))
    wanted = request(problem, steps)
    replies = list(ParallelEngine(dataclasses.replace(problem, workers=2)).run(wanted))
    assert_equal(list(ReferenceEngine(problem).run(wanted)), replies)


def test_activations_of_half_the_width_come_close() -> None:
    for name in ("mnist-cnn", "cifar-cnn"):
        problem = toy_problem("fixed", images(*NETS[name][1]), 3, model=_centred(name))
        wanted = request(problem, 1, sigma=0.0)
        exact = stacked(problem, wanted)
        for native in (False, True):
            rough = stacked(dataclasses.replace(problem, precision="bf16"), wanted, native=native)
            for a, b in zip(exact, rough, strict=True):
                assert float((a.delta - b.delta).norm()) < 0.1 * float(a.delta.norm())


# --- several runs at once ---------------------------------------------------------------------------


def _settings(**changes: object) -> Settings:
    settings = Settings().replace(
        privacy={"sigma": 0.5},
        data={"parties": 2, "partition": "iid", "min_examples": 1},
        train={"rounds": 2, "rate": 0.5, "lr": 0.1},
        model={"init": "painted", "center": True},
        clip={"rule": "fixed"},
        run={"device": "cpu", "engine": "reference"},
    )
    return settings.replace(**changes)


def _data(shape: tuple[int, ...], n: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x, x_test = (2 * torch.rand((count, *shape), generator=generator) - 1 for count in (n, 10))
    return from_arrays(x, torch.arange(n) % 10, x_test, torch.arange(10) % 10)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_stacked_runs_equal_themselves_alone(name: str, steps: int) -> None:
    data = _data(SHAPES[name])
    feds = [
        prepare(_settings(run={"seed": s, "device": "cpu", "engine": "reference"}, train={"steps": steps}), data)
        for s in (0, 1)
    ]
    assert len(_group(feds)) == 1
    rounds = list(run_many(feds))
    for r, federation in enumerate(feds):
        alone = play(federation)
        assert float(rounds[-1].loss[r]) == pytest.approx(alone[-1].loss, rel=1e-3)
        assert rounds[-1].averaged is not None
        torch.testing.assert_close(rounds[-1].averaged[r], alone[-1].averaged, rtol=1e-3, atol=1e-4)


def test_runs_with_other_means_are_not_mixed(tmp_path: Path) -> None:
    data, found = _data(SHAPES["mnist-cnn"]), priors.read("painted", "mnist-cnn", "relu")
    priors.write(tmp_path / "same.npz", found)
    priors.write(tmp_path / "other.npz", {**found, "3.mean": found["3.mean"] + 1})
    inits = ["painted", str(tmp_path / "same.npz"), str(tmp_path / "other.npz")]
    feds = [prepare(_settings(model={"init": init, "center": True}), data) for init in inits]
    plain = prepare(_settings(model={"center": False}), data)
    assert _group([*feds, plain]) == [[0, 1], [2], [3]]
    assert digest(plain.problem.model) == ""
