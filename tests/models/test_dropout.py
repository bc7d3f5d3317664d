"""Random layers draw by keys of the examples: the same masks in every batch and engine, and none in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fulcrum
from fulcrum.data import from_arrays
from fulcrum.data.records import select_rows
from fulcrum.errors import ModelError
from fulcrum.gradients import GradientRecorder
from fulcrum.models.draws import KeyedDraws, make_example_keys
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.own import validate_prepared
from fulcrum.models.prepared import PreparedModel, add_example_keys, prepare_model

KEYS = make_example_keys(7, torch.arange(6))


class Depth(nn.Module):
    """Stochastic depth as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4 if self.training else 0.0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 4, num_layers=2, dropout=0.5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


LAYERS: dict[str, nn.Module] = {
    "Dropout": nn.Dropout(0.4),
    "in place": nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4, inplace=True)),
    "Dropout1d": nn.Dropout1d(0.4),
    "AlphaDropout": nn.AlphaDropout(0.4),
    "stochastic depth": Depth(),
    "MultiheadAttention": Attention(),
    "fused attention": Fused(),
    "LSTM": Recurrent(),
    "encoder": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_an_examples_mask_does_not_depend_on_the_others(kind: str) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(6, 5, 8), LAYERS[kind].train()
    before = torch.get_rng_state()

    def run(rows: Any) -> Tensor:
        with KeyedDraws(KEYS[rows]), torch.no_grad():
            out: Tensor = layer(x[rows].clone())
            return out

    whole = run(slice(0, 6))
    assert torch.equal(torch.get_rng_state(), before), "the global generator does not move"
    for rows in (slice(0, 2), slice(3, 4), [5, 1]):
        torch.testing.assert_close(run(rows), whole[rows], rtol=1e-5, atol=1e-6)
    with KeyedDraws(make_example_keys(8, torch.arange(6))), torch.no_grad():
        assert not torch.allclose(layer(x.clone()), whole), "another seed draws other masks"
    copies = x[:1].expand(6, 5, 8).clone()
    with KeyedDraws(KEYS), torch.no_grad():
        drawn = layer(copies)
    assert not torch.allclose(drawn[0], drawn[1]), "two examples have masks of their own"


def test_masks_have_the_right_frequency_and_look_independent() -> None:
    draws = KeyedDraws(make_example_keys(3, torch.arange(200)))
    first, second = (draws.keep((200, 500), 0.3).double() for _ in range(2))
    for kept in (first, second):
        assert float(kept.mean()) == pytest.approx(0.7, abs=4 * (0.21 / 1e5) ** 0.5)
        assert float((kept[:, 1:] * kept[:, :-1]).mean()) == pytest.approx(0.49, abs=0.01), "neighbouring places"
        assert float((kept[1:] * kept[:-1]).mean()) == pytest.approx(0.49, abs=0.01), "neighbouring examples"
    assert float((first * second).mean()) == pytest.approx(0.49, abs=0.01), "two calls"
    assert float(draws.keep((200, 500), 0.5).double().mean()) != pytest.approx(0.7, abs=0.01)
    normal = torch.empty(200, 500)
    with draws:
        normal.normal_(1.0, 2.0)
    assert float(normal.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(normal.std()) == pytest.approx(2.0, abs=0.05)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def test_gradients_are_those_of_autograd_with_the_same_masks() -> None:
    x, y = torch.randn(6, 6), torch.arange(6) % 3
    model = prepare_model(make_model(), x)
    assert isinstance(model, PreparedModel)
    validate_prepared(model, x)
    data = from_arrays(x, y, classes=3, public=True)
    layout = ParameterLayout.of(model)
    params, inputs = layout.flatten(model), add_example_keys(x, 5, torch.arange(6))
    by_ghost, by_vmap = (
        GradientRecorder(model, layout, data.task, how)(params, inputs, y).matrix() for how in ("auto", "vmap")
    )
    torch.testing.assert_close(by_ghost, by_vmap, rtol=1e-4, atol=1e-6)
    for row in range(6):
        part = slice(row, row + 1)
        loss = data.task.loss(model(**dict(select_rows(inputs, part))), y[part]).sum()
        wanted = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(by_ghost[row], torch.cat([g.flatten() for g in wanted]), rtol=1e-4, atol=1e-6)
    without = GradientRecorder(model, layout, data.task)(params, x, y).matrix()
    assert not torch.allclose(by_ghost, without, rtol=1e-2)


def run(engine: str, seed: int = 0, **more: Any) -> fulcrum.Result:
    torch.manual_seed(1)
    x = torch.randn(90, 6)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    data = from_arrays(x, y, x[:30], y[:30], classes=3, public=True)
    words = {"parties": 3, "epsilon": 8.0, "rounds": 3, "rate": 0.3, "partition": "iid", "engine": engine, **more}
    return fulcrum.train(data, make_model(), private_seed=seed, **words)


def test_engines_agree_and_a_seed_repeats_a_run() -> None:
    results = {engine: run(engine).model.state_dict() for engine in ("reference", "parallel", "stacked")}
    again, other = run("parallel").model.state_dict(), run("parallel", seed=1).model.state_dict()
    for name, value in results["reference"].items():
        for engine in ("parallel", "stacked"):
            torch.testing.assert_close(results[engine][name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(again[name], results["parallel"][name])
        assert not torch.equal(other[name], value)


def test_a_resumed_run_draws_the_same_masks(tmp_path: Any) -> None:
    whole = run("parallel", out=tmp_path / "whole")

    def stop(result: fulcrum.RoundResult) -> None:
        if result.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("parallel", out=tmp_path / "part", on_round=stop, run={"checkpoint_every": 1})
    torch.manual_seed(1)
    x = torch.randn(90, 6)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    data = from_arrays(x, y, x[:30], y[:30], classes=3, public=True)
    done = fulcrum.resume(tmp_path / "part", dataset=data, model=make_model())
    for name, value in whole.model.state_dict().items():
        assert torch.equal(done.model.state_dict()[name], value)


def test_the_trained_model_is_an_ordinary_one() -> None:
    model = run("parallel").model
    assert type(model) is nn.Sequential
    assert isinstance(model[2], nn.Dropout)
    x = torch.randn(2, 6)
    assert torch.equal(model(x), model(x)), "eval mode"


def test_random_numbers_for_a_whole_batch_are_refused() -> None:
    class Common(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty((1, 1)).bernoulli_(0.5) if self.training else x

    x = torch.rand(2, 6)
    with pytest.raises(ModelError, match=r"numbers of shape \[1, 1\] for 2 examples"):
        validate_prepared(prepare_model(nn.Sequential(nn.Linear(6, 2), Common()), x), x)


def test_masks_inside_a_module_that_goes_through_vmap() -> None:
    """A module without a rule runs a second time in vmap; its masks must be those of the first time."""

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres, self.drop = nn.Parameter(torch.randn(5, 6)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.drop(torch.cdist(x, self.centres))
            return out

    torch.manual_seed(0)
    x, y = torch.randn(6, 6), torch.arange(6) % 3
    model = prepare_model(nn.Sequential(Distances(), nn.Linear(5, 3)), x)
    task = from_arrays(x, y, classes=3, public=True).task
    layout = ParameterLayout.of(model)
    params, inputs = layout.flatten(model), add_example_keys(x, 5, torch.arange(6))
    found = GradientRecorder(model, layout, task)(params, inputs, y).matrix()
    for row in range(6):
        part = slice(row, row + 1)
        loss = task.loss(model(**dict(select_rows(inputs, part))), y[part]).sum()
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-5)
