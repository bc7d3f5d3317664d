"""Where the jobs of stacked runs are clipped and noised: at the parties in each local step, or once at the server.

Both classes serve `local_steps.JobRounds`. `by_job` and `totals` are the tensors that steps and `collect` change;
totals are sums over the groups of a round.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fulcrum.engines.batched.chunks import ChunkedBatch, sum_chunks_by_job
from fulcrum.engines.batched.jobs import JobTable, get_client_level_terms
from fulcrum.engines.batched.server import BatchedServer, find_server_sigma
from fulcrum.engines.stacked.core import ClippedSums
from fulcrum.engines.stacked.draws import NormalStream, RandomDraws
from fulcrum.engines.stacked.rules import StackedRule, StackedState
from fulcrum.engines.stacked.sampling import select_row_on_device
from fulcrum.engines.stacked.step import StepTerms, add_noise_and_average
from fulcrum.engines.stacked.trainer import probe_statistics_width
from fulcrum.errors import BudgetError
from fulcrum.gradients.rounding import NormTable, SquaredNorms, squared_norms, to_norm_table
from fulcrum.privacy.mechanism import ChargedNoiseScale, NoiseMultipliers, add_noise, compute_charged_scale, scale_noise
from fulcrum.training.problem import assign_coordinate_groups
from fulcrum.types import Axes, Bounds


def sum_by_run(values: Tensor, weights: Tensor | None, starts: Tensor) -> Tensor:
    """Each run's sum of its jobs' rows, each row times its weight: [J, x], [J] -> [R, x].

    starts [R + 1]: the first job of each run, then the first padding job. Rows are added one after the other, and
    only those of the run, so the bits are reproducible and an overflow in another run has no effect.
    """
    if not values.shape[1]:
        return values.new_zeros((len(starts) - 1, 0))
    every = torch.arange(len(values), device=values.device)
    bags = torch.nn.functional.embedding_bag(every, values, starts, mode="sum", per_sample_weights=weights)
    return bags[:-1]


def _find_run_starts(label: Tensor, runs: int) -> Tensor:
    """Where the jobs of each run begin, from the run of each job [J]; the last is where the empty ones do: [R + 1]."""
    return torch.searchsorted(label, torch.arange(runs + 1, device=label.device))


class NoiseAtParties:
    """Unit example: each party clips and noises every local step; the server averages what they release."""

    def __init__(self, server: BatchedServer, table: JobTable, steps: int) -> None:
        self.server, self.core, self.table, self.steps = server, server.core, table, steps
        self.sources = [federation.problem.randomness for federation in server.federations]
        self._make_term_tables()
        view, _ = self.core.rule.view(server.rule_state, 0, server.rounds)
        runs, dim = server.theta.shape
        self.width = probe_statistics_width(self.core, server.rule_state, 0, server.rounds)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=server.device)

        self.noise = zeros(table.jobs, dim if view.transform is None else len(view.transform.groups))
        self.noise_extra = zeros(table.jobs, self.width)
        self.extra, self.asked = zeros(table.jobs, self.width), zeros(table.jobs)  # over the round's steps
        self.step_number = torch.zeros((), dtype=torch.int64, device=server.device)
        self.by_job = [self.extra, self.asked, self.step_number]
        self.sum, self.statistics = zeros(runs, dim), zeros(runs, self.width + 2)
        self.totals = [self.sum, self.statistics]

    def _make_term_tables(self) -> None:
        """Public terms of every party in every round, [T, P + 1]; one row where all rounds are the same."""
        server, rule, sizes = self.server, self.core.problem.rule, self.table.parties.size.tolist()
        plans = [federation.plan for federation in server.federations]
        clients = [(plan, k) for plan in plans for k in range(plan.parties)]
        known: dict[tuple[float, float, float, bool, float], ChargedNoiseScale] = {}
        rounds = 1 if all(plan.schedule == "constant" for plan in plans) else server.rounds
        sigma, noise, extra = (torch.zeros((rounds, len(clients) + 1), dtype=torch.float64) for _ in range(3))
        for t in range(rounds):
            for p, (plan, k) in enumerate(clients):
                task = plan.assignment(k, t, 1.0)
                key = (task.rate, task.sigma, task.rate * sizes[p], True, task.noise_parties)
                if key not in known:
                    known[key] = compute_charged_scale(rule, Bounds(torch.ones(1), 1.0), *key)
                sigma[t, p], noise[t, p], extra[t, p] = task.sigma, float(known[key].sum), float(known[key].extra)
        self.host_sigma = sigma
        self.sigma, self.noise_scale, self.extra_scale = (v.float().to(server.device) for v in (sigma, noise, extra))
        self.noisy = bool((sigma > 0).any())
        every = [plan.assignment(k, 0, 1.0).statistics_interval for plan, k in clients]
        self.intervals = set(every)
        self.statistics_interval = torch.tensor([*every, 1], device=server.device)

    def asks_statistics(self, t: int, step: int) -> bool:
        """Whether any party releases statistics in this local step of round t."""
        return any((t * self.steps + step) % interval == 0 for interval in self.intervals)

    # --- random numbers ------------------------------------------------------------------------

    def draw_step_noise(self, draws: RandomDraws, t: int, group: int, step: int) -> None:
        """The noise of a local step, from each party's own streams, standard normal."""
        if not self.noisy:
            return
        sigma = self.host_sigma[0 if len(self.host_sigma) == 1 else t].tolist()
        noised = [(j, r, k) for j, r, k in self.table.members(t, group) if sigma[self.table.firsts[r] + k] > 0]
        for purpose, rows in (("noise", self.noise), ("noise-extra", self.noise_extra)):
            draws.fill_normals(rows, [NormalStream(self.sources[r], (purpose, t, k, step), j) for j, r, k in noised])

    def draw_round_noise(self, draws: RandomDraws, t: int) -> None:
        """The server adds no noise."""

    # --- parts of the programs -----------------------------------------------------------------

    def _get_round_row(self, table: Tensor) -> Tensor:
        """This round's row of a table."""
        return select_row_on_device(table, torch.zeros_like(self.server.t) if len(table) == 1 else self.server.t)

    def get_chunk_states(self, run: Tensor) -> StackedState:
        """The rule's state of each chunk, from the chunk's run."""
        return {name: value.index_select(0, run) for name, value in self.server.rule_state.items()}

    def get_step_sigma(self, client: Tensor) -> Tensor:
        """The noise multiplier of each job [J]."""
        return self._get_round_row(self.sigma).index_select(0, client)

    def step(self, found: ClippedSums, chunks: ChunkedBatch, client: Tensor, batch: Tensor, run: Tensor) -> Tensor:
        """What the parties release of a step: the noised mean gradients [J, d]; statistics are added up.

        run [J]: the run of each job.
        """
        server = self.server
        number = server.t * self.steps + self.step_number
        terms: StepTerms = {
            "batch": batch,
            "noise": self._get_round_row(self.noise_scale).index_select(0, client),
            "noise_extra": self._get_round_row(self.extra_scale).index_select(0, client),
            "asked": (torch.remainder(number, self.statistics_interval.index_select(0, client)) == 0).float(),
        }
        first = chunks.starts[:-1].clamp_max(len(chunks.owner) - 1)
        sums = replace(
            found,
            sum=sum_chunks_by_job(chunks, found.sum),
            extra=sum_chunks_by_job(chunks, found.extra),
            C=found.C.index_select(0, first),
            extra_bound=found.extra_bound.index_select(0, first),
        )
        rule, state = self.core.rule, server.rule_state
        view, axes = (
            rule.get_first_view(state, server.t, server.rounds),
            rule.stack_axes(state, server.t, server.rounds),
        )
        if axes is not None:  # of each run -> of each job
            axes = Axes(axes.centre.index_select(0, run), axes.scale.index_select(0, run))
        gradient, extra = add_noise_and_average(sums, terms, self.noise, self.noise_extra, view, axes=axes)
        self.extra.add_(extra)
        self.asked.add_(terms["asked"])
        self.step_number.add_(1)
        return gradient

    def collect(self, updates: Tensor, label: Tensor, weight: Tensor) -> None:
        """Updates [J, d] of jobs of the runs `label` [J], weighted, into their runs' sums; their statistics too."""
        starts = _find_run_starts(label, len(self.sum))
        self.sum.add_(sum_by_run(updates, weight, starts))
        extra = self.extra / self.asked.clamp_min(1)[:, None]
        steps = torch.full_like(self.asked, float(self.steps))
        own = torch.cat([extra, self.asked[:, None], steps[:, None]], dim=1)
        self.statistics.add_(sum_by_run(own, weight, starts))

    def end(self) -> None:
        """The rules and the server optimisers, in place."""
        server = self.server
        extra, asked, steps = self.statistics[:, :-2], self.statistics[:, -2], self.statistics[:, -1]
        lr, noise = select_row_on_device(server.lr, server.t), select_row_on_device(server.noise, server.t)
        server.end_round(self.core.rule, self.sum, extra, lr, steps, server.t, noise, asked)


class NoiseAtServer:
    """Unit client (DP-FedAvg): parties train plainly; the trusted server clips their updates and noises the mean."""

    def __init__(self, server: BatchedServer, table: JobTable, divisor: Tensor) -> None:
        self.server, self.core, self.slots = server, server.core, table.slots
        first = server.federations[0].problem
        self.rule = StackedRule(first.rule)
        self.coordinates = assign_coordinate_groups(first.layout, first.groups).to(server.device)
        self.divisor = divisor.to(server.device)
        self._make_term_tables()
        runs, dim = server.theta.shape
        self.width = probe_statistics_width(replace(self.core, rule=self.rule), server.rule_state, 0, server.rounds)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=server.device)

        self.noise, self.noise_extra = zeros(runs, dim), zeros(runs, self.width)
        self.by_job: list[Tensor] = []
        self.sum, self.extra = zeros(runs, dim), zeros(runs, self.width)
        self.C, self.bound = torch.zeros_like(server.rule_state["C"]), zeros(runs)
        self.totals = [self.sum, self.extra]

    def _make_term_tables(self) -> None:
        """The servers' public terms: [T, R], and [R] where they do not move."""
        server = self.server
        terms = [get_client_level_terms(federation) for federation in server.federations]
        sigma, noise, extra = (torch.zeros(self.divisor.shape, dtype=torch.float64) for _ in range(3))
        for r, (federation, own) in enumerate(zip(server.federations, terms, strict=True)):
            for t in range(server.rounds):
                z = find_server_sigma(federation.plan, t)
                scale = compute_charged_scale(self.rule.rule, Bounds(torch.ones(1), 1.0), own.rate, z, own.cohort)
                if any(group.compute_round_events(t) != (scale.event,) for group in federation.plan.groups):
                    raise BudgetError(f"round {t + 1} would release {scale.event}, which is not what was planned.")
                sigma[t, r], noise[t, r] = z, float(scale.sum) * own.sensitivity
                extra[t, r] = float(scale.extra) / own.cohort
        self.host_sigma = sigma
        self.sigma, self.noise_scale, self.extra_scale = (v.float().to(server.device) for v in (sigma, noise, extra))
        self.cohort = torch.tensor([own.cohort for own in terms], dtype=torch.float32).to(server.device)

    def asks_statistics(self, t: int, step: int) -> bool:
        """The parties release nothing in their local steps."""
        return False

    # --- random numbers ------------------------------------------------------------------------

    def draw_step_noise(self, draws: RandomDraws, t: int, group: int, step: int) -> None:
        """Local steps are not noised."""

    def draw_round_noise(self, draws: RandomDraws, t: int) -> None:
        """The servers' noise, standard normal."""
        sigma = self.host_sigma[t].tolist()
        noised = [(r, f.problem.randomness) for r, f in enumerate(self.server.federations) if sigma[r] > 0]
        for purpose, rows in (("noise", self.noise), ("noise-extra", self.noise_extra)):
            draws.fill_normals(rows, [NormalStream(source, (purpose, "central", t), r) for r, source in noised])

    # --- parts of the programs -----------------------------------------------------------------

    def get_chunk_states(self, run: Tensor) -> StackedState:
        """The parties clip nothing: each chunk has a C that is never reached."""
        return {"C": torch.full((len(run), 1), torch.inf, device=run.device)}

    def get_step_sigma(self, client: Tensor) -> Tensor:
        """No noise in the steps of any job [J]."""
        return torch.zeros(len(client), device=client.device)

    def step(self, found: ClippedSums, chunks: ChunkedBatch, client: Tensor, batch: Tensor, run: Tensor) -> Tensor:
        """The plain mean gradients [J, d]."""
        return sum_chunks_by_job(chunks, found.sum).div_(batch[:, None])

    def collect(self, updates: Tensor, label: Tensor, weight: Tensor) -> None:
        """Updates [J, d], clipped and weighted, into their runs' sums; see `average_client_updates`."""
        server, state, runs, jobs = self.server, self.server.rule_state, len(self.sum), len(updates)
        run, starts = label.clamp_max(runs - 1), _find_run_starts(label, runs)
        gradients = updates.neg_()  # as rules read them
        good = torch.isfinite(squared_norms(gradients).bounds.sqrt().float())[:, None]
        gradients.masked_fill_(~good, 0)
        groups = state["C"].shape[1]
        norms, norm_bounds, _ = self._measure_group_norms(gradients, groups)

        # The rule sees each run's jobs as a batch: [R, slots].
        place = starts[:-1, None] + torch.arange(self.slots, device=label.device)
        mask = place < starts[1:, None]
        place = place.clamp_max(jobs - 1).flatten()

        def by_run(values: Tensor) -> Tensor:
            rows = values.index_select(0, place).view(*mask.shape, *values.shape[1:])
            return rows.masked_fill(~mask.view(*mask.shape, *[1] * (values.dim() - 1)), 0)

        _, direction = self.rule.view(state, server.t, server.rounds)
        dots = None
        if direction is not None:
            dots = by_run((gradients * direction.index_select(0, run)).sum(dim=1))
        sigma, ones = select_row_on_device(self.sigma, server.t), torch.ones_like(self.cohort)
        decided = self.rule.clip(
            state, by_run(norms), mask, dots, None, sigma, self.cohort, ones, norm_bounds=by_run(norm_bounds)
        )
        factors, again, extra, _, C, bound = decided

        back = run * self.slots + torch.arange(jobs, device=label.device) - starts.index_select(0, run)
        back = back.clamp_max(runs * self.slots - 1)

        def sums(factors: Tensor, weights: Tensor | None = None) -> Tensor:
            own = factors.flatten(0, 1).index_select(0, back)  # [J, G]
            own = own if weights is None else own * weights[:, None]
            if groups == 1:
                return sum_by_run(gradients, own[:, 0].contiguous(), starts)
            return sum_by_run(gradients * own.index_select(1, self.coordinates), None, starts)

        self.sum.add_(sums(factors, weight))
        statistics = [extra.sum(dim=1), *([sums(again)] if again.shape[2] else [])]  # never weighted
        self.extra.add_(torch.cat(statistics, dim=1))
        self.C.copy_(C)
        self.bound.copy_(bound)

    def _measure_group_norms(self, gradients: Tensor, groups: int) -> NormTable:
        """[J, G] each; tensor by tensor, so that a GPU adds up in the same order each time."""
        problem = self.server.federations[0].problem
        parts = gradients.split(problem.layout.sizes, dim=1) if groups > 1 else (gradients,)
        tables = [gradients.new_zeros((3, len(gradients)), dtype=torch.float64) for _ in range(groups)]
        for group, part in zip(problem.groups if groups > 1 else (0,), parts, strict=True):
            tables[group] = tables[group] + torch.stack(squared_norms(part))
        return to_norm_table(SquaredNorms(*torch.stack(tables, dim=2)), gradients.dtype)

    def end(self) -> None:
        """The means, their noise, the rules and the server optimisers, in place: one step at learning rate 1."""
        server, t = self.server, self.server.t
        multipliers = NoiseMultipliers(
            select_row_on_device(self.noise_scale, t), select_row_on_device(self.extra_scale, t)
        )
        scale = scale_noise(Bounds(self.C, self.bound), multipliers)
        mean, extra, _ = add_noise(
            self.sum / select_row_on_device(self.divisor, t)[:, None],
            self.extra / self.cohort[:, None],
            scale,
            (self.noise, self.noise_extra),
            {},
        )
        ones = torch.ones_like(self.cohort)
        server.end_round(self.rule, -mean, extra, ones, ones, t, select_row_on_device(server.noise, t))
