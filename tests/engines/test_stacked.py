"""The stacked engine equals the reference, whatever the layers, the rule, the memory and the order of events."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fulcrum.clipping import RULES
from fulcrum.clipping.fixed import FIXED
from fulcrum.clipping.rule import no_statistics_share
from fulcrum.data import Dataset, from_arrays
from fulcrum.engines import ENGINES, find_engine
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import StackedEngine, core, sampling
from fulcrum.engines.stacked.table import store_on_device
from fulcrum.errors import ConfigError, RunError
from fulcrum.gradients import NUM_PROBE_EXAMPLES
from fulcrum.gradients.stacked import passes
from fulcrum.models.build import build_model
from fulcrum.models.builtin import ACTIVATIONS
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.runs.choices import check_choices
from fulcrum.settings.schema import Clip, Model, Settings
from fulcrum.types import Assignment, RoundRequest, RuleState, Stats
from support.events import as_gaussian
from support.federations import toy_data, toy_model, toy_problem
from support.rounds import assert_equal, images, request, stacked

CPU = torch.device("cpu")


# --- equality -------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_every_rule_equals_the_reference(rule: str, steps: int, groups: str) -> None:
    problem = toy_problem(rule, parties=3, diagnostics=True)
    problem = dataclasses.replace(problem, groups=problem.layout.layers if groups == "layer" else ())
    for sigma in (0.0, 1.0):
        wanted = request(problem, steps, sigma)
        assert_equal(list(ReferenceEngine(problem).run(wanted)), stacked(problem, wanted))


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.share is not no_statistics_share])
@pytest.mark.parametrize("every", [2, 100])
def test_statistics_now_and_then_equal_the_reference(rule: str, every: int) -> None:
    """Asked in some steps of some rounds: the events differ by step, and what was not asked for is zero."""
    problem = toy_problem(rule, parties=3)
    wanted = request(problem, 3, 1.0)
    tasks = tuple(
        dataclasses.replace(task, statistics_interval=1 if k == 2 else every)
        for k, task in enumerate(wanted.assignments)
    )
    wanted = dataclasses.replace(wanted, assignments=tasks)
    replies = list(ReferenceEngine(problem).run(wanted))
    assert_equal(replies, stacked(problem, wanted))
    assert [len({as_gaussian(event).sigma for event in reply.events}) for reply in replies] == [
        *([2 if every == 2 else 1] * 2),
        1,
    ]
    assert [bool(reply.extra.any()) for reply in replies] == [every == 2] * 2 + [True]


@pytest.mark.parametrize("reading", ["loss", "hypergradient", "derivative"])
@pytest.mark.parametrize("limit", [0, 3])
def test_a_rule_that_reads_losses_and_learning_rates_equals_the_reference(reading: str, limit: int) -> None:
    for rule in ("moo-paper", "moo-paper-batch"):
        problem = toy_problem(rule, parties=3)
        state = problem.rule.init(Clip(C0=0.5, kappa=0.3, reading=reading), problem.shape)
        wanted = request(problem, 2, 1.0, states=(state,) * 3)
        assert_equal(list(ReferenceEngine(problem).run(wanted)), stacked(problem, wanted, limit))


def odd() -> nn.Module:
    """Stride, padding, dilation, uneven kernels, overlapping pools, no bias."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, bias=False),
        nn.Sigmoid(),
        nn.AvgPool2d(3, stride=2),
        nn.Conv2d(4, 5, (2, 3), stride=(2, 1)),
        nn.MaxPool2d(2, stride=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mnist-cnn": (lambda: build_model(Model(name="mnist-cnn"), (1, 28, 28), 3, 0), (1, 28, 28)),
    "cifar-cnn": (lambda: build_model(Model(name="cifar-cnn"), (3, 12, 12), 3, 0), (3, 12, 12)),
    "linear": (lambda: build_model(Model(name="linear"), (1, 4, 5), 3, 0), (1, 4, 5)),
    "odd": (odd, (2, 19, 20)),
    **{
        name: (lambda name=name: build_model(Model(name="mlp", activation=name, hidden=(7, 5)), (8,), 3, 0), (8,))  # type: ignore[misc]
        for name in ACTIVATIONS
    },
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("steps", "limit", "native"), [(1, 0, False), (1, 0, True), (2, 0, False), (1, 3, False), (2, 5, True)]
)
def test_every_layer_equals_the_reference(name: str, steps: int, limit: int, native: bool) -> None:
    make, shape = MODELS[name]
    problem = toy_problem("fixed", images(*shape), 3, model=make())
    assert StackedEngine(problem).notes == ()
    wanted = request(problem, steps, sigma=0.0)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), stacked(problem, wanted, limit, native))


def test_max_pooling_takes_the_first_of_equal_pixels_as_pytorch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 2, (24, 1, 6, 6), generator=generator).float()
    data = from_arrays(x, torch.arange(24) % 3, x[:6], torch.arange(6) % 3)
    model = nn.Sequential(
        nn.MaxPool2d(2, stride=1), nn.Conv2d(1, 2, 1), nn.MaxPool2d(3, stride=2), nn.Flatten(), nn.Linear(8, 3)
    )
    problem = toy_problem("fixed", data, 3, model=model)
    wanted = request(problem, 2, 0.0)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), stacked(problem, wanted))


class Shared(nn.Module):
    """One layer used twice: not a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    model = toy_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


class Table(nn.Module):
    """A table with as many rows as the comparison with autograd has examples: its rows are no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(NUM_PROBE_EXAMPLES, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = self.table(torch.arange(NUM_PROBE_EXAMPLES))
        return self.last(torch.tanh(x @ where.t() @ where))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make", [Shared, frozen, Table, lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))]
)
@pytest.mark.parametrize("rule", ["moo", "fixed", "psac", "wav"])
def test_other_models_are_followed_use_by_use(make: Callable[[], nn.Module], rule: str) -> None:
    torch.manual_seed(0)
    problem = toy_problem(rule, parties=3, model=make())
    engine = StackedEngine(problem, rows_limit=7)
    wanted = request(problem)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), list(engine.run(wanted)))
    assert engine.trainer is not None
    assert engine.trainer.core.recorder is not None
    assert not any("torch.func" in note for note in engine.notes)


class OneByOne(nn.Module):
    """A loop over the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row @ self.weight for row in x])


def test_models_that_cannot_be_followed_go_through_torch_func_and_say_so() -> None:
    torch.manual_seed(0)
    problem = toy_problem("moo", parties=3, model=OneByOne())
    engine = StackedEngine(problem, rows_limit=7)
    wanted = request(problem)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), list(engine.run(wanted)))
    assert "torch.func" in engine.notes[0]


def test_persons_go_through_the_reference_and_that_is_said() -> None:
    data = toy_data(person=[i // 2 for i in range(60)])
    problem = toy_problem("fixed", data, 3, unit="person")
    wanted = request(problem)
    engine = StackedEngine(problem)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), list(engine.run(wanted)))
    assert "person" in engine.notes[0]


def test_parties_of_very_different_sizes_and_terms_come_back_in_order() -> None:
    data = toy_data(n=240)
    problem = toy_problem("fixed", data, 2, partition=_uneven(data, [3, 150, 1, 20, 40, 26]))
    tasks = tuple(Assignment(k, 0.2 + 0.1 * (k % 3), 0.5 * (k % 2), 1 + k % 2, 0.2) for k in (4, 0, 5, 2, 3, 1))
    wanted = request(problem, clients=6, assignments=tasks)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), stacked(problem, wanted))


def _uneven(data: Dataset, sizes: list[int]) -> Any:
    from fulcrum.data import Partition

    return Partition(torch.arange(len(data.y)), torch.tensor([0, *sizes]).cumsum(0))


def test_statistics_without_a_share_of_the_noise_are_refused_as_by_the_reference() -> None:
    bare = dataclasses.replace(RULES["quantile"], share=no_statistics_share)
    problem = dataclasses.replace(toy_problem("fixed"), rule=bare)
    for engine in (ReferenceEngine, StackedEngine):
        with pytest.raises(ValueError, match="no share"):
            list(engine(problem).run(request(problem, clients=2)))
        list(engine(problem).run(request(problem, sigma=0.0, clients=2)))  # nothing is promised where nothing is noised


def test_a_rule_that_cannot_be_stacked_is_called_client_by_client() -> None:
    def clip(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
        C = float(state["C"][0]) if math.isfinite(stats.sigma) else 0.0
        return (C / stats.norms.clamp_min(1e-12)).clamp(max=1.0), stats.norms.new_zeros((len(stats.norms), 0)), state

    problem = toy_problem(dataclasses.replace(FIXED, name="stubborn", clip=clip), parties=3)
    wanted = request(problem)
    engine = StackedEngine(problem)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), list(engine.run(wanted)))
    assert "stubborn" in engine.notes[0]


# --- what is not finite, and memory ------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["fixed", "none"])
def test_an_example_that_overflows_counts_as_zero(rule: str) -> None:
    data = toy_data()
    x = data.x.clone()
    x[::7] = 3e38
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    model.load_state_dict(toy_model().state_dict())
    problem = toy_problem(rule, from_arrays(x, data.y, data.x_test, data.y_test), 3, model=model)
    wanted = request(problem, 2, 0.0)
    replies = stacked(problem, wanted)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), replies)
    assert all(bool(torch.isfinite(reply.delta).all()) for reply in replies)
    clean = toy_problem(rule, data, 3, model=model)
    assert not torch.allclose(stacked(clean, request(clean, 2, 0.0))[0].delta, replies[0].delta)


def test_memory_that_runs_out_halves_the_pieces_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = toy_problem("fixed", parties=3)
    wanted = request(problem)
    plain = stacked(problem, wanted)
    seen: list[int] = []

    def scarce(program: Any, theta: Any, x: torch.Tensor, *rest: Any) -> Any:
        seen.append(x.shape[0] * x.shape[1])
        if seen[-1] > 6:
            raise torch.OutOfMemoryError("out of memory")
        return passes.run_stacked_pass(program, theta, x, *rest)

    monkeypatch.setattr(core, "run_stacked_pass", scarce)
    engine = StackedEngine(problem, rows_limit=16)  # each halving collects garbage, which takes a while
    assert_equal(plain, list(engine.run(wanted)))
    assert max(seen) > 12
    assert "memory ran out" in engine.notes[-1]

    def none_left(*given: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(core, "run_stacked_pass", none_left)
    with pytest.raises(RunError, match="single example"):
        list(StackedEngine(problem, rows_limit=4).run(wanted))


def test_an_unsound_rule_sees_its_whole_batch_even_in_pieces() -> None:
    def clip(stats: Stats, state: RuleState) -> tuple[torch.Tensor, torch.Tensor, RuleState]:
        middle = (stats.norms * stats.mask[:, None]).sum(dim=0) / stats.mask.sum().clamp_min(1)
        return (
            torch.clamp(middle / stats.norms.clamp_min(1e-12), max=1.0),
            stats.norms.new_zeros((len(stats.norms), 0)),
            {"C": middle},
        )

    problem = toy_problem(dataclasses.replace(FIXED, name="mean", clip=clip, sound=False, where="client"), parties=3)
    wanted = request(problem)
    truth = list(ReferenceEngine(problem).run(wanted))
    assert_equal(truth, stacked(problem, wanted, limit=4))
    assert_equal(truth, stacked(problem, wanted))


# --- sampling and noise on the device -------------------------------------------------------------


def test_compact_reports_a_row_that_is_too_short() -> None:
    joins = torch.tensor([[True, False, True, True], [False, False, False, True]])
    places, mask, counts = sampling.compact_rows(joins, 2)
    assert counts.tolist() == [3, 1]
    assert places[1, 0] == 3
    assert mask.tolist() == [[True, True], [True, False]]
    assert places[0].tolist() == [0, 2]


@pytest.mark.parametrize("rule", ["none", "fixed"])
def test_long_sums_may_be_cut_into_parts(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = toy_problem(rule, toy_data(300), 3)
    whole, wanted = [], request(problem)

    def in_one_piece(rows: int, positions: int) -> int:
        whole.append(rows)
        return 1

    monkeypatch.setattr(passes, "count_sum_splits", in_one_piece)
    in_one = stacked(problem, wanted)
    assert whole, "there are such sums"
    monkeypatch.setattr(passes, "count_sum_splits", lambda rows, positions: rows)  # an example each
    assert_equal(in_one, stacked(problem, wanted))
    monkeypatch.undo()
    assert passes.count_sum_splits(64, 16) == 1
    assert passes.count_sum_splits(64, 1024) == 64
    assert passes.count_sum_splits(1000, 100) == 50
    assert all(
        rows % passes.count_sum_splits(rows, places) == 0 for rows in (0, 8, 24, 12568) for places in (1, 25, 196)
    )


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the device makes the numbers of the streams, and nobody looks at them on the way."""
    monkeypatch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)


def test_a_sample_that_does_not_fit_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    problem = toy_problem("fixed", toy_data(300), 3, randomness=SeededRandomness(4))
    wanted = request(problem)
    roomy = stacked(problem, wanted)
    monkeypatch.setattr(sampling, "PAD_DEVIATIONS", -4.0)
    assert sampling.compute_pad_size(100, 0.5) < 40
    assert_equal(roomy, stacked(problem, wanted))
    monkeypatch.setattr("fulcrum.engines.stacked.trainer.StackedTrainer._round_is_complete", lambda self, parts: True)
    cut = stacked(problem, wanted)
    assert not torch.allclose(cut[0].delta, roomy[0].delta, rtol=1e-2)


def test_draws_of_the_device_depend_on_the_round_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    problem = toy_problem("fixed", parties=3, randomness=SeededRandomness(4))
    first, again = stacked(problem, request(problem)), stacked(problem, request(problem))
    assert all(torch.equal(a.delta, b.delta) for a, b in zip(first, again, strict=True))
    other = stacked(problem, request(problem, round=2))
    assert not torch.equal(first[0].delta, other[0].delta)
    assert not torch.equal(
        first[0].delta,
        stacked(toy_problem("fixed", parties=3, randomness=SeededRandomness(5)), request(problem))[0].delta,
    )


def test_the_device_samples_at_the_rate_and_noises_by_sigma(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    data = toy_data(600)
    problem = toy_problem("fixed", data, 3, randomness=SeededRandomness(4), diagnostics=True)
    rounds = [
        stacked(problem, request(problem, 1, 2.0, round=t, params=torch.zeros(problem.layout.dim))) for t in range(30)
    ]
    joined = sum(reply.diagnostics["batch"] for replies in rounds for reply in replies)
    trials = 30 * 600

    def off(rate: float) -> float:
        return abs(joined - rate * trials) / math.sqrt(trials * rate * (1 - rate))

    assert off(0.5) < 5
    assert off(0.45) > 5
    # With all weights at zero the first layer has no gradient: what moves it is noise alone.
    weights = problem.layout.sizes[0]
    noise = torch.stack([replies[0].delta[:weights] for replies in rounds]) / (0.3 * 2.0 * 0.5 / 100)
    spread = float(noise.std())
    assert spread == pytest.approx(1.0, rel=0.1)
    assert spread != pytest.approx(1.5, rel=0.1)


def test_secure_numbers_are_drawn_once_while_a_step_is_repeated() -> None:
    drawn: list[Any] = []

    class Counted(SecureRandomness):
        def uniform(self, key: Any, count: int) -> torch.Tensor:
            drawn.append(key)
            return super().uniform(key, count)

    data = toy_data()
    x = data.x.clone()
    x[:] = 3e38  # nothing is finite, so that the sums are computed twice
    problem = toy_problem("fixed", from_arrays(x, data.y, data.x_test, data.y_test), 3, randomness=Counted())
    replies = stacked(problem, request(problem, 1, 1.0))
    assert len(drawn) == len(set(drawn)) == 3
    assert all(bool(torch.isfinite(reply.delta).all()) for reply in replies)


# --- speed settings -------------------------------------------------------------------------------


def test_examples_are_kept_as_bytes_only_where_that_loses_nothing() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    x = (codes.float() / 255.0 - 0.5) / 0.5
    small = store_on_device(x, CPU, small=True)
    assert small.values.dtype == (torch.uint8 if small.scale else torch.float32)
    index = torch.tensor([[2, 0]])
    assert torch.equal(small.rows(index), x[index])
    fine = store_on_device(codes.float() / 255.0, CPU, small=True)
    assert fine.values.dtype == torch.uint8
    assert torch.equal(fine.rows(index), (codes.float() / 255.0)[index])
    assert store_on_device(torch.randn(4, 3), CPU, small=True).values.dtype == torch.float32


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_no_contribution_passes_the_bound_whatever_the_precision(precision: str) -> None:
    data = images(1, 28, 28, n=24)
    model = MODELS["mnist-cnn"][0]()
    problem = toy_problem("fixed", data, 24, model=model, precision=precision)
    state = problem.rule.init(Clip(C0=0.05), problem.shape)
    tasks = tuple(Assignment(k, 1.0, 0.0, 1, 1.0) for k in range(24))
    wanted = RoundRequest(0, 1, problem.layout.flatten(model), tasks, (state,) * 24)
    sizes = torch.stack([reply.delta.norm() for reply in stacked(problem, wanted)]) / 0.05
    assert float(sizes.max()) <= 1 + 1e-5
    assert float(sizes.min()) > 0.95  # and it is C that they were clipped to


def test_bf16_stays_near_the_reference() -> None:
    problem = toy_problem("fixed", images(1, 28, 28), 3, model=MODELS["mnist-cnn"][0](), precision="bf16")
    wanted = request(problem, 1, 0.0)
    for a, b in zip(ReferenceEngine(problem).run(wanted), stacked(problem, wanted), strict=True):
        error = float((a.delta - b.delta).norm() / a.delta.norm())
        assert 1e-4 < error < 0.1


def test_the_engine_is_registered_and_a_cpu_keeps_the_reference() -> None:
    problem = toy_problem()
    assert ENGINES["stacked"] is StackedEngine
    assert isinstance(find_engine("stacked", problem), StackedEngine)
    assert not isinstance(find_engine("auto", problem), StackedEngine)
    with pytest.raises(ConfigError, match=r"run\.precision"):
        check_choices(Settings().replace(run={"precision": "fp8"}))
