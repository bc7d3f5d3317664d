"""Local training of many jobs at once. A job is one client's task in one run; jobs of similar size go side by side.

Every job samples and noises by the numbers of its own streams: the same bits whichever jobs go beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fulcrum.clipping.rule import ClipRule
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.core import StackedCore
from fulcrum.engines.stacked.draws import NormalStream, RandomDraws, UniformStream, make_padded_table
from fulcrum.engines.stacked.replay import GraphReplayer
from fulcrum.engines.stacked.rules import StackedState
from fulcrum.engines.stacked.sampling import compute_bucket_size, round_up_to_multiple
from fulcrum.engines.stacked.step import (
    DrawnNumbers,
    StepResult,
    StepTerms,
    TaskRelease,
    draw_and_run_local_step,
    draw_and_sum_local_step,
    release_local_step,
    run_local_step,
    sum_local_step,
)
from fulcrum.privacy.events import Event, Unprotected
from fulcrum.privacy.mechanism import compute_charged_scale, refuse_unnoised_statistics
from fulcrum.rng import Randomness, StreamKey, name_stream
from fulcrum.types import Assignment, Bounds


@dataclass(frozen=True)
class ClientJob:
    """One client's task. start and size: its part of the trainer's order. run: which set of weights it starts from.

    attempt: number of times that the round was released before.
    """

    task: Assignment
    start: int
    size: int
    run: int
    randomness: Randomness
    weight_decay: float
    attempt: int = 0

    def name_stream(self, purpose: str, t: int, step: int) -> StreamKey:
        """The name of one of its streams, as in `training.client`."""
        return name_stream(purpose, t, self.task.client, step, attempt=self.attempt)


@dataclass
class BucketResult:
    """The result of a bucket of jobs, still on the device: one `StepResult` per local step.

    members: the jobs' positions; tensors may have more rows than members, for padding. events: per member, the event
    of each step. asked: per member, the number of steps that released the rule's statistics.
    """

    members: list[int]
    start: Tensor = field(repr=False)
    steps: list[StepResult] = field(repr=False)
    events: list[tuple[Event, ...]]
    asked: list[int]
    pad: int
    key: tuple[int, float]

    @property
    def deltas(self) -> Tensor:
        """Each member's update, [members, d]."""
        last = self.steps[-1]
        return (last.theta - self.start if last.messages is None else last.messages)[: len(self.members)]

    @property
    def extras(self) -> Tensor:
        """The mean over the steps that released any of the extra, [members, J]."""
        found = torch.stack([step.extra for step in self.steps]).sum(dim=0)[: len(self.members)]
        if min(self.asked) == max(self.asked):  # nothing to bring to the device
            return found / max(1, self.asked[0])
        return found / torch.tensor(self.asked, device=found.device).clamp_min(1)[:, None]


class StackedTrainer:
    """Runs jobs on a core. order: rows of the data set, of one run or of several one after the other."""

    def __init__(self, core: StackedCore, order: Tensor) -> None:
        self.core = core
        self.device = core.problem.device
        self.order = order.to(self.device)
        self.replayer = GraphReplayer(core)
        self._pads: dict[tuple[int, float], int] = {}
        self._terms: dict[tuple[Any, ...], tuple[StepTerms, list[tuple[Event, Event]]]] = {}
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        self._width: int | None = None
        problem = core.problem
        self.exact = (problem.proven or problem.randomness.mode == "secure") and problem.rule.private
        """Whether every release is integers on a grid: in real use, and in proven arithmetic."""

    def train(
        self,
        jobs: Sequence[ClientJob],
        thetas: Tensor,
        states: Callable[[list[int]], StackedState],
        t: int,
        rounds: int,
    ) -> list[BucketResult]:
        """All local steps of all jobs in round t. thetas [R, d]; states(members) gives the members' states, stacked.

        A round whose sample did not fit, or whose sums were not finite, is done again on the same random numbers.
        """
        draws = RandomDraws(self.device, [job.randomness for job in jobs])
        draws.begin_round(t)
        while True:
            buckets = _group_into_buckets(jobs)
            parts = [
                self._train_bucket(jobs, members, thetas, states, t, rounds, draws, alone=len(buckets) == 1)
                for members in buckets
            ]
            if self._round_is_complete(parts):
                return parts

    def _train_bucket(
        self,
        jobs: Sequence[ClientJob],
        members: list[int],
        thetas: Tensor,
        states: Callable[[list[int]], StackedState],
        t: int,
        rounds: int,
        draws: RandomDraws,
        alone: bool,
    ) -> BucketResult:
        """The local steps of one bucket. Nothing is read back from the device here.

        alone: the round has no other bucket.
        """
        mine = [jobs[i] for i in members]
        rate = mine[0].task.rate
        width = compute_bucket_size(max(job.size for job in mine))
        count = len(members)
        places = count if count <= 4 else round_up_to_multiple(count, 2 ** (count.bit_length() - 3))
        tasks = [job.task for job in mine]
        asks = [[task.asks_statistics(t, step) for task in tasks] for step in range(tasks[0].steps)]  # [N][members]
        state = _pad_states(states(members), places)
        shared = len(thetas) == 1
        start = thetas if shared else thetas[_make_padded_index([job.run for job in mine], places, self.device)]
        key = (width, rate)
        pad = self._pads.get(key) or sampling.compute_pad_size(width, rate)
        view, _ = self.core.rule.view(state, t, rounds)
        d = self.core.problem.layout.dim if view.transform is None else len(view.transform.groups)
        if self._width is None:
            self._width = probe_statistics_width(self.core, state, t, rounds)
        terms, pairs = self._get_step_terms(mine, places)
        theta, steps = start, []
        for step in range(mine[0].task.steps):
            given = {
                "theta": theta,
                "state": state,
                "terms": terms | {"asked": self._get_statistics_flags(asks[step], places)},
                "t": torch.tensor(t, device=self.device),
            }
            if draws.on_device:  # the program draws: one call in place of fifty
                given["streams"] = _locate_streams(mine, t, step, places, self.device)
            else:
                uniforms = torch.empty((places, width), dtype=torch.float64, device=self.device)
                drawn = _fill_uniforms(draws, mine, t, step, uniforms)
                given["uniforms"] = uniforms
                if drawn is not None:  # the host knows how many joined before anything starts
                    pad = max(pad, round_up_to_multiple(int((drawn < rate).sum(dim=1).max())))
            numbers = DrawnNumbers(width, d, self._width)
            shape = (places, width, len(theta), rounds)
            if self.exact or mine[0].task.message is not None:
                releases = [
                    TaskRelease(
                        job.task,
                        job.task.rate * job.size,
                        asked,
                        job.randomness,
                        job.name_stream("noise", t, step)[1:],
                    )
                    for job, asked in zip(mine, asks[step], strict=True)
                ]
                done, pad = self._release_step(shape, pad, key, given, releases, numbers)
            else:
                tail: tuple[Any, ...] = (numbers,)
                if not draws.on_device:
                    tail = ()
                    for purpose, m in (("noise", d), ("noise-extra", self._width)):
                        table = torch.zeros((places, m), device=self.device)
                        given[purpose.replace("-", "_")] = _fill_normals(draws, purpose, mine, t, step, table)
                step_program = draw_and_run_local_step if draws.on_device else run_local_step
                program = partial(step_program, self.core, pad, rounds, self.order, *tail)
                done = self.replayer.run((*shape, pad), program, given)
            if self.replayer.graphs:
                last = alone and step + 1 == mine[0].task.steps
                done = done.copy_state() if last else done.copy()
            theta, state = done.theta, done.state
            steps.append(done)
        events = [tuple(pair[not ask[i]] for ask in asks) for i, pair in enumerate(pairs)]
        asked = [sum(ask[i] for ask in asks) for i in range(count)]
        return BucketResult(members, start, steps, events, asked, pad, key)

    def _release_step(
        self,
        shape: tuple[int, ...],
        pad: int,
        key: tuple[int, float],
        given: dict[str, Any],
        releases: Sequence[TaskRelease],
        numbers: DrawnNumbers,
    ) -> tuple[StepResult, int]:
        """A step whose releases are integers on a grid, and the pad that its samples fitted.

        Sums are released once they are known to be right: what is released is drawn once.
        """
        rounds = shape[-1]
        while True:
            common = (self.core, pad, rounds, self.order)
            program = (
                partial(draw_and_sum_local_step, *common, numbers)
                if "streams" in given
                else partial(sum_local_step, *common)
            )
            found = self.replayer.run(("sums", *shape, pad), program, given)
            largest, fine = torch.stack([found.counts.max(), found.sums.finite.to(found.counts)]).tolist()
            if largest > pad:
                pad = self._pads[key] = round_up_to_multiple(largest)
            elif not fine and not self.core.how.careful:
                self.core.careful()
            else:
                with torch.no_grad():
                    public = (given["theta"], given["terms"], releases, given["t"], rounds)
                    return release_local_step(self.core, found, *public), pad

    def _get_statistics_flags(self, asks: list[bool], places: int) -> Tensor:
        """1 for jobs that release statistics in a step, 0 for the others: [places]."""
        key = (*asks, *[False] * (places - len(asks)))
        if key not in self._flags:
            self._flags[key] = torch.tensor(key, dtype=torch.float32).to(self.device)
        return self._flags[key]

    def _get_step_terms(self, jobs: Sequence[ClientJob], places: int) -> tuple[StepTerms, list[tuple[Event, Event]]]:
        # The grid of a masked message moves with C, and none of the terms depends on it.
        tasks = [job.task if job.task.message is None else replace(job.task, message=None) for job in jobs]
        key = (places, *((task, job.start, job.size, job.weight_decay) for task, job in zip(tasks, jobs, strict=True)))
        if key not in self._terms:
            if len(self._terms) > 64:
                self._terms.clear()
            self._terms[key] = _build_step_terms(self.core.problem.rule, jobs, places, self.device, bool(self._width))
        return self._terms[key]

    def _round_is_complete(self, parts: Sequence[BucketResult]) -> bool:
        """Whether every sample fitted and every sum was finite; if not, what is needed to repeat is noted."""
        counts = torch.stack([step.counts.max() for part in parts for step in part.steps])
        finite = torch.stack([step.finite for part in parts for step in part.steps]).all()
        *most, fine = torch.cat([counts, finite.to(counts)[None]]).tolist()  # the one wait of a round
        good, at = True, 0
        for part in parts:
            largest = int(max(most[at : at + len(part.steps)]))
            at += len(part.steps)
            if largest > part.pad:
                self._pads[part.key] = round_up_to_multiple(largest)
                good = False
        if not fine and not self.core.how.careful:
            self.core.careful()
            good = False
        return good


def probe_statistics_width(core: StackedCore, state: StackedState, t: Any, rounds: int) -> int:
    """Number of statistics J that a rule releases beside the gradient, found by a call on dummy numbers."""
    C = state["C"][:1]
    view, direction = core.rule.view(state, t, rounds)
    rows = C.new_ones((1, 1))
    own = {name: value[:1] for name, value in state.items()}
    seen = (rows if direction is not None else None, rows if view.losses else None)
    probes = None if view.probes is None else C.new_ones((1, 1, len(view.probes)))
    _, again, extra, *_ = core.rule.clip(own, C[:, None], rows > 0, *seen, rows[0], rows[0], rows[0], probes=probes)
    whole = core.problem.layout.dim if view.transform is None else len(view.transform.groups)
    return int(extra.shape[2]) + (whole if again.shape[2] else 0)


def _group_into_buckets(jobs: Sequence[ClientJob]) -> list[list[int]]:
    """Positions of jobs that train side by side: similar size, the same rate, as many steps."""
    found: dict[tuple[int, int, float], list[int]] = {}
    for position, job in enumerate(jobs):
        found.setdefault((compute_bucket_size(job.size), job.task.steps, job.task.rate), []).append(position)
    return [found[key] for key in sorted(found)]


def _make_padded_index(values: list[int], places: int, device: torch.device) -> Tensor:
    return torch.tensor([*values, *[values[0]] * (places - len(values))], device=device)


def _pad_states(state: StackedState, places: int) -> StackedState:
    """Padding jobs have the first job's state; their size is 0."""
    spare = places - len(state["C"])
    if not spare:
        return state
    return {name: torch.cat([value, value[:1].expand(spare, *value.shape[1:])]) for name, value in state.items()}


def _build_step_terms(
    rule: ClipRule, jobs: Sequence[ClientJob], places: int, device: torch.device, statistics: bool
) -> tuple[StepTerms, list[tuple[Event, Event]]]:
    """The public terms of the jobs as tensors, and the event of each one's step with statistics and without.

    statistics: whether the rule releases any beside the gradient.
    """
    unit = Bounds(torch.ones(1), 1.0)
    batches = [job.task.rate * job.size for job in jobs]
    noise, without = (
        [
            compute_charged_scale(rule, unit, j.task.rate, j.task.sigma, batch, asked, j.task.noise_parties)
            for j, batch in zip(jobs, batches, strict=True)
        ]
        for asked in (True, False)
    )
    for scale in noise:
        if statistics and not isinstance(scale.event, Unprotected):
            refuse_unnoised_statistics(scale.extra)

    def column(values: Sequence[Any], dtype: torch.dtype, filler: float) -> Tensor:
        return torch.tensor([*values, *[filler] * (places - len(jobs))], dtype=dtype).to(device)

    return {
        "start": column([job.start for job in jobs], torch.int64, 0),
        "size": column([job.size for job in jobs], torch.int64, 0),
        "rate": column([job.task.rate for job in jobs], torch.float64, 0.0),
        "sigma": column([job.task.sigma for job in jobs], torch.float32, 0.0),
        "batch": column(batches, torch.float32, 1.0),
        "noise": column([float(s.sum) for s in noise], torch.float32, 0.0),
        "noise_extra": column([s.extra for s in noise], torch.float32, 0.0),
        "lr": column([job.task.lr for job in jobs], torch.float32, 0.0),
        "weight_decay": column([job.weight_decay for job in jobs], torch.float32, 0.0),
    }, [(s.event, other.event) for s, other in zip(noise, without, strict=True)]


def _fill_uniforms(draws: RandomDraws, jobs: Sequence[ClientJob], t: int, step: int, table: Tensor) -> Tensor | None:
    """A number in [0, 1) for each unit of the jobs: table [places, width], float64; 1 where a job has no unit.

    Returns the same numbers where they come from the host.
    """
    width = table.shape[1]
    streams = [
        UniformStream(job.randomness, job.name_stream("sample", t, step), i * width, job.size)
        for i, job in enumerate(jobs)
    ]
    return draws.fill_uniforms(table, streams)


def _locate_streams(jobs: Sequence[ClientJob], t: int, step: int, places: int, device: torch.device) -> Tensor:
    """Keys and nonces of the jobs' streams: int32 [3, places, 11] for samples, noise and noise of statistics."""
    streams = [
        [NormalStream(job.randomness, job.name_stream(purpose, t, step), i) for i, job in enumerate(jobs)]
        for purpose in ("sample", "noise", "noise-extra")
    ]
    return torch.from_numpy(make_padded_table(streams, places)).to(device, non_blocking=True)


def _fill_normals(
    draws: RandomDraws, purpose: str, jobs: Sequence[ClientJob], t: int, step: int, table: Tensor
) -> Tensor:
    """Standard normal numbers for the jobs that are noised: table [places, count], zeros elsewhere."""
    streams = [
        NormalStream(job.randomness, job.name_stream(purpose, t, step), i)
        for i, job in enumerate(jobs)
        if job.task.sigma > 0
    ]
    return draws.fill_normals(table, streams)
