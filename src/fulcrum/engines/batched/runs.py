"""Several runs at once: different seeds, splits, rules, learning rates, C and sigma, in one tensor program.

    for r in run_many([prepare(s) for s in settings]):
        print(r.round, r.accuracy)

For studies: nothing is charged to a ledger, and single parties' releases are seen by a `ReleaseWatch` only. A run gets
the same samples and noise however it is stacked, bit for bit, and they are those of the reference engine; sums may
round otherwise in another stack. Runs with secure randomness or proven arithmetic are never stacked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fulcrum.data.declared import refuse_without_ledger
from fulcrum.engines.batched.local_steps import JobRounds, can_stack_local_steps
from fulcrum.engines.batched.per_job import PerJobRounds
from fulcrum.engines.batched.server import BatchedServer
from fulcrum.engines.batched.single_step import SingleStepRounds
from fulcrum.engines.batched.stacking import can_stack_runs, make_federation_key
from fulcrum.engines.batched.watching import ReleaseWatch
from fulcrum.engines.stacked import build_stacked_core
from fulcrum.errors import ConfigError
from fulcrum.settings.derived import compute_local_steps
from fulcrum.training.client_level import make_local_problem
from fulcrum.training.federation import Federation
from fulcrum.training.loop import check_randomness, federate, is_evaluation_round


@dataclass(frozen=True)
class BatchedRoundResult:
    """One round of R runs, in the order they were given. round counts from 1.

    C [R, G] is the clipping norm in use (for client rules the mean over participants; NaN where a run has fewer
    groups). metrics: those of the runs' tasks by name, [R] each, on public test data, NaN where a run was not evaluated
    in this round or has another task. participants: those of each run (unit client: those who paid, for who took part
    is secret). averaged [R, d], the models that were evaluated, comes with the last round only, and only where all
    runs have as many parameters.
    """

    round: int
    rounds: int
    C: Tensor
    metrics: dict[str, Tensor]
    participants: tuple[tuple[int, ...], ...]
    averaged: Tensor | None = None

    @property
    def accuracy(self) -> Tensor:
        """[R], a fraction; NaN where there is none."""
        return self.metrics.get("accuracy", torch.full((len(self.C),), torch.nan))

    @property
    def loss(self) -> Tensor:
        """[R]; NaN where there is none."""
        return self.metrics.get("loss", torch.full((len(self.C),), torch.nan))


def run_many(
    federations: Sequence[Federation], rows_limit: int = 0, watch: ReleaseWatch | None = None
) -> Iterator[BatchedRoundResult]:
    """Train all federations side by side and yield their rounds.

    They must have the same number of rounds. Those with equal `make_federation_key` are stacked; the rest go in
    stacks of their own. Rounds come in bursts: a burst is yielded once every
    Poisson sample fitted its place and every sum was finite (otherwise the burst is repeated on the same random
    numbers, with more places). rows_limit: the most examples in one piece of a step; 0: chosen by device memory.
    watch: sees every party's releases; the runs must then be one stack, and each party must release for itself.
    """
    if not federations:
        raise ConfigError("run_many was given no federations; give at least one.")
    for federation in federations:
        refuse_without_ledger(federation.problem.dataset)
    rounds = federations[0].settings.train.rounds
    if any(federation.settings.train.rounds != rounds for federation in federations):
        raise ConfigError("train.rounds differs between the runs; runs that are trained together need the same.")
    for federation in federations:
        check_randomness(federation, "")
    together = group_stackable_runs(federations)
    if watch is not None and len(together) > 1:
        raise ConfigError(f"runs whose releases are watched must be one stack, and these are {len(together)}.")
    stacks = [_make_run_stack(federations, members, rows_limit, watch) for members in together]
    burst = min(stack.burst for stack in stacks)
    for first in range(0, rounds, burst):
        last = min(rounds, first + burst)
        for stack in stacks:
            stack.run_rounds(first, last)
        for t in range(first, last):
            yield _collect_round(federations, stacks, t, rounds)


def group_stackable_runs(federations: Sequence[Federation]) -> list[list[int]]:
    """Which runs can be one stack."""
    found: dict[Hashable, list[int]] = {}
    for i, federation in enumerate(federations):
        found.setdefault(make_federation_key(federation), []).append(i)
    return list(found.values())


class _RunStack(Protocol):
    """Runs that are played together; members are their places in the list of federations."""

    members: list[int]
    burst: int

    def run_rounds(self, first: int, last: int) -> None: ...

    def get_round_results(self, t: int) -> tuple[Tensor, dict[str, Tensor]]: ...

    def participants(self, member: int, t: int) -> tuple[int, ...]: ...

    def averaged(self) -> Tensor: ...


def _make_run_stack(
    federations: Sequence[Federation], members: list[int], rows_limit: int, watch: ReleaseWatch | None = None
) -> _RunStack:
    mine = [federations[i] for i in members]
    first = mine[0]
    core = None
    real = first.problem.proven or first.problem.randomness.mode == "secure"
    if not real and can_stack_runs(first.settings, first.problem.rule):
        core, _ = build_stacked_core(make_local_problem(first.problem), rows_limit)
    if core is None:
        _refuse_watch(watch, first)
        return SeparateRuns(members, mine)
    server = BatchedServer(mine, core)
    if watch is not None:
        masked_or_central = first.plan.central or first.plan.is_pairwise or first.plan.shares_noise
        if masked_or_central or not can_stack_local_steps(server):
            _refuse_watch(watch, first)
        return StackedRuns(members, server, JobRounds(server, watch))
    central, rule = bool(first.plan.central), core.problem.rule
    one_step = not central and rule.where == "server" and rule.sound and compute_local_steps(first.settings.train) == 1
    if one_step and core.rule.can_be_stacked(server.rule_state, core.problem.layout.dim, server.t, server.rounds):
        return StackedRuns(members, server, SingleStepRounds(server))
    masked = any(federation.plan.is_pairwise for federation in mine)  # whose shares of noise follow the round's set
    if can_stack_local_steps(server) and not masked:
        return StackedRuns(members, server, JobRounds(server))
    return SeparateRuns(members, mine) if central else StackedRuns(members, server, PerJobRounds(server))


def _refuse_watch(watch: ReleaseWatch | None, federation: Federation) -> None:
    if watch is not None:
        raise ConfigError(
            f"the releases of single parties cannot be watched with clip.rule = {federation.settings.clip.rule!r}, "
            f"privacy.unit = {federation.settings.privacy.unit!r} and privacy.aggregation = "
            f"{federation.settings.privacy.aggregation!r}; use a sound rule of the server such as fixed, moo or none, "
            "unit example and aggregation plain."
        )


class StackedRuns:
    """A stack of runs that share a tensor program."""

    def __init__(
        self, members: list[int], server: BatchedServer, player: SingleStepRounds | JobRounds | PerJobRounds
    ) -> None:
        self.members, self.server, self.player = members, server, player
        self.burst = player.burst

    def run_rounds(self, first: int, last: int) -> None:
        """Rounds first .. last - 1, again if need be."""
        watch = getattr(self.player, "watch", None)
        held = [*self.server.list_state_tensors(), *(watch.list_state_tensors() if watch is not None else [])]
        before = [value.clone() for value in held]
        with torch.no_grad():
            while True:
                for t in range(first, last):
                    self.player.run_rounds(t)
                    if is_evaluation_round(self.server.federations[0].settings, t):
                        self.player.replayer.run("evaluate", self.server.evaluate_test_metrics, {})
                if self.player.settled():
                    break
                for value, old in zip(held, before, strict=True):
                    value.copy_(old)
        self._logs = [log[first:last].cpu() for log in self._copy_device_logs()]
        self._first = first

    def _copy_device_logs(self) -> tuple[Tensor, Tensor]:
        return self.server.log_C, self.server.log_metrics

    def get_round_results(self, t: int) -> tuple[Tensor, dict[str, Tensor]]:
        """C [r, G] and the metrics by name, [r] each, of round t."""
        C, metrics = (log[t - self._first] for log in self._logs)
        return C, dict(zip(self.server.metrics, metrics.unbind(dim=1), strict=True))

    def participants(self, member: int, t: int) -> tuple[int, ...]:
        """Who took part."""
        return self.server.participants[member][t]

    def averaged(self) -> Tensor:
        """[r, d]"""
        return self.server.averaged.cpu()


class SeparateRuns:
    """Runs that cannot be stacked, one after the other through their own engines."""

    burst = 1

    def __init__(self, members: list[int], federations: list[Federation]) -> None:
        self.members, self.federations = members, federations
        self.runs = [federate(federation) for federation in federations]

    def run_rounds(self, first: int, last: int) -> None:
        """One round of each run."""
        self.done = [next(run) for run in self.runs]

    def get_round_results(self, t: int) -> tuple[Tensor, dict[str, Tensor]]:
        """C and the metrics of the round just played."""
        results = [result for result, _ in self.done]
        names = dict.fromkeys(name for result in results for name in result.metrics)
        metrics = {name: torch.tensor([result.metrics.get(name, torch.nan) for result in results]) for name in names}
        return torch.tensor([result.C for result in results]), metrics

    def participants(self, member: int, t: int) -> tuple[int, ...]:
        """Who took part; those who paid, where that is secret."""
        who = self.done[member][0].participants
        return tuple(range(self.federations[member].plan.parties)) if who is None else who

    def averaged(self) -> Tensor:
        """[r, d]"""
        return torch.stack([snapshot.averaged for _, snapshot in self.done]).cpu()


def _collect_round(
    federations: Sequence[Federation], stacks: Sequence[_RunStack], t: int, rounds: int
) -> BatchedRoundResult:
    """One round of all stacks, in the order of the federations."""
    looks = [stack.get_round_results(t) for stack in stacks]
    groups = max(C.shape[1] for C, _ in looks)
    C = torch.full((len(federations), groups), torch.nan)
    names = dict.fromkeys(name for _, own in looks for name in own)
    metrics = {name: torch.full((len(federations),), torch.nan) for name in names}
    who: list[tuple[int, ...]] = [()] * len(federations)
    for stack, (own_C, own_metrics) in zip(stacks, looks, strict=True):
        C[stack.members, : own_C.shape[1]] = own_C
        for name, values in own_metrics.items():
            metrics[name][stack.members] = values
        for place, member in enumerate(stack.members):
            who[member] = stack.participants(place, t)
    averaged = None
    if t + 1 == rounds:
        models = {
            member: model for stack in stacks for member, model in zip(stack.members, stack.averaged(), strict=True)
        }
        if len({len(model) for model in models.values()}) == 1:
            averaged = torch.stack([models[i] for i in range(len(federations))])
    return BatchedRoundResult(t + 1, rounds, C, metrics, tuple(who), averaged)


__all__ = ["BatchedRoundResult", "run_many"]
