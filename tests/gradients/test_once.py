"""A property that is computed once per object, with no lock between objects."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from fulcrum.gradients.once import once_property


@dataclass(frozen=True)
class Tape:
    meet: threading.Barrier
    calls: list[int] = field(default_factory=list)

    @once_property
    def norms(self) -> int:
        """Waits for the other thread."""
        self.calls.append(1)
        self.meet.wait(timeout=5)
        return 7


def test_it_is_computed_once_per_object() -> None:
    tape = Tape(threading.Barrier(1))
    assert (tape.norms, tape.norms) == (7, 7)
    assert len(tape.calls) == 1
    assert isinstance(Tape.norms, once_property)
    assert Tape.norms.__doc__ == "Waits for the other thread."


def test_two_threads_do_not_wait_for_each_other() -> None:
    """Each computes while the other does: a lock for all objects would let none of them arrive."""
    meet = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda tape: tape.norms, [Tape(meet), Tape(meet)])) == [7, 7]


def test_a_lock_for_all_objects_is_noticed() -> None:
    """The wrong case: what Python 3.11's `functools.cached_property` does."""
    lock, meet = threading.Lock(), threading.Barrier(2)

    class Locked:
        def norms(self) -> int:
            with lock:
                meet.wait(timeout=0.2)
                return 7

    with ThreadPoolExecutor(2) as pool, pytest.raises(threading.BrokenBarrierError):
        list(pool.map(lambda tape: tape.norms(), [Locked(), Locked()]))
