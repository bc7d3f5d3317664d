"""The parallel engine: clients side by side on the cores of one machine, each by the fast local step.

Workers are threads with single-threaded arithmetic: PyTorch lets go of the interpreter while it computes,
data and weights are shared without a copy, and two clients at once use two cores better than one client
on both. Every client's arithmetic is its own, so the result is the same for any number of workers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

import torch

from fulcrum.data.records import move_inputs_to_device
from fulcrum.engines.fast import make_ghost_step
from fulcrum.gradients import GradientRecorder
from fulcrum.training.client import LocalStepTerms, StepSample, train_client
from fulcrum.training.clipped_sum import Contribution
from fulcrum.training.engine import Engine
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, RoundRequest, RuleState, View


class ParallelEngine(Engine):
    """Trains the participants of a round on `problem.workers` cores; 0: as many as PyTorch would use threads."""

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem
        self.workers = problem.workers or torch.get_num_threads()
        self.notes: tuple[str, ...] = ()
        if problem.precision != "float32":
            self.notes = (f"precision {problem.precision}: a CPU computes in float32",)
        self._pool: ThreadPoolExecutor | None = None
        self._followers: SimpleQueue[GradientRecorder] = SimpleQueue()

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Replies in the order of the request. An error in a client is raised here, and stops the others."""
        pool, stop = self._start(request), threading.Event()
        pairs = list(zip(request.assignments, request.states, strict=True))
        if len(pairs) < self.workers:  # fewer clients than cores: the pieces of a batch side by side
            yield from (self._train_in_pieces(request, *pair) for pair in pairs)
            return
        largest_first = sorted(range(len(pairs)), key=lambda i: -self._estimate_effort(pairs[i][0]))
        futures = {i: pool.submit(self._train_one_client, request, *pairs[i], stop) for i in largest_first}
        try:
            for i in range(len(pairs)):
                yield futures.pop(i).result()
        finally:
            # Also on Ctrl-C: each running client stops after its current step.
            stop.set()
            for future in futures.values():
                future.cancel()
            wait(futures.values())

    def _estimate_effort(self, task: Assignment) -> float:
        starts = self.problem.partition.starts
        return task.steps * task.rate * float(starts[task.client + 1] - starts[task.client])

    def _train_one_client(
        self, request: RoundRequest, task: Assignment, state: RuleState, stop: threading.Event
    ) -> ClientReply:
        follow = self._followers.get()
        step = make_ghost_step(follow)

        def work(
            problem: TrainingProblem, sample: StepSample, view: View, state: RuleState, terms: LocalStepTerms
        ) -> Contribution:
            if stop.is_set():
                raise InterruptedError("the round was given up")
            return step(problem, sample, view, state, terms)

        try:
            return train_client(self.problem, request, task, state, work)
        finally:
            self._followers.put(follow)

    def _train_in_pieces(self, request: RoundRequest, task: Assignment, state: RuleState) -> ClientReply:
        """One client, whose pieces go to all workers; sums are added in the order of the pieces."""
        pool = self._start(request)
        follow = self._followers.get()
        self._followers.put(follow)  # in this thread it only splits and, for some rules, works while the others wait

        def map_pieces(
            work: Callable[[GradientRecorder, slice], Contribution], pieces: Sequence[slice]
        ) -> Iterable[Contribution]:
            def one(piece: slice) -> Contribution:
                mine = self._followers.get()
                try:
                    return work(mine, piece)
                finally:
                    self._followers.put(mine)

            return pool.map(one, pieces)

        return train_client(self.problem, request, task, state, make_ghost_step(follow, map_pieces))

    def _start(self, request: RoundRequest) -> ThreadPoolExecutor:
        if self._pool is None:
            first = self.problem.dataset.records.take(torch.zeros(1, dtype=torch.int64))
            device = self.problem.device
            follow = self.problem.make_recorder()
            follow.settle(request.params, move_inputs_to_device(first.x, device), first.y.to(device))
            for n in range(self.workers):
                self._followers.put(follow if n == 0 or follow.is_thread_safe else follow.clone())
            self._pool = make_single_threaded_pool(self.workers)
        return self._pool


def make_single_threaded_pool(workers: int) -> ThreadPoolExecutor:
    """A pool of threads in which every operation of PyTorch runs on one core. It ends when it is let go of."""
    threads, everyone = torch.get_num_threads(), threading.Barrier(workers)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fulcrum")

    def begin(_: int) -> None:
        torch.get_num_threads()  # a thread that never asked takes up the process's number at its first operation
        torch.set_num_threads(1)
        limit_mkl_in_this_thread()
        everyone.wait()

    list(pool.map(begin, range(workers)))
    torch.set_num_threads(threads)  # threads that others start later have the usual number again
    return pool


def limit_mkl_in_this_thread() -> bool:
    """Has MKL run on one core in this thread; False where PyTorch comes without it.

    `torch.set_num_threads` sets MKL's number for the whole process, so that a later call elsewhere would undo it.
    """
    setter = getattr(_find_torch_library(), "MKL_Set_Num_Threads_Local", None)
    if setter is None:
        return False
    setter(1)
    return True


def _find_torch_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
