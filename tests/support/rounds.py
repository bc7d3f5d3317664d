"""One round as an engine is asked for it, and when two engines' replies count as equal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fulcrum.data import Dataset, from_arrays
from fulcrum.engines.batched import run_many
from fulcrum.engines.stacked import StackedEngine
from fulcrum.settings.schema import Clip
from fulcrum.training.federation import Federation
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, RoundRequest


def images(*shape: int, n: int = 24, seed: int = 0) -> Dataset:
    """n random images of the given shape in three classes, and six test images."""
    generator = torch.Generator().manual_seed(seed)
    x, x_test = (torch.randn((count, *shape), generator=generator) for count in (n, 6))
    return from_arrays(x, torch.arange(n) % 3, x_test, torch.arange(6) % 3, public=True)


def request(
    problem: TrainingProblem, steps: int = 2, sigma: float = 0.3, clients: int = 3, **changes: Any
) -> RoundRequest:
    """The second round of ten for the first clients, each with a learning rate of its own."""
    state = problem.rule.init(Clip(C0=0.5), problem.shape)
    params = problem.layout.flatten(problem.model)
    tasks = tuple(Assignment(k, 0.5, sigma, steps, 0.3 + 0.1 * k) for k in range(clients))
    return dataclasses.replace(RoundRequest(1, 10, params, tasks, (state,) * clients, 0.01), **changes)


def stacked(problem: TrainingProblem, wanted: RoundRequest, limit: int = 0, native: bool = False) -> list[ClientReply]:
    """What the stacked engine replies within a memory limit; native: with its own matrix products."""
    engine = StackedEngine(problem, limit)
    if engine.trainer is not None:
        own = engine.trainer.core
        own.how = dataclasses.replace(own.how, native=native)
    return list(engine.run(wanted))


def assert_equal(one: list[ClientReply], two: list[ClientReply], tolerance: float = 2e-5) -> None:
    """Same clients and events; updates, statistics and states up to rounding."""
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert (a.client, a.events) == (b.client, b.events)
        torch.testing.assert_close(b.delta, a.delta, rtol=tolerance, atol=tolerance * float(a.delta.abs().max()))
        torch.testing.assert_close(b.extra, a.extra, rtol=tolerance, atol=1e-6)
        for name, value in a.state.items():
            torch.testing.assert_close(b.state[name], torch.as_tensor(value), rtol=tolerance, atol=1e-6)
        assert a.diagnostics == pytest.approx(dict(b.diagnostics), rel=1e-4)


def last_model(feds: list[Federation]) -> torch.Tensor:
    """The averaged weights of several runs at once after their last round, [runs, d]."""
    rounds = list(run_many(feds))
    assert rounds[-1].averaged is not None
    return rounds[-1].averaged
