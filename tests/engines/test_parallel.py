"""The parallel engine: equal to the reference on the same streams, the same bits for any number of workers."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulcrum.clipping import RULES
from fulcrum.clipping.fixed import FIXED
from fulcrum.clipping.rule import ClipRule
from fulcrum.data import Dataset, split
from fulcrum.engines import choose_engine, fast, find_engine
from fulcrum.engines import parallel as parallel_engine
from fulcrum.engines.parallel import ParallelEngine
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.threads import _find_torch_library, find_shared_pool, make_single_threaded_pool
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import RecordedRandomness, SeededRandomness
from fulcrum.settings.schema import Clip, Data
from fulcrum.training.client import make_materialised_step, train_client
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState, Stats, Transform, View
from support.federations import CLASSES, toy_data, toy_model, toy_problem
from support.rounds import assert_equal

SIZES = (3, 12, 1, 20, 9)
"""Examples of the five parties: unequal, so that the largest is not the first to be asked."""


def uneven(problem: TrainingProblem) -> TrainingProblem:
    """The problem with its records dealt out as SIZES says."""
    starts = torch.tensor([0, *torch.tensor(SIZES).cumsum(0).tolist()])
    return dataclasses.replace(problem, partition=dataclasses.replace(problem.partition, starts=starts))


def request(problem: TrainingProblem, t: int = 0, sigma: float = 0.7, steps: int = 3) -> RoundRequest:
    tasks = tuple(Assignment(k, 0.6, sigma, steps, 0.3) for k in range(problem.partition.parties))
    state = problem.rule.init(Clip(C0=0.8, balance=0.5), problem.shape)
    params = problem.layout.flatten(problem.model)
    return RoundRequest(t, 10, params, tasks, (state,) * len(tasks), weight_decay=0.01)


def parallel(problem: TrainingProblem, asked: RoundRequest, workers: int = 2) -> list[ClientReply]:
    return list(ParallelEngine(dataclasses.replace(problem, workers=workers)).run(asked))


def oracle(problem: TrainingProblem, asked: RoundRequest) -> list[ClientReply]:
    """The reference with every gradient found by vmap: nothing of the fast path in it."""
    work = make_materialised_step(GradientRecorder(problem.model, problem.layout, problem.dataset.task, how="vmap"))
    pairs = zip(asked.assignments, asked.states, strict=True)
    return [train_client(problem, asked, task, state, work) for task, state in pairs]


def check_equal(problem: TrainingProblem, asked: RoundRequest) -> None:
    """1, 2 and 3 workers give the same bits, and those of the reference up to rounding."""
    replies = {workers: parallel(problem, asked, workers) for workers in (1, 2, 3)}
    truth = oracle(problem, asked)
    for reply, two, three, true in zip(*replies.values(), truth, strict=True):
        assert reply.client == two.client == three.client == true.client
        assert reply.events == two.events == three.events == true.events
        for name in ("delta", "extra"):
            value = getattr(reply, name)
            assert torch.equal(value, getattr(two, name))
            assert torch.equal(value, getattr(three, name))
            torch.testing.assert_close(value, getattr(true, name), rtol=1e-4, atol=1e-5)
        for name, value in reply.state.items():
            assert torch.equal(value, two.state[name])
            torch.testing.assert_close(value, true.state[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("groups", ["flat", "layer"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.every(3)
def test_every_rule_equals_the_reference(rule: str, groups: str) -> None:
    problem = uneven(toy_problem(rule, parties=5))
    if groups == "layer":
        problem = dataclasses.replace(problem, groups=problem.layout.layers)
    check_equal(problem, request(problem))


def test_the_comparison_notices_other_streams_and_other_rules() -> None:
    problem = uneven(toy_problem("fixed", parties=5))
    asked = request(problem)
    found = parallel(problem, asked)[3].delta
    for other in (
        dataclasses.replace(problem, randomness=SeededRandomness(4)),
        dataclasses.replace(problem, rule=RULES["none"]),
    ):
        assert not torch.allclose(found, oracle(other, request(other))[3].delta, rtol=1e-2)


def test_recorded_numbers_give_what_they_gave_when_they_were_drawn() -> None:
    problem = uneven(toy_problem("fixed", parties=5))
    asked, kept = request(problem), problem.randomness
    steps = [(0, k, step) for k in range(5) for step in range(3)]
    played = RecordedRandomness(
        {("sample", *key): kept.uniform(("sample", *key), 60) for key in steps},
        {("noise", *key): kept.normal(("noise", *key), problem.layout.dim) for key in steps},
    )
    # A stream's first numbers do not depend on how many are drawn, for the uniform ones.
    again = parallel(dataclasses.replace(problem, randomness=played), asked)
    for one, two in zip(parallel(problem, asked), again, strict=True):
        # Recorded numbers are added without rounding to the grid: 2^-21 of the noise in each of three steps.
        torch.testing.assert_close(one.delta, two.delta, rtol=1e-6, atol=1e-6)
    for wrong in (2.0**-10, 1.0):  # a coarser rounding, another number
        other = {key: value + wrong for key, value in played.normals.items()}
        found = parallel(dataclasses.replace(problem, randomness=RecordedRandomness(played.uniforms, other)), asked)
        assert not torch.allclose(found[0].delta, again[0].delta, rtol=1e-6, atol=1e-6)


# --- every kind of layer ------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A forward of its own, so that hooks are needed: not to be shared between threads."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Recurrent(nn.Module):
    """Nothing that book-keeping or vmap can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def images(channels: int, side: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(45, channels, side, side, generator=generator)


def series(generator: torch.Generator) -> Tensor:
    return torch.randn(45, 5, 6, generator=generator)


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[torch.Generator], Tensor]]] = {
    "conv2d": (lambda: [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(108, CLASSES)], images(2, 6)),
    "conv2d-strided": (
        lambda: [
            *(nn.Conv2d(1, 4, 4, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
            *(nn.Conv2d(4, 6, 2, stride=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(24, CLASSES)),
        ],
        images(1, 10),
    ),
    "conv2d-grouped": (
        lambda: [nn.Conv2d(4, 6, 3, groups=2, dilation=2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, CLASSES)],
        images(4, 8),
    ),
    "conv1d": (lambda: [nn.Conv1d(5, 4, 3, stride=2), nn.ELU(), nn.Flatten(), nn.Linear(8, CLASSES)], series),
    "group-norm": (
        lambda: [
            *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
        ],
        images(2, 6),
    ),
    "layer-norm": (lambda: [nn.LayerNorm(6), nn.Linear(6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, CLASSES)], series),
    "embedding": (
        lambda: [nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, CLASSES)],
        lambda generator: torch.randint(0, 9, (45, 5), generator=generator),
    ),
    "hooked": (
        lambda: [Wrapped(nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, CLASSES)))],
        series,
    ),
    "unknown-layer": (lambda: [nn.Flatten(), nn.Linear(30, 4), nn.PReLU(), nn.Linear(4, CLASSES)], series),
    "recurrent": (lambda: [Recurrent()], series),
}


def problem_of(name: str, rule: ClipRule = FIXED) -> TrainingProblem:
    make, draw = MODELS[name]
    x = draw(torch.Generator().manual_seed(1))
    y = torch.arange(45) % CLASSES
    shell = toy_data(45)
    data: Dataset = shell.with_changes(x=x, y=y, x_test=x, y_test=y)
    model = seeded(nn.Sequential(*make()))
    partition = split(shell, Data(parties=5, partition="iid", min_examples=1), 0)
    return uneven(TrainingProblem(data, partition, model, ParameterLayout.of(model), rule, SeededRandomness(3)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the LSTM has no batching rule
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_equals_the_reference(name: str) -> None:
    problem = problem_of(name)
    check_equal(problem, request(problem))


# --- what rules may ask for ---------------------------------------------------------------------


def look(**asks: Any) -> ClipRule:
    """The fixed rule with another view; where it sees inner products or losses, they scale the gradients."""

    def clip(stats: Stats, state: RuleState) -> tuple[Tensor, Tensor, RuleState]:
        factors, extra, state = FIXED.clip(stats, state)
        seen = stats.dots if stats.dots is not None else stats.losses
        if seen is None:
            return factors, extra, state
        return factors * torch.sigmoid(seen)[:, None], torch.tanh(seen)[:, None], state

    shared = asks.get("direction") is not None or asks.get("losses", False)
    return dataclasses.replace(
        FIXED,
        name="looking",
        view=lambda state, t, rounds: View(**asks),
        clip=clip,
        bounds=lambda state: dataclasses.replace(FIXED.bounds(state), extra=1.0 if shared else 0.0),
        share=lambda sigma, batch: 0.1 if shared else 0.0,
    )


def flipped(dim: int) -> Transform:
    return Transform(lambda g: g.flip(1), lambda s: s.flip(0), torch.zeros(dim, dtype=torch.int64))


@pytest.mark.parametrize("ask", ["direction", "losses", "transform"])
def test_what_a_rule_asks_for_is_as_in_the_reference(ask: str) -> None:
    dim = toy_problem().layout.dim
    direction = torch.randn(dim, generator=torch.Generator().manual_seed(5))
    asks: dict[str, dict[str, Any]] = {
        "direction": {"direction": direction},
        "losses": {"losses": True},
        "transform": {"transform": flipped(dim)},
    }
    problem = uneven(toy_problem(look(**asks[ask]), parties=5))
    check_equal(problem, request(problem))


def test_persons_and_diagnostics_are_as_in_the_reference() -> None:
    data = toy_data(45, person=[i // 2 for i in range(45)])
    problem = toy_problem("fixed", dataset=data, parties=5, unit="person", diagnostics=True)
    asked = request(problem)
    check_equal(problem, asked)
    for reply, true in zip(parallel(problem, asked), ReferenceEngine(problem).run(asked), strict=True):
        assert reply.diagnostics == pytest.approx(true.diagnostics, rel=1e-4)
        assert set(reply.diagnostics) == {"clipped", "mean_norm", "train_loss", "batch"}


@pytest.mark.parametrize("rule", ["fixed", "wav"])
def test_an_example_that_is_not_finite_counts_as_zero(rule: str) -> None:
    problem = uneven(toy_problem(rule, parties=5))
    x = problem.dataset.x.clone()
    x[problem.partition.indices(3)[:2]] = torch.nan
    broken = dataclasses.replace(problem, dataset=problem.dataset.with_changes(x=x))
    check_equal(broken, request(broken))
    assert all(torch.isfinite(reply.delta).all() for reply in parallel(broken, request(broken)))


# --- clients side by side -----------------------------------------------------------------------


@pytest.mark.parametrize("model", ["toy", "conv2d-strided", "group-norm"])
def test_clients_side_by_side_have_the_same_bits_as_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uneven(toy_problem("fixed", parties=5) if model == "toy" else problem_of(model))
    asked = request(problem)
    passes: list[int] = []
    together = GradientRecorder.record_together

    def count(self: GradientRecorder, params: Any, parts: Any, x: Tensor, y: Tensor) -> Any:
        passes.append(len(parts))
        return together(self, params, parts, x, y)

    monkeypatch.setattr(GradientRecorder, "record_together", count)
    side_by_side = parallel(problem, asked, 1)
    assert max(passes) == 5
    passes.clear()
    monkeypatch.setattr(parallel_engine, "TOGETHER_BYTES", 1)
    alone = parallel(problem, asked, 1)
    assert not passes
    for one, other in zip(side_by_side, alone, strict=True):
        assert one.client == other.client
        assert torch.equal(one.delta, other.delta)


def test_the_comparison_side_by_side_notices_the_weights_of_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = toy_problem("fixed", parties=5)
    asked = request(problem)
    truth = parallel(problem, asked, 1)
    together = GradientRecorder.record_together

    def mix_up(self: GradientRecorder, params: Any, parts: Any, x: Tensor, y: Tensor) -> Any:
        return together(self, [*params[1:], params[0]], parts, x, y)

    monkeypatch.setattr(GradientRecorder, "record_together", mix_up)
    wrong = parallel(problem, asked, 1)
    assert not any(torch.allclose(a.delta, b.delta, rtol=1e-4) for a, b in zip(truth, wrong, strict=True))


# --- workers ------------------------------------------------------------------------------------


def failing(when: Callable[[], None]) -> ClipRule:
    """The fixed rule, which first calls `when` at every step."""

    def clip(stats: Stats, state: RuleState) -> tuple[Tensor, Tensor, RuleState]:
        when()
        return FIXED.clip(stats, state)

    return dataclasses.replace(FIXED, clip=clip)


def workers_alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fulcrum")]


def test_an_error_in_a_worker_arrives_with_its_words_and_the_others_stop() -> None:
    calls: list[int] = []

    def when() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError("client arithmetic went wrong")

    problem = uneven(toy_problem(failing(when), parties=5))
    engine = ParallelEngine(dataclasses.replace(problem, workers=2))
    asked = request(problem, steps=200)
    with pytest.raises(ZeroDivisionError, match="client arithmetic went wrong"):
        list(engine.run(asked))
    assert len(calls) < 5 * 200  # the rest of the round was given up
    assert len(list(engine.run(request(problem)))) == 5  # and the next one works


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Python's own answer to SIGINT, also where the tests run in the background and their shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_stops_the_workers_after_the_step_they_are_in() -> None:
    calls: list[int] = []

    def when() -> None:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    problem = uneven(toy_problem(failing(when), parties=5))
    engine = ParallelEngine(dataclasses.replace(problem, workers=2))
    with pytest.raises(KeyboardInterrupt):
        list(engine.run(request(problem, steps=2000)))
    done = len(calls)
    assert done < 5 * 2000
    assert len(list(engine.run(request(problem)))) == 5
    assert len(calls) == done + 5 * 3  # nobody was still at work


def test_a_round_that_is_given_up_leaves_nobody_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_engine, "TOGETHER_BYTES", 1)  # side by side, all clients would end at once
    calls: list[int] = []
    # Not uneven: the largest would start first, and client 0 might end last, with nobody left to stop.
    problem = toy_problem(failing(lambda: calls.append(1)), parties=5)
    engine = ParallelEngine(dataclasses.replace(problem, workers=2))
    round_ = engine.run(request(problem, steps=300))
    assert next(round_).client == 0
    assert isinstance(round_, Generator)
    round_.close()
    done = len(calls)
    assert done < 5 * 300
    list(engine.run(request(problem)))
    assert len(calls) == done + 5 * 3


def test_workers_end_with_their_engine_and_leave_other_threads_alone() -> None:
    gc.collect()
    before, threads = workers_alive(), torch.get_num_threads()  # of other tests, which may end at any time
    problem = uneven(toy_problem("fixed", parties=5))
    engine = ParallelEngine(dataclasses.replace(problem, workers=3))
    assert set(workers_alive()) <= set(before)  # nobody starts before there is work
    list(engine.run(request(problem)))
    mine = [worker for worker in workers_alive() if worker not in before]
    assert len(mine) == 3
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [threads] == [torch.get_num_threads()]
    del engine
    gc.collect()
    for thread in mine:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_auto_takes_the_parallel_engine_on_a_cpu_and_asks_pytorch_for_the_number_of_workers() -> None:
    problem = toy_problem()
    assert choose_engine("auto", problem) == "parallel"
    assert choose_engine("reference", problem) == "reference"
    engine = find_engine("auto", problem)
    assert isinstance(engine, ParallelEngine)
    assert engine.workers == torch.get_num_threads()


def test_a_run_is_the_same_for_any_number_of_workers() -> None:
    import fulcrum

    def weights(workers: int) -> Tensor:
        names: dict[str, Any] = {"parties": 3, "partition": "iid", "rounds": 4, "rate": 0.5, "sigma": 1.0}
        result = fulcrum.train(toy_data(), run={"workers": workers}, **names)
        return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])

    one = weights(1)
    assert torch.equal(one, weights(2))
    assert torch.equal(one, weights(4))


def test_evaluation_gives_what_the_model_itself_gives() -> None:
    from fulcrum.training.evaluate import evaluate_model

    for name in ("conv2d-strided", "group-norm", "hooked"):
        problem = problem_of(name)
        x, y = problem.dataset.x, problem.dataset.y
        problem = dataclasses.replace(problem, dataset=problem.dataset.with_changes(x_test=x, y_test=y))
        params = problem.layout.flatten(problem.model)
        logits = problem.model(x).detach()
        found = evaluate_model(problem, params, batch=7)
        assert found["accuracy"] == pytest.approx(float((logits.argmax(dim=1) == y).float().mean()))
        assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)
        assert evaluate_model(problem, params * 1.5)["loss"] != pytest.approx(found["loss"], rel=1e-3)


@pytest.mark.every(3)
@pytest.mark.parametrize("records", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [toy_model, lambda: Wide()], ids=["sequence", "own-forward"])
@pytest.mark.parametrize("rule", ["fixed", "moo", "psac", "quantile"])
def test_persons_go_the_fast_way_and_equal_the_reference(
    rule: str, make: Any, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toy_data(person=[i * i // (7 * records) for i in range(60)])  # unequal numbers of records
    torch.manual_seed(0)
    problem = toy_problem(rule, data, 3, unit="person", model=make())
    wanted = request(problem)
    expected = list(ReferenceEngine(problem).run(wanted))

    def forbidden(*_: Any) -> None:
        raise AssertionError("gradients were written out")

    monkeypatch.setattr(fast, "make_materialised_step", lambda follow: forbidden)
    assert_equal(expected, list(ParallelEngine(problem).run(wanted)))


class Wide(nn.Module):
    """Positions, an embedding-like table, a convolution, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv1d(2, 4, 2, padding=1), nn.Linear(4, 4)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x.view(len(x), 2, 3))).transpose(1, 2)
        return self.last(torch.tanh(self.mix(torch.tanh(self.mix(h)))).flatten(1))  # type: ignore[no-any-return]


def test_a_person_with_a_record_that_is_not_finite_keeps_the_others() -> None:
    data = toy_data(person=[i // 3 for i in range(60)])
    assert isinstance(data.records.x, Tensor)
    data.records.x[4, 0] = float("nan")
    problem = toy_problem("fixed", data, 3, unit="person")
    wanted = request(problem)
    assert_equal(list(ReferenceEngine(problem).run(wanted)), list(ParallelEngine(problem).run(wanted)))


def test_each_worker_computes_on_one_core() -> None:
    """PyTorch's and MKL's number of threads; a thread that only calls `set_num_threads` loses its number again."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = make_single_threaded_pool(2)
        torch.set_num_threads(2)
        assert set(pool.map(lambda _: torch.get_num_threads(), range(4))) == {1}
        library: Any = _find_torch_library()
        if hasattr(library, "MKL_Get_Max_Threads"):
            assert set(pool.map(lambda _: library.MKL_Get_Max_Threads(), range(4))) == {1}
            assert library.MKL_Get_Max_Threads() == 2
        start, go = threading.Event(), threading.Event()
        seen: list[int] = []

        def careless() -> None:
            torch.set_num_threads(1)
            start.set()
            go.wait()
            seen.append(torch.get_num_threads())

        thread = threading.Thread(target=careless)
        thread.start()
        start.wait()
        torch.set_num_threads(2)
        go.set()
        thread.join()
        assert seen == [2]
    finally:
        torch.set_num_threads(before)


def test_the_shared_pool_computes_on_one_core_and_a_fork_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = find_shared_pool(2)
    assert find_shared_pool(2) is pool
    assert set(pool.map(lambda _: torch.get_num_threads(), range(8))) == {1}
    monkeypatch.setattr(os, "getpid", lambda: -1)
    other = find_shared_pool(2)
    assert other is not pool
    other.shutdown()
