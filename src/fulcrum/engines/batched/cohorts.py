"""Rounds at client level (DP-FedAvg): secret cohorts train plainly, and the trusted server clips their updates.

Who is drawn is known for all rounds beforehand (`roster`), so every shape is. The jobs of a round, one for each
party that was drawn in each run, lie one after the other in buffers as long as the largest round needs, whichever runs
they belong to. Which party a job is comes from a table on the device: a round needs nothing from the host but random
numbers. It is made of four programs. `begin` lays out the jobs' weights and examples, `step` is a local step of all of
them, `collect` clips their updates and adds them up, and `end` adds the noise and moves the servers. Where the jobs'
weights would take too much memory, a round's jobs go in groups, one after the other: a sound rule clips each update by
itself.

Chunks, repeated bursts and where random numbers come from are as in `locals`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fulcrum.engines.batched.chunks import Units, add_up, choose, chunked, fill, look_back, weights_cost
from fulcrum.engines.batched.locals import BURST
from fulcrum.engines.batched.roster import draw_roster, terms_of
from fulcrum.engines.batched.server import Server, server_sigma
from fulcrum.engines.batched.streams import Streams
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.core import Tasks, clipped_sums
from fulcrum.engines.stacked.replay import Replayer
from fulcrum.engines.stacked.rules import StackedRule
from fulcrum.engines.stacked.sampling import at
from fulcrum.engines.stacked.trainer import extra_width
from fulcrum.errors import BudgetError
from fulcrum.privacy.mechanism import scales
from fulcrum.rng import Key, Seeded, stream_seed
from fulcrum.settings.derived import local_steps
from fulcrum.training.problem import coordinate_groups
from fulcrum.types import Bounds

BUDGET = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Bytes that the weights of jobs that train side by side may take; a step needs about ten times that for a while."""


def suits(server: Server) -> bool:
    """Whether `Cohorts` can play these runs: a sound rule of the server, in the gradients' own basis, that stacks."""
    rule = server.federations[0].problem.rule
    if rule.where != "server" or rule.when != "round" or not rule.sound:
        return False
    return StackedRule(rule).stacks(server.rule_state, server.core.problem.layout.dim, server.t, server.rounds)


class Cohorts:
    """Plays rounds of R runs whose unit is the client; see `suits`. J jobs train side by side."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.core, self.device = server.core, server.device
        self.replayer = Replayer(self.core)
        first = server.federations[0]
        self.rule = StackedRule(first.problem.rule)
        self.coordinates = coordinate_groups(first.problem.layout, first.problem.groups).to(self.device)
        self.steps = local_steps(first.settings.train)
        self.sources = [federation.problem.randomness for federation in server.federations]
        self.seeds = [source.seed for source in self.sources if isinstance(source, Seeded)]
        self.on_device = sampling.draws_on_device(self.device, self.sources)
        allowed = BUDGET.get(self.device.type, BUDGET["cuda"]) // (4 * self.core.problem.layout.dim)
        self.roster = draw_roster(server.federations, server.rounds, max(1, allowed))
        self.parties, self.table = self.roster.parties.to(self.device), self.roster.table.to(self.device)
        self.jobs, self.groups, self.slots = self.roster.jobs, self.roster.groups, self.roster.slots
        sizes, rates = self.roster.parties.size.tolist(), self.roster.parties.rate.tolist()
        cost = weights_cost(self.core)
        self.count, self.length = choose(sizes, rates, self.core.rows_limit, cost, self.roster.table)
        orders = [federation.problem.partition.order for federation in server.federations]
        self.order = torch.cat(orders).to(self.device)
        self._tables()
        self._buffers()
        self.generator = torch.Generator(self.device)
        self.streams = Streams()

    @property
    def burst(self) -> int:
        """Rounds to play before looking: one where numbers cannot be drawn again."""
        return BURST if self.on_device else 1

    # --- what is known beforehand --------------------------------------------------------------

    def _tables(self) -> None:
        """The servers' public terms: [T, R], and [R] where they do not move."""
        server, rule = self.server, self.rule.rule
        terms = [terms_of(federation) for federation in server.federations]
        sigma, noise, extra = (torch.zeros(self.roster.divisor.shape, dtype=torch.float64) for _ in range(3))
        for r, (federation, own) in enumerate(zip(server.federations, terms, strict=True)):
            for t in range(server.rounds):
                z = server_sigma(federation.plan, t)
                scale = scales(rule, Bounds(torch.ones(1), 1.0), own.rate, z, own.cohort)
                if any(group.round_events(t) != (scale.event,) for group in federation.plan.groups):
                    raise BudgetError(f"round {t + 1} would release {scale.event}, which is not what was planned.")
                sigma[t, r], noise[t, r] = z, float(scale.sum) * own.sensitivity
                extra[t, r] = scale.extra / own.cohort
        self.host_sigma = sigma
        self.sigma, self.noise_scale, self.extra_scale = (v.float().to(self.device) for v in (sigma, noise, extra))
        self.divisor = self.roster.divisor.to(self.device)
        self.cohort = torch.tensor([own.cohort for own in terms], dtype=torch.float32).to(self.device)
        self.noisy = bool((sigma > 0).any())
        self.decays = any(federation.settings.train.weight_decay > 0 for federation in server.federations)

    def _buffers(self) -> None:
        """What the programs read and write."""
        runs, dim = self.server.theta.shape
        own = replace(self.core, rule=self.rule)
        self.width = extra_width(own, self.server.rule_state, 0, self.server.rounds)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        places = self.roster.places
        self.client = zeros(self.jobs, dtype=torch.int64)
        self.theta = zeros(self.jobs, dim)
        rows, owner = zeros(2, places, dtype=torch.int64).unbind()
        rate, last = zeros(places, dtype=torch.float64), zeros(self.jobs, dtype=torch.int64)
        self.units = Units(rows, owner, rate, last)
        self.uniforms = zeros(places, dtype=torch.float64)
        self.noise, self.noise_extra = zeros(runs, dim), zeros(runs, self.width)
        self.sum, self.extra = zeros(runs, dim), zeros(runs, self.width)  # over the round's groups
        self.reach, self.bound = zeros(runs), zeros(runs)
        self.group, self.most = zeros(dtype=torch.int64), zeros(dtype=torch.int64)
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)

    # --- a round -------------------------------------------------------------------------------

    def play(self, t: int) -> None:
        """Queues round t; nothing is read back."""
        self.streams.begin(t)
        for value in (self.sum, self.extra, self.group):
            value.zero_()
        for group in range(self.roster.groups_of[t]):
            self.replayer.change(("begin",), self._begin, [])
            for step in range(self.steps):
                self._draw_samples(t, group, step)
                self.replayer.change(("step", self.count), self._step, [self.theta, self.most, self.finite])
            self.replayer.change(("collect",), self._collect, [self.theta, self.sum, self.extra, self.group])
        self._draw_noise(t)
        self.replayer.change(("end",), self._end, self.server.held())

    def _draw_samples(self, t: int, group: int, step: int) -> None:
        """A number for each example of the jobs. On the host it is known at once how many chunks they need."""
        if self.on_device:
            self.generator.manual_seed(stream_seed(self.seeds[0], ("cohorts", *self.seeds, t, group, step)))
            self.uniforms.uniform_(generator=self.generator)
            return
        uniforms, joined = [torch.ones(0, dtype=torch.float64)], []
        host, here = self.roster.parties, self.roster.table[t * self.groups + group]
        of_jobs = (values[here].tolist() for values in (host.run, host.size, host.rate))
        for party, r, size, rate in zip(here.tolist(), *of_jobs, strict=True):
            if size:
                own = self._draw(r, ("sample", t, party - self.roster.firsts[r], step), size)
                uniforms.append(own)
                joined.append(int((own < rate).sum()))
        needed = int(fill(torch.tensor(joined), self.length).sum()) + self.jobs - len(joined)
        self.count = max(self.count, needed)
        drawn = torch.cat(uniforms)
        self.uniforms[: len(drawn)].copy_(drawn)

    def _draw_noise(self, t: int) -> None:
        """The servers' noise, standard normal."""
        if not self.noisy:
            return
        if self.on_device:
            self.generator.manual_seed(stream_seed(self.seeds[0], ("cohorts", *self.seeds, t, "noise")))
            self.noise.normal_(generator=self.generator)
            self.noise_extra.normal_(generator=self.generator)
            return
        for r in range(len(self.sources)):
            for purpose, values in (("noise", self.noise), ("noise-extra", self.noise_extra)):
                if self.host_sigma[t, r] > 0 and values.shape[1]:
                    values[r].copy_(self._draw(r, (purpose, "central", t), values.shape[1]))

    def _draw(self, r: int, key: Key, count: int) -> Tensor:
        """A stream of run r."""
        return self.streams.draw(self.sources[r], r, key, count)

    # --- the programs --------------------------------------------------------------------------

    def _of_jobs(self, values: Tensor) -> Tensor:
        """Of each job, from a table of the parties: [P + 1] -> [J]."""
        return values.index_select(0, self.client)

    def _runs(self) -> Tensor:
        """The run of each job [J]; nobody belongs to the last."""
        return self._of_jobs(self.parties.run).clamp_max(len(self.sources) - 1)

    def _begin(self) -> None:
        """Which parties the jobs of this group are, their weights, and their examples."""
        server, units, parties = self.server, self.units, self.parties
        self.client.copy_(at(self.table, server.t * self.groups + self.group))
        torch.index_select(server.theta, 0, self._runs(), out=self.theta)
        sizes = self._of_jobs(parties.size)
        end = sizes.cumsum(dim=0)
        place = torch.arange(self.roster.places, device=self.device)
        owner = torch.searchsorted(end, place, right=True).clamp_max(self.jobs - 1)
        taken = place < end[-1:]
        # From a job's place in this row to its place in the order.
        shift = self._of_jobs(parties.start) - (end - sizes)
        index = (shift.index_select(0, owner) + place).masked_fill(~taken, 0)
        units.rows.copy_(self.order.index_select(0, index))
        units.owner.copy_(owner)
        units.rate.copy_(self._of_jobs(parties.rate).index_select(0, owner).masked_fill(~taken, 0))
        units.last.copy_((end - 1).clamp_min(0))

    def _step(self) -> None:
        """A local step of all jobs: nothing is clipped, nothing is noised."""
        server, parties = self.server, self.parties
        run = self._runs()
        batch = (self._of_jobs(parties.rate) * self._of_jobs(parties.size)).float()
        batch = batch.masked_fill(batch == 0, 1)
        lr = at(server.lr, server.t).index_select(0, run)
        chunks = chunked(self.units, self.uniforms, self.count, self.length)
        owner = chunks.owner
        tasks = Tasks(
            self.theta.index_select(0, owner),
            chunks.rows[:, None],
            chunks.mask[:, None],
            {"C": torch.full((self.count, 1), torch.inf, device=self.device)},
            torch.zeros(self.count, device=self.device),
            batch.index_select(0, owner),
            lr.index_select(0, owner),
            server.t,
            server.rounds,
        )
        found = clipped_sums(self.core, tasks)
        gradient = add_up(chunks, found.sum).div_(batch[:, None])
        if self.decays:
            gradient.add_(server.weight_decay.index_select(0, run)[:, None] * self.theta)
        self.theta.sub_(gradient.mul_(lr[:, None]))
        self.most.copy_(torch.maximum(self.most, chunks.needed))
        self.finite.logical_and_(found.finite)

    def _collect(self) -> None:
        """The jobs' updates, clipped and weighted, into their runs' sums; see `central.average`."""
        server, state, runs = self.server, self.server.rule_state, len(self.sources)
        run, label = self._runs(), self._of_jobs(self.parties.run)
        starts = torch.searchsorted(label, torch.arange(runs + 1, device=self.device))  # the last: of nobody
        gradients = torch.sub(server.theta.index_select(0, run), self.theta, out=self.theta)  # -D_k, as rules read it
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        good = torch.isfinite(norms)
        gradients.masked_fill_(~good, 0)
        groups = state["C"].shape[1]
        norms = norms.masked_fill(~good, 0) if groups == 1 else self._norms(gradients, groups)

        # The rule sees each run's jobs as a batch: [R, slots].
        place = starts[:-1, None] + torch.arange(self.slots, device=self.device)
        mask = place < starts[1:, None]
        place = place.clamp_max(self.jobs - 1).flatten()

        def by_run(values: Tensor) -> Tensor:
            rows = values.index_select(0, place).view(*mask.shape, *values.shape[1:])
            return rows.masked_fill(~mask.view(*mask.shape, *[1] * (values.dim() - 1)), 0)

        _, direction = self.rule.view(state, server.t, server.rounds)
        dots = None
        if direction is not None:
            dots = by_run((gradients * direction.index_select(0, run)).sum(dim=1))
        sigma, ones = at(self.sigma, server.t), torch.ones_like(self.cohort)
        decided = self.rule.clip(state, by_run(norms), mask, dots, None, sigma, self.cohort, ones)
        factors, again, extra, _, C, bound = decided

        back = run * self.slots + torch.arange(self.jobs, device=self.device) - starts.index_select(0, run)
        back = back.clamp_max(runs * self.slots - 1)

        def sums(factors: Tensor, weights: Tensor | None = None) -> Tensor:
            own = factors.flatten(0, 1).index_select(0, back)  # [J, G]
            return self._sums(gradients, own if weights is None else own * weights[:, None], starts)

        self.sum.add_(sums(factors, self._of_jobs(self.parties.weight)))
        statistics = [extra.sum(dim=1), *([sums(again)] if again.shape[2] else [])]  # never weighted
        self.extra.add_(torch.cat(statistics, dim=1))
        self.reach.copy_(torch.linalg.vector_norm(C, dim=1))
        self.bound.copy_(bound)
        self.group.add_(1)

    def _norms(self, gradients: Tensor, groups: int) -> Tensor:
        """[J, G]; tensor by tensor, so that a GPU adds up in the same order each time."""
        problem = self.server.federations[0].problem
        squares = [gradients.new_zeros(len(gradients)) for _ in range(groups)]
        for group, part in zip(problem.groups, gradients.split(problem.layout.sizes, dim=1), strict=True):
            squares[group] = squares[group] + torch.linalg.vector_norm(part, dim=1).square()
        return torch.stack(squares, dim=1).sqrt()

    def _sums(self, gradients: Tensor, factors: Tensor, starts: Tensor) -> Tensor:
        """Each run's sum [R, d] of its jobs' rows [J, d], each group of coordinates scaled by its factor [J, G]."""
        every = torch.arange(self.jobs, device=self.device)
        weights: Tensor | None = factors[:, 0].contiguous()
        if factors.shape[1] > 1:
            gradients, weights = gradients * factors.index_select(1, self.coordinates), None
        bags = torch.nn.functional.embedding_bag(every, gradients, starts, mode="sum", per_sample_weights=weights)
        return bags[:-1]

    def _end(self) -> None:
        """The means, their noise, the rules and the server optimisers, in place: one step at learning rate 1."""
        server, t = self.server, self.server.t
        scale = at(self.noise_scale, t)
        on_sum = (self.reach * scale).masked_fill(scale == 0, 0)  # C may be infinite where nothing is noised
        mean = self.sum / at(self.divisor, t)[:, None] + self.noise * on_sum[:, None]
        on_extra = self.bound * at(self.extra_scale, t)
        extra = self.extra / self.cohort[:, None] + self.noise_extra * on_extra[:, None]
        C, ones = server.rule_state["C"].clone(), torch.ones_like(scale)
        update, after = self.rule.adapt(
            server.rule_state, -mean, extra, ones, ones, t, server.rounds, at(server.noise, t)
        )
        server.move(update, after, C)

    def settled(self) -> bool:
        """Whether all rounds since the last look were right; if not, what is needed to repeat them is noted."""
        most, again = look_back(self.core, self.most, self.finite)
        if most > self.count:
            self.count, again = most + most // 64, True
        return not again
