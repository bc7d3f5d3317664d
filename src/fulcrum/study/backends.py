"""Runs jobs: one after the other, in processes of one thread each, or stacked on a GPU.

`run_jobs` is an iterator of (job, outcome) in the order they finish; the caller stores them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import torch

from fulcrum.engines.batched import can_stack_runs, make_stack_key, run_many
from fulcrum.errors import ConfigError, FulcrumError
from fulcrum.study.job import StudyJob
from fulcrum.study.run_job import (
    DatasetCache,
    JobOutcome,
    TimeBudgetExceeded,
    get_federation_score,
    make_job_outcome,
    prepare_job,
    train_to_end,
)
from fulcrum.training.federation import Federation

MessageFn = Callable[[str], None]

SECONDS_BETWEEN_LINES = 20.0
"""How long a stack is silent at least between two lines about its progress."""


@dataclass
class TimeBudget:
    """A time budget in seconds (0: none). `fits` estimates from the last job of the same kind.

    It does not use the slowest: the first job of a kind also loads data and records programs. For the
    same reason `check_time_left` leaves out a job's first rounds.
    """

    seconds: float = 0.0
    began: float = field(default_factory=lambda: time.monotonic())
    last: dict[Hashable, float] = field(default_factory=dict)
    marks: dict[float, tuple[int, float]] = field(default_factory=dict)

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the budget is spent."""
        return self.seconds - (time.monotonic() - self.began) if self.seconds else float("inf")

    def fits(self, kind: Hashable, size: int = 1) -> bool:
        """Whether another job (or `size` of them) of this kind will probably end in time."""
        return self.remaining_seconds > 1.1 * size * self.last.get(kind, 0.0)

    def record_duration(self, kind: Hashable, seconds: float) -> None:
        """Record the duration of one job."""
        self.last[kind] = seconds

    def check_time_left(self, done: int, total: int, since: float) -> None:
        """In a job that began at `since`: raise TimeBudgetExceeded once it is clear that it will not end in time."""
        now = time.monotonic()
        first, then = self.marks.setdefault(since, (done, now))
        # Rounds are reported in bursts, so the rate is computed over at least a tenth of the job.
        known = done - first >= max(2, total // 10)
        if self.remaining_seconds <= 0 or (
            known and (now - then) / (done - first) * (total - done) > self.remaining_seconds
        ):
            raise TimeBudgetExceeded


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backends. stack: maximum runs in one tensor program. workers: processes (0: one per core).

    precision: run.precision for all jobs; empty: each job's own.
    """

    data_dir: str = ""
    device: str = "auto"
    stack: int = 48
    precision: str = ""
    workers: int = 0
    clock: TimeBudget = field(default_factory=TimeBudget)
    say: MessageFn = print


BackendFn = Callable[[Sequence[StudyJob], BackendOptions], Iterator[tuple[StudyJob, JobOutcome]]]


def run_jobs(
    jobs: Iterable[StudyJob], backend: str = "auto", how: BackendOptions | None = None
) -> Iterator[tuple[StudyJob, JobOutcome]]:
    """Run the jobs and yield each once, in the order they finish. Ends early when the time budget is spent."""
    jobs, how = list(jobs), how or BackendOptions()
    chosen = choose_backend(how.device) if backend == "auto" else backend
    if chosen not in BACKENDS:
        raise ConfigError(f"backend = {backend!r} is not known; choose auto or one of {', '.join(BACKENDS)}.")
    yield from BACKENDS[chosen](jobs, how)


def choose_backend(device: str) -> str:
    """The backend for "auto": stacked with a GPU, processes with several cores, else sequential."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return "stacked"
    return "processes" if count_available_cores() > 1 else "sequential"


def count_available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- one after the other --------------------------------------------------------------------------


def run_sequentially(jobs: Sequence[StudyJob], how: BackendOptions) -> Iterator[tuple[StudyJob, JobOutcome]]:
    """One after the other, each with the engine that "auto" chooses."""
    datasets = DatasetCache(how.data_dir)
    for job in jobs:
        result = _run_single_job(job, datasets, how)
        if result is not None:
            yield job, result


def _run_single_job(job: StudyJob, datasets: DatasetCache, how: BackendOptions) -> JobOutcome | None:
    """Run one job; None where it will not end in time (a shorter one still may)."""
    kind, began = make_batch_key(job), time.monotonic()
    if not how.clock.fits(kind):
        return None
    try:
        result = train_to_end(
            prepare_job(job, datasets, how.device, how.precision),
            lambda t, total: how.clock.check_time_left(t, total, began),
        )
    except TimeBudgetExceeded:
        return None
    except FulcrumError:
        raise
    except Exception as error:  # an error in one rule must not stop the other jobs
        how.say(f"FAILED, left undone: {job.cell} seed {job.seed}: {type(error).__name__}: {error}")
        return None
    how.clock.record_duration(kind, time.monotonic() - began)
    return result


# --- processes ------------------------------------------------------------------------------------

_worker_state: dict[str, Any] = {}
"""In a worker process: its data sets and options."""


def _init_worker_process(how: BackendOptions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(1)
    _worker_state.update(datasets=DatasetCache(how.data_dir), how=how)


def _run_in_worker(job: StudyJob) -> tuple[StudyJob, JobOutcome | None]:
    return job, _run_single_job(job, _worker_state["datasets"], _worker_state["how"])


def run_in_processes(jobs: Sequence[StudyJob], how: BackendOptions) -> Iterator[tuple[StudyJob, JobOutcome]]:
    """Several at once, each in a process with one thread."""
    workers = min(how.workers or count_available_cores(), len(jobs))
    if workers <= 1:
        yield from run_sequentially(jobs, how)
        return
    # Only plain values are sent to a new process, and its clock starts with the process.
    left = max(how.clock.remaining_seconds, 1e-3) if how.clock.seconds else 0.0
    options = BackendOptions(how.data_dir, how.device, precision=how.precision, clock=TimeBudget(left))
    # Not a Pool, which waits forever if its processes die at the start.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _init_worker_process, (options,)) as pool:
        try:
            for done in as_completed([pool.submit(_run_in_worker, job) for job in jobs]):
                job, result = done.result()
                if result is not None:
                    yield job, result
        except BaseException:  # interrupted, or the caller stopped: do not wait for active runs
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise


# --- stacked --------------------------------------------------------------------------------------


def _run_stack(
    federations: Sequence[Federation], check: Callable[[int, int], None], say: MessageFn | None = None
) -> list[JobOutcome]:
    """Outcomes of runs trained together, in order. The only place that uses `run_many`. say: told of every tenth round.

    It yields one value per round with .round, .rounds, .C [R, G] (NaN for groups a run lacks), and .metrics by name,
    [R] each (NaN where a run was not evaluated, or has no such metric).
    """
    began = time.monotonic()
    Cs: list[list[tuple[int, float]]] = [[] for _ in federations]
    curves: list[list[tuple[int, float]]] = [[] for _ in federations]
    scores = [get_federation_score(federation).name for federation in federations]
    names = [tuple(federation.problem.task.metrics) for federation in federations]
    last: list[dict[str, float]] = [{} for _ in federations]
    spoken = 0.0
    for step in run_many(list(federations)):
        C = step.C.double().nan_to_num(nan=0.0, posinf=float("inf")).square().sum(dim=1).sqrt().tolist()
        found = {name: values.tolist() for name, values in step.metrics.items()}
        for i in range(len(federations)):
            Cs[i].append((step.round, C[i]))
            metrics = {name: found[name][i] for name in names[i]}
            if not math.isnan(metrics[scores[i]]):
                curves[i].append((step.round, metrics[scores[i]]))
                last[i] = metrics
        check(step.round, step.rounds)
        passed = time.monotonic() - began
        if say is not None and passed - spoken >= SECONDS_BETWEEN_LINES:
            spoken = passed
            say(f"{len(federations)} runs: round {step.round} of {step.rounds} after {passed:.1f} s")
    share = (time.monotonic() - began) / len(federations)
    return [make_job_outcome(f, Cs[i], curves[i], last[i], share) for i, f in enumerate(federations)]


def find_equal_runs(federations: Sequence[Federation]) -> list[int]:
    """For each run, the first one that is the same run; its own place where there is none.

    A rehearsal chooses C and the learning rate, so that runs from different starts become the same run. Their settings
    are then equal, and so are their releases, bit for bit: one of them is played.
    """
    first: dict[Hashable, int] = {}
    keys = [
        (repr(federation.settings), id(federation.problem.dataset), id(federation.problem.model))
        for federation in federations
    ]
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def run_stacked(jobs: Sequence[StudyJob], how: BackendOptions) -> Iterator[tuple[StudyJob, JobOutcome]]:
    """Jobs that may share a stack (`make_batch_key`) run together on one device; other jobs run alone."""
    datasets = DatasetCache(how.data_dir)
    alone = [job for job in jobs if not can_stack_runs(job.settings)]
    groups: dict[Hashable, list[StudyJob]] = {}
    for job in jobs:
        if can_stack_runs(job.settings):
            groups.setdefault(make_batch_key(job), []).append(job)
    for kind, members in groups.items():
        members.sort(key=lambda job: job.settings.train.rate)  # batches of equal size need no padding
        size = how.stack
        while members:
            if not how.clock.fits(kind, min(size, len(members))):
                how.say(f"no time left for {len(members)} jobs like {members[0].cell}")
                break
            chunk, began = members[:size], time.monotonic()
            try:
                ready = [prepare_job(job, datasets, how.device, how.precision) for job in chunk]
                if (seconds := time.monotonic() - began) >= 1:
                    how.say(f"{len(chunk)} runs like {chunk[0].cell} prepared in {seconds:.1f} s")
                places = find_equal_runs(ready)
                results = _run_stack(
                    [ready[i] for i in dict.fromkeys(places)],
                    lambda t, total, began=began: how.clock.check_time_left(t, total, began),  # type: ignore[misc]
                    how.say,
                )
                of_place = dict(zip(dict.fromkeys(places), results, strict=True))
                results = [of_place[place] for place in places]
                del ready
            except TimeBudgetExceeded:
                how.say(f"time is up: {len(chunk)} jobs like {chunk[0].cell} left undone")
                break
            except torch.cuda.OutOfMemoryError:
                if size == 1:
                    raise
                size = min(size, len(chunk)) // 2 or 1
                torch.cuda.empty_cache()
                how.say(f"out of memory; stacks of {size} from here")
                continue
            except FulcrumError:
                raise
            except Exception as error:
                how.say(f"cannot be stacked, goes one by one: {chunk[0].cell}: {type(error).__name__}: {error}")
                alone += members
                break
            how.clock.record_duration(kind, (time.monotonic() - began) / len(chunk))
            members = members[len(chunk) :]
            yield from zip(chunk, results, strict=True)
    yield from run_sequentially(alone, how)


def make_batch_key(job: StudyJob) -> Hashable:
    """Equal for jobs that may share a stack and take about equally long."""
    settings = job.settings
    # At client level a round of 1000 parties and one of 10 take very different times.
    return make_stack_key(settings), settings.data.parties if settings.privacy.unit == "client" else 0


BACKENDS: dict[str, BackendFn] = {"sequential": run_sequentially, "processes": run_in_processes, "stacked": run_stacked}
