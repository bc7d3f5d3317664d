"""Rounds of one local step under server rules: each run's sample is one batch, and only aggregates are formed.

With one local step all clients of a run compute gradients at the same weights, and the aggregate is a weighted
sum over all their examples. The clients' own sums are never needed. The noise of the aggregate is the weighted sum of
the clients' own draws, from the streams that the reference engine reads: the same bits however runs are stacked. The
reference rounds each client's release to a grid; that rounding, at most 2^-21 of its noise's standard deviation
(`exact_noise.GRID_BITS`), is left out here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulcrum.engines.batched.chunks import ROUNDS_PER_CHECK, read_overflow_check
from fulcrum.engines.batched.server import BatchedServer
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.core import StackedTasks, compute_clipped_sums
from fulcrum.engines.stacked.draws import NormalStream, RandomDraws, UniformStream
from fulcrum.engines.stacked.replay import GraphReplayer
from fulcrum.engines.stacked.sampling import compact_rows, round_up_to_multiple, select_row_on_device
from fulcrum.engines.stacked.trainer import probe_statistics_width
from fulcrum.privacy.mechanism import ChargedNoiseScale, NoiseMultipliers, add_noise, compute_charged_scale, scale_noise
from fulcrum.types import Assignment, Bounds


class SingleStepRounds:
    """Plays rounds of R runs in which every run's clients are one batch."""

    def __init__(self, server: BatchedServer) -> None:
        self.server = server
        self.core, self.device = server.core, server.device
        self.replayer = GraphReplayer(self.core)
        problems = [federation.problem for federation in server.federations]
        self.sources = [p.randomness for p in problems]
        self.starts: list[list[int]] = [p.partition.starts.tolist() for p in problems]
        self.draws = RandomDraws(self.device, self.sources)
        self.burst = ROUNDS_PER_CHECK if self.draws.on_device else 1  # numbers of the host are kept for one round only
        self.order = torch.stack([p.partition.order for p in problems]).to(self.device)  # [R, n]
        self.parties = max(p.partition.parties for p in problems)
        owner = [torch.repeat_interleave(torch.arange(p.partition.parties), p.partition.sizes) for p in problems]
        self.host_owner = torch.stack(owner)  # [R, n]: the client that holds each place of the order
        self.owner = self.host_owner.to(self.device)
        self._scales: dict[tuple[float, float, float, float], ChargedNoiseScale] = {}
        self._make_term_tables()
        self.width = probe_statistics_width(self.core, server.rule_state, 0, server.rounds)
        runs, places = self.order.shape
        self.uniforms = torch.zeros((runs, places), dtype=torch.float64, device=self.device)
        self.noise = torch.zeros((runs, self.core.problem.layout.dim), device=self.device)
        self.noise_extra = torch.zeros((runs, self.width), device=self.device)
        self.most = torch.zeros((), dtype=torch.int64, device=self.device)
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)

    def _make_term_tables(self) -> None:
        """Public terms of every client in every round, [T, R, K]; one row where all rounds are the same."""
        server = self.server
        plans = [federation.plan for federation in server.federations]
        same = all(len(set(run)) == 1 for run in server.participants) and all(plan.steady for plan in plans)
        rounds = 1 if same else server.rounds
        shape = (rounds, len(plans), self.parties)
        rate, weight, noise, extra = (torch.zeros(shape, dtype=torch.float64) for _ in range(4))
        batch, sigma, asked = torch.ones(shape[1:]), torch.zeros(shape), torch.zeros(shape[:2])
        expected = 0.0
        for r, plan in enumerate(plans):
            tasks = [plan.assignment(k, 0, 1.0) for k in range(plan.parties)]
            batches = [task.rate * plan.units(k) for k, task in enumerate(tasks)]
            batch[r, : plan.parties] = torch.tensor(batches)
            for t in range(rounds):
                here = server.participants[r][t]
                tasks = [plan.assignment(k, t, 1.0) for k in range(plan.parties)] if not plan.steady else tasks
                sigma[t, r, : plan.parties] = torch.tensor([task.sigma for task in tasks])
                asked[t, r] = float(tasks[0].asks_statistics(t, 0))
                for task, share in zip(plan.assignments(here, t, 1.0), server.weights(r, t), strict=True):
                    k = task.client
                    scale = self._compute_noise_scale(task, batches[k])
                    rate[t, r, k], weight[t, r, k] = task.rate, share / batches[k]
                    noise[t, r, k] = float(scale.sum) * share / batches[k]
                    extra[t, r, k] = scale.extra * share / batches[k]
                units = sum(plan.units(k) for k in here)
                mean = sum(batches[k] for k in here)
                expected = max(expected, sampling.compute_pad_size(units, mean / units) if here else 0)
        self.pad = max(8, int(expected))
        self.asks = (asked > 0).any(dim=1).tolist()
        self.host_rate, self.host_noise, self.host_extra = rate, noise, extra
        self.rate, self.weight = rate.to(self.device), weight.float().to(self.device)
        # The clients' draws are scaled one by one: 1 where a run's aggregate is noised, else 0. [T, R]
        self.noised, self.noised_extra = ((value > 0).any(dim=2).float().to(self.device) for value in (noise, extra))
        self.batch, self.sigma, self.asked = (value.to(self.device) for value in (batch, sigma, asked))
        self.noisy = bool((noise > 0).any())

    def _compute_noise_scale(self, task: Assignment, batch: float) -> ChargedNoiseScale:
        """The noise of a client, in units of the bounds; computed once for equal terms."""
        key = (task.rate, task.sigma, batch, task.noise_parties)
        if key not in self._scales:
            unit = Bounds(torch.ones(1), 1.0)
            self._scales[key] = compute_charged_scale(
                self.core.problem.rule, unit, task.rate, task.sigma, batch, shares=task.noise_parties
            )
        return self._scales[key]

    # --- a round -------------------------------------------------------------------------------

    def run_rounds(self, t: int) -> None:
        """Queues round t; nothing is read back."""
        self.draws.begin_round(t)
        uniforms, noise, noise_extra = self._list_streams(t)
        drawn = self.draws.fill_uniforms(self.uniforms, uniforms)
        if self.noisy:
            self.draws.sum_normals(self.noise, noise)
            self.draws.sum_normals(self.noise_extra, noise_extra)
        if drawn is not None:  # the host knows how many joined before anything starts
            joins = drawn < self.host_rate[0 if len(self.host_rate) == 1 else t].gather(1, self.host_owner)
            self.pad = max(self.pad, round_up_to_multiple(int(joins.sum(dim=1).max())))
        self.probed = self.asks[0 if len(self.asks) == 1 else t]
        self.replayer.run_in_place(
            ("round", self.pad, self.probed), self._round, [*self.server.list_state_tensors(), self.most, self.finite]
        )

    def _list_streams(self, t: int) -> tuple[list[UniformStream], list[NormalStream], list[NormalStream]]:
        """The clients' own streams of round t: their samples, and their noise with its weight in the aggregate."""
        row, places = 0 if len(self.host_noise) == 1 else t, self.order.shape[1]
        uniforms: list[UniformStream] = []
        noise: list[NormalStream] = []
        noise_extra: list[NormalStream] = []
        for r, source in enumerate(self.sources):
            starts, factors, extras = self.starts[r], self.host_noise[row, r].tolist(), self.host_extra[row, r].tolist()
            for k in self.server.participants[r][t]:
                size = starts[k + 1] - starts[k]
                uniforms.append(UniformStream(source, ("sample", t, k, 0), r * places + starts[k], size))
                if factors[k] > 0:
                    noise.append(NormalStream(source, ("noise", t, k, 0), r, factors[k]))
                if extras[k] > 0:
                    noise_extra.append(NormalStream(source, ("noise-extra", t, k, 0), r, extras[k]))
        return uniforms, noise, noise_extra

    def _round(self) -> None:
        """The tensor program of one round, in place."""
        server = self.server
        row = torch.zeros_like(server.t) if len(self.rate) == 1 else server.t
        rate, weight = select_row_on_device(self.rate, row), select_row_on_device(self.weight, row)  # [R, K]
        places, mask, counts = compact_rows(self.uniforms < rate.gather(1, self.owner), self.pad)
        rows, clients = self.order.gather(1, places), self.owner.gather(1, places)  # [R, pad]

        def of_rows(value: Tensor) -> Tensor:
            return value.gather(1, clients)[:, None]

        state, lr = server.rule_state, select_row_on_device(server.lr, server.t)
        tasks = StackedTasks(
            server.theta,
            rows[:, None],
            mask[:, None],
            state,
            of_rows(select_row_on_device(self.sigma, row)),
            of_rows(self.batch),
            lr[:, None, None].expand(-1, 1, rows.shape[1]),
            server.t,
            server.rounds,
            scale=of_rows(weight),
            probed=self.probed,
        )
        sums = compute_clipped_sums(self.core, tasks)
        asked = select_row_on_device(self.asked, row)
        noised, noised_extra = (select_row_on_device(value, row) for value in (self.noised, self.noised_extra))
        scale = scale_noise(Bounds(sums.C, sums.extra_bound), NoiseMultipliers(noised, noised_extra), asked)
        gradient, extra, _ = add_noise(sums.sum, sums.extra, scale, (self.noise, self.noise_extra), {})
        gradient, extra = gradient.float(), extra.float()  # float64 where bounds are proven
        axes = self.core.rule.stack_axes(state, server.t, server.rounds)
        gradient = gradient if axes is None else axes.inverse(gradient)
        aggregate = -lr[:, None] * (gradient + server.weight_decay[:, None] * server.theta)
        noise = select_row_on_device(server.noise, server.t)
        server.end_round(self.core.rule, aggregate, extra, lr, torch.ones_like(lr), server.t, noise, asked)
        self.most.copy_(torch.maximum(self.most, counts.max()))
        self.finite.logical_and_(sums.finite)

    def settled(self) -> bool:
        """Whether all rounds since the last look were right; if not, what is needed to repeat them is noted."""
        most, again = read_overflow_check(self.core, self.most, self.finite)
        if most > self.pad:
            self.pad, again = round_up_to_multiple(most), True
        return not again
