"""Rounds of one local step under server rules: each run's sample is one batch, and only aggregates are formed.

With one local step all clients of a run compute gradients at the same weights, and the aggregate is a weighted
sum over all their examples. The clients' own sums are never needed. In a seeded run on a GPU their noise is
drawn as one Gaussian of the aggregate's variance: the same distribution as adding the clients' draws, and less
work. That is for studies: in a real federation every client adds its own noise. With recorded, secure or CPU
randomness the clients' own streams are drawn and added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulcrum.engines.batched.chunks import look_back
from fulcrum.engines.batched.server import Server
from fulcrum.engines.stacked import sampling
from fulcrum.engines.stacked.core import Tasks, clipped_sums
from fulcrum.engines.stacked.replay import Replayer
from fulcrum.engines.stacked.sampling import at, compact, round_up
from fulcrum.engines.stacked.trainer import extra_width
from fulcrum.privacy.mechanism import Scales, scales
from fulcrum.rng import Seeded, stream_seed
from fulcrum.types import Assignment, Bounds

BURST = 25
"""Rounds between two looks at whether every sample fitted and every sum was finite."""


class Pooled:
    """Plays rounds of R runs in which every run's clients are one batch."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.core, self.device = server.core, server.device
        self.replayer = Replayer(self.core)
        problems = [federation.problem for federation in server.federations]
        self.seeds = [p.randomness.seed for p in problems if isinstance(p.randomness, Seeded)]
        self.on_device = sampling.draws_on_device(self.device, [p.randomness for p in problems])
        self.order = torch.stack([p.partition.order for p in problems]).to(self.device)  # [R, n]
        self.parties = max(p.partition.parties for p in problems)
        owner = [torch.repeat_interleave(torch.arange(p.partition.parties), p.partition.sizes) for p in problems]
        self.owner = torch.stack(owner).to(self.device)  # [R, n]: the client that holds each place of the order
        self._scales: dict[tuple[float, float, float, int], Scales] = {}
        self._tables()
        self.width = extra_width(self.core, server.rule_state, 0, server.rounds)
        runs, places = self.order.shape
        self.uniforms = torch.zeros((runs, places), dtype=torch.float64, device=self.device)
        self.noise = torch.zeros((runs, self.core.problem.layout.dim), device=self.device)
        self.noise_extra = torch.zeros((runs, self.width), device=self.device)
        self.most = torch.zeros((), dtype=torch.int64, device=self.device)
        self.finite = torch.ones((), dtype=torch.bool, device=self.device)
        self.generator = torch.Generator(self.device)
        self._drawn = -1

    @property
    def burst(self) -> int:
        """Rounds to play before looking: one where numbers cannot be drawn again."""
        return BURST if self.on_device else 1

    def _tables(self) -> None:
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
                asked[t, r] = float(tasks[0].asks(t, 0))
                for k, share in zip(here, server.weights(r, t), strict=True):
                    scale = self._scale(tasks[k], batches[k])
                    rate[t, r, k], weight[t, r, k] = tasks[k].rate, share / batches[k]
                    noise[t, r, k] = float(scale.sum) * share / batches[k]
                    extra[t, r, k] = scale.extra * share / batches[k]
                units = sum(plan.units(k) for k in here)
                mean = sum(batches[k] for k in here)
                expected = max(expected, sampling.pad_for(units, mean / units) if here else 0)
        self.pad = max(8, int(expected))
        self.host_noise, self.host_extra = noise, extra
        self.rate, self.weight = rate.to(self.device), weight.float().to(self.device)
        self.spread = noise.square().sum(dim=2).sqrt().float().to(self.device)  # [T, R]
        self.spread_extra = extra.square().sum(dim=2).sqrt().float().to(self.device)
        self.batch, self.sigma, self.asked = (value.to(self.device) for value in (batch, sigma, asked))
        self.noisy = bool((noise > 0).any())

    def _scale(self, task: Assignment, batch: float) -> Scales:
        """The noise of a client, in units of the bounds; computed once for equal terms."""
        key = (task.rate, task.sigma, batch, task.shares)
        if key not in self._scales:
            unit = Bounds(torch.ones(1), 1.0)
            self._scales[key] = scales(self.core.problem.rule, unit, task.rate, task.sigma, batch, shares=task.shares)
        return self._scales[key]

    # --- a round -------------------------------------------------------------------------------

    def play(self, t: int) -> None:
        """Queues round t; nothing is read back."""
        if self.on_device:
            self._draw_here(t)
        elif self._drawn != t:  # a round that is repeated gets the same numbers, also where they cannot be replayed
            self._draw_on_host(t)
            self._drawn = t
        self.replayer.change(("round", self.pad), self._round, [*self.server.held(), self.most, self.finite])

    def _draw_here(self, t: int) -> None:
        self.generator.manual_seed(stream_seed(self.seeds[0], ("many", *self.seeds, t)))
        self.uniforms.uniform_(generator=self.generator)
        if self.noisy:
            self.noise.normal_(generator=self.generator)
            self.noise_extra.normal_(generator=self.generator)

    def _draw_on_host(self, t: int) -> None:
        """The clients' own streams; their noise is added up with the weights it would get."""
        joined = 0
        row = 0 if len(self.host_noise) == 1 else t
        for r, federation in enumerate(self.server.federations):
            problem = federation.problem
            starts = problem.partition.starts.tolist()
            uniforms = torch.ones(self.uniforms.shape[1], dtype=torch.float64)
            noise, extra = torch.zeros(self.noise.shape[1]), torch.zeros(self.width)
            count = 0
            for k in self.server.participants[r][t]:
                own = problem.randomness.uniform(("sample", t, k, 0), starts[k + 1] - starts[k])
                uniforms[starts[k] : starts[k + 1]] = own
                count += int((own < federation.plan.assignment(k, t, 1.0).rate).sum())
                for scale, total, purpose in (
                    (self.host_noise, noise, "noise"),
                    (self.host_extra, extra, "noise-extra"),
                ):
                    factor = float(scale[row, r, k])
                    if factor > 0 and len(total):
                        total += factor * problem.randomness.normal((purpose, t, k, 0), len(total))
            joined = max(joined, count)
            self.uniforms[r].copy_(uniforms)
            self.noise[r].copy_(noise)
            self.noise_extra[r].copy_(extra)
        self.pad = max(self.pad, round_up(joined))

    def _round(self) -> None:
        """The tensor program of one round, in place."""
        server = self.server
        row = torch.zeros_like(server.t) if len(self.rate) == 1 else server.t
        rate, weight = at(self.rate, row), at(self.weight, row)  # [R, K]
        places, mask, counts = compact(self.uniforms < rate.gather(1, self.owner), self.pad)
        rows, clients = self.order.gather(1, places), self.owner.gather(1, places)  # [R, pad]

        def of_rows(value: Tensor) -> Tensor:
            return value.gather(1, clients)[:, None]

        state, lr = server.rule_state, at(server.lr, server.t)
        tasks = Tasks(
            server.theta,
            rows[:, None],
            mask[:, None],
            state,
            of_rows(at(self.sigma, row)),
            of_rows(self.batch),
            lr[:, None, None].expand(-1, 1, rows.shape[1]),
            server.t,
            server.rounds,
            scale=of_rows(weight),
        )
        sums = clipped_sums(self.core, tasks)
        reach = torch.linalg.vector_norm(sums.C, dim=1)
        spread = at(self.spread, row) if self.on_device else torch.ones_like(reach)
        spread_extra = at(self.spread_extra, row) if self.on_device else torch.ones_like(reach)
        on_sum = (reach * spread).masked_fill(at(self.spread, row) == 0, 0)  # C may be infinite where nothing is noised
        gradient = sums.sum + self.noise * on_sum[:, None]
        asked = at(self.asked, row)
        extra = (sums.extra + self.noise_extra * (sums.extra_bound * spread_extra)[:, None]) * asked[:, None]
        aggregate = -lr[:, None] * (gradient + server.weight_decay[:, None] * server.theta)
        C = state["C"].clone()
        noise = at(server.noise, server.t)
        update, after = self.core.rule.adapt(
            state, aggregate, extra, lr, torch.ones_like(lr), server.t, server.rounds, noise, asked
        )
        server.move(update, after, C)
        self.most.copy_(torch.maximum(self.most, counts.max()))
        self.finite.logical_and_(sums.finite)

    def settled(self) -> bool:
        """Whether all rounds since the last look were right; if not, what is needed to repeat them is noted."""
        most, again = look_back(self.core, self.most, self.finite)
        if most > self.pad:
            self.pad, again = round_up(most), True
        return not again
