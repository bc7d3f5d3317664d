"""Rounds of several local steps under server rules: every client of every run is a job with weights of its own.

Who takes part, how many steps they make and how large they are is the same in every round, so all jobs lie in
buffers that stay where they are: a local step of all of them is one tensor program, the end of a round another,
and nothing but random numbers is made in between. Jobs are sorted into a few classes by the places that their
samples need; a sample that did not fit is noticed after a burst, and the burst is played again with more room.

In a seeded run on a GPU the numbers of all jobs are drawn at once, keyed by round and step. Recorded, secure and
CPU numbers are the clients' own streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fulcrum.config import local_steps
from fulcrum.engine.stacked import sampling
from fulcrum.engine.stacked.replay import Replayer
from fulcrum.engine.stacked.rules import Stacked
from fulcrum.engine.stacked.sampling import at, round_up
from fulcrum.engine.stacked.step import Numbers, local_step
from fulcrum.engine.stacked.trainer import extra_width
from fulcrum.many.classes import split
from fulcrum.many.server import Server
from fulcrum.noise import Scales, scales
from fulcrum.rng import Key, Seeded, stream_seed
from fulcrum.types import Bounds

BURST = 25
"""Rounds between two looks at whether every sample fitted and every sum was finite."""

ROOM = 4.5
"""Standard deviations above the mean for which there is room. One sample of its class's largest job in 300 000 is
larger and costs a burst; eight, as elsewhere, would cost a fifth more rows in every step."""


def suits(server: Server) -> bool:
    """Whether `Locals` can play these runs: a sound server rule, and everybody in every round with as many steps."""
    rule = server.core.problem.rule
    if rule.where != "server" or rule.when != "round" or not rule.sound or server.core.rule.looped:
        return False
    for federation, who in zip(server.federations, server.participants, strict=True):
        plan, steps = federation.plan, local_steps(federation.settings.train)
        if any(plan.assignment(k, 0, 1.0).steps != steps for k in range(plan.parties)):
            return False
        if any(len(here) < plan.parties for here in who) or any(plan.units(k) < 1 for k in range(plan.parties)):
            return False
    return True


@dataclass(frozen=True)
class _Job:
    """Client k of run r. start and size: its part of the order of all runs, one after the other."""

    run: int
    client: int
    start: int
    size: int
    rate: float
    pad: int


@dataclass(frozen=True)
class _Class:
    """Jobs at these places, and their part of the uniform numbers, [jobs, width]. terms: what never changes."""

    jobs: slice
    uniforms: Tensor
    terms: Numbers


class Locals:
    """Plays rounds of R runs whose K clients make N local steps each; see `suits`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.core, self.device = server.core, server.device
        self.replayer = Replayer(self.core)
        problems = [federation.problem for federation in server.federations]
        self.steps = local_steps(server.federations[0].settings.train)
        self.seeds = [p.randomness.seed for p in problems if isinstance(p.randomness, Seeded)]
        self.on_device = sampling.draws_on_device(self.device, [p.randomness for p in problems])
        self.order = torch.cat([p.partition.order for p in problems]).to(self.device)
        self.jobs = self._find_jobs()
        self._tables()
        self._buffers()
        self._lay_out()
        self.generator = torch.Generator(self.device)
        self._round = -1
        self._kept: dict[tuple[int, Key], Tensor] = {}

    @property
    def burst(self) -> int:
        """Rounds to play before looking: one where numbers cannot be drawn again."""
        return BURST if self.on_device else 1

    # --- what stays the same -------------------------------------------------------------------

    def _find_jobs(self) -> list[_Job]:
        """All jobs, those that need few places first."""
        found, offset = [], 0
        for r, federation in enumerate(self.server.federations):
            starts = federation.problem.partition.starts.tolist()
            for k in range(federation.plan.parties):
                size, rate = starts[k + 1] - starts[k], federation.plan.assignment(k, 0, 1.0).rate
                pad = sampling.pad_for(size, rate, ROOM)
                found.append(_Job(r, k, offset + starts[k], size, rate, pad))
            offset += len(federation.problem.partition.order)
        return sorted(found, key=lambda job: (job.pad, job.run, job.client))

    def _tables(self) -> None:
        """Public terms of every job in every round, [T, J]; one row where all rounds are the same."""
        server, rule = self.server, self.core.problem.rule
        plans = [server.federations[job.run].plan for job in self.jobs]
        known: dict[tuple[float, float, float, bool, int], Scales] = {}
        rounds = 1 if all(plan.schedule == "constant" for plan in plans) else server.rounds
        sigma, noise, extra = (torch.zeros((rounds, len(plans)), dtype=torch.float64) for _ in range(3))
        for t in range(rounds):
            tasks = [plan.assignment(job.client, t, 1.0) for job, plan in zip(self.jobs, plans, strict=True)]
            for j, (job, task) in enumerate(zip(self.jobs, tasks, strict=True)):
                key = (job.rate, task.sigma, job.rate * job.size, True, task.shares)
                if key not in known:
                    known[key] = scales(rule, Bounds(torch.ones(1), 1.0), *key)
                sigma[t, j], noise[t, j], extra[t, j] = task.sigma, float(known[key].sum), known[key].extra
        self.host_sigma = sigma.tolist()
        self.sigma, self.noise_scale, self.extra_scale = (v.float().to(self.device) for v in (sigma, noise, extra))
        self.noisy = bool((sigma > 0).any())
        every = [plan.assignment(job.client, 0, 1.0).every for job, plan in zip(self.jobs, plans, strict=True)]
        self.every = torch.tensor(every, device=self.device)
        self.run = torch.tensor([job.run for job in self.jobs], device=self.device)
        self._shares()

    def _shares(self) -> None:
        """Where the clients of each run are among the jobs, and their weights in its mean: [R, K].

        A run with fewer clients has its first one again, with weight 0: a neighbour's job may not be finite.
        """
        places: list[list[int]] = [[] for _ in self.server.federations]
        for j in sorted(range(len(self.jobs)), key=lambda j: self.jobs[j].client):
            places[self.jobs[j].run].append(j)
        most = max(map(len, places))
        weights = [[*self.server.weights(r, 0), *[0.0] * (most - len(own))] for r, own in enumerate(places)]
        filled = [[*own, *own[:1] * (most - len(own))] for own in places]
        self.places = torch.tensor(filled, device=self.device)
        self.share = torch.tensor(weights, dtype=torch.float32).to(self.device)

    def _buffers(self) -> None:
        """What the programs read and write; [J, ...]."""
        server, count = self.server, len(self.jobs)
        view, _ = self.core.rule.view(server.rule_state, 0, server.rounds)
        dim = self.core.problem.layout.dim
        self.width = extra_width(self.core, server.rule_state, 0, server.rounds)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.theta = zeros(count, dim)
        self.noise = zeros(count, dim if view.transform is None else len(view.transform.groups))
        self.noise_extra = zeros(count, self.width)
        self.extra = zeros(count, self.width)  # added up over the round's steps
        self.asked = zeros(count)  # of which so many released it
        self.step = zeros(dtype=torch.int64)
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)

    def _lay_out(self) -> None:
        """Classes of jobs, and the uniform numbers: those of a class are a part of one buffer."""
        cuts = split([job.pad for job in self.jobs])
        groups = [self.jobs[a:b] for a, b in pairwise(cuts)]
        shapes = [(len(own), max(job.size for job in own)) for own in groups]
        self.pads = [max(8, own[-1].pad) for own in groups]
        self.most = torch.zeros(len(groups), dtype=torch.int64, device=self.device)
        self.uniforms = torch.zeros(sum(m * n for m, n in shapes), dtype=torch.float64, device=self.device)
        parts = self.uniforms.split([m * n for m, n in shapes])
        self.classes = [
            _Class(slice(cuts[c], cuts[c + 1]), parts[c].view(shapes[c]), self._fixed(own))
            for c, own in enumerate(groups)
        ]

    def _fixed(self, jobs: Sequence[_Job]) -> Numbers:
        decay = [self.server.federations[job.run].settings.train.weight_decay for job in jobs]
        columns = {
            "start": torch.tensor([job.start for job in jobs]),
            "size": torch.tensor([job.size for job in jobs]),
            "rate": torch.tensor([job.rate for job in jobs], dtype=torch.float64),
            "batch": torch.tensor([job.rate * job.size for job in jobs], dtype=torch.float32),
            "weight_decay": torch.tensor(decay, dtype=torch.float32),
        }
        return {name: value.to(self.device) for name, value in columns.items()}

    # --- a round -------------------------------------------------------------------------------

    def play(self, t: int) -> None:
        """Queues round t; nothing is read back."""
        if t != self._round:
            self._round = t
            self._kept.clear()
        torch.index_select(self.server.theta, 0, self.run, out=self.theta)
        for value in (self.extra, self.asked, self.step):
            value.zero_()
        for step in range(self.steps):
            if self.on_device:
                self._draw_here(t, step)
            else:
                self._draw_on_host(t, step)
            mine = [self.theta, self.extra, self.asked, self.step, self.most, self.finite]
            self._queue(("step", *self.pads), self._step, mine)
        self._queue(("end",), self._end, self.server.held())

    def _queue(self, key: tuple[str | int, ...], program: Callable[[], None], changes: list[Tensor]) -> None:
        """Runs a program; what it changes is put back after a trial run."""
        held = [] if self.replayer.knows(key) else changes
        before = [value.clone() for value in held]

        def undo() -> None:
            for value, old in zip(held, before, strict=True):
                value.copy_(old)

        self.replayer.run(key, program, {}, undo)

    def _draw_here(self, t: int, step: int) -> None:
        self.generator.manual_seed(stream_seed(self.seeds[0], ("many", *self.seeds, t, step)))
        self.uniforms.uniform_(generator=self.generator)
        if self.noisy:
            self.noise.normal_(generator=self.generator)
            self.noise_extra.normal_(generator=self.generator)

    def _draw_on_host(self, t: int, step: int) -> None:
        """The clients' own streams. Here it is known at once how many places a sample needs."""
        sigma = self.host_sigma[0 if len(self.host_sigma) == 1 else t]
        noise, extra = torch.zeros(self.noise.shape), torch.zeros(self.noise_extra.shape)
        for c, own in enumerate(self.classes):
            uniforms = torch.ones(own.uniforms.shape, dtype=torch.float64)
            for row, j in enumerate(range(own.jobs.start, own.jobs.stop)):
                job = self.jobs[j]
                key: Key = (t, job.client, step)
                drawn = self._draw(j, ("sample", *key), job.size)
                uniforms[row, : job.size] = drawn
                self.pads[c] = max(self.pads[c], round_up(int((drawn < job.rate).sum())))
                if sigma[j] > 0:
                    noise[j] = self._draw(j, ("noise", *key), noise.shape[1])
                    if self.width:
                        extra[j] = self._draw(j, ("noise-extra", *key), self.width)
            own.uniforms.copy_(uniforms)
        self.noise.copy_(noise)
        self.noise_extra.copy_(extra)

    def _draw(self, j: int, key: Key, count: int) -> Tensor:
        """A stream of job j. A round that is repeated gets the same numbers, also where they cannot be replayed."""
        randomness = self.server.federations[self.jobs[j].run].problem.randomness
        draw = randomness.uniform if key[0] == "sample" else randomness.normal
        if isinstance(randomness, Seeded):
            return draw(key, count)
        if (j, key) not in self._kept:
            self._kept[j, key] = draw(key, count)
        return self._kept[j, key]

    def _step(self) -> None:
        """The tensor program of a local step of all jobs, in place."""
        server = self.server
        row = torch.zeros_like(server.t) if len(self.sigma) == 1 else server.t
        now = server.t * self.steps + self.step
        asked = (torch.remainder(now, self.every) == 0).float()
        lr = at(server.lr, server.t).index_select(0, self.run)
        moving = {"sigma": at(self.sigma, row), "noise": at(self.noise_scale, row)}
        moving |= {"noise_extra": at(self.extra_scale, row), "lr": lr, "asked": asked}
        counts, finite = [], []
        for own, pad in zip(self.classes, self.pads, strict=True):
            here = own.jobs
            run = self.run[here]
            state: Stacked = {name: value.index_select(0, run) for name, value in server.rule_state.items()}
            done = local_step(
                self.core,
                pad,
                server.rounds,
                self.order,
                theta=self.theta[here],
                state=state,
                terms=own.terms | {name: value[here] for name, value in moving.items()},
                uniforms=own.uniforms,
                noise=self.noise[here],
                noise_extra=self.noise_extra[here],
                t=server.t,
            )
            self.theta[here].copy_(done.theta)
            self.extra[here].add_(done.extra)
            counts.append(done.counts.max())
            finite.append(done.finite)
        self.asked.add_(asked)
        self.most.copy_(torch.maximum(self.most, torch.stack(counts)))
        self.finite.logical_and_(torch.stack(finite).all())
        self.step.add_(1)

    def _end(self) -> None:
        """The tensor program that ends a round: the runs' means, their rules and server optimisers, in place."""
        server = self.server
        deltas = self._mean(self.theta, server.theta)
        extra = self._mean(self.extra / self.asked.clamp_min(1)[:, None])
        asked = self._mean(self.asked[:, None]).squeeze(1)
        steps = self.share.sum(dim=1) * self.steps
        C = server.rule_state["C"].clone()
        lr, noise = at(server.lr, server.t), at(server.noise, server.t)
        update, after = self.core.rule.adapt(
            server.rule_state, deltas, extra, lr, steps, server.t, server.rounds, noise, asked
        )
        server.move(update, after, C)

    def _mean(self, values: Tensor, base: Tensor | None = None) -> Tensor:
        """The clients' weighted mean in each run, less the base [R, x]: [J, x] -> [R, x].

        Not a product of matrices, which tf32 would round.
        """
        by_run = values.index_select(0, self.places.flatten()).view(*self.places.shape, values.shape[1])
        if base is not None:
            by_run = by_run - base[:, None]
        return (by_run * self.share[:, :, None]).sum(dim=1)

    def settled(self) -> bool:
        """Whether all rounds since the last look were right; if not, what is needed to repeat them is noted."""
        *most, fine = torch.cat([self.most, self.finite.to(self.most)[None]]).tolist()
        self.most.zero_()
        self.finite.fill_(True)
        good = True
        for c, largest in enumerate(most):
            if largest > self.pads[c]:
                self.pads[c], good = round_up(largest), False
        if not fine and not self.core.how.careful:
            self.core.careful()
            good = False
        return good
