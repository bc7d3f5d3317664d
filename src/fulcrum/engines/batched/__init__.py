"""Several runs at once: different seeds, splits, rules, learning rates, C and sigma, in one tensor program.

    for r in run_many([prepare(s) for s in settings]):
        print(r.round, r.accuracy)

For studies: nothing is charged to a ledger and no replies of single clients exist. Each run has the same
distribution of results as it would have alone; its random numbers on a GPU depend on the seeds of all runs that
it shares a stack with. With the same recorded numbers it equals the reference engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fulcrum.engines.batched import cohorts
from fulcrum.engines.batched.apart import Apart
from fulcrum.engines.batched.cohorts import Cohorts
from fulcrum.engines.batched.locals import Locals, suits
from fulcrum.engines.batched.pooled import Pooled
from fulcrum.engines.batched.server import Server, take_part
from fulcrum.engines.stacked import find_core
from fulcrum.errors import ConfigError
from fulcrum.models.whitening import digest
from fulcrum.settings.derived import local_steps
from fulcrum.training.client_level import local_problem
from fulcrum.training.evaluate import evaluate
from fulcrum.training.federation import Federation
from fulcrum.training.round import play_client_round, play_round
from fulcrum.training.snapshot import Snapshot, first_snapshot


@dataclass(frozen=True)
class ManyRound:
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


def run_many(federations: Sequence[Federation], rows_limit: int = 0) -> Iterator[ManyRound]:
    """Train all federations side by side and yield their rounds.

    They must have the same number of rounds. Those that share data, model, rule, unit, local steps and server
    optimiser are stacked; the rest go in stacks of their own. Rounds come in bursts: a burst is yielded once it is
    known that every Poisson sample fitted its place and every sum was finite (otherwise it was played again, on the
    same random numbers, with more room). rows_limit: the most examples in one piece of a step; 0 asks the device.
    """
    if not federations:
        raise ConfigError("run_many was given no federations; give at least one.")
    rounds = federations[0].settings.train.rounds
    if any(federation.settings.train.rounds != rounds for federation in federations):
        raise ConfigError("train.rounds differs between the runs; runs that are trained together need the same.")
    stacks = [_make(federations, members, rows_limit) for members in _group(federations)]
    burst = min(stack.burst for stack in stacks)
    for first in range(0, rounds, burst):
        last = min(rounds, first + burst)
        for stack in stacks:
            stack.play(first, last)
        for t in range(first, last):
            yield _collect(federations, stacks, t, rounds)


def _group(federations: Sequence[Federation]) -> list[list[int]]:
    """Which runs can be one stack."""
    found: dict[Hashable, list[int]] = {}
    for i, federation in enumerate(federations):
        found.setdefault(_signature(federation), []).append(i)
    return list(found.values())


def _signature(federation: Federation) -> Hashable:
    """What stacked runs must have in common."""
    problem, settings = federation.problem, federation.settings
    train = settings.train
    return (
        problem.dataset.fingerprint,
        id(problem.dataset) if not problem.dataset.fingerprint else 0,
        problem.dataset.task.key(),
        repr(problem.model),
        digest(problem.model),
        problem.layout,
        problem.rule,
        problem.groups,
        problem.unit,
        problem.precision,
        str(problem.device),
        train.server,
        local_steps(train),
        settings.run.evaluate_every,
        problem.randomness.mode,
        # A change of basis is made once for a whole stack, so runs that set it differently go apart.
        settings.clip if _transforms(federation) else None,
    )


def _transforms(federation: Federation) -> bool:
    """Whether the rule clips in another basis."""
    problem = federation.problem
    state = problem.rule.init(federation.settings.clip, problem.shape)
    return problem.rule.view(state, 0, federation.settings.train.rounds).transform is not None


class _Stack(Protocol):
    """Runs that are played together; members are their places in the list of federations."""

    members: list[int]
    burst: int

    def play(self, first: int, last: int) -> None: ...

    def look(self, t: int) -> tuple[Tensor, dict[str, Tensor]]: ...

    def participants(self, member: int, t: int) -> tuple[int, ...]: ...

    def averaged(self) -> Tensor: ...


def _make(federations: Sequence[Federation], members: list[int], rows_limit: int) -> _Stack:
    mine = [federations[i] for i in members]
    core, _ = find_core(local_problem(mine[0].problem), rows_limit)
    if core is None:
        return _Alone(members, mine)
    server = Server(mine, core)
    if mine[0].plan.central:
        return _Together(members, server, Cohorts(server)) if cohorts.suits(server) else _Alone(members, mine)
    rule = core.problem.rule
    pooled = rule.where == "server" and rule.sound and local_steps(mine[0].settings.train) == 1
    if pooled:
        pooled = core.rule.stacks(server.rule_state, core.problem.layout.dim, server.t, server.rounds)
    if pooled:
        return _Together(members, server, Pooled(server))
    return _Together(members, server, Locals(server) if suits(server) else Apart(server))


class _Together:
    """A stack of runs that share a tensor program."""

    def __init__(self, members: list[int], server: Server, player: Pooled | Locals | Apart | Cohorts) -> None:
        self.members, self.server, self.player = members, server, player
        self.burst = player.burst
        self._every = server.federations[0].settings.run.evaluate_every

    def play(self, first: int, last: int) -> None:
        """Rounds first .. last - 1, again if need be."""
        held = self.server.held()
        before = [value.clone() for value in held]
        with torch.no_grad():
            while True:
                for t in range(first, last):
                    self.player.play(t)
                    if (t + 1) % self._every == 0 or t + 1 == self.server.rounds:
                        self.player.replayer.run("evaluate", self.server.evaluate, {})
                if self.player.settled():
                    break
                for value, old in zip(held, before, strict=True):
                    value.copy_(old)
        self._logs = [log[first:last].cpu() for log in self._device_logs()]
        self._first = first

    def _device_logs(self) -> tuple[Tensor, Tensor]:
        return self.server.log_C, self.server.log_metrics

    def look(self, t: int) -> tuple[Tensor, dict[str, Tensor]]:
        """C [r, G] and the metrics by name, [r] each, of round t."""
        C, metrics = (log[t - self._first] for log in self._logs)
        return C, dict(zip(self.server.metrics, metrics.unbind(dim=1), strict=True))

    def participants(self, member: int, t: int) -> tuple[int, ...]:
        """Who took part."""
        return self.server.participants[member][t]

    def averaged(self) -> Tensor:
        """[r, d]"""
        return self.server.averaged.cpu()


class _Alone:
    """Runs that cannot be stacked, one after the other through their own engines."""

    burst = 1

    def __init__(self, members: list[int], federations: list[Federation]) -> None:
        self.members, self.federations = members, federations
        self.snapshots: list[Snapshot] = [first_snapshot(federation) for federation in federations]
        self.who = [take_part(f, f.settings.train.rounds) for f in federations]

    def play(self, first: int, last: int) -> None:
        """One round of each run."""
        rows = []
        for i, federation in enumerate(self.federations):
            play = play_client_round if federation.plan.central else play_round
            self.snapshots[i], _, C = play(federation, self.snapshots[i], self.who[i][first], first)
            every, rounds = federation.settings.run.evaluate_every, federation.settings.train.rounds
            found: dict[str, float] = {}
            if (first + 1) % every == 0 or first + 1 == rounds:
                found = evaluate(federation.problem, self.snapshots[i].averaged)
            rows.append((torch.tensor(C), found))
        self._rows = rows

    def look(self, t: int) -> tuple[Tensor, dict[str, Tensor]]:
        """C and the metrics of the round just played."""
        names = {name: None for _, found in self._rows for name in found}
        metrics = {n: torch.tensor([found.get(n, torch.nan) for _, found in self._rows]) for n in names}
        return torch.stack([C for C, _ in self._rows]), metrics

    def participants(self, member: int, t: int) -> tuple[int, ...]:
        """Who took part."""
        return self.who[member][t]

    def averaged(self) -> Tensor:
        """[r, d]"""
        return torch.stack([snapshot.averaged for snapshot in self.snapshots]).cpu()


def _collect(federations: Sequence[Federation], stacks: Sequence[_Stack], t: int, rounds: int) -> ManyRound:
    """One round of all stacks, in the order of the federations."""
    looks = [stack.look(t) for stack in stacks]
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
    return ManyRound(t + 1, rounds, C, metrics, tuple(who), averaged)


__all__ = ["ManyRound", "run_many"]
