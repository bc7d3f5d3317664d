"""Per-example gradients: book-keeping against vmap and against a plain loop of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum.grads import book, parts, record
from fulcrum.models import Layout

B, CLASSES = 5, 3


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(count: int = B, seed: int = 1) -> Tensor:
    return torch.randint(0, CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def seeded(model: nn.Module, seed: int = 2, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with reproducible parameters, biases and norm scales included."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def loop(model: nn.Module, layout: Layout, x: Tensor, y: Tensor) -> Tensor:
    """The plainest oracle: backward on one example after the other."""
    rows = []
    named = dict(model.named_parameters())
    for i in range(len(x)):
        value = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(value, [named[n] for n in layout.names], allow_unused=True)
        rows.append(
            torch.cat(
                [(torch.zeros(s) if g is None else g).reshape(-1) for g, s in zip(found, layout.sizes, strict=True)]
            )
        )
    return torch.stack(rows)


class Head(nn.Module):
    """Everything but the first dimension summed over a fixed random projection to logits."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, h: Tensor) -> Tensor:
        h = h.reshape(len(h), -1)
        return torch.sin(h) @ randn(h.shape[1], self.classes, seed=9, dtype=h.dtype)


class Wrapped(nn.Module):
    """A forward of its own: takes the hooked path."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear-no-bias": (lambda: nn.Linear(6, 4, bias=False), (6,)),
    "linear-middle": (lambda: nn.Linear(6, 4), (7, 6)),
    "linear-two-middle": (lambda: nn.Linear(3, 2), (2, 4, 3)),
    "linear-long": (lambda: nn.Linear(2, 2), (40, 2)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (3, 9)),
    "conv1d-options": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 11)),
    "conv1d-same": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 8)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 6, 7)),
    "conv2d-no-bias": (lambda: nn.Conv2d(2, 3, (3, 2), bias=False), (2, 6, 7)),
    "conv2d-one-channel": (lambda: nn.Conv2d(1, 5, 4, stride=2, padding=1), (1, 8, 9)),
    "conv2d-stride": (lambda: nn.Conv2d(3, 4, 3, stride=(2, 1), padding=(1, 0)), (3, 7, 6)),
    "conv2d-dilation": (lambda: nn.Conv2d(3, 4, (2, 3), dilation=(2, 1)), (3, 7, 6)),
    "conv2d-dilation-wide": (lambda: nn.Conv2d(9, 4, 2, dilation=2, stride=2), (9, 8, 8)),
    "conv2d-groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
    "conv2d-groups-strided": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, stride=2), (4, 5, 5)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 5, 5)),
    "conv2d-same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same"), (2, 6, 6)),
    "conv2d-valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 6, 6)),
    "conv2d-reflect": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), (2, 6, 6)),
    "conv2d-circular": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (2, 6, 6)),
    "conv2d-replicate-same": (lambda: nn.Conv2d(2, 3, 2, padding="same", padding_mode="replicate"), (2, 6, 6)),
    "conv2d-1x1": (lambda: nn.Conv2d(4, 3, 1), (4, 6, 6)),
    "conv2d-whole-image": (lambda: nn.Conv2d(2, 3, 5), (2, 5, 5)),
    "conv2d-few-positions": (lambda: nn.Conv2d(8, 9, 3), (8, 4, 4)),
    "conv2d-many-positions": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 12, 12)),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 5)),
    "group-norm-flat": (lambda: nn.GroupNorm(2, 8), (8,)),
    "layer-norm": (lambda: nn.LayerNorm(6), (6,)),
    "layer-norm-middle": (lambda: nn.LayerNorm(6), (4, 6)),
    "layer-norm-two": (lambda: nn.LayerNorm((4, 6)), (3, 4, 6)),
    "layer-norm-no-bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
}


def check_tape(tape: object, truth: Tensor, layout: Layout, tight: float = 1e-10) -> None:
    """Every answer of a tape against the matrix of true gradients."""

    def close(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=tight, atol=tight * float(truth.abs().max()))

    dtype = truth.dtype
    close(tape.norms(), truth.norm(dim=1, keepdim=True))
    close(tape.matrix(), truth)
    groups = layout.layers
    by_layer = torch.zeros(len(truth), max(groups) + 1, dtype=dtype)
    for block, group in zip(truth.split(layout.sizes, dim=1), groups, strict=True):
        by_layer[:, group] += block.square().sum(dim=1)
    close(tape.norms(groups), by_layer.sqrt())
    direction = randn(layout.dim, seed=4, dtype=dtype)
    close(tape.dots(direction), truth @ direction)
    factors = randn(len(truth), 1, seed=5, dtype=dtype)
    close(tape.weighted_sum(factors), (factors * truth).sum(dim=0))
    factors = randn(len(truth), max(groups) + 1, seed=6, dtype=dtype)
    per_entry = torch.repeat_interleave(torch.tensor(groups), torch.tensor(layout.sizes))
    close(tape.weighted_sum(factors, groups), (factors[:, per_entry] * truth).sum(dim=0))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("wrap", [False, True], ids=["sequence", "hooked"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_equals_vmap_and_a_loop(name: str, wrap: bool) -> None:
    make, shape = LAYERS[name]
    body = seeded(nn.Sequential(make(), nn.Tanh(), nn.Flatten(), nn.Identity(), make_linear(make, shape)))
    model = Wrapped(body) if wrap else body
    layout, x, y = Layout.of(model), randn(B, *shape), labels()
    params = layout.flatten(model)
    truth = loop(model, layout, x, y)
    found = record(model, layout, params, x, y, how="book")
    assert isinstance(found, book.Book)
    check_tape(found, truth, layout)
    check_tape(record(model, layout, params, x, y, how="vmap"), truth, layout)
    torch.testing.assert_close(found.losses, F.cross_entropy(model(x), y, reduction="none"))


def make_linear(make: object, shape: tuple[int, ...]) -> nn.Linear:
    return nn.Linear(make()(torch.zeros(2, *shape)).flatten(1).shape[1], CLASSES)


@pytest.mark.parametrize("keep", [0.0, 1e9], ids=["nothing-written", "all-written"])
@pytest.mark.parametrize("name", ["linear-long", "conv1d-options", "conv2d-groups", "conv2d-many-positions"])
def test_both_ways_to_the_norm_agree(name: str, keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "KEEP", keep)
    for touch in (0, 10**9):  # first direct, then ghost norms wherever there is a choice
        monkeypatch.setattr(parts, "TOUCH", touch)
        make, shape = LAYERS[name]
        model = seeded(nn.Sequential(make(), nn.Tanh(), nn.Flatten(), make_linear(make, shape)))
        layout, x, y = Layout.of(model), randn(B, *shape), labels()
        tape = record(model, layout, layout.flatten(model), x, y, how="book")
        written = isinstance(tape.parts[0][0], parts.Rows)
        assert written == (keep > 0 and touch == 0)
        check_tape(tape, loop(model, layout, x, y), layout)


@pytest.mark.parametrize("scratch", [1, 10_000])
def test_working_in_small_pieces_changes_nothing(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.SCRATCH, "cpu", scratch)
    model = seeded(
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 9, 3), nn.Flatten(), nn.LazyLinear(CLASSES)
        )
    )
    model(randn(1, 2, 6, 6))
    layout, x, y = Layout.of(seeded(model)), randn(B, 2, 6, 6), labels()
    tape = record(model, layout, layout.flatten(model), x, y, how="book")
    check_tape(tape, loop(model, layout, x, y), layout)
