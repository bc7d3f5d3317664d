"""The work that every method of the CPU benchmark does, and the methods without peers: plain, and Fulcrum.

One round: every party starts from the same weights, takes its local steps on Poisson samples, and the updates are
averaged. Samples come from the same named streams for all methods, so all see the same examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fulcrum.clipping import find_rule
from fulcrum.data import from_arrays, split
from fulcrum.engines import find_engine
from fulcrum.models.build import build_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.settings import schema as config
from fulcrum.training.problem import TrainingProblem
from fulcrum.training.server import average_replies
from fulcrum.types import Assignment, RoundRequest

C, LR = 1.0, 0.1


@dataclass(frozen=True)
class Work:
    """One line of the table: whose model, how many parties of how many examples, how many local steps.

    batch: expected number of examples per step.
    """

    name: str
    shape: tuple[int, int, int]
    parties: int
    examples: int
    steps: int
    sigma: float = 1.0
    batch: int = 64

    @property
    def rate(self) -> float:
        return self.batch / self.examples


FULL = {
    "mnist": Work("mnist", (1, 28, 28), parties=10, examples=6000, steps=10),
    "cifar": Work("cifar", (3, 32, 32), parties=10, examples=5000, steps=2),
    # The paper's own steps: one per round, at a rate of 0.05.
    "mnist-300": Work("mnist-300", (1, 28, 28), parties=10, examples=6000, steps=1, batch=300),
    "cifar-250": Work("cifar-250", (3, 32, 32), parties=10, examples=5000, steps=1, batch=250),
}
QUICK = {
    "mnist": Work("mnist", (1, 28, 28), parties=3, examples=600, steps=2),
    "cifar": Work("cifar", (3, 32, 32), parties=2, examples=300, steps=1),
    "mnist-300": Work("mnist-300", (1, 28, 28), parties=2, examples=600, steps=1, batch=30),
    "cifar-250": Work("cifar-250", (3, 32, 32), parties=2, examples=300, steps=1, batch=25),
}

Round = Callable[[int], Tensor]
"""Plays round t from the initial weights and returns the averaged update [d]."""


def problem(work: Work, rule: str = "fixed") -> TrainingProblem:
    """Random images of the right shape: for time and memory, pixels are pixels."""
    generator = torch.Generator().manual_seed(1)
    count = work.parties * work.examples
    x = torch.rand(count, *work.shape, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)
    data = from_arrays(x, y, x[:10], y[:10], classes=10, name=work.name, public=True)
    partition = split(data, config.Data(parties=work.parties, partition="iid"), 0)
    model = build_model(config.Model(), work.shape, 10, seed=0)
    return TrainingProblem(data, partition, model, ParameterLayout.of(model), find_rule(rule), SeededRandomness(7))


def batches(made: TrainingProblem, work: Work, t: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The client's Poisson samples of round t, as Fulcrum draws them."""
    index = made.partition.indices(client)
    for step in range(work.steps):
        joins = made.randomness.uniform(("sample", t, client, step), len(index)) < work.rate
        rows = index[joins]
        yield made.dataset.x[rows], made.dataset.y[rows]


def loop(made: TrainingProblem, work: Work, model: nn.Module, train: Callable[[Tensor, Tensor], None]) -> Round:
    """FedAvg by a sequential loop over the clients: `train` takes one step of `model` on one batch."""
    start = made.layout.flatten(made.model)

    def play(t: int) -> Tensor:
        total = torch.zeros_like(start)
        for client in range(work.parties):
            made.layout.write(model, start)
            for x, y in batches(made, work, t, client):
                train(x, y)
            total += (made.layout.flatten(model) - start) / work.parties
        made.layout.write(model, start)
        return total

    return play


def plain(made: TrainingProblem, work: Work) -> Round:
    """No privacy: model, autograd, SGD, all of PyTorch's threads. The mean is over the expected batch, as elsewhere."""
    model = build_model(config.Model(), work.shape, 10, seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)

    def train(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        (cross_entropy(model(x), y, reduction="sum") / work.batch).backward()
        optimiser.step()

    return loop(made, work, model, train)


def secure(made: TrainingProblem) -> TrainingProblem:
    """In real use, with a fresh secret: randomness from the operating system, float32 sums with measured margins."""
    return dataclasses.replace(made, randomness=SecureRandomness())


def proven(made: TrainingProblem) -> TrainingProblem:
    """In real use, with a fresh secret and proven bounds from the gradients to the released integers."""
    return dataclasses.replace(made, randomness=SecureRandomness(), proven=True)


MODES: dict[str, Callable[[TrainingProblem], TrainingProblem]] = {
    "fulcrum": lambda made: made,
    "fulcrum-fast-secure": secure,
    "fulcrum-proven": proven,
}
"""Fulcrum's rows: seeded (a simulation), secure with fast arithmetic, secure with proven arithmetic."""


def fulcrum(made: TrainingProblem, work: Work, engine: str = "auto") -> Round:
    """Clip, noise, FedAvg by one of Fulcrum's engines."""
    trainer = find_engine(engine, made)
    state = made.rule.init(config.Clip(C0=C), made.shape)
    tasks = tuple(Assignment(k, work.rate, work.sigma, work.steps, LR) for k in range(work.parties))
    start, weights = made.layout.flatten(made.model), torch.full((work.parties,), 1 / work.parties)

    def play(t: int) -> Tensor:
        asked = RoundRequest(t, 1000, start, tasks, (state,) * work.parties)
        return average_replies(list(trainer.run(asked)), weights)[0]

    return play
