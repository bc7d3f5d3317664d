"""Per-example gradients: book-keeping against vmap and against a plain loop of autograd."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum import gradients as grads
from fulcrum.data.tasks import task_from_loss
from fulcrum.errors import ModelError
from fulcrum.gradients import GradientTape, list_gradient_paths
from fulcrum.gradients import ghost as book
from fulcrum.gradients import outer_products as outer
from fulcrum.gradients import param_grads as parts
from fulcrum.gradients.layers import GRAD_SAMPLERS
from fulcrum.models.build import build_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.settings import schema as config
from support.gradients import CLASSES, CLASSIFY, B, check_tape, labels, loop, randn, record, seeded


class Wrapped(nn.Module):
    """A forward of its own: takes the hooked path."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
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


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("wrap", [False, True], ids=["sequence", "hooked"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_equals_vmap_and_a_loop(name: str, wrap: bool) -> None:
    make, shape = LAYERS[name]
    body = seeded(nn.Sequential(make(), nn.Tanh(), nn.Flatten(), nn.Identity(), make_linear(make, shape)))
    model = Wrapped(body) if wrap else body
    layout, x, y = ParameterLayout.of(model), randn(B, *shape), labels()
    params = layout.flatten(model)
    truth = loop(model, layout, x, y)
    found = record(model, layout, params, x, y, how="book")
    assert isinstance(found, book.GhostTape)
    check_tape(found, truth, layout)
    check_tape(record(model, layout, params, x, y, how="vmap"), truth, layout)
    torch.testing.assert_close(found.losses, F.cross_entropy(model(x), y, reduction="none"))


def make_linear(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Linear:
    return nn.Linear(make()(torch.zeros(2, *shape)).flatten(1).shape[1], CLASSES)


@pytest.mark.parametrize("keep", [0.0, 1e9], ids=["nothing-written", "all-written"])
@pytest.mark.parametrize("name", ["linear-long", "conv1d-options", "conv2d-groups", "conv2d-many-positions"])
def test_both_ways_to_the_norm_agree(name: str, keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MAX_MATERIALISED_RATIO", keep)
    for touch in (0, 10**9):  # first direct, then ghost norms wherever there is a choice
        monkeypatch.setattr(outer, "WRITE_READ_COST", touch)
        make, shape = LAYERS[name]
        model = seeded(nn.Sequential(make(), nn.Tanh(), nn.Flatten(), make_linear(make, shape)))
        layout, x, y = ParameterLayout.of(model), randn(B, *shape), labels()
        tape = record(model, layout, layout.flatten(model), x, y, how="book")
        assert isinstance(tape, book.GhostTape)
        written = isinstance(tape.parts[0][0], parts.MaterialisedGrad)
        assert written == (keep > 0 and touch == 0)
        check_tape(tape, loop(model, layout, x, y), layout)


@pytest.mark.parametrize("scratch", [1, 10_000])
@pytest.mark.parametrize("work", [1, 2_000, 2**30])
def test_working_in_pieces_changes_nothing(scratch: int, work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.SCRATCH_BYTES, "cpu", scratch)
    monkeypatch.setitem(grads.PASS_MEMORY_BYTES, "cpu", work)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 9, 3), nn.Flatten(), nn.Linear(144, CLASSES)]
    model = seeded(nn.Sequential(*layers))
    layout, x, y = ParameterLayout.of(model), randn(B, 2, 6, 6), labels()
    check_tape(record(model, layout, layout.flatten(model), x, y), loop(model, layout, x, y), layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["relu", "tanh", "tempered"])
@pytest.mark.parametrize(("name", "shape"), [("mnist-cnn", (1, 28, 28)), ("cifar-cnn", (3, 32, 32))])
def test_the_papers_models_equal_vmap(name: str, shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> None:
    model = build_model(config.Model(name=name, activation=activation), shape, CLASSES, seed=3).to(dtype)
    layout, x, y = ParameterLayout.of(model), randn(4, *shape, dtype=dtype), labels(4)
    params = layout.flatten(model)
    truth = record(model, layout, params, x, y, how="vmap").matrix()
    tight = 1e-4 if dtype == torch.float32 else 1e-10
    check_tape(record(model, layout, params, x, y, how="book"), truth, layout, tight)
    assert {path for _, path, _ in list_gradient_paths(model)} == {"book"}


# --- embeddings ---------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Embeds token ids [B, T] (or [B]) and classifies their weighted mean."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES if tied else 7, 4, **options)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.embedding(ids))
        if h.dim() == 3:
            h = (h * torch.arange(1, h.shape[1] + 1, dtype=h.dtype).view(1, -1, 1)).mean(dim=1)
        return self.head(h)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"tied": True}], ids=["plain", "padding", "tied"])
@pytest.mark.parametrize("shape", [(B,), (B, 6)])
def test_embeddings(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    tokens = Tokens(**options)
    model = seeded(tokens)
    ids = torch.randint(0, tokens.embedding.num_embeddings, shape, generator=torch.Generator().manual_seed(3))
    layout, y = ParameterLayout.of(model), labels()
    tape = record(model, layout, layout.flatten(model), ids, y, how="book")
    check_tape(tape, loop(model, layout, ids, y), layout)


# --- shared and frozen parameters ---------------------------------------------------------------


def twice() -> nn.Module:
    layer, conv = nn.Linear(6, 6), nn.Conv1d(2, 2, 3, padding=1)
    body = nn.Sequential(layer, nn.Tanh(), layer, nn.Unflatten(1, (2, 3)), conv, nn.Tanh(), conv, nn.Flatten())
    return seeded(nn.Sequential(body, nn.Linear(6, CLASSES)))


def test_a_layer_used_twice_adds_up_before_the_norm() -> None:
    model = twice()
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    truth = loop(model, layout, x, y)
    tape = record(model, layout, layout.flatten(model), x, y, how="book")
    assert isinstance(tape, book.GhostTape)
    assert [len(uses) for uses in tape.parts] == [2, 2, 2, 2, 1, 1]
    check_tape(tape, truth, layout)
    apart = torch.stack([part.squared_norms().values for part in tape.parts[0]]).sum(dim=0).sqrt()
    true = truth[:, : layout.sizes[0]].norm(dim=1)
    assert not torch.allclose(apart, true)  # what adding squares of the uses would give


@pytest.mark.parametrize("how", ["auto", "book", "vmap"])
def test_a_layer_used_twice_keeps_its_own_parameters(how: str) -> None:
    # torch.func.functional_call restores such a layer wrongly: its parameters are gone after the call.
    model = twice()
    layout, own = ParameterLayout.of(model), list(model.parameters())
    record(model, layout, randn(layout.dim, seed=8), randn(B, 6), labels(), how=how)
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))


def test_two_layers_with_one_weight() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    model = seeded(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(6, CLASSES)))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    assert layout.names == ("0.weight", "0.bias", "2.bias", "4.weight", "4.bias")
    tape = record(model, layout, layout.flatten(model), x, y, how="book")
    check_tape(tape, loop(model, layout, x, y), layout)


@pytest.mark.parametrize("wrap", [False, True], ids=["sequence", "hooked"])
@pytest.mark.parametrize("frozen", ["0.weight", "0.", "2.bias", "2.", "4.weight"])
def test_frozen_parameters_have_no_gradient(frozen: str, wrap: bool) -> None:
    layers = [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, CLASSES)]
    body = seeded(nn.Sequential(*layers))
    for name, parameter in body.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    model = Wrapped(body) if wrap else body
    layout, x, y = ParameterLayout.of(model), randn(B, 1, 6, 6), labels()
    tape = record(model, layout, layout.flatten(model), x, y, how="book")
    check_tape(tape, loop(model, layout, x, y), layout)


# --- modules that book-keeping does not know ------------------------------------------------------


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(len(x), 3, 2))[0][:, -1])


class Borrowed(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(torch.tanh(self.first(x)), self.first.weight.t())))


class Positions(nn.Module):
    """A table of positions looked up once for the whole batch: its rows are not examples."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.table = nn.Embedding(count, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        where = self.table(torch.arange(self.count))
        return self.head(torch.tanh(x @ where.t() @ where))


class Merged(nn.Module):
    """Folds a dimension into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x.view(-1, 2))).view(-1, 6))


class Overwriting(nn.Module):
    """Overwrites a layer's input after the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        out = self.first(h)
        h += 1.0
        return self.head(torch.tanh(out))


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "prelu": (nn.PReLU, (6,)),
    "prelu-in-the-middle": (nn.PReLU, (4, 6)),
    "nested": (lambda: nn.Sequential(nn.PReLU(), nn.Identity()), (4, 6)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_single_unknown_module_goes_through_vmap_alone(name: str) -> None:
    make, shape = UNKNOWN[name]
    wide = make()(torch.zeros(2, *shape)).flatten(1).shape[1]
    model = seeded(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), make(), nn.Tanh(), nn.Flatten(), nn.Linear(wide, CLASSES)))
    layout, x, y = ParameterLayout.of(model), randn(B, *shape), labels()
    tape = record(model, layout, layout.flatten(model), x, y)
    assert isinstance(tape, book.GhostTape)
    check_tape(tape, loop(model, layout, x, y), layout)
    assert [path for _, path, _ in list_gradient_paths(model)] == ["book", "vmap", "book"]
    assert all(reason for _, _, reason in list_gradient_paths(model))


@pytest.mark.parametrize(
    "make",
    [Recurrent, Borrowed, Merged, Scale, *(partial(Positions, n) for n in (2, grads.NUM_PROBE_EXAMPLES, B))],
    ids=["lstm", "borrowed-weight", "merged-batch", "parameter-of-the-model", "table-2", "table-probe", "table-b"],
)
def test_every_use_is_followed_whoever_makes_it(make: type[nn.Module]) -> None:
    model = seeded(make())
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    params = layout.flatten(model)
    for _ in range(2):  # found out, then remembered
        tape = record(model, layout, params, x, y)
        assert isinstance(tape, book.GhostTape)
        check_tape(tape, loop(model, layout, x, y), layout)


class OneByOne(nn.Module):
    """A Python loop over the examples: the calls are others for a batch of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(row) for row in x])


@pytest.mark.parametrize("alone", [True, False], ids=["the-model", "a-module"])
def test_what_cannot_be_followed_goes_through_vmap_for_the_module_around(alone: bool) -> None:
    model = seeded(OneByOne() if alone else nn.Sequential(nn.Linear(6, 6), nn.Tanh(), OneByOne()))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    for _ in range(2):  # found out, then remembered
        check_tape(recorder(layout.flatten(model), x, y), loop(model, layout, x, y), layout)
        assert [site.name for site in recorder.sites or ()] == ["" if alone else "2"]


def test_an_unknown_way_is_refused() -> None:
    model = seeded(OneByOne())
    layout = ParameterLayout.of(model)
    with pytest.raises(ModelError, match="auto, book, vmap"):
        record(model, layout, layout.flatten(model), randn(B, 6), labels(), how="magic")


def test_an_input_overwritten_after_use_is_noticed() -> None:
    model = seeded(Overwriting())
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    with pytest.raises(ModelError, match="input of linear is overwritten"):
        record(model, layout, layout.flatten(model), x, y, how="book")


@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_in_place_activations_and_given_inputs_survive(shape: tuple[int, ...]) -> None:
    wide = 3 * (shape[0] if len(shape) > 1 else 1)
    layers = [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.LeakyReLU(0.1, inplace=True), nn.Flatten()]
    body = seeded(nn.Sequential(*layers, nn.Linear(wide, CLASSES)))
    for model in (body, Wrapped(body)):
        layout, x, y = ParameterLayout.of(model), randn(B, *shape), labels()
        params = layout.flatten(model)
        before = x.clone(), params.clone()
        tape = record(model, layout, params, x, y, how="book")
        check_tape(tape, loop(model, layout, x, y), layout)
        assert torch.equal(x, before[0])
        assert torch.equal(params, before[1])


def test_layers_with_hooks_or_computed_weights_are_left_to_vmap() -> None:
    first = nn.Linear(6, 6)
    hooked = seeded(nn.Sequential(first, nn.Tanh(), nn.Linear(6, CLASSES)))
    first.register_forward_hook(lambda module, args, out: out * 2)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, CLASSES))
    for model, path in ((hooked, ("0", "vmap")), (seeded(normed), None)):
        layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
        check_tape(record(model, layout, layout.flatten(model), x, y), loop(model, layout, x, y), layout)
        assert path is None or list_gradient_paths(model)[0][:2] == path
    assert "hooks" in list_gradient_paths(hooked)[0][2]


def test_every_known_layer_is_tested() -> None:
    tested = {type(make()) for make, _ in LAYERS.values()} | {nn.Embedding}
    assert tested == set(GRAD_SAMPLERS)


# --- what a tape leaves alone ---------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True], ids=["sequence", "hooked"])
def test_the_given_parameters_count_and_the_models_own_stay(wrap: bool) -> None:
    body = seeded(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES)))
    model = Wrapped(body) if wrap else body
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    own = layout.flatten(model)
    other = randn(layout.dim, seed=8)
    for how in ("auto", "book", "vmap"):
        tape = record(model, layout, other, x, y, how=how)
        assert torch.equal(layout.flatten(model), own)
        assert all(p.grad is None for p in model.parameters())
        assert not any(m._forward_hooks for m in model.modules())
        twin = seeded(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES)))
        layout_twin = ParameterLayout.of(twin)
        layout_twin.write(twin, other)
        check_tape(tape, loop(twin, layout_twin, x, y), layout)


@pytest.mark.parametrize("how", ["auto", "book", "vmap"])
def test_factors_of_one_give_the_batch_gradient(how: str) -> None:
    model = build_model(config.Model(name="mnist-cnn"), (1, 28, 28), CLASSES, seed=0).double()
    layout, x, y = ParameterLayout.of(model), randn(B, 1, 28, 28), labels()
    tape = record(model, layout, layout.flatten(model), x, y, how=how)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    batch = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(tape.weighted_sum(torch.ones(B, 1, dtype=torch.float64)), batch)


@pytest.mark.parametrize("how", ["auto", "book", "vmap"])
def test_a_loss_of_ones_own(how: str) -> None:
    model = seeded(nn.Sequential(nn.Linear(6, 1)))
    layout, x, target = ParameterLayout.of(model), randn(B, 6), randn(B, seed=7)

    def squared(out: Tensor, y: Tensor) -> Tensor:
        return (out.squeeze(1) - y).square()

    tape = record(model, layout, layout.flatten(model), x, target, task_from_loss(squared), how)
    residual = 2 * (model(x).detach().squeeze(1) - target)
    torch.testing.assert_close(tape.matrix(), torch.cat([residual[:, None] * x, residual[:, None]], dim=1))
    torch.testing.assert_close(tape.losses, residual.square() / 4)


def test_a_loss_over_the_batch_is_refused() -> None:
    model = seeded(nn.Sequential(nn.Linear(6, CLASSES)))
    layout = ParameterLayout.of(model)
    with pytest.raises(ModelError, match="one value an example"):
        record(model, layout, layout.flatten(model), randn(B, 6), labels(), task_from_loss(F.cross_entropy, CLASSES))


def test_threads_may_share_a_sequence() -> None:
    model = small_cnn()
    layout, x, y = ParameterLayout.of(model), randn(B, 1, 8, 8), labels()
    starts = [randn(layout.dim, seed=seed) for seed in range(8)]

    def matrix(params: Tensor) -> Tensor:
        return record(model, layout, params, x, y).matrix()

    with ThreadPoolExecutor(4) as pool:
        for found, params in zip(pool.map(matrix, starts), starts, strict=True):
            torch.testing.assert_close(found, matrix(params))


@pytest.mark.parametrize("how", ["auto", "book", "vmap"])
def test_an_empty_batch(how: str) -> None:
    model = build_model(config.Model(name="mnist-cnn"), (1, 28, 28), 10, seed=0)
    layout = ParameterLayout.of(model)
    params = layout.flatten(model)
    tape = record(model, layout, params, torch.empty(0, 1, 28, 28), torch.empty(0, dtype=torch.int64), how=how)
    groups = layout.layers
    assert tape.losses.shape == (0,)
    assert tape.matrix().shape == (0, layout.dim)
    assert tape.norms().shape == (0, 1)
    assert tape.norms(groups).shape == (0, 4)
    assert tape.dots(params).shape == (0,)
    assert torch.equal(tape.weighted_sum(torch.empty(0, 4), groups), torch.zeros(layout.dim))


# --- examples that are not finite ------------------------------------------------------------------


def small_cnn(dtype: torch.dtype = torch.float64) -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 9, 3), nn.GroupNorm(3, 9)]
    return seeded(nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, CLASSES)), dtype=dtype)


BAD = {"nan": float("nan"), "inf": float("inf"), "overflow": 1e200}


def check_zeroed(tape: GradientTape, alone: GradientTape, layout: ParameterLayout, bad: int) -> None:
    """`tape` has one bad example more than `alone`, and must answer as if it were not there."""
    others = [i for i in range(B) if i != bad]
    direction = randn(layout.dim, seed=4)
    for groups in ((), layout.layers):
        norms = tape.norms(groups)
        assert bool((norms[bad] == 0).all())
        torch.testing.assert_close(norms[others], alone.norms(groups))
        factors = torch.rand(B, norms.shape[1], dtype=norms.dtype, generator=torch.Generator().manual_seed(3))
        for wild in (1.0, float("inf"), float("nan")):  # C / 0 is what a careless rule makes of norm 0
            factors[bad] = wild
            torch.testing.assert_close(tape.weighted_sum(factors, groups), alone.weighted_sum(factors[others], groups))
    for all_, rest in (
        (tape.matrix(), alone.matrix()),
        (tape.dots(direction), alone.dots(direction)),
        (tape.losses, alone.losses),
    ):
        assert bool((all_[bad] == 0).all())
        torch.testing.assert_close(all_[others], rest)


@pytest.mark.parametrize("work", [1, 2**30], ids=["pieces", "whole"])
@pytest.mark.parametrize("how", ["auto", "hooked", "vmap"])
@pytest.mark.parametrize("value", BAD)
def test_an_example_that_is_not_finite_counts_as_zero(
    value: str, how: str, work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grads.PASS_MEMORY_BYTES, "cpu", work)
    model = Wrapped(small_cnn()) if how == "hooked" else small_cnn()
    layout, x, y, bad = ParameterLayout.of(model), randn(B, 1, 8, 8), labels(), 2
    x[bad, 0, 3, 4] = BAD[value]
    others = [i for i in range(B) if i != bad]
    way = {"auto": "auto", "hooked": "book", "vmap": "vmap"}[how]

    def tape(rows: list[int]) -> GradientTape:
        return record(model, layout, layout.flatten(model), x[rows], y[rows], how=way)

    check_zeroed(tape(list(range(B))), tape(others), layout, bad)
    # The sum alone, before anybody asked for a norm.
    ones = torch.ones(B, 1, dtype=torch.float64)
    torch.testing.assert_close(tape(list(range(B))).weighted_sum(ones), tape(others).weighted_sum(ones[others]))


def test_zeroing_the_output_gradients_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_cnn()
    layout, x, y = ParameterLayout.of(model), randn(B, 1, 8, 8), labels()
    x[2] = float("nan")
    monkeypatch.setattr(book, "MAX_MATERIALISED_RATIO", 0.0)

    def half(part: Any, good: Tensor) -> Any:
        return dataclasses.replace(part, g=parts.zero_masked_rows(part.g, good))

    ones = torch.ones(B, 1, dtype=torch.float64)
    assert record(model, layout, layout.flatten(model), x, y).weighted_sum(ones).isfinite().all()
    for kind in (outer.LinearGrad, outer.ConvGrad):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "only", half)
            assert not record(model, layout, layout.flatten(model), x, y).weighted_sum(ones).isfinite().all()


def test_a_norm_that_overflows_counts_as_zero() -> None:
    model = seeded(nn.Sequential(nn.Linear(6, CLASSES)), dtype=torch.float32)
    layout, x, y = ParameterLayout.of(model), randn(B, 6, dtype=torch.float32), labels()
    x[1] = torch.tensor([1e25, 0, 0, 0, 0, 0])
    params = layout.flatten(model) * 0
    for how in ("book", "vmap"):
        tape = record(model, layout, params, x, y, how=how)
        assert tape.norms()[1] == 0
        assert float(tape.weighted_sum(torch.ones(B, 1)).abs().max()) < 100


def test_all_examples_bad() -> None:
    model = small_cnn()
    layout = ParameterLayout.of(model)
    for wrapped in (model, Wrapped(model)):
        layout = ParameterLayout.of(wrapped)
        tape = record(wrapped, layout, layout.flatten(wrapped), randn(B, 1, 8, 8) * float("nan"), labels())
        assert not tape.norms().any()
        assert not tape.weighted_sum(torch.ones(B, 1, dtype=torch.float64)).any()


def test_a_ghost_norm_is_never_far_below_the_truth() -> None:
    # Two positions that cancel all but 1e-4 of each other, in single precision.
    count, rest = 200, 1e-4
    a = randn(count, 1, 50, dtype=torch.float32).expand(-1, 2, -1).contiguous()
    g = randn(count, 1, 30, seed=1, dtype=torch.float32) * torch.tensor([1.0, rest - 1.0]).view(1, 2, 1)
    true = torch.bmm(g.double().transpose(1, 2), a.double()).flatten(1).norm(dim=1)
    gram, other = torch.bmm(a, a.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2))
    careless = (gram * other).sum(dim=(1, 2)).clamp(min=0).sqrt().double()
    assert bool((careless < 0.5 * true).any())
    found = outer.ghost_squared_norms(a.transpose(1, 2), g)
    assert bool((found.bounds.sqrt() >= true).all())
    torch.testing.assert_close(found.bounds.sqrt(), true, rtol=1e-4, atol=0)
    # Where little cancels the guard changes nothing.
    g[:, 1] = g[:, 0].flip(1)
    true = torch.bmm(g.double().transpose(1, 2), a.double()).flatten(1).norm(dim=1)
    found = outer.ghost_squared_norms(a.transpose(1, 2), g)
    torch.testing.assert_close(found.values.sqrt(), true, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.bounds.sqrt(), true, rtol=1e-9, atol=0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_can_be_kept() -> None:
    assert grads.retain_freed_memory()
