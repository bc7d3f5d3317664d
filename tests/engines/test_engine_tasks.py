"""Every engine releases the same update for every task: what is learned is a value, and no engine knows it by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fulcrum
from fulcrum.data import Dataset, from_arrays
from fulcrum.data.records import select_rows
from fulcrum.data.tasks import Task, task_from_loss
from fulcrum.engines.batched import run_many
from fulcrum.engines.parallel import ParallelEngine
from fulcrum.engines.reference import ReferenceEngine
from fulcrum.engines.stacked import StackedEngine
from fulcrum.errors import ModelError
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.tape import ChunkedTape
from fulcrum.models.build import build_model
from fulcrum.models.builtin import initialise_weights
from fulcrum.models.checks import validate_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.runs import prepare
from fulcrum.settings.schema import Clip, Model, TaskSettings
from fulcrum.training.evaluate import evaluate_model, evaluate_with_parties, mean_over_parties
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, RoundRequest
from support.federations import play, toy_problem, toy_settings

N, TEST, LENGTH, WORDS = 36, 20, 4, 7


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=drawn(seed))


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=drawn(seed))


# --- models ---------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A prediction per position, [B, L] -> [B, L, outputs]: not a plain sequence, so hooks follow it."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(WORDS, 5), nn.LayerNorm(5), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.table(x))))  # type: ignore[no-any-return]


class TwoInputs(nn.Module):
    """Words and numbers, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 3), nn.Linear(3 + 2, 3)

    def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
        return self.head(torch.cat([self.table(words).mean(dim=1), numbers], dim=1))  # type: ignore[no-any-return]


def dense(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


def quartic(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of a user's own, without slopes."""
    return (outputs.squeeze(-1) - targets).square().square()


# --- cases ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A task with data that it fits and a model for it."""

    task: str | TaskSettings | Task
    model: Callable[[], nn.Module]
    y: Callable[[int], Tensor | None]
    x: Callable[[int], Any] = lambda n: normal(n, 6, seed=n)

    def dataset(self) -> Dataset:
        return from_arrays(self.x(N), self.y(N), self.x(TEST), self.y(TEST), task=self.task, name="toy")

    def problem(self, rule: str = "fixed", parties: int = 3) -> TrainingProblem:
        model = self.model()
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.copy_(0.5 * normal(*parameter.shape, seed=100 + place))
        return toy_problem(rule, self.dataset(), parties, model=model)


def labels(n: int) -> Tensor:
    return torch.arange(n) % 3


def answers(n: int) -> Tensor:
    return torch.arange(n) % 2


def words(n: int) -> Tensor:
    return whole(WORDS, n, LENGTH, seed=n)


def some_ignored(n: int) -> Tensor:
    targets = whole(WORDS, n, LENGTH, seed=n + 1)
    targets[:, 1] = -100
    targets[0] = -100  # an example without a counted position: loss 0, gradient 0
    return targets


def regression(loss: str, **more: Any) -> TaskSettings:
    return TaskSettings(name="regression", loss=loss, **more)


CASES: dict[str, Case] = {
    "classification": Case("classification", lambda: dense(3), labels),
    "weighted": Case(TaskSettings(class_weights=(0.5, 1.0, 4.0)), lambda: dense(3), labels),
    "binary": Case(TaskSettings(name="binary", class_weights=(1.0, 5.0)), lambda: dense(1), answers),
    "multilabel": Case(
        TaskSettings(name="multilabel", class_weights=(1.0, 3.0, 0.5)), lambda: dense(3), lambda n: whole(2, n, 3)
    ),
    "squared": Case(regression("squared", scale=2.0, offset=1.0), lambda: dense(1), lambda n: 3 * normal(n, seed=n)),
    "absolute": Case(regression("absolute", low=-4.0, high=6.0), lambda: dense(2), lambda n: 3 * normal(n, 2, seed=n)),
    "huber": Case(regression("huber", scale=0.5, huber_width=0.7), lambda: dense(1), lambda n: normal(n, seed=n)),
    "tokens": Case(TaskSettings(name="tokens", classes=WORDS), lambda: Tagger(WORDS), some_ignored, words),
    "next-token": Case(
        TaskSettings(name="next-token", classes=WORDS),
        lambda: nn.Sequential(nn.Embedding(WORDS, 4), nn.Tanh(), nn.Linear(4, WORDS)),
        lambda n: None,
        words,
    ),
    "own": Case(task_from_loss(quartic), lambda: dense(1), lambda n: normal(n, seed=n)),
    "two inputs": Case(
        "classification", TwoInputs, labels, lambda n: {"words": words(n), "numbers": normal(n, 2, seed=n)}
    ),
}

RULES = ("fixed", "moo", "psac", "quantile", "wav")


def request(problem: TrainingProblem, steps: int = 2, sigma: float = 0.5) -> RoundRequest:
    state = problem.rule.init(Clip(C0=0.5), problem.shape)
    clients = problem.partition.parties
    assignments = tuple(Assignment(k, 0.6, sigma, steps, 0.3) for k in range(clients))
    return RoundRequest(1, 10, problem.layout.flatten(problem.model), assignments, (state,) * clients, 0.01)


def apart(found: list[ClientReply], wanted: list[ClientReply]) -> float:
    """The largest relative distance between updates, and between statistics."""
    pairs = zip(found, wanted, strict=True)
    return max(
        max(float((a.delta - b.delta).norm() / b.delta.norm()), float((a.extra - b.extra).abs().sum()))
        for a, b in pairs
    )


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_engines_equal_the_reference(name: str, rule: str) -> None:
    problem = CASES[name].problem(rule)
    wanted = request(problem)
    reference = list(ReferenceEngine(problem).run(wanted))
    for engine in (ParallelEngine(dataclasses.replace(problem, workers=1)), StackedEngine(problem)):
        assert apart(list(engine.run(wanted)), reference) < 2e-5, type(engine).__name__


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_runs_side_by_side_equal_the_reference(name: str) -> None:
    case = CASES[name]
    start = case.problem().layout.flatten(case.problem().model)
    federations = [
        prepare(
            toy_settings(clip={"rule": rule}, run={"seed": seed, "engine": "reference"}, train={"rounds": 3}),
            dataclasses.replace(case.dataset(), public=True),
            case.problem().model,
        )
        for seed, rule in enumerate(("fixed", "fixed", "moo", "psac", "quantile", "wav"))
    ]
    *_, last = run_many(federations)
    assert last.averaged is not None
    for place, federation in enumerate(federations):
        alone, found = play(federation)[-1].averaged, last.averaged[place]
        assert float((found - alone).norm() / (alone - start).norm()) < 1e-5
        metrics = evaluate_model(federation.problem, found)
        assert set(last.metrics) == set(metrics)
        for metric, value in metrics.items():
            assert float(last.metrics[metric][place]) == pytest.approx(value, rel=1e-4, nan_ok=True), metric
        assert float(last.loss[place]) != pytest.approx(evaluate_model(federation.problem, start)["loss"], rel=1e-4)


def test_engines_that_forget_class_weights_are_told_apart() -> None:
    """The wrong case: slopes of the loss without weights beside the loss with them."""
    for name in ("weighted", "binary", "multilabel"):
        case = CASES[name]
        problem = case.problem()
        assert isinstance(case.task, TaskSettings)
        plain = dataclasses.replace(case, task=dataclasses.replace(case.task, class_weights=())).dataset().task
        task = dataclasses.replace(problem.dataset.task, slopes=plain.slopes)
        wrong = dataclasses.replace(problem, dataset=dataclasses.replace(problem.dataset, task=task))
        wanted = request(problem)
        reference = list(ReferenceEngine(problem).run(wanted))
        for engine in (ParallelEngine(dataclasses.replace(wrong, workers=1)), StackedEngine(wrong)):
            assert apart(list(engine.run(wanted)), reference) > 1e-2


# --- gradients ------------------------------------------------------------------------------------


def by_autograd(problem: TrainingProblem, params: Tensor) -> Tensor:
    """The oracle: one example after the other through the model itself, in float64."""
    model, data = problem.model, problem.dataset
    problem.layout.write(model, params)
    rows = []
    for i in range(len(data.y)):
        x = select_rows(data.x, slice(i, i + 1))
        outputs = model(x) if isinstance(x, Tensor) else model(**x)
        loss = data.task.loss(outputs, data.y[i : i + 1])
        found = torch.autograd.grad(loss.sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def doubled(case: Case) -> TrainingProblem:
    problem = case.problem()
    data = problem.dataset
    x = (
        {n: v.double() if v.is_floating_point() else v for n, v in data.x.items()}
        if isinstance(data.x, dict)
        else (data.x.double() if data.x.is_floating_point() else data.x)
    )
    return dataclasses.replace(problem, dataset=data.with_changes(x=x), model=problem.model.double())


@pytest.mark.parametrize("how", ["book", "vmap"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_task_equal_float64_autograd(name: str, how: str) -> None:
    problem = doubled(CASES[name])
    data, layout = problem.dataset, problem.layout
    params = layout.flatten(problem.model)
    tape = GradientRecorder(problem.model, layout, data.task, how)(params, data.x, data.y)
    truth = by_autograd(problem, params)
    torch.testing.assert_close(tape.matrix(), truth, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(tape.norms()[:, 0], truth.norm(dim=1), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(tape.matrix(), 1.01 * truth, rtol=1e-4, atol=0), "the wrong case"


def test_pieces_of_several_inputs_and_tokens_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("two inputs", "tokens", "next-token"):
        problem = CASES[name].problem()
        data, params = problem.dataset, problem.layout.flatten(problem.model)
        whole = GradientRecorder(problem.model, problem.layout, data.task)(params, data.x, data.y)
        with monkeypatch.context() as small:
            small.setattr("fulcrum.gradients.PASS_MEMORY_BYTES", {"cpu": 2000, "cuda": 2000})
            parts = GradientRecorder(problem.model, problem.layout, data.task)(params, data.x, data.y)
        assert isinstance(parts, ChunkedTape)
        torch.testing.assert_close(parts.matrix(), whole.matrix())
        torch.testing.assert_close(parts.losses, whole.losses)


# --- evaluation -----------------------------------------------------------------------------------


def test_evaluation_of_parties_merges_to_that_of_all() -> None:
    case = CASES["classification"]
    party = torch.tensor([2, 0, 1, 1] * 5)
    data = case.dataset()
    data = dataclasses.replace(data.with_changes(party_test=party), party_names=("a", "b", "c", "empty"))
    problem = dataclasses.replace(case.problem(), dataset=data)
    params = problem.layout.flatten(problem.model)
    found = evaluate_with_parties(problem, params, batch=3)  # batches that cut through parties
    with torch.no_grad():
        right = (problem.model(data.x_test).argmax(dim=1) == data.y_test).double()
    assert list(found.parties) == ["a", "b", "c"]
    for place, name in enumerate("abc"):
        assert found.parties[name]["accuracy"] == pytest.approx(float(right[party == place].mean()))
    assert found.metrics["accuracy"] == pytest.approx(float(right.mean()))
    mean = sum(float(right[party == k].mean()) for k in range(3)) / 3
    assert found.mean_over_parties["accuracy"] == pytest.approx(mean)
    assert abs(mean - float(right.mean())) > 1e-3, "else the test could not tell them apart"
    without = dataclasses.replace(problem, dataset=case.dataset())
    assert evaluate_with_parties(without, params).parties == {}
    assert evaluate_model(without, params) == pytest.approx(found.metrics)


def test_no_test_records_no_metrics() -> None:
    problem = CASES["classification"].problem()
    problem = dataclasses.replace(problem, dataset=dataclasses.replace(problem.dataset, test=None))
    assert evaluate_model(problem, problem.layout.flatten(problem.model)) == {}


def test_parties_without_a_value_do_not_count() -> None:
    assert mean_over_parties({"a": {"auc": 0.5}, "b": {"auc": math.nan}, "c": {"auc": 1.0}}) == {"auc": 0.75}
    assert math.isnan(mean_over_parties({"a": {"auc": math.nan}})["auc"])
    assert mean_over_parties({}) == {}


def test_the_model_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CASES["tokens"].problem()
    looks: list[object] = []
    found = fulcrum.gradients.analyse_model

    def counted(*given: Any) -> Any:
        looks.append(given)
        return found(*given)

    monkeypatch.setattr(fulcrum.gradients, "analyse_model", counted)
    for _ in range(3):
        evaluate_model(problem, problem.layout.flatten(problem.model))
    assert len(looks) == 1


def test_runs_with_other_class_weights_are_not_stacked() -> None:
    one, other, same = (
        from_arrays(normal(9, 2), labels(9), task=TaskSettings(class_weights=weights)).task
        for weights in ((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), (1.0, 2.0, 3.0))
    )
    assert one.key() == same.key() != other.key()
    hash(one.key())
    assert task_from_loss(quartic).key() != task_from_loss(lambda o, t: quartic(o, t)).key()


# --- models ---------------------------------------------------------------------------------------


def tagger(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    assert input_shape == (LENGTH,)
    return Tagger(outputs)


def flat_tagger(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 2), nn.Flatten(), nn.Linear(2 * LENGTH, classes))


def two_inputs(input_shape: dict[str, tuple[int, ...]]) -> nn.Module:
    assert input_shape == {"words": (LENGTH,), "numbers": (2,)}
    return TwoInputs()


class MixesWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x).mean(dim=1)
        return found - found.mean(dim=0)  # type: ignore[no-any-return]


def test_own_models_are_tried_on_inputs_of_the_datas_type() -> None:
    here = __name__
    ids = words(8)
    build_model(Model(name=f"{here}:tagger"), (LENGTH,), WORDS, 0, ids, sequence=True)
    build_model(Model(name=f"{here}:flat_tagger"), (LENGTH,), 3, 0, ids)
    both = {"words": ids, "numbers": normal(8, 2)}
    build_model(Model(name=f"{here}:two_inputs"), {"words": (LENGTH,), "numbers": (2,)}, 3, 0, both)
    with pytest.raises(ModelError, match=r"outputs of shape \[3, length, 3\]"):
        build_model(Model(name=f"{here}:flat_tagger"), (LENGTH,), 3, 0, ids, sequence=True)
    with pytest.raises(ModelError, match=r"logits of shape \[3, 7\]"):
        build_model(Model(name=f"{here}:tagger"), (LENGTH,), WORDS, 0, ids)
    with pytest.raises(ModelError, match="failed on a batch"):
        build_model(Model(name=f"{here}:tagger"), (LENGTH,), WORDS, 0, sequence=True)  # made-up numbers are no words
    with pytest.raises(ModelError, match="several inputs"):
        build_model(Model(name="linear"), {"words": (LENGTH,)}, 3, 0)
    with pytest.raises(ModelError, match="prediction per position"):
        build_model(Model(name="mlp"), (LENGTH,), 3, 0, sequence=True)


def test_mixing_is_seen_on_words_too() -> None:
    with pytest.raises(ModelError, match="mixes the examples"):
        validate_model(MixesWords(), words(2))
    validate_model(Tagger(3), words(2))
    validate_model(TwoInputs(), {"words": words(2), "numbers": normal(2, 2)})


def test_initial_weights_of_norms_and_embeddings() -> None:
    table, norm, groups = nn.Embedding(400, 50, padding_idx=0), nn.LayerNorm(50), nn.GroupNorm(5, 50)
    last = nn.Linear(50, 2)
    initialise_weights(nn.Sequential(table, norm, groups, last), drawn())
    assert float(table.weight.detach()[1:].std()) == pytest.approx(1.0, abs=0.05)
    assert not table.weight[0].any()
    layers: tuple[nn.LayerNorm | nn.GroupNorm, ...] = (norm, groups)
    for layer in layers:
        assert torch.equal(layer.weight, torch.ones(50))
        assert torch.equal(layer.bias, torch.zeros(50))
    assert float(last.weight.detach().abs().max()) <= 50**-0.5


def test_a_vocabulary_does_not_count_as_outputs() -> None:
    few, many = (
        ParameterLayout.of(nn.Sequential(nn.Embedding(count, 8), nn.Linear(8, 2))).expected_init_norm
        for count in (10, 100_000)
    )
    assert few == many == pytest.approx(math.sqrt((8 + 2) / 3))
    assert ParameterLayout.of(dense(3)).expected_init_norm == pytest.approx(math.sqrt((5 + 3) / 3))


def test_cross_entropy_is_still_pytorchs() -> None:
    data = CASES["classification"].dataset()
    outputs = normal(N, 3)
    assert torch.equal(data.task.loss(outputs, data.y), F.cross_entropy(outputs, data.y, reduction="none"))
