"""Made-up data: every task and kind of input, from declared facts alone, the same each time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fulcrum.data import from_arrays
from fulcrum.data.made_up import VARIATIONS, DataFacts, InputFacts, can_make_up, make_up_dataset, read_data_facts
from fulcrum.settings.schema import TaskSettings

EASY = VARIATIONS[0]


def facts_of(shape: tuple[int, ...], task: str = "classification", outputs: int = 4, words: int = 0) -> DataFacts:
    classes = outputs if task != "regression" else 0
    return DataFacts({"": InputFacts(shape, words)}, TaskSettings(task, classes=classes), outputs)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((9,), 0), ((1, 8, 8), 0), ((3, 12, 10), 0), ((5, 8, 8), 0), ((16, 3), 0), ((7,), 30)],
    ids=["table", "grey", "colour", "five channels", "series", "sentences"],
)
def test_inputs_of_every_kind_have_the_declared_shape_and_can_be_told_apart(shape, words) -> None:
    data = make_up_dataset(facts_of(shape, words=words), EASY, 300, 100, seed=1)
    again = make_up_dataset(facts_of(shape, words=words), EASY, 300, 100, seed=1)
    other = make_up_dataset(facts_of(shape, words=words), EASY, 300, 100, seed=2)
    assert tuple(data.x.shape) == (300, *shape)
    assert data.public
    assert torch.equal(data.x, again.x)
    assert torch.equal(data.y, again.y)
    assert not torch.equal(data.x, other.x)
    if words:
        assert int(data.x.min()) >= 1
        assert int(data.x.max()) < words
        table = torch.stack([torch.bincount(row, minlength=words) for row in data.x]).float()
    else:
        table = data.x.flatten(1)
    # A linear fit by least squares does better than chance on the records it was fitted to, and than on random labels.
    assert (
        fit(table, data.y) > fit(table, data.y[torch.randperm(300, generator=torch.Generator().manual_seed(0))]) + 0.1
    )


def fit(x: torch.Tensor, y: torch.Tensor) -> float:
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)[:, :40]
    weights = torch.linalg.lstsq(x, nn.functional.one_hot(y, 4).float(), driver="gelsd").solution
    return float(((x @ weights).argmax(dim=1) == y).float().mean())


@pytest.mark.parametrize(
    ("task", "outputs", "shape"),
    [("binary", 1, (200,)), ("multilabel", 3, (200, 3)), ("regression", 1, (200,)), ("regression", 2, (200, 2))],
)
@pytest.mark.parametrize("inputs", [(6,), (1, 8, 8)])
def test_targets_of_every_task(task: str, outputs: int, shape: tuple[int, ...], inputs: tuple[int, ...]) -> None:
    data = make_up_dataset(facts_of(inputs, task, outputs), EASY, 200, 50, seed=0)
    assert data.task.name == task
    assert tuple(data.y.shape) == shape
    if task != "regression":
        assert 0.2 < data.y.float().mean() < 0.8


@pytest.mark.parametrize("task", ["tokens", "next-token"])
def test_sequences_of_tokens(task: str) -> None:
    facts = dataclasses.replace(facts_of((12,), task, 40, words=40), sequence=True)
    data = make_up_dataset(facts, EASY, 100, 20, seed=0)
    assert tuple(data.y.shape) == (100, 12)
    assert int(data.x.max()) < 40


def test_declared_balance_and_range_are_kept() -> None:
    for shape in ((9,), (1, 8, 8)):
        facts = dataclasses.replace(facts_of(shape, outputs=3), balance=(0.7, 0.2, 0.1))
        shares = torch.bincount(make_up_dataset(facts, EASY, 3000, 10, seed=0).y, minlength=3) / 3000
        assert torch.allclose(shares, torch.tensor([0.7, 0.2, 0.1]), atol=0.05)
    even = torch.bincount(make_up_dataset(facts_of((9,), outputs=3), EASY, 3000, 10, seed=0).y, minlength=3) / 3000
    assert not torch.allclose(even, torch.tensor([0.7, 0.2, 0.1]), atol=0.05)
    facts = DataFacts({"": InputFacts((5,))}, TaskSettings("regression", low=10.0, high=40.0), 1)
    y = make_up_dataset(facts, EASY, 500, 10, seed=0).y
    assert 15 < float(y.mean()) < 35
    assert float(y.min()) >= 10


def test_facts_see_shapes_and_types_and_no_value() -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(6, 3)

    def facts(x: torch.Tensor, y: torch.Tensor) -> DataFacts:
        return read_data_facts(from_arrays(x, y, classes=3, public=False), model)

    one = facts(torch.randn(40, 6, generator=generator), torch.zeros(40, dtype=torch.int64))
    two = facts(1e3 * torch.rand(55, 6, generator=generator), torch.full((55,), 2))
    assert one == two
    assert one != facts(torch.rand(40, 7), torch.zeros(40, dtype=torch.int64))
    words = read_data_facts(
        from_arrays(torch.ones(9, 4, dtype=torch.int64), torch.zeros(9, dtype=torch.int64), classes=3),
        nn.Embedding(77, 2),
    )
    assert words.inputs[""] == InputFacts((4,), 77)


def test_a_task_of_ones_own_has_no_made_up_data() -> None:
    assert not can_make_up(DataFacts({"": InputFacts((3,))}, TaskSettings("package.module:task"), 1))
    assert can_make_up(facts_of((3,)))
