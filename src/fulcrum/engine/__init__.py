"""Engines run a round's local training. An engine is an argument: `run(RoundRequest) -> replies`.

The reference engine is a plain loop, slow and obvious; every other engine must equal it when fed the
same sampling and noise. Engines know nothing of accounting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from fulcrum.engine import parallel, reference
from fulcrum.engine.stacked import StackedEngine
from fulcrum.errors import ConfigError
from fulcrum.grads import keep_memory
from fulcrum.local import Problem
from fulcrum.types import ClientReply, RoundRequest


class Engine(Protocol):
    """Runs the local training of a round's participants, in the order of the request."""

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """Replies, one an assignment, in order."""
        ...


@runtime_checkable
class Remote(Protocol):
    """An engine whose clients are elsewhere: they may be away, answer late, or refuse from their own ledgers.

    `run` then leaves out those who did not answer, and a repeated round brings the same bytes again.
    """

    def run(self, request: RoundRequest) -> Iterable[ClientReply]:
        """Replies of those who answered, in the order of the request."""
        ...

    def present(self, clients: Sequence[int]) -> list[int]:
        """Those of the clients that can be asked now; waits until there are enough to go on."""
        ...

    def spent(self) -> set[int]:
        """Clients whose own ledger has refused: they take no further part."""
        ...


ENGINES: dict[str, Callable[[Problem], Engine]] = {
    "reference": reference.ReferenceEngine,
    "stacked": StackedEngine,
    "parallel": parallel.ParallelEngine,
}

FASTEST = {"cpu": "parallel", "cuda": "stacked"}
"""What measured fastest on each kind of device; `reference` on any other."""


def choose_engine(name: str, problem: Problem) -> str:
    """The engine that a setting names; `auto` takes what measured fastest on the problem's device."""
    return FASTEST.get(problem.device.type, "reference") if name == "auto" else name


def find_engine(name: str, problem: Problem) -> Engine:
    """The engine of that name (or `auto`), made for a problem."""
    chosen = choose_engine(name, problem)
    if chosen not in ENGINES:
        raise ConfigError(f"run.engine = {name!r} is not known; choose auto or one of {', '.join(ENGINES)}.")
    keep_memory()  # glibc would hand every step's buffers back to the system, and fault them in again
    return ENGINES[chosen](problem)


__all__ = ["ENGINES", "Engine", "Remote", "choose_engine", "find_engine"]
