"""A federation of the same shape over made-up records: what may be tried out before a run without touching its data.

Taken over are public facts: settings, plan, model, shapes and types of records, and how many each party holds. Of
private records no value is read.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulcrum.data import Dataset, Partition
from fulcrum.data.records import Records, map_inputs
from fulcrum.rng import CipherRandomness, StreamKey, torch_generator
from fulcrum.rng.chacha import KEY_BYTES
from fulcrum.training.federation import Federation


@dataclass(frozen=True)
class EvenRandomness(CipherRandomness):
    """Randomness whose Poisson samples all have the expected size, to the nearest unit: a few steps stand for many.

    Drawn as usual, so that it takes as long. A GPU draws for itself, and its samples vary; they are large there.
    """

    def uniform(self, key: StreamKey, count: int) -> Tensor:
        """`count` numbers in [0, 1), float64; for a sample at equal distances."""
        drawn = super().uniform(key, count)
        return (torch.arange(count, dtype=torch.float64) + 0.5) / count if key[0] == "sample" else drawn


MADE_UP_RECORDS = 256
"""Different records; a party that holds more has some of them several times."""


def make_up_federation(federation: Federation) -> Federation:
    """The federation with made-up records, a copy of its model, and randomness of its own; its engine is not changed.

    Records of data that is public (`Dataset.public`) are used as they are, the first few.
    """
    problem, settings = federation.problem, federation.settings
    model = copy.deepcopy(problem.model)
    records, partition = _make_up_parties(federation, model)
    dataset = Dataset("made-up records", problem.dataset.task, records, public=True)
    private = dataclasses.replace(
        problem,
        dataset=dataset,
        partition=partition,
        model=model,
        randomness=EvenRandomness(os.urandom(KEY_BYTES), mode=problem.randomness.mode),
    )
    run = dataclasses.replace(settings.run, ledger="")
    return dataclasses.replace(
        federation, settings=dataclasses.replace(settings, run=run), problem=private, evaluation=None
    )


def _make_up_parties(federation: Federation, model: nn.Module) -> tuple[Records, Partition]:
    problem, plan = federation.problem, federation.plan
    parts = problem.partition
    held = problem.dataset.records
    if problem.unit != "person":
        records = make_up_records(held, min(len(held), MADE_UP_RECORDS), model, problem.dataset.public)
        return records, Partition(torch.arange(len(held)) % len(records), parts.starts, parts.names)
    # Persons are told apart by the ids of their records: each needs a row of its own. The rows are one, many times.
    one = make_up_records(held, 1, model, problem.dataset.public)
    x = map_inputs(lambda value: value.expand(len(held), *value.shape[1:]), one.x)
    sizes = parts.sizes
    within = torch.arange(len(held)) - torch.repeat_interleave(parts.starts[:-1], sizes)
    units = torch.repeat_interleave(torch.as_tensor(plan.sizes), sizes)
    person = within % units  # ids are compared within a party only
    y = one.y.expand(len(held), *one.y.shape[1:])
    return Records(x, y, person=person), Partition(torch.arange(len(held)), parts.starts, parts.names)


def make_up_records(held: Records, count: int, model: nn.Module, public: bool) -> Records:
    """`count` records with the shapes and types of those held: public ones themselves, or numbers from a fixed stream.

    Numbers lie in [0, 1), integers below the smallest table of the model, and targets are 0: a value that every task
    takes.
    """
    if public:
        return Records(map_inputs(lambda value: value[:count], held.x), held.y[:count])
    stream, below = torch_generator(0, "made-up records"), find_smallest_table(model)

    def make(value: Tensor) -> Tensor:
        shape = (count, *value.shape[1:])
        if value.is_floating_point():
            return torch.rand(shape, generator=stream, dtype=value.dtype)
        return torch.randint(0, below, shape, generator=stream, dtype=torch.int64).to(value.dtype)

    return Records(map_inputs(make, held.x), torch.zeros((count, *held.y.shape[1:]), dtype=held.y.dtype))


def find_smallest_table(model: nn.Module) -> int:
    """Rows of the model's smallest embedding, so that made-up integers are valid for all; 1 without any."""
    tables = [layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return min(tables, default=1)
