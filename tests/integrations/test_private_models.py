"""`fulcrum.private` with models of all kinds: the release is the sum of autograd's gradients, one example at a time."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import fulcrum
from fulcrum.errors import ModelError

N = 30


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(9, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.cell(self.words(ids))[0][:, -1])


class Tied(nn.Module):
    """One matrix as table and as output layer, and a parameter at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(9, 5), nn.Parameter(torch.ones(5))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.words(ids).mean(1) * self.scale, self.words.weight)[:, :3]


class OwnFunction(nn.Module):
    """Uses its parameter by a function that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Parameter(torch.randn(4, 4) * 0.3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.einsum("bi,ij->bj", x, torch.linalg.matrix_exp(self.mix)))


class TwoHeads(nn.Module):
    """Two outputs, a flag among the arguments, and a layer that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 1), nn.Linear(5, 2)

    def forward(self, x: Tensor, flat: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.tanh(self.body(x))
        return self.a(hidden), {"b": self.b(hidden)[:, 0], "more": self.unused(hidden)}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(48, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


def two_losses(out: tuple[Tensor, dict[str, Tensor]], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y) + 0.3 * F.mse_loss(out[1]["b"], y.float())


def ids() -> Tensor:
    return torch.randint(9, (N, 6), generator=torch.Generator().manual_seed(0))


def numbers(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[..., Tensor]]] = {
    "recurrent": (Recurrent, ids, F.cross_entropy),
    "tied": (Tied, ids, F.cross_entropy),
    "own function": (OwnFunction, lambda: numbers(4), F.cross_entropy),
    "two heads": (TwoHeads, lambda: numbers(4), two_losses),
    "encoder": (encoder, ids, F.cross_entropy),
    "cnn": (cnn, lambda: numbers(1, 6, 6), F.cross_entropy),
}


def start(model: nn.Module, x: Tensor, **words):
    y = torch.randint(3, (N,), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    usual = {"method": "dp-sgd", "sigma": 1e-6, "C0": 20.0, "seed": 3, "epochs": 2}
    return fulcrum.private(model, optimizer, loader, **{**usual, **words}), y


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def read_grads(model: nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def step(loop, loss=F.cross_entropy) -> None:
    for x, y in loop.loader:
        loss(loop.model(x), y).backward()
        loop.optimizer.step()
        break


@pytest.mark.parametrize("name", CASES)
def test_a_model_releases_the_sum_of_its_examples(name):
    make, inputs, loss = CASES[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    own = copy.deepcopy(model)
    loop, y = start(model, x)
    rows = loop.privacy.draw_sample(0).rows.tolist()
    total = torch.zeros_like(flat(own))
    for row in rows:
        own.zero_grad()
        loss(own(x[row : row + 1]), y[row : row + 1]).backward()
        total += read_grads(own)
    before = flat(model)
    step(loop, loss)
    assert torch.allclose((before - flat(model)) * 10, total, atol=2e-4, rtol=1e-3)
    assert total.norm() > 0.1
    step(loop, loss)  # and again, with another number of examples
    assert loop.privacy.step == 2


def test_an_example_without_a_number_counts_as_zero():
    x = numbers(4)
    x[::2] = float("nan")
    model = nn.Linear(4, 3)
    loop, y = start(model, x)
    rows = [row for row in loop.privacy.draw_sample(0).rows.tolist() if row % 2]
    own, before = copy.deepcopy(model), flat(model)
    own.zero_grad()
    F.cross_entropy(own(x[rows]), y[rows], reduction="sum").backward()
    step(loop)
    wanted = read_grads(own)
    assert torch.allclose((before - flat(model)) * 10, wanted, atol=2e-4)


def test_copies_of_the_model_are_plain_models():
    torch.manual_seed(0)
    model, x = cnn(), numbers(1, 6, 6)
    loop, y = start(model, x)
    averaged = AveragedModel(model)
    twin = copy.deepcopy(model)
    step(loop)
    averaged.update_parameters(model)
    assert torch.equal(averaged.module(x), model.eval()(x))
    model.train()
    assert not torch.equal(twin(x), model(x))  # its own weights, not those of the model
    F.cross_entropy(twin(x), y).backward()
    assert twin[0].weight.grad is not None
    text = io.BytesIO()
    torch.save(model, text)
    text.seek(0)
    loaded = torch.load(text, weights_only=False)
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    assert loop.privacy.step == 1


def test_a_tensor_of_the_whole_batch_in_the_loss_is_refused():
    """Decorrelation by the batch's own matrix: no rows of examples, but it changes with the batch."""
    loop, _ = start(nn.Linear(4, 3), numbers(4))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        share = torch.bincount(y, minlength=3) / len(y)
        return F.cross_entropy(out - share.log1p(), y)

    step(loop, loss)
    with pytest.raises(ModelError, match="changes from batch to batch"):
        step(loop, loss)
    prior = torch.tensor([0.2, 0.3, 0.5])
    loop, _ = start(nn.Linear(4, 3), numbers(4))
    for _ in range(4):
        step(loop, lambda out, y: F.cross_entropy(out - prior.log1p(), y))


def test_compiled_and_parallel_models_are_refused():
    with pytest.raises(ModelError, match="float32"):
        start(nn.Linear(4, 3).half(), numbers(4))
    compiled = type("OptimizedModule", (nn.Linear,), {})(4, 3)  # what torch.compile returns
    with pytest.raises(ModelError, match=r"torch\.compile"):
        start(compiled, numbers(4))
    with pytest.raises(ModelError, match="DataParallel"):
        start(nn.DataParallel(nn.Linear(4, 3)), numbers(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", [{}, {"method": "moo", "epsilon": 3.0, "sigma": None}, {"physical_batch": 4}])
def test_a_loop_on_a_gpu_is_the_loop_on_the_cpu(words):
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        loop, _ = start(cnn().to(device), numbers(1, 6, 6), **words)
        while loop.privacy.step < loop.privacy.steps:
            for x, y in loop.loader:
                F.cross_entropy(loop.model(x.to(device)), y.to(device)).backward()
                loop.optimizer.step()
        found.append(flat(loop.model).cpu())
    assert torch.allclose(found[0], found[1], atol=1e-3)
