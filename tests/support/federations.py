"""Small data sets, problems and federations that most tests train on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fulcrum.clipping import find_rule
from fulcrum.clipping.rule import ClipRule
from fulcrum.data import Dataset, from_arrays, split
from fulcrum.engines import find_engine
from fulcrum.models.layout import ParameterLayout
from fulcrum.privacy.ledger import Ledger
from fulcrum.rng import Randomness, SeededRandomness
from fulcrum.runs import prepare
from fulcrum.settings.schema import Clip, Data, Settings
from fulcrum.training.client import train_client
from fulcrum.training.client_level import make_local_problem
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, RoundRequest, RoundResult

FEATURES, CLASSES = 6, 3


def toy_data(n: int = 60, seed: int = 0, **columns: Any) -> Dataset:
    """n examples of three Gaussian classes in six dimensions, and test data; public unless `columns` say otherwise."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(count) % CLASSES
        return centres[y] + torch.randn(count, FEATURES, generator=generator), y

    x, y = draw(n)
    x_test, y_test = draw(90)
    return from_arrays(x, y, x_test, y_test, **{"public": True, **columns})


def toy_model(seed: int = 0) -> nn.Module:
    """A two-layer network with fixed weights."""
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def toy_problem(
    rule: str | ClipRule = "fixed",
    dataset: Dataset | None = None,
    parties: int = 2,
    randomness: Randomness | None = None,
    model: nn.Module | None = None,
    **changes: Any,
) -> TrainingProblem:
    """A problem over a toy data set, split evenly."""
    dataset = dataset or toy_data()
    model = model or toy_model()
    partition = split(dataset, Data(parties=parties, partition="iid", min_examples=1), 0)
    chosen = find_rule(rule) if isinstance(rule, str) else rule
    problem = TrainingProblem(
        dataset, partition, model, ParameterLayout.of(model), chosen, randomness or SeededRandomness(3)
    )
    return dataclasses.replace(problem, **changes)


def one_client(
    problem: TrainingProblem,
    C0: float = 1.0,
    rate: float = 0.5,
    sigma: float = 0.0,
    steps: int = 1,
    lr: float = 0.5,
    weight_decay: float = 0.0,
    client: int = 0,
    **settings: Any,
) -> ClientReply:
    """One client's round from the model's own weights."""
    state = problem.rule.init(Clip(C0=C0, **settings), problem.shape)
    params = problem.layout.flatten(problem.model)
    task = Assignment(client, rate, sigma, steps, lr)
    request = RoundRequest(0, 10, params, (task,), (state,), weight_decay)
    return train_client(problem, request, task, state)


def toy_settings(**sections: dict[str, Any]) -> Settings:
    """Three parties, six rounds and sigma 1, at example level; `sections` change it."""
    base = Settings().replace(
        data={"source": "toy", "parties": 3, "partition": "iid", "min_examples": 5},
        model={"name": "linear"},
        train={"rounds": 6, "rate": 0.2, "lr": 0.5},
        privacy={"sigma": 1.0},
    )
    return base.replace(**sections)


def toy_federation(**sections: dict[str, Any]) -> Federation:
    """The federation of these settings over the toy data."""
    return prepare(toy_settings(**sections), toy_data())


def client_settings(parties: int = 6, **sections: dict[str, Any]) -> Settings:
    """Half of the parties in each of six rounds and sigma 1, at client level; `sections` change it."""
    base = Settings().replace(
        data={"source": "toy", "parties": parties, "partition": "iid", "min_examples": 1},
        model={"name": "linear"},
        train={"rounds": 6, "rate": 1.0, "lr": 0.3, "participation": 0.5, "weights": "uniform"},
        clip={"rule": "fixed"},
        privacy={"sigma": 1.0, "unit": "client"},
    )
    return base.replace(**sections)


def client_federation(parties: int = 6, examples: int = 3, **sections: dict[str, Any]) -> Federation:
    """The federation of these settings, with the given number of examples per party."""
    return prepare(client_settings(parties, **sections), toy_data(examples * parties))


def with_randomness(made: Federation, randomness: Randomness) -> Federation:
    """The federation with another source of samples and noise."""
    problem = dataclasses.replace(made.problem, randomness=randomness)
    engine = find_engine(made.settings.run.engine, make_local_problem(problem))
    return dataclasses.replace(made, problem=problem, engine=engine)


def play(federation: Federation, path: Path | str = ":memory:", run: str = "r") -> list[RoundResult]:
    """Every round of the federation, charged to the ledger at `path`."""
    with Ledger.open(path) as ledger:
        return [result for result, _ in federate(federation, ledger, run)]
