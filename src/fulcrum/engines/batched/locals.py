"""Rounds of several local steps under server rules: every client of every run is a job with weights of its own.

Who takes part, how many steps they make and how large they are is the same in every round, so all jobs lie in
buffers that stay where they are: a local step of all of them is one tensor program, the end of a round another,
and nothing but random numbers is made in between. The jobs' samples lie in chunks of equal length (`chunks`);
samples that did not fit are noticed after a burst, and the burst is played again with more room.

In a seeded run on a GPU the numbers of all jobs are drawn at once, keyed by round and step. Recorded, secure and
CPU numbers are the clients' own streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fulcrum.engines.batched.chunks import Units, add_up, choose, chunked, fill, look_back, weights_cost
from fulcrum.engines.batched.server import Server
from fulcrum.engines.batched.streams import Streams
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.core import Tasks, clipped_sums
from fulcrum.engines.stacked.replay import Replayer
from fulcrum.engines.stacked.sampling import at
from fulcrum.engines.stacked.step import Numbers, noised
from fulcrum.engines.stacked.trainer import extra_width
from fulcrum.privacy.mechanism import Scales, scales
from fulcrum.rng import Key, Seeded, stream_seed
from fulcrum.settings.derived import local_steps
from fulcrum.types import Bounds

BURST = 25
"""Rounds between two looks at whether every sample fitted and every sum was finite."""


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
    """Client k of run r, its units and its rate."""

    run: int
    client: int
    size: int
    rate: float


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
        self.jobs = [
            _Job(r, k, int(size), federation.plan.assignment(k, 0, 1.0).rate)
            for r, federation in enumerate(server.federations)
            for k, size in enumerate(federation.problem.partition.sizes)
        ]
        sizes, rates = [job.size for job in self.jobs], [job.rate for job in self.jobs]
        self.count, self.length = choose(sizes, rates, self.core.rows_limit, weights_cost(self.core))
        self.units = self._units()
        self._tables()
        self._buffers()
        self.generator = torch.Generator(self.device)
        self.streams = Streams()

    @property
    def burst(self) -> int:
        """Rounds to play before looking: one where numbers cannot be drawn again."""
        return BURST if self.on_device else 1

    # --- what stays the same -------------------------------------------------------------------

    def _units(self) -> Units:
        """The units of all jobs, in the order of the partitions."""
        sizes = torch.tensor([job.size for job in self.jobs])
        rates = torch.tensor([job.rate for job in self.jobs], dtype=torch.float64)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        rows = torch.cat([federation.problem.partition.order for federation in self.server.federations])
        last = sizes.cumsum(dim=0) - 1
        return Units(*(value.to(self.device) for value in (rows, owner, rates[owner], last)))

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
        batches = [job.rate * job.size for job in self.jobs]
        self.batch = torch.tensor(batches, dtype=torch.float32).to(self.device)
        self._shares()

    def _shares(self) -> None:
        """Where the clients of each run are among the jobs, and their weights in its mean: [R, K].

        A run with fewer clients has its first one again, with weight 0: a neighbour's job may not be finite.
        """
        counts = [federation.plan.parties for federation in self.server.federations]
        most, places, weights, first = max(counts), [], [], 0
        for r, count in enumerate(counts):
            places.append([*range(first, first + count), *[first] * (most - count)])
            weights.append([*self.server.weights(r, 0), *[0.0] * (most - count)])
            first += count
        self.places = torch.tensor(places, device=self.device)
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
        self.most = zeros(dtype=torch.int64)
        self.uniforms = zeros(len(self.units.owner), dtype=torch.float64)
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)

    # --- a round -------------------------------------------------------------------------------

    def play(self, t: int) -> None:
        """Queues round t; nothing is read back."""
        self.streams.begin(t)
        torch.index_select(self.server.theta, 0, self.run, out=self.theta)
        for value in (self.extra, self.asked, self.step):
            value.zero_()
        for step in range(self.steps):
            if self.on_device:
                self._draw_here(t, step)
            else:
                self._draw_on_host(t, step)
            mine = [self.theta, self.extra, self.asked, self.step, self.most, self.finite]
            self.replayer.change(("step", self.count), self._step, mine)
        self.replayer.change(("end",), self._end, self.server.held())

    def _draw_here(self, t: int, step: int) -> None:
        self.generator.manual_seed(stream_seed(self.seeds[0], ("many", *self.seeds, t, step)))
        self.uniforms.uniform_(generator=self.generator)
        if self.noisy:
            self.noise.normal_(generator=self.generator)
            self.noise_extra.normal_(generator=self.generator)

    def _draw_on_host(self, t: int, step: int) -> None:
        """The clients' own streams. Here it is known at once how many chunks the samples need."""
        sigma = self.host_sigma[0 if len(self.host_sigma) == 1 else t]
        noise, extra = torch.zeros(self.noise.shape), torch.zeros(self.noise_extra.shape)
        uniforms = []
        for j, job in enumerate(self.jobs):
            key: Key = (t, job.client, step)
            uniforms.append(self._draw(j, ("sample", *key), job.size))
            if sigma[j] > 0:
                noise[j] = self._draw(j, ("noise", *key), noise.shape[1])
                if self.width:
                    extra[j] = self._draw(j, ("noise-extra", *key), self.width)
        joined = [int((own < job.rate).sum()) for own, job in zip(uniforms, self.jobs, strict=True)]
        self.count = max(self.count, int(fill(torch.tensor(joined), self.length).sum()))
        self.uniforms.copy_(torch.cat(uniforms))
        self.noise.copy_(noise)
        self.noise_extra.copy_(extra)

    def _draw(self, j: int, key: Key, count: int) -> Tensor:
        """A stream of job j."""
        return self.streams.draw(self.server.federations[self.jobs[j].run].problem.randomness, j, key, count)

    def _step(self) -> None:
        """The tensor program of a local step of all jobs, in place."""
        server = self.server
        row = torch.zeros_like(server.t) if len(self.sigma) == 1 else server.t
        terms: Numbers = {
            "batch": self.batch,
            "noise": at(self.noise_scale, row),
            "noise_extra": at(self.extra_scale, row),
            "asked": (torch.remainder(server.t * self.steps + self.step, self.every) == 0).float(),
        }
        lr, sigma = at(server.lr, server.t).index_select(0, self.run), at(self.sigma, row)
        chunks = chunked(self.units, self.uniforms, self.count, self.length)
        owner = chunks.owner
        run = self.run.index_select(0, owner)
        tasks = Tasks(
            self.theta.index_select(0, owner),
            chunks.rows[:, None],
            chunks.mask[:, None],
            {name: value.index_select(0, run) for name, value in server.rule_state.items()},
            sigma.index_select(0, owner),
            self.batch.index_select(0, owner),
            lr.index_select(0, owner),
            server.t,
            server.rounds,
        )
        found = clipped_sums(self.core, tasks)
        total, statistics = add_up(chunks, found.sum), add_up(chunks, found.extra)
        first = chunks.starts[:-1].clamp_max(self.count - 1)
        C, extra_bound = found.C.index_select(0, first), found.extra_bound.index_select(0, first)
        sums = replace(found, sum=total, extra=statistics, C=C, extra_bound=extra_bound)
        view, _ = self.core.rule.view(server.rule_state, server.t, server.rounds)
        gradient, extra = noised(sums, terms, self.noise, self.noise_extra, view)
        decay = server.weight_decay.index_select(0, self.run)
        self.theta.sub_(lr[:, None] * (gradient + decay[:, None] * self.theta))
        self.extra.add_(extra)
        self.asked.add_(terms["asked"])
        self.most.copy_(torch.maximum(self.most, chunks.needed))
        self.finite.logical_and_(found.finite)
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
        most, again = look_back(self.core, self.most, self.finite)
        if most > self.count:
            self.count, again = most + most // 64, True
        return not again
