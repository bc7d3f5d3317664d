"""Every function of the table, and whole models, against autograd in float64 on one example after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fulcrum import gradients as grads
from fulcrum.errors import ModelError
from fulcrum.gradients import ghost as book
from fulcrum.gradients import param_grads as parts
from fulcrum.gradients import recording, rule_tables
from fulcrum.gradients.uses import FUNCTION_RULES
from fulcrum.models.layout import ParameterLayout
from support.gradients import CLASSES, CLASSIFY, B, check_tape, labels, loop, randn, record, seeded


class Head(nn.Module):
    """A layer between two linear ones, in a forward of its own."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.shape, self.call, self.layer = shape, call, layer
        size = int(torch.tensor(shape).prod())
        self.first = nn.Linear(6, size)
        wide = call(layer, torch.zeros(2, *shape)).flatten(1).shape[1]
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).view(len(x), *self.shape)
        return self.head(torch.tanh(self.call(self.layer, h)).flatten(1))


class Direct(nn.Module):
    """Parameters used without a layer."""

    def __init__(self, how: Callable[[nn.ParameterDict, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.own = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.own, x)


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def attend(layer: Any, x: Tensor, **options: Any) -> Tensor:
    return layer(x, x, x, **options)[0]  # type: ignore[no-any-return]


def cross(layer: Any, x: Tensor) -> Tensor:
    return layer(x[:, :2], x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def causal(layer: Any, x: Tensor) -> Tensor:
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    return attend(layer, x, attn_mask=mask, need_weights=False)


def padded(layer: Any, x: Tensor) -> Tensor:
    hidden = torch.zeros(len(x), 3, dtype=torch.bool)
    hidden[:, -1] = True
    return attend(layer, x, key_padding_mask=hidden, need_weights=True)


def class_token(own: nn.ParameterDict, x: Tensor) -> Tensor:
    return torch.cat([own["token"].expand(len(x), -1, -1), x], dim=1) + own["place"]


def merge(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.flatten(0, 1)).unflatten(0, (len(x), -1))  # type: ignore[no-any-return]


def twice(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(torch.tanh(layer(x)))


def last_step(layer: Any, x: Tensor) -> Tensor:
    return layer(x)[0][:, -1]  # type: ignore[no-any-return]


def all_steps(layer: Any, x: Tensor) -> Tensor:
    return layer(x)[0]  # type: ignore[no-any-return]


def last_states(layer: Any, x: Tensor) -> Tensor:
    states = layer(x)[1]
    states = torch.cat(states) if isinstance(states, tuple) else states
    return states.transpose(0, 1)  # type: ignore[no-any-return]


def time_first(layer: Any, x: Tensor) -> Tensor:
    return layer(x.transpose(0, 1))[0].transpose(0, 1)  # type: ignore[no-any-return]


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[..., Tensor]]] = {
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, stride=(1, 2, 1)), (2, 3, 4, 3), plain),
    "conv3d-groups": (lambda: nn.Conv3d(4, 4, (1, 2, 2), groups=2, dilation=(1, 1, 2)), (4, 2, 4, 4), plain),
    "conv3d-same": (lambda: nn.Conv3d(2, 3, 3, padding="same", bias=False), (2, 3, 3, 3), plain),
    "conv-1x1-stride": (lambda: nn.Conv2d(4, 3, 1, stride=2), (4, 5, 5), plain),
    "transposed-1d": (lambda: nn.ConvTranspose1d(4, 3, 2), (4, 6), plain),
    "transposed-1d-stride": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2), (4, 6), plain),
    "transposed-2d": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, padding=1, output_padding=1), (3, 4, 5), plain),
    "transposed-2d-dilated": (lambda: nn.ConvTranspose2d(2, 2, 2, dilation=2, output_padding=1), (2, 3, 3), plain),
    "transposed-3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 2), plain),
    "rms-norm": (lambda: nn.RMSNorm(6), (4, 6), plain),
    "rms-norm-eps": (lambda: nn.RMSNorm((4, 6), eps=0.1), (2, 4, 6), plain),
    "instance-norm": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 6), plain),
    "instance-norm-2d": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4), plain),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 5), plain),
    "layer-norm": (lambda: nn.LayerNorm((4, 6)), (3, 4, 6), plain),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (3, 4), attend),
    "attention-cross": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (3, 4), cross),
    "attention-causal": (lambda: nn.MultiheadAttention(4, 2, batch_first=True, bias=False), (3, 4), causal),
    "attention-padded": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (3, 4), padded),
    "attention-own-widths": (lambda: nn.MultiheadAttention(4, 2, kdim=4, vdim=4, batch_first=True), (3, 4), cross),
    "encoder-layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True),
        (3, 4),
        plain,
    ),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), (3, 4), lambda layer, x: layer(x, x.flip(1))),
    "lstm": (lambda: nn.LSTM(4, 3, batch_first=True), (5, 4), all_steps),
    "lstm-last": (lambda: nn.LSTM(4, 3, batch_first=True, bias=False), (5, 4), last_step),
    "lstm-states": (lambda: nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), (5, 4), last_states),
    "lstm-two": (lambda: nn.LSTM(4, 3, 2, bidirectional=True), (5, 4), time_first),
    "gru": (lambda: nn.GRU(4, 3, batch_first=True), (5, 4), all_steps),
    "gru-last": (lambda: nn.GRU(4, 3, batch_first=True, bias=False), (5, 4), last_step),
    "gru-states": (lambda: nn.GRU(4, 3, 2, batch_first=True, bidirectional=True), (5, 4), last_states),
    "gru-two": (lambda: nn.GRU(4, 3, 2, bidirectional=True), (5, 4), time_first),
    "rnn": (lambda: nn.RNN(4, 3, batch_first=True), (5, 4), all_steps),
    "merged-rows": (lambda: nn.Linear(4, 5), (3, 4), merge),
    "used-twice": (lambda: nn.Linear(4, 4), (3, 4), twice),
    "conv-used-twice": (lambda: nn.Conv1d(4, 4, 3, padding=1), (4, 5), twice),
    "added": (lambda: Direct(lambda own, x: own["p"] + x, p=(3, 4)), (3, 4), plain),
    "subtracted": (lambda: Direct(lambda own, x: own["p"] - (x - own["q"]), p=(1, 3, 1), q=(4,)), (3, 4), plain),
    "multiplied": (lambda: Direct(lambda own, x: x * own["p"], p=(4,)), (3, 4), plain),
    "scaled": (lambda: Direct(lambda own, x: own["p"] * x, p=()), (3, 4), plain),
    "matmul": (lambda: Direct(lambda own, x: x @ own["p"], p=(4, 5)), (3, 4), plain),
    "class-token": (lambda: Direct(class_token, token=(1, 1, 4), place=(1, 4, 4)), (3, 4), plain),
    "no-rule": (lambda: Direct(lambda own, x: torch.cdist(x, own["p"]), p=(5, 4)), (3, 4), plain),
    "einsum": (
        lambda: Direct(lambda own, x: torch.einsum("...i,io->o...", x, own["p"]).movedim(0, -1), p=(4, 5)),
        (3, 4),
        plain,
    ),
    "einsum-heads": (
        lambda: Direct(lambda own, x: torch.einsum("hio,bti->bhto", own["p"], x), p=(2, 2, 3)),
        (12, 2),
        plain,
    ),
    "einsum-two-inputs": (
        lambda: Direct(lambda own, x: torch.einsum("bhtd,dho->bto", x, own["p"]), p=(2, 3, 7)),
        (3, 9, 2),
        plain,
    ),
    "einsum-outer": (lambda: Direct(lambda own, x: torch.einsum("bi,o->bio", x, own["p"]), p=(3,)), (4,), plain),
    "transposed-parameter": (lambda: Direct(lambda own, x: F.linear(x, own["p"].t()), p=(4, 5)), (3, 4), plain),
}


def build(name: str) -> nn.Module:
    make, shape, call = LAYERS[name]
    return seeded(Head(make(), shape, call))


@pytest.mark.parametrize("frozen", ["", "bias"], ids=["", "frozen-bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_function_equals_autograd(name: str, frozen: str) -> None:
    model = build(name)
    for parameter, value in model.named_parameters():
        value.requires_grad_(not (frozen and frozen in parameter))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    tape = recorder(layout.flatten(model), x, y)
    assert isinstance(tape, book.GhostTape)
    check_tape(tape, loop(model, layout, x, y), layout)
    assert not recorder.sites
    assert bool(list_by_vmap(recorder)) == (name in UNKNOWN)


UNKNOWN = {"no-rule": "no rule for cdist"}
"""What no rule knows: vmap for that call alone."""


def list_by_vmap(recorder: grads.GradientRecorder) -> list[str]:
    """The reasons of the calls that go through vmap."""
    assert recorder.plan is not None
    return [call.reason for call in recorder.plan.calls.calls if call.kind == "vmap"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_only_the_call_without_a_rule_goes_through_vmap(name: str) -> None:
    model = build(name)
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    recorder(layout.flatten(model), x, y)
    assert list_by_vmap(recorder) == [UNKNOWN[name]]


def test_a_plan_names_function_shape_and_way() -> None:
    model = build("attention")
    x, y = randn(1, 6), labels(1)
    found = {name: (path, reason) for name, path, reason in grads.list_gradient_paths(model, x, y, CLASSIFY)}
    assert found["first.weight"] == ("book", "linear, 1 positions, 6 x 12: norm from the norms of input and gradient")
    assert found["layer.in_proj_weight"][1].startswith("multi_head_attention_forward, 3 positions, 4 x 12: norm from")
    paths = grads.list_gradient_paths(build("no-rule"), x, y, CLASSIFY)
    assert [(path, reason) for name, path, reason in paths if name == "layer.own.p"] == [
        ("vmap", "no rule for cdist, for this call alone")
    ]


def test_a_wrong_norm_of_a_registered_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_tables, "LAYER_RULES", {})
    monkeypatch.setattr(recording, "LAYER_RULES", rule_tables.LAYER_RULES)
    own = read_own_layer_page()
    half = lambda a, g: 0.25 * own["norm"](a, g)  # noqa: E731
    grads.register_layer(own["Gain"])(lambda layer, p, a, g: {"weight": grads.OwnGrad(a, g, half, own["total"])})
    model = seeded(Head(own["Gain"](4), (3, 4), plain))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    check_tape(recorder(layout.flatten(model), x, y), loop(model, layout, x, y), layout)
    assert [(site.name, site.reason) for site in recorder.sites or ()] == [("layer", recording.DIFFERS)]


def test_a_rule_that_leaves_out_a_term_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong case: the second use of a shared weight is not recorded. The comparison notices; vmap takes its place."""
    right = FUNCTION_RULES[F.linear]
    seen: list[tuple[Any, Tensor]] = []

    def forgetful(recorder: Any, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if any(recorder is one and weight is other for one, other in seen):
            return function(input, weight, bias)
        seen.append((recorder, weight))
        return right(recorder, function, input, weight, bias)

    monkeypatch.setitem(FUNCTION_RULES, F.linear, forgetful)
    model = build("used-twice")
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    truth = loop(model, layout, x, y)
    wrong = record(model, layout, layout.flatten(model), x, y, how="book")
    assert not torch.allclose(wrong.matrix(), truth)
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    tape = recorder(layout.flatten(model), x, y)
    assert list_by_vmap(recorder) == [recording.DIFFERS] * 2
    assert not recorder.objection
    check_tape(tape, truth, layout)


@pytest.mark.parametrize("limit", [0, 1024], ids=["sorted", "pairs"])
def test_long_texts_sort_their_indices(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_GRAM_POSITIONS", limit)
    index = torch.randint(0, 5, (4, 9), generator=torch.Generator().manual_seed(1))
    part = parts.EmbeddingGrad(index, randn(4, 9, 3), 5)
    truth = part.rows().square().sum(dim=1)
    found = part.squared_norms()
    torch.testing.assert_close(found.values, truth)
    assert bool((found.bounds >= truth).all())
    apart = part.g.square().sum(dim=(1, 2))
    assert not torch.allclose(found.values, apart)  # what adding squares of the positions would give


def test_fast_norms_stay_within_their_bounds() -> None:
    """float32 Gram matrices against float64: the stated bound holds, also where positions cancel."""
    a, g = randn(8, 33, 16, seed=3), randn(8, 33, 12, seed=4)
    a[4:, 1:] = a[4:, :1]  # one input at all positions,
    g[4:] -= g[4:].mean(dim=1, keepdim=True)  # and gradients that add up to nothing
    from fulcrum.gradients.outer_products import LinearGrad

    exact = LinearGrad(a.float().double(), g.float().double()).rows().square().sum(dim=1)
    found = LinearGrad(a.float(), g.float()).squared_norms(fast=True)
    assert bool((found.bounds >= exact).all())
    assert bool((found.values[4:] < 1e-3 * found.lengths[4:]).all())
    torch.testing.assert_close(found.values[:4], exact[:4], rtol=1e-4, atol=0)


# --- a user's own layer ---------------------------------------------------------------------------


def read_own_layer_page() -> dict[str, Any]:
    page = (Path(__file__).parents[2] / "docs" / "own-layer.md").read_text()
    names: dict[str, Any] = {}
    for block in page.split("```python")[1:]:
        exec(block.split("```")[0], names)
    return names


@pytest.mark.parametrize("proven", [False, True])
def test_a_registered_layer_is_followed(proven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_tables, "LAYER_RULES", {})
    monkeypatch.setattr(recording, "LAYER_RULES", rule_tables.LAYER_RULES)
    own = read_own_layer_page()
    model = seeded(Head(own["Gain"](4), (3, 4), plain))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY, block=4 if proven else 0)
    tape = recorder(layout.flatten(model), x, y)
    assert not recorder.sites
    assert not recorder.objection
    check_tape(tape, loop(model, layout, x, y), layout)


def test_a_wrong_sum_of_a_registered_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_tables, "LAYER_RULES", {})
    monkeypatch.setattr(recording, "LAYER_RULES", rule_tables.LAYER_RULES)
    own = read_own_layer_page()
    half = lambda a, g, factors: 0.5 * own["total"](a, g, factors)  # noqa: E731
    grads.register_layer(own["Gain"])(lambda layer, p, a, g: {"weight": grads.OwnGrad(a, g, own["norm"], half)})
    model = seeded(Head(own["Gain"](4), (3, 4), plain))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    tape = recorder(layout.flatten(model), x, y)
    assert [(site.name, site.reason) for site in recorder.sites or ()] == [("layer", recording.DIFFERS)]
    check_tape(tape, loop(model, layout, x, y), layout)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda layer, p, a, g: {}, "returns nothing for its parameter 'weight'"),
        (lambda layer, p, a, g: a @ g, "rule registered for Gain failed"),
        (
            lambda layer, p, a, g: {"weight": grads.OwnGrad(a, g, torch.mul, lambda a, g, f: g)},
            "one squared norm per example",
        ),
    ],
    ids=["forgets", "fails", "norm-of-each-position"],
)
def test_mistakes_in_a_rule_are_named(rule: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_tables, "LAYER_RULES", {})
    monkeypatch.setattr(recording, "LAYER_RULES", rule_tables.LAYER_RULES)
    own = read_own_layer_page()
    grads.register_layer(own["Gain"])(rule)
    model = seeded(Head(own["Gain"](4), (3, 4), plain))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    with pytest.raises(ModelError, match=words):
        grads.GradientRecorder(model, layout, CLASSIFY)(layout.flatten(model), x, y)


class Called(nn.Module):
    """A parameter in a user's own function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, a: Tensor) -> Tensor:
        return self.function.apply(a, self.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("right", [True, False])
def test_a_registered_function_is_followed(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong case: its rule forgets half; vmap takes its place."""
    monkeypatch.setattr(rule_tables, "FUNCTION_RULES", dict(FUNCTION_RULES))
    own = read_own_layer_page()
    if not right:

        def halved(recorder: Any, function: Any, a: Tensor, weight: Tensor) -> Tensor:
            out, seen = function(a, weight), a.detach()
            use = grads.ParameterUse(weight, lambda g: grads.MaterialisedGrad(0.5 * (seen * g).sum(dim=1)))
            return recorder.tap(out, [use], (a,))  # type: ignore[no-any-return]

        grads.register_function_rule(own["Product"])(halved)
    model = seeded(Head(Called(own["Product"]), (3, 4), plain))
    layout, x, y = ParameterLayout.of(model), randn(B, 6), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    check_tape(recorder(layout.flatten(model), x, y), loop(model, layout, x, y), layout)
    assert list_by_vmap(recorder) == ([] if right else [recording.DIFFERS])
