"""The parallel engine: clients side by side on the cores of one machine, each by the fast local step.

Workers are threads with single-threaded arithmetic: PyTorch lets go of the interpreter while it computes,
data and weights are shared without a copy, and two clients at once use two cores better than one client
on both. A worker takes several clients of a small network through its layers together (`fast.train_side_by_side`):
the interpreter, which only one thread has at a time, is then asked less often. Every client's arithmetic is its own,
so the result is the same for any number of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue

import torch

from fulcrum.data.records import move_inputs_to_device
from fulcrum.engines.fast import TOGETHER_BYTES, make_ghost_step, may_go_together, train_side_by_side
from fulcrum.gradients import GradientRecorder
from fulcrum.gradients.threads import make_single_threaded_pool
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
        self._bytes_each = 0
        """Bytes of a pass for one example, where clients may go side by side; else 0."""

    def run(self, request: RoundRequest) -> Iterator[ClientReply]:
        """Replies in the order of the request. An error in a client is raised here, and stops the others."""
        pool, stop = self._start(request), threading.Event()
        pairs = list(zip(request.assignments, request.states, strict=True))
        if len(pairs) < self.workers:  # fewer clients than cores: the pieces of a batch side by side
            yield from (self._train_in_pieces(request, *pair) for pair in pairs)
            return
        groups = self._group_clients(request, [task for task, _ in pairs])
        futures = {
            i: pool.submit(self._train_group, request, [pairs[k] for k in g], stop) for i, g in enumerate(groups)
        }
        place = {k: (i, n) for i, group in enumerate(groups) for n, k in enumerate(group)}
        try:
            for k in range(len(pairs)):
                i, n = place[k]
                yield futures[i].result()[n]
        finally:
            # Also on Ctrl-C: each running client stops after its current step.
            stop.set()
            for future in futures.values():
                future.cancel()
            wait(futures.values())

    def _estimate_effort(self, task: Assignment) -> float:
        starts = self.problem.partition.starts
        return task.steps * task.rate * float(starts[task.client + 1] - starts[task.client])

    def _group_clients(self, request: RoundRequest, tasks: Sequence[Assignment]) -> list[list[int]]:
        """Clients that train side by side, largest first: one each, or several where a pass has room for them.

        The result is the same for any groups.
        """
        efforts = [self._estimate_effort(task) for task in tasks]
        order = sorted(range(len(tasks)), key=lambda k: -efforts[k])
        largest = max((effort / task.steps for effort, task in zip(efforts, tasks, strict=True)), default=0.0)
        most = int(TOGETHER_BYTES // max(1.0, self._bytes_each * largest)) if self._bytes_each else 1
        turns = -(-len(tasks) // (self.workers * max(1, most)))
        count = min(len(tasks), self.workers * turns)
        return [order[n::count] for n in range(count)]

    def _train_group(
        self, request: RoundRequest, clients: Sequence[tuple[Assignment, RuleState]], stop: threading.Event
    ) -> list[ClientReply]:
        follow = self._followers.get()
        step = make_ghost_step(follow)

        def go_on() -> None:
            if stop.is_set():
                raise InterruptedError("the round was given up")

        def work(
            problem: TrainingProblem, sample: StepSample, view: View, state: RuleState, terms: LocalStepTerms
        ) -> Contribution:
            go_on()
            return step(problem, sample, view, state, terms)

        try:
            # A masked sum is held, not released: its client goes alone.
            if len(clients) > 1 and all(task.message is None for task, _ in clients):
                return train_side_by_side(self.problem, request, clients, follow, go_on)
            return [train_client(self.problem, request, task, state, work) for task, state in clients]
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
            one = move_inputs_to_device(first.x, device), first.y.to(device)
            follow.settle(request.params, *one)
            if may_go_together(self.problem, follow):
                self._bytes_each = follow.measure_example(request.params, *one)
            for n in range(self.workers):
                self._followers.put(follow if n == 0 or follow.is_thread_safe else follow.clone())
            self._pool = make_single_threaded_pool(self.workers)
        return self._pool
