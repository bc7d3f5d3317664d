"""Rounds in which every party trains from weights of its own: several local steps, or whole parties as units.

A table of jobs (`jobs`) lists who trains in which round, for all rounds in advance. The jobs of a round, of all runs,
lie one after the other in buffers of the size of the largest round. The table is on the device, so a round needs only
random numbers from the host. A round has four programs: begin lays out the jobs' weights and examples, step is one
local step of all jobs, collect adds the jobs' updates to their runs' sums, and end updates the servers. Where the
jobs' weights would take too much memory, a round's jobs train in groups, one after the other. Clipping and noise, at
the parties or at the server, are in `noise_at`.

The jobs' samples lie in chunks of equal length (`chunks`). After a burst of rounds a check finds samples that did not
fit, and the burst is repeated with more chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulcrum.engines.batched.chunks import (
    ROUNDS_PER_CHECK,
    JobUnits,
    choose_chunk_layout,
    count_chunks,
    estimate_weights_cost,
    read_overflow_check,
    sample_into_chunks,
)
from fulcrum.engines.batched.jobs import RoundCohort, draw_round_cohorts, make_job_table
from fulcrum.engines.batched.noise_at import NoiseAtParties, NoiseAtServer
from fulcrum.engines.batched.server import BatchedServer
from fulcrum.engines.batched.watching import ReleaseWatch
from fulcrum.engines.stacked.core import StackedTasks, compute_clipped_sums
from fulcrum.engines.stacked.draws import RandomDraws, UniformStream
from fulcrum.engines.stacked.replay import GraphReplayer
from fulcrum.engines.stacked.rules import StackedRule
from fulcrum.engines.stacked.sampling import select_row_on_device
from fulcrum.settings.derived import compute_local_steps

JOB_WEIGHT_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Bytes that the weights of jobs that train side by side may take; a step needs about ten times that for a while."""


def can_stack_local_steps(server: BatchedServer) -> bool:
    """Whether `JobRounds` can play these runs: a sound server rule that moves once per round and can be stacked.

    All parties must make as many local steps, and own at least one unit. At client level the server clips in the
    gradients' own basis only.
    """
    rule = server.federations[0].problem.rule
    if rule.where != "server" or rule.when != "round" or not rule.sound:
        return False
    if server.federations[0].plan.central:
        own = StackedRule(rule)
        if own.get_first_view(server.rule_state, server.t, server.rounds).needs_gradients:
            return False
        return own.can_be_stacked(server.rule_state, server.core.problem.layout.dim, server.t, server.rounds)
    if server.core.rule.looped:
        return False
    for federation in server.federations:
        plan, steps = federation.plan, compute_local_steps(federation.settings.train)
        if any(plan.assignment(k, 0, 1.0).steps != steps or plan.units(k) < 1 for k in range(plan.parties)):
            return False
    return True


class JobRounds:
    """Plays rounds of R runs; see `can_stack_local_steps`. J jobs train side by side."""

    def __init__(self, server: BatchedServer, watch: ReleaseWatch | None = None) -> None:
        self.server, self.watch = server, watch
        self.core, self.device = server.core, server.device
        self.replayer = GraphReplayer(self.core)
        self.steps = compute_local_steps(server.federations[0].settings.train)
        self.sources = [federation.problem.randomness for federation in server.federations]
        self.draws = RandomDraws(self.device, self.sources)
        self.burst = ROUNDS_PER_CHECK if self.draws.on_device else 1  # numbers of the host are kept for one round only
        allowed = max(
            1, JOB_WEIGHT_BYTES.get(self.device.type, JOB_WEIGHT_BYTES["cuda"]) // (4 * self.core.problem.layout.dim)
        )
        self.noise: NoiseAtServer | NoiseAtParties
        if server.federations[0].plan.central:
            rounds, divisor = draw_round_cohorts(server.federations, server.rounds)
            self.table = make_job_table(server.federations, rounds, allowed)
            self.noise = NoiseAtServer(server, self.table, divisor)
        else:
            self.table = make_job_table(server.federations, _list_participants(server), allowed)
            self.noise = NoiseAtParties(server, self.table, self.steps)
        self.parties = self.table.parties.to(self.device)
        self.party_of, self.weight_of = (values.to(self.device) for values in (self.table.party, self.table.weight))
        self.jobs = self.table.jobs
        self.sizes: list[int] = self.table.parties.size.tolist()
        sizes, rates = self.sizes, self.table.parties.rate.tolist()
        cost = estimate_weights_cost(self.core)
        self.count, self.length = choose_chunk_layout(sizes, rates, self.core.rows_limit, cost, self.table.party)
        orders = [federation.problem.partition.order for federation in server.federations]
        self.order = torch.cat(orders).to(self.device)
        self.probed = True
        self.decays = any(federation.settings.train.weight_decay > 0 for federation in server.federations)
        self._make_buffers()
        if watch is not None:
            watch.begin(server, self.steps)

    def _make_buffers(self) -> None:
        """What the programs read and write."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        places = self.table.places
        self.client, self.weight = zeros(self.jobs, dtype=torch.int64), zeros(self.jobs)
        self.theta = zeros(self.jobs, self.core.problem.layout.dim)
        rows, owner = zeros(2, places, dtype=torch.int64).unbind()
        rate, last = zeros(places, dtype=torch.float64), zeros(self.jobs, dtype=torch.int64)
        self.units = JobUnits(rows, owner, rate, last)
        self.uniforms = zeros(places, dtype=torch.float64)
        self.releases = zeros(len(self.sizes) if self.watch else 0, self.core.problem.layout.dim)  # last row: padding
        self.group, self.most = zeros(dtype=torch.int64), zeros(dtype=torch.int64)
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)

    # --- a round -------------------------------------------------------------------------------

    def run_rounds(self, t: int) -> None:
        """Queue round t; nothing is read back from the device."""
        noise, run = self.noise, self.replayer.run_in_place
        self.draws.begin_round(t)
        for value in (*noise.totals, self.group, self.releases):
            value.zero_()
        for group in range(self.table.groups_of[t]):
            run(("begin",), self._begin_group, [])
            for step in range(self.steps):
                self._draw_samples(t, group, step)
                noise.draw_step_noise(self.draws, t, group, step)
                self.probed = noise.asks_statistics(t, step)
                run(
                    ("step", self.count, self.probed),
                    self._run_local_step,
                    [self.theta, *noise.by_job, self.most, self.finite],
                )
            run(("collect",), self._collect_results, [self.theta, *noise.totals, self.group])
            if self.watch is not None:
                self.releases.index_copy_(0, self.client, self.theta)
        if self.watch is not None:
            run(("watch",), self._show_releases, self.watch.list_state_tensors())
        noise.draw_round_noise(self.draws, t)
        run(("end",), noise.end, self.server.list_state_tensors())

    def _draw_samples(self, t: int, group: int, step: int) -> None:
        """A number for each example of the jobs. On the host it is known at once how many chunks they need."""
        members, host = self.table.members(t, group), self.table.parties
        streams, start = [], 0
        for _, r, k in members:
            size = self.sizes[self.table.firsts[r] + k]
            streams.append(UniformStream(self.sources[r], ("sample", t, k, step), start, size))
            start += size
        drawn = self.draws.fill_uniforms(self.uniforms, streams)
        if drawn is None:
            return
        chosen = torch.tensor([self.table.firsts[r] + k for _, r, k in members], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(chosen)), host.size[chosen])
        joins = drawn[: len(owner)] < host.rate[chosen][owner]
        joined = torch.bincount(owner[joins], minlength=len(chosen))
        self.count = max(self.count, int(count_chunks(joined, self.length).sum()) + self.jobs - len(chosen))

    # --- the programs --------------------------------------------------------------------------

    def _select_by_job(self, values: Tensor) -> Tensor:
        """Of each job, from a table of the parties: [P + 1] -> [J]."""
        return values.index_select(0, self.client)

    def _get_job_runs(self) -> Tensor:
        """The run of each job [J]; a padding job has the weights of the last run."""
        return self._select_by_job(self.parties.run).clamp_max(len(self.sources) - 1)

    def _begin_group(self) -> None:
        """Which parties the jobs of this group are, their weights, and their examples."""
        server, units, parties, table = self.server, self.units, self.parties, self.table
        row = self.group if table.steady else server.t * table.groups + self.group
        self.client.copy_(select_row_on_device(self.party_of, row))
        self.weight.copy_(select_row_on_device(self.weight_of, row))
        torch.index_select(server.theta, 0, self._get_job_runs(), out=self.theta)
        for value in self.noise.by_job:
            value.zero_()
        sizes = self._select_by_job(parties.size)
        end = sizes.cumsum(dim=0)
        place = torch.arange(table.places, device=self.device)
        owner = torch.searchsorted(end, place, right=True).clamp_max(self.jobs - 1)
        taken = place < end[-1:]
        # From a job's place in this row to its place in the order.
        shift = self._select_by_job(parties.start) - (end - sizes)
        index = (shift.index_select(0, owner) + place).masked_fill(~taken, 0)
        units.rows.copy_(self.order.index_select(0, index))
        units.owner.copy_(owner)
        units.rate.copy_(self._select_by_job(parties.rate).index_select(0, owner).masked_fill(~taken, 0))
        units.last.copy_((end - 1).clamp_min(0))

    def _run_local_step(self) -> None:
        """One local step of all jobs, in place."""
        server, parties = self.server, self.parties
        run = self._get_job_runs()
        batch = (self._select_by_job(parties.rate) * self._select_by_job(parties.size)).float()
        batch = batch.masked_fill(batch == 0, 1)
        lr = select_row_on_device(server.lr, server.t).index_select(0, run)
        chunks = sample_into_chunks(self.units, self.uniforms, self.count, self.length)
        owner = chunks.owner
        tasks = StackedTasks(
            self.theta.index_select(0, owner),
            chunks.rows[:, None],
            chunks.mask[:, None],
            self.noise.get_chunk_states(run.index_select(0, owner)),
            self.noise.get_step_sigma(self.client).index_select(0, owner),
            batch.index_select(0, owner),
            lr.index_select(0, owner),
            server.t,
            server.rounds,
            units=chunks.rows.numel(),
            probed=self.probed,
        )
        found = compute_clipped_sums(self.core, tasks)
        gradient = self.noise.step(found, chunks, self.client, batch, run)
        if self.decays:
            gradient.add_(server.weight_decay.index_select(0, run)[:, None] * self.theta)
        self.theta.sub_(gradient.mul_(lr[:, None]))
        self.most.copy_(torch.maximum(self.most, chunks.needed))
        self.finite.logical_and_(found.finite)

    def _collect_results(self) -> None:
        """The jobs' updates into their runs' sums; the buffer of their weights holds the updates then."""
        run = self._get_job_runs()
        torch.sub(self.theta, self.server.theta.index_select(0, run), out=self.theta)
        self.noise.collect(self.theta, self._select_by_job(self.parties.run), self.weight)
        self.group.add_(1)

    def _show_releases(self) -> None:
        """What the parties of all runs released in this round, to whoever watches."""
        assert self.watch is not None
        self.watch.look(self.releases[:-1])

    def settled(self) -> bool:
        """Whether all rounds since the last look were right; if not, what is needed to repeat them is noted."""
        most, again = read_overflow_check(self.core, self.most, self.finite)
        if most > self.count:
            self.count, again = most + most // 64, True
        return not again


def _list_participants(server: BatchedServer) -> list[list[RoundCohort]]:
    """Who takes part in each round of each run [T][R], and the weights."""
    runs = range(len(server.federations))
    return [[RoundCohort(server.participants[r][t], server.weights(r, t)) for r in runs] for t in range(server.rounds)]
