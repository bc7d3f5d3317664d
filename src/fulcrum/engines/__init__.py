"""Engines run a round's local training. An engine is an argument: `run(RoundRequest) -> replies`.

The reference engine is a plain, slow loop; every other engine must give the same result on the same
sampling and noise. Engines do no accounting.
"""

from __future__ import annotations

from collections.abc import Callable

from fulcrum.engines import parallel, reference
from fulcrum.engines.stacked import StackedEngine
from fulcrum.errors import ConfigError
from fulcrum.gradients import retain_freed_memory
from fulcrum.training.engine import Engine
from fulcrum.training.problem import TrainingProblem

ENGINES: dict[str, Callable[[TrainingProblem], Engine]] = {
    "reference": reference.ReferenceEngine,
    "stacked": StackedEngine,
    "parallel": parallel.ParallelEngine,
}

FASTEST_ENGINES = {"cpu": "parallel", "cuda": "stacked"}
"""The fastest engine by measurement on each kind of device; `reference` on any other."""


def choose_engine(name: str, problem: TrainingProblem) -> str:
    """The engine that a setting names; `auto` takes the fastest one on the problem's device."""
    return FASTEST_ENGINES.get(problem.device.type, "reference") if name == "auto" else name


def find_engine(name: str, problem: TrainingProblem) -> Engine:
    """The engine of that name (or `auto`), made for a problem."""
    chosen = choose_engine(name, problem)
    if chosen not in ENGINES:
        raise ConfigError(f"run.engine = {name!r} is not known; choose auto or one of {', '.join(ENGINES)}.")
    retain_freed_memory()  # otherwise glibc returns each step's buffers to the system and faults them in again
    return ENGINES[chosen](problem)


__all__ = ["ENGINES", "Engine", "choose_engine", "find_engine"]
