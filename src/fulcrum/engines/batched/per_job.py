"""Rounds of any kind: every client of every run is a job with weights of its own; see `stacked.trainer`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulcrum.engines.batched.server import BatchedServer
from fulcrum.engines.stacked.rules import StackedState
from fulcrum.engines.stacked.trainer import BucketResult, ClientJob, StackedTrainer
from fulcrum.settings.derived import compute_learning_rate


class PerJobRounds:
    """Plays rounds of R runs, job by job: several local steps, rules of the clients' own, rules that are not sound."""

    burst = 1

    def __init__(self, server: BatchedServer) -> None:
        self.server, self.device = server, server.device
        problems = [federation.problem for federation in server.federations]
        self.trainer = StackedTrainer(server.core, torch.cat([p.partition.order for p in problems]))
        self.replayer = self.trainer.replayer
        self.parties = max(p.partition.parties for p in problems)
        self.own = server.core.problem.rule.where == "client"
        self.states: StackedState = {}
        if self.own:  # [R * K, ...]
            self.states = {
                name: value.repeat_interleave(self.parties, dim=0) for name, value in server.rule_state.items()
            }

    def run_rounds(self, t: int) -> None:
        """Plays round t and ends it."""
        server = self.server
        jobs, weights = self._list_jobs(t)
        C = server.rule_state["C"].clone()
        if not jobs:
            server.move(torch.zeros_like(server.theta), server.rule_state, C)
            return
        runs = torch.tensor([job.run for job in jobs], device=self.device)
        clients = torch.tensor([job.run * self.parties + job.task.client for job in jobs], device=self.device)
        shares = torch.tensor(weights, device=self.device)
        source, index = (self.states, clients) if self.own else (server.rule_state, runs)
        if self.own:
            C = _mean_by_index(runs, self.states["C"][clients], len(C))

        def states(members: list[int]) -> StackedState:
            chosen = index[torch.tensor(members, device=self.device)]
            return {name: value[chosen] for name, value in source.items()}

        parts = self.trainer.train(jobs, server.theta, states, t, server.rounds)
        places = torch.tensor([i for part in parts for i in part.members], device=self.device)
        deltas, extras = torch.cat([p.deltas for p in parts]), torch.cat([p.extras for p in parts])
        shares, runs, clients = shares[places], runs[places], clients[places]
        aggregate = _sum_by_index(runs, deltas * shares[:, None], len(C))
        extra = _sum_by_index(runs, extras * shares[:, None], len(C))
        counts = [(job.task.steps, job.task.asked(t), self._compute_noise(job, t)) for job in jobs]
        public = torch.tensor(counts, dtype=torch.float32, device=self.device)[places]  # [J, 3]
        lr, noise = server.lr[t], server.noise[t]
        if self.own:
            self._adapt_client_states(parts, clients, deltas, extras, lr[runs], public, t)
            server.move(aggregate, server.rule_state, C)
            return
        steps, asked = _sum_by_index(runs, public[:, :2] * shares[:, None], len(C)).unbind(dim=1)
        server.end_round(server.core.rule, aggregate, extra, lr, steps, t, noise, asked)

    def _list_jobs(self, t: int) -> tuple[list[ClientJob], list[float]]:
        jobs, weights, offset = [], [], 0
        for r, federation in enumerate(self.server.federations):
            problem, train = federation.problem, federation.settings.train
            lr, starts = compute_learning_rate(train, t), problem.partition.starts
            for task in federation.plan.assignments(self.server.participants[r][t], t, lr):
                start, size = offset + int(starts[task.client]), int(starts[task.client + 1] - starts[task.client])
                jobs.append(ClientJob(task, start, size, r, problem.randomness, train.weight_decay))
            weights += self.server.weights(r, t)
            offset += len(problem.partition.order)
        return jobs, weights

    def _compute_noise(self, job: ClientJob, t: int) -> float:
        """The noise in a job's own update, as `Released` has it."""
        plan = self.server.federations[job.run].plan
        return plan.compute_step_noise(job.task.client, t) / math.sqrt(job.task.steps)

    def _adapt_client_states(
        self,
        parts: list[BucketResult],
        clients: Tensor,
        deltas: Tensor,
        extras: Tensor,
        lr: Tensor,
        public: Tensor,
        t: int,
    ) -> None:
        """Each client's own state: as its steps left it, adapted to its own release if the rule adapts once per round.

        public [J, 3]: steps, asked and noise of each.
        """
        rule = self.server.core.rule
        last = [{n: v[: len(p.members)] for n, v in p.steps[-1].state.items()} for p in parts]
        state = {name: torch.cat([own[name] for own in last]) for name in last[0]}
        if rule.rule.when == "round":
            steps, asked, noise = public.unbind(dim=1)
            _, state, _ = rule.adapt(state, deltas, extras, lr, steps, t, self.server.rounds, noise, asked)
        for name, value in self.states.items():
            value[clients] = state[name]

    def settled(self) -> bool:
        """Every round is settled before it ends."""
        return True


def _sum_by_index(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Sums of rows with the same index, [J, x] -> [count, x]; a product, so that the bits are always the same."""
    chosen = (index[None, :] == torch.arange(count, device=index.device)[:, None]).to(values.dtype)
    return chosen @ values


def _mean_by_index(index: Tensor, values: Tensor, count: int) -> Tensor:
    ones = torch.ones((len(index), 1), device=index.device)
    return _sum_by_index(index, values, count) / _sum_by_index(index, ones, count).clamp_min(1)
