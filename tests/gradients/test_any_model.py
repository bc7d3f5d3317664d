"""Models that nobody planned for, against autograd in float64 on one example after the other.

Each names the way that it is followed: by rules alone, by vmap for one call, or by vmap for one module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fulcrum import gradients as grads
from fulcrum.gradients import probe, uses
from fulcrum.gradients.call_plan import Axis, CallPlan
from fulcrum.gradients.derived import DerivedGrad
from fulcrum.gradients.ghost import GhostTape
from fulcrum.gradients.recording import plan_uses
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.prepared import add_example_keys, draws_keys, prepare_model
from support.gradients import CLASSES, CLASSIFY, B, check_tape, labels, loop, randn, seeded

WORDS = 7


class Model(nn.Module):
    """A forward given as a function of the parts and the input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def L(inputs: int, outputs: int = CLASSES) -> nn.Linear:
    return nn.Linear(inputs, outputs)


class Hand(nn.Module):
    """A layer norm over channels, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = P(4), P(4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-3).sqrt()
        return self.weight[:, None] * x + self.bias[:, None]


class Product(torch.autograd.Function):
    """A user's own function, without a batching rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        x, w = ctx.saved_tensors
        return slopes[0] * w, (slopes[0] * x).sum(0)


class Experts(nn.Module):
    """Each example goes to one of two layers: how many rows each sees depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.each = L(6, 2), nn.ModuleList([L(6, 5), L(6, 5)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(1)
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.each):
            mine = shares.argmax(1) == number
            if mine.any():
                out[mine] = shares[mine, number : number + 1] * expert(x[mine])
        return out


class Cells(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell = kind(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = L(6, 5).requires_grad_(False), P(2, 6), P(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


def in_place(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    h += s.p
    h *= s.p
    h[:, 1] = s.q
    return s.head(torch.relu_(h))  # type: ignore[no-any-return]


def masked(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).masked_fill(x[..., :1] > 0.5, s.q)
    h[x[..., 0] > 1] = s.p
    return s.head(h.flatten(1))  # type: ignore[no-any-return]


def relative_bias(s: Any, x: Tensor) -> Tensor:
    index = torch.tensor([[2, 1, 0], [3, 2, 1], [4, 3, 2]])
    scores = s.a(x) @ s.a(x).transpose(1, 2) + s.p[index.view(-1)].view(3, 3)
    return s.head((scores.softmax(-1) @ x).flatten(1))  # type: ignore[no-any-return]


def packed(s: Any, x: Tensor) -> Tensor:
    lengths = (x[:, 0, 0] > 0).long() + 2
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, _ = nn.utils.rnn.pad_packed_sequence(s.rnn(sequence)[0], batch_first=True, total_length=3)
    return s.head(out.flatten(1))  # type: ignore[no-any-return]


def time_first(s: Any, x: Tensor) -> Tensor:
    return s.head(s.body(x.transpose(0, 1)).mean(0))  # type: ignore[no-any-return]


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(L(6, 5))


ENCODER: dict[str, Any] = {"d_model": 6, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0}
Case = tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], dict[str, Callable[[], Any]]]

BY_RULES: dict[str, Case] = {
    "encoder-time-first": (
        time_first,
        (3, 6),
        {"body": lambda: nn.TransformerEncoderLayer(**ENCODER), "head": lambda: L(6)},
    ),
    "linear-time-first": (time_first, (3, 6), {"body": lambda: L(6, 5), "head": lambda: L(5)}),
    "linear-time-first-of-b": (time_first, (B, 6), {"body": lambda: L(6, 5), "head": lambda: L(5)}),
    "norm-time-first": (time_first, (4, 6), {"body": lambda: nn.LayerNorm(6), "head": lambda: L(6)}),
    "gru-time-first": (
        lambda s, x: s.head(s.a(x.transpose(0, 1))[0][-1]),
        (3, 6),
        {"a": lambda: nn.GRU(6, 4), "head": lambda: L(4)},
    ),
    "rows-merged": (
        lambda s, x: s.head(s.a(x.flatten(0, 1)).view(len(x), -1)),
        (2, 3, 5),
        {"a": lambda: nn.Conv1d(3, 4, 2), "head": lambda: L(32)},
    ),
    "rows-merged-norm": (
        lambda s, x: s.head(s.a(x.flatten(0, 1)).view(len(x), -1)),
        (2, 4, 3),
        {"a": lambda: nn.GroupNorm(2, 4), "head": lambda: L(24)},
    ),
    "rows-merged-lstm": (
        lambda s, x: s.head(s.a(x.flatten(0, 1))[0].reshape(len(x), -1)),
        (2, 3, 5),
        {"a": lambda: nn.LSTM(5, 2, batch_first=True), "head": lambda: L(12)},
    ),
    "rows-merged-attention": (
        lambda s, x: s.head(s.a(x.flatten(0, 1)).view(len(x), -1)),
        (2, 2, 6),
        {"a": lambda: nn.TransformerEncoderLayer(**ENCODER, batch_first=True), "head": lambda: L(24)},
    ),
    "rows-merged-inside-out": (
        lambda s, x: s.head(torch.cat(s.a(torch.cat([x[:, 0], x[:, 1]])).chunk(2), 1)),
        (2, 6),
        {"a": lambda: L(6, 4), "head": lambda: L(8)},
    ),
    "position-slice": (
        lambda s, x: s.head((s.a(x) + s.p[:, :3]).flatten(1)),
        (3, 6),
        {"a": lambda: L(6, 2), "p": lambda: P(1, 7, 2), "head": lambda: L(6)},
    ),
    "position-table": (
        lambda s, x: s.head((x + s.p(torch.arange(3))).flatten(1)),
        (3, 6),
        {"p": lambda: nn.Embedding(4, 6), "head": lambda: L(18)},
    ),
    "position-resized": (
        lambda s, x: s.head((x + F.interpolate(s.p, size=6)).flatten(1)),
        (3, 6),
        {"p": lambda: P(1, 3, 4), "head": lambda: L(18)},
    ),
    "in-place": (in_place, (6,), {"a": lambda: L(6, 5), "p": lambda: P(5), "q": lambda: P(), "head": lambda: L(5)}),
    "masked": (masked, (3, 6), {"a": lambda: L(6, 2), "p": lambda: P(2), "q": lambda: P(), "head": lambda: L(6)}),
    "chosen": (
        lambda s, x: s.head(torch.where(x > 0, x / s.p.exp(), s.q**2)),
        (6,),
        {"p": lambda: P(6), "q": lambda: P(), "head": lambda: L(6)},
    ),
    "gate": (
        lambda s, x: s.head(torch.sigmoid(s.p) * s.a(x) + (1 - torch.sigmoid(s.p)) * x),
        (6,),
        {"p": lambda: P(), "a": lambda: L(6, 6), "head": lambda: L(6)},
    ),
    "mix-of-layers": (
        lambda s, x: s.head(sum(w * a(x) for w, a in zip(s.p.softmax(0), s.a, strict=True))),
        (6,),
        {"p": lambda: P(2), "a": lambda: nn.ModuleList([L(6, 5), L(6, 5)]), "head": lambda: L(5)},
    ),
    "relative-bias": (relative_bias, (3, 6), {"a": lambda: L(6, 4), "p": lambda: P(5), "head": lambda: L(18)}),
    "learned-queries": (
        lambda s, x: s.head(s.a(s.p.expand(len(x), -1, -1), x, x)[0].flatten(1)),
        (3, 6),
        {"p": lambda: P(1, 2, 6), "a": lambda: nn.MultiheadAttention(6, 2, batch_first=True), "head": lambda: L(12)},
    ),
    "attention-added-keys": (
        lambda s, x: s.head(s.a(x, x, x)[0].flatten(1)),
        (3, 6),
        {
            "a": lambda: nn.MultiheadAttention(6, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
            "head": lambda: L(18),
        },
    ),
    "batch-norm-frozen": (
        lambda s, x: s.head(s.a(x).flatten(1)),
        (4, 3),
        {"a": lambda: nn.BatchNorm1d(4).eval(), "head": lambda: L(12)},
    ),
    "repeated": (
        lambda s, x: s.head(torch.cat([s.p.repeat(len(x), 2, 1), s.q.expand_as(x), x], 1).flatten(1)),
        (2, 6),
        {"p": lambda: P(1, 1, 6), "q": lambda: P(6), "head": lambda: L(36)},
    ),
    "transposed": (lambda s, x: s.head(torch.tanh(x @ s.p.T)), (6,), {"p": lambda: P(5, 6), "head": lambda: L(5)}),
    "slices-that-overlap": (
        lambda s, x: s.head(F.linear(x, s.p[:4]) * F.linear(x, s.p[1:])),
        (6,),
        {"p": lambda: P(5, 6), "head": lambda: L(4)},
    ),
    "rows-of-parameters": (
        lambda s, x: s.head(F.linear(x, torch.stack([p * 2 for p in s.p]))),
        (6,),
        {"p": lambda: nn.ParameterList([P(6), P(6)]), "head": lambda: L(2)},
    ),
    "expanded-to-a-weight": (
        lambda s, x: s.head(F.linear(x, s.p.expand(B, 6), s.p[:B])),
        (6,),
        {"p": lambda: P(6), "head": lambda: L(B)},
    ),
    "gpt2-layer": (
        lambda s, x: s.head(torch.addmm(s.b, x.reshape(-1, 6), s.p).view(len(x), -1)),
        (3, 6),
        {"p": lambda: P(6, 4), "b": lambda: P(4), "head": lambda: L(12)},
    ),
    "low-rank-merged": (lambda s, x: s.head(torch.tanh(s.a(x))), (6,), {"a": LowRank, "head": lambda: L(5)}),
    "weight-norm": (lambda s, x: s.head(torch.tanh(s.a(x))), (6,), {"a": weight_normed, "head": lambda: L(5)}),
    "orthogonal": (
        lambda s, x: s.head(torch.tanh(s.a(x))),
        (6,),
        {"a": lambda: nn.utils.parametrizations.orthogonal(L(6, 5)), "head": lambda: L(5)},
    ),
    "hyper-network": (
        lambda s, x: s.head(F.linear(x, s.a(s.p).view(4, 6))),
        (6,),
        {"p": lambda: P(3), "a": lambda: L(3, 24), "head": lambda: L(4)},
    ),
    "prototypes": (
        lambda s, x: -(s.a(x)[:, None] - s.p).square().sum(-1),
        (6,),
        {"a": lambda: L(6, 4), "p": lambda: P(CLASSES, 4)},
    ),
    "fourier": (
        lambda s, x: s.head(torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(s.p), n=6)),
        (6,),
        {"p": lambda: P(6), "head": lambda: L(6)},
    ),
    "tied-inside-out": (
        lambda s, x: s.head(F.linear(torch.tanh(s.a(x)), s.a.weight.t())),
        (6,),
        {"a": lambda: L(6, 4), "head": lambda: L(6)},
    ),
    "tied-convolutions": (
        lambda s, x: s.head(F.conv_transpose1d(torch.tanh(s.a(x)), s.a.weight).flatten(1)),
        (4, 5),
        {"a": lambda: nn.Conv1d(4, 3, 3), "head": lambda: L(20)},
    ),
    "norm-by-hand": (lambda s, x: s.head(s.a(x).flatten(1)), (4, 3), {"a": Hand, "head": lambda: L(12)}),
    "detached": (lambda s, x: s.head(x * s.p.detach() + s.p), (6,), {"p": lambda: P(6), "head": lambda: L(6)}),
    "checkpoint": (
        lambda s, x: s.head(checkpoint(lambda h: torch.tanh(s.b(torch.tanh(s.a(h)))), x, use_reentrant=False)),
        (6,),
        {"a": lambda: L(6, 5), "b": lambda: nn.LayerNorm(5), "head": lambda: L(5)},
    ),
    "lstm-cell": (lambda s, x: s.head(s.a(x)), (3, 6), {"a": lambda: Cells(nn.LSTMCell), "head": lambda: L(3)}),
    "gru-cell": (lambda s, x: s.head(s.a(x)), (3, 6), {"a": lambda: Cells(nn.GRUCell), "head": lambda: L(3)}),
    "rnn-cell": (lambda s, x: s.head(s.a(x)), (3, 6), {"a": lambda: Cells(nn.RNNCell), "head": lambda: L(3)}),
    "rnn-relu-two-ways": (
        lambda s, x: s.head(s.a(x)[0][:, 0]),
        (3, 6),
        {"a": lambda: nn.RNN(6, 4, 2, "relu", batch_first=True, bidirectional=True), "head": lambda: L(8)},
    ),
    "prelu": (lambda s, x: s.head(s.a(x).flatten(1)), (3, 6), {"a": lambda: nn.PReLU(3), "head": lambda: L(18)}),
}

BY_CALLS: dict[str, Case] = {
    "stacked": (
        lambda s, x: s.head(torch.cat([torch.stack([s.p] * len(x)), x], 1)),
        (6,),
        {"p": lambda: P(2), "head": lambda: L(8)},
    ),
    "einsum-by-head": (
        lambda s, x: s.head(torch.einsum("bthd,hde->bthe", x, s.p).flatten(1)),
        (3, 2, 4),
        {"p": lambda: P(2, 4, 2), "head": lambda: L(12)},
    ),
    "distances": (lambda s, x: -torch.cdist(s.a(x), s.p), (6,), {"a": lambda: L(6, 4), "p": lambda: P(CLASSES, 4)}),
    "product-from-the-left": (
        lambda s, x: s.head((s.p @ x).flatten(1)),
        (3, 6),
        {"p": lambda: P(2, 3), "head": lambda: L(12)},
    ),
    "own-function": (
        lambda s, x: s.head(Product.apply(s.a(x), s.p)),
        (6,),
        {"p": lambda: P(5), "a": lambda: L(6, 5), "head": lambda: L(5)},
    ),
    "batch-in-channels": (
        lambda s, x: s.head(F.conv1d(x.reshape(1, -1, 5), s.p.repeat(len(x), 1, 1), groups=len(x)).view(len(x), -1)),
        (2, 5),
        {"p": lambda: P(3, 2, 2), "head": lambda: L(12)},
    ),
    "lstm-projected": (
        lambda s, x: s.head(s.a(x)[0][:, -1]),
        (3, 6),
        {"a": lambda: nn.LSTM(6, 4, proj_size=2, batch_first=True), "head": lambda: L(2)},
    ),
}

BY_MODULES: dict[str, tuple[Case, str]] = {
    "experts": ((lambda s, x: s.head(s.a(x)), (6,), {"a": Experts, "head": lambda: L(5)}), "a"),
    "packed": (
        (
            lambda s, x: s.head(s.a(x)),
            (3, 6),
            {"a": lambda: Model(packed, rnn=nn.GRU(6, 4, batch_first=True), head=L(12, 5)), "head": lambda: L(5)},
        ),
        "a",
    ),
}


def follow(case: Case) -> grads.GradientRecorder:
    """The recorder of a case's model, after all its answers were compared with autograd's."""
    run, shape, parts = case
    torch.manual_seed(0)
    model = seeded(Model(run, **{name: make() for name, make in parts.items()}))
    layout, x, y = ParameterLayout.of(model), randn(B, *shape), labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    truth = loop(model, layout, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations without a batching rule
        tape = recorder(layout.flatten(model), x, y)
    assert isinstance(tape, GhostTape)
    check_tape(tape, truth, layout)
    table = recorder.record_once(layout.flatten(model), x, y).norm_table(layout.layers)
    for group in range(max(layout.layers) + 1):
        own = torch.cat([t for t, g in zip(truth.split(layout.sizes, 1), layout.layers, strict=True) if g == group], 1)
        assert bool((table.bounds[:, group] >= own.norm(dim=1) * (1 - 1e-12)).all())
    return recorder


def list_ways(recorder: grads.GradientRecorder) -> tuple[set[str], set[str]]:
    """(functions, modules) that go through vmap."""
    assert recorder.plan is not None
    calls = {call.reason for call in recorder.plan.calls.calls if call.kind == "vmap"}
    return calls, {site.name for site in recorder.plan.sites}


@pytest.mark.parametrize("name", BY_RULES)
def test_rules_follow(name: str) -> None:
    assert list_ways(follow(BY_RULES[name])) == (set(), set())


@pytest.mark.parametrize("name", BY_CALLS)
def test_vmap_for_one_call_follows(name: str) -> None:
    calls, modules = list_ways(follow(BY_CALLS[name]))
    assert len(calls) == 1
    assert not modules


@pytest.mark.parametrize("name", BY_MODULES)
def test_vmap_for_one_module_follows_what_depends_on_the_data(name: str) -> None:
    case, module = BY_MODULES[name]
    assert list_ways(follow(case))[1] == {module}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=["indexed", "bag"])
def test_words_are_looked_up_in_a_table(kind: type[nn.Module]) -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        found = s.a.weight[x].mean(1) if kind is nn.Embedding else s.a(x)
        return found @ s.a.weight.T @ s.head

    model = seeded(Model(run, a=kind(WORDS, 4), head=P(WORDS, CLASSES)))
    layout, x, y = ParameterLayout.of(model), torch.arange(4 * B).view(B, 4) % WORDS, labels()
    recorder = grads.GradientRecorder(model, layout, CLASSIFY)
    check_tape(recorder(layout.flatten(model), x, y), loop(model, layout, x, y), layout)
    assert list_ways(recorder) == (set(), set())


# --- wrong cases ----------------------------------------------------------------------------------


def record_with(change: Callable[[CallPlan], CallPlan], name: str) -> tuple[Tensor, Tensor]:
    """(gradients by a changed plan, true ones)."""
    run, shape, parts = BY_RULES[name]
    torch.manual_seed(0)
    model = seeded(Model(run, **{part: make() for part, make in parts.items()}))
    layout, x, y = ParameterLayout.of(model), randn(B, *shape), labels()
    own = layout.flatten(model)
    plan = plan_uses(model, layout, own, x, y, CLASSIFY)
    plan = replace(plan, calls=change(plan.calls))
    tape = probe.record_ghost_tape(model, probe.GradProgram({}, ()), layout, own, x, y, CLASSIFY, plan)
    return tape.matrix(), loop(model, layout, x, y)


@pytest.mark.parametrize("name", ["linear-time-first-of-b", "rows-merged-inside-out"])
def test_where_examples_are_decides(name: str) -> None:
    """Wrong case: as many steps as examples, or rows in another order. Sizes fit, gradients are those of nobody."""

    def turn(place: Any) -> Any:
        return Axis(0, place.each) if isinstance(place, Axis) else place

    def fit(shape: tuple[int, ...], place: Any) -> tuple[int, ...]:
        """The shape that is checked: with the examples of the batch where they truly are."""
        at = place.dim if isinstance(place, Axis) else len(shape)
        return tuple(place.each * B if dim == at else size for dim, size in enumerate(shape))

    def confuse(calls: CallPlan) -> CallPlan:
        changed = [
            replace(
                call,
                given=tuple(map(turn, call.given or ())),
                found=tuple(map(turn, call.found)),
                shapes=tuple(map(fit, call.shapes, call.given or ())),
            )
            for call in calls.calls
        ]
        return replace(calls, calls=tuple(changed))

    right, truth = record_with(lambda calls: calls, name)
    torch.testing.assert_close(right, truth, rtol=1e-10, atol=1e-10)
    wrong, _ = record_with(confuse, name)
    assert not torch.allclose(wrong, truth, rtol=1e-3)


def test_what_parameters_make_leads_back_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong case: a transposed weight's gradients are taken for the weight's own. The comparison notices."""
    right = follow(BY_RULES["transposed"])
    monkeypatch.setattr(uses, "DerivedGrad", lambda part, *_: part)
    wrong = follow(BY_RULES["transposed"])
    assert list_ways(right) == (set(), set())
    assert list_ways(wrong) != (set(), set())


def test_views_keep_norms_without_writing_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    plain = DerivedGrad.squared_norms

    def note(self: DerivedGrad, fast: bool = False) -> Any:
        kept.append(self.moved)
        return plain(self, fast)

    monkeypatch.setattr(DerivedGrad, "squared_norms", note)
    for name in ("transposed", "weight-norm"):
        follow(BY_RULES[name])
    assert {True, False} == set(kept)


# --- random layers --------------------------------------------------------------------------------


class DroppingExperts(Experts):
    """Experts whose module, which goes through vmap, draws random numbers too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


RANDOM: dict[str, Case] = {
    "encoder": (
        lambda s, x: s.head(s.body(x).mean(1)),
        (3, 6),
        {
            "body": lambda: nn.TransformerEncoderLayer(**{**ENCODER, "dropout": 0.4}, batch_first=True),
            "head": lambda: L(6),
        },
    ),
    "gru": (
        lambda s, x: s.head(s.a(x)[0][:, -1]),
        (3, 6),
        {"a": lambda: nn.GRU(6, 4, 2, dropout=0.4, batch_first=True), "head": lambda: L(4)},
    ),
    "experts": (lambda s, x: s.head(s.a(x)), (6,), {"a": DroppingExperts, "head": lambda: L(5)}),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", RANDOM)
def test_dropout_is_that_of_each_example_whatever_the_way(name: str) -> None:
    """Wrong case: other keys give other gradients."""
    run, shape, parts = RANDOM[name]
    torch.manual_seed(0)
    model = seeded(Model(run, **{part: make() for part, make in parts.items()}), dtype=torch.float32)
    x, y = randn(B, *shape, dtype=torch.float32), labels()
    prepared = prepare_model(model, x)
    assert draws_keys(prepared)
    layout = ParameterLayout.of(prepared)
    own, keyed = layout.flatten(prepared), add_example_keys(x, 3, torch.arange(B))
    assert not isinstance(keyed, Tensor)
    recorder = grads.GradientRecorder(prepared, layout, CLASSIFY)
    truth = torch.cat(
        [
            grads.GradientRecorder(prepared, layout, CLASSIFY, how="vmap")(
                own, {part: value[n : n + 1] for part, value in keyed.items()}, y[n : n + 1]
            ).matrix()
            for n in range(B)
        ]
    )
    torch.testing.assert_close(recorder(own, keyed, y).matrix(), truth, rtol=1e-4, atol=1e-6)
    other = recorder(own, add_example_keys(x, 4, torch.arange(B)), y)
    assert not torch.allclose(other.matrix(), truth, rtol=1e-2)
    assert not recorder.objection
