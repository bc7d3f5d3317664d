"""The server's side of several runs at once: models, server optimisers, averages, clipping states, all stacked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fulcrum.data.records import ModelInputs, map_inputs
from fulcrum.data.tasks import merge_metric_sums
from fulcrum.engines.batched.stacking import get_server_numbers, get_shared_train_fields
from fulcrum.engines.stacked.core import StackedCore
from fulcrum.engines.stacked.rules import StackedRule, StackedState, stack_states
from fulcrum.engines.stacked.sampling import select_row_on_device
from fulcrum.engines.stacked.table import get_resident_examples
from fulcrum.gradients.stacked.passes import forward_stacked, functional_outputs, unflatten_stacked
from fulcrum.privacy.plan import Plan
from fulcrum.settings.derived import compute_learning_rate
from fulcrum.settings.schema import Train
from fulcrum.training.federation import Federation, make_model_facts
from fulcrum.training.loop import select_participants
from fulcrum.training.round import compute_aggregate_noise, find_planned_sigma
from fulcrum.training.server import SERVERS, compute_client_weights
from fulcrum.types import Released


def list_round_participants(federation: Federation, rounds: int) -> list[tuple[int, ...]]:
    """Who takes part in each round: those the public coin invites, up to their cap. No ledger is asked."""
    plan, count = federation.plan, [0] * federation.plan.parties
    if plan.central:  # the same in every round: everybody may be drawn, and pays
        return [tuple(select_participants(federation, 0, count))] * rounds
    found = []
    for t in range(rounds):
        here = tuple(select_participants(federation, t, count))
        for k in here:
            count[k] += 1
        found.append(here)
    return found


def find_server_sigma(plan: Plan, t: int) -> float:
    """The planned multiplier of the trusted server's noise in round t (unit client)."""
    return find_planned_sigma(group.compute_round_events(t) for group in plan.groups)


class BatchedServer:
    """R runs on one core. Everything is a tensor that starts with [R]; `t` counts rounds on the device.

    Tables over the rounds (learning rates, averaging) lie on the device, so that a round needs nothing from the
    host but random numbers.
    """

    def __init__(self, federations: Sequence[Federation], core: StackedCore) -> None:
        self.federations = federations
        self.core = core
        self.device = core.problem.device
        self.rounds = federations[0].settings.train.rounds
        problems = [federation.problem for federation in federations]
        settings = [federation.settings for federation in federations]
        self.theta = torch.stack([p.layout.flatten(p.model) for p in problems]).to(self.device)
        self.averaged = self.theta.clone()
        starts = [f.problem.rule.init(f.settings.clip, make_model_facts(f)) for f in federations]
        self.rule_state = stack_states(starts, self.device)
        self.kind = SERVERS.find(settings[0].train.server)
        self.server_state = stack_states([self.kind.init(core.problem.layout.dim) for _ in federations], self.device)
        self._known: dict[tuple[int, tuple[int, ...], float], float] = {}
        self.participants = [list_round_participants(federation, self.rounds) for federation in federations]
        self.t = torch.zeros((), dtype=torch.int64, device=self.device)
        trains = [s.train for s in settings]
        self.lr = self._to_device_table(
            [[compute_learning_rate(train, t) for train in trains] for t in range(self.rounds)]
        )
        self.average = self._to_device_table(
            [[_average_decay(train, t) for train in trains] for t in range(self.rounds)]
        )
        self.weight_decay = self._to_device_table([train.weight_decay for train in trains])
        self.averages = any(train.ema > 0 for train in trains)
        numbers = [get_server_numbers(train) for train in trains]
        self.numbers = {name: self._to_device_table([own[name] for own in numbers]) for name in numbers[0]}
        self.everybody = all(len(here) > 0 for run in self.participants for here in run)
        self.active = self._to_device_table(
            [[float(len(run[t]) > 0) for run in self.participants] for t in range(self.rounds)]
        )
        self.noise = self._to_device_table([self._compute_noise(t) for t in range(self.rounds)])
        groups = self.rule_state["C"].shape[1]
        self.log_C = torch.zeros((self.rounds, len(federations), groups), device=self.device)
        data = core.problem.dataset
        self.metrics = data.task.metrics if data.test is not None else {}
        shape = (self.rounds, len(federations), len(self.metrics))
        self.log_metrics = torch.full(shape, torch.nan, device=self.device)
        if data.test is not None:
            self.test, self.test_targets = get_resident_examples(data, "x_test", core.program, self.device)

    def _to_device_table(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self.device)

    def _compute_noise(self, t: int) -> list[float]:
        """The noise in each run's aggregate, as in `Released`."""
        found = []
        for r, federation in enumerate(self.federations):
            plan, here = federation.plan, self.participants[r][t]
            if plan.central:
                found.append(find_server_sigma(plan, t) * plan.central.sensitivity)
                continue
            key = (r, here, plan.compute_step_noise(here[0], t) if here else 0.0)  # which moves under a noise schedule
            if key not in self._known and here:
                tasks = plan.assignments(here, t, 1.0)
                weights = torch.tensor(self.weights(r, t))
                self._known[key] = compute_aggregate_noise(tasks, plan.compute_round_noises(here, t), weights)
            found.append(self._known.get(key, 0.0))
        return found

    def weights(self, run: int, t: int) -> list[float]:
        """The weights of a run's participants in round t."""
        federation, here = self.federations[run], self.participants[run][t]
        units = [federation.plan.units(k) for k in here]
        return compute_client_weights(units, federation.settings.train.weights).tolist()

    def end_round(
        self,
        rule: StackedRule,
        aggregate: Tensor,
        extra: Tensor,
        lr: Tensor,
        steps: Tensor,
        t: Any,
        noise: Tensor,
        asked: Tensor | None = None,
    ) -> None:
        """Ends a round in place: rules, server optimisers and averages, from what was released.

        aggregate [R, d], extra [R, J]; lr, steps, noise and asked [R]: see `Released`. Runs in which nobody took part
        stand still.
        """
        C = self.rule_state["C"].clone()
        change, rule_state, server_state = rule.adapt(
            self.rule_state,
            aggregate,
            extra,
            lr,
            steps,
            t,
            self.rounds,
            noise,
            asked,
            self._move_one,
            (self.server_state, self.numbers),
        )
        self._store_round(change, server_state, rule_state, C)

    def _move_one(
        self, update: Tensor, server: tuple[StackedState, dict[str, Tensor]], released: Released, C: Tensor
    ) -> tuple[Tensor, StackedState]:
        """The server optimiser of one run."""
        state, numbers = server
        shared = get_shared_train_fields(self.federations[0].settings.train)
        # Not a `Train`: a field of which each run has its own value, and which is no number, is missing here.
        train = SimpleNamespace(**shared, **numbers)
        change, after = self.kind.move(update, state, train, released, C)  # type: ignore[arg-type]
        return change, dict(after)

    def move(self, update: Tensor, rule_state: StackedState, C: Tensor) -> None:
        """Ends a round in place where the parties' own rules have moved already: update [R, d], C [R, G] of the round.

        Runs in which nobody took part stand still.
        """

        def one(update: Tensor, server: tuple[StackedState, dict[str, Tensor]]) -> tuple[Tensor, StackedState]:
            released = Released(update, update[:0], 1.0, 1.0, 0, self.rounds)
            return self._move_one(update, server, released, update[:1])

        change, server_state = vmap(one)(update, (self.server_state, self.numbers))
        self._store_round(change, server_state, rule_state, C)

    def _store_round(self, change: Tensor, server_state: StackedState, rule_state: StackedState, C: Tensor) -> None:
        active = select_row_on_device(self.active, self.t) > 0
        index = self.t[None]
        self.log_C.index_copy_(0, index, C[None])
        self._set_active_runs(self.theta, self.theta + change, active)
        for held, new in ((self.server_state, server_state), (self.rule_state, rule_state)):
            for name, value in held.items():
                self._set_active_runs(value, new[name], active)
        keep = select_row_on_device(self.average, self.t)[:, None]
        self.averaged.copy_(keep * self.averaged + (1 - keep) * self.theta if self.averages else self.theta)
        self.t += 1

    def _set_active_runs(self, held: Tensor, new: Tensor, active: Tensor) -> None:
        if held is new:
            return
        held.copy_(new if self.everybody else torch.where(active.view(-1, *[1] * (held.dim() - 1)), new, held))

    def evaluate_test_metrics(self) -> None:
        """The task's metrics of the averaged models on public test data, written into the log of the last round.

        Nothing happens where there are no test records.
        """
        if not self.metrics:
            return
        task, runs, count = self.core.problem.dataset.task, len(self.theta), len(self.test_targets)
        sums: dict[str, Tensor] | None = None
        step = max(1, min(count, self.core.rows_limit // runs))
        for start in range(0, count, step):
            targets = self.test_targets[start : start + step]
            outputs = self._compute_outputs(torch.arange(start, min(count, start + step), device=self.device), runs)
            sums = merge_metric_sums(sums, task.sums(outputs, targets.expand(runs, *targets.shape)))
        assert sums is not None
        found = torch.stack([metric.result(sums[name]) for name, metric in self.metrics.items()], dim=1)
        self.log_metrics.index_copy_(0, (self.t - 1)[None], found[None].to(self.log_metrics))

    def _compute_outputs(self, rows: Tensor, runs: int) -> Tensor:
        """Outputs [R, n, ...] of the averaged models for rows [n] of the test records."""
        x: ModelInputs = map_inputs(lambda value: value.expand(runs, *value.shape), self.test.rows(rows))
        if self.core.program is None:
            return functional_outputs(self.core.problem.model, self.core.problem.layout, self.averaged, x)
        assert isinstance(x, Tensor)  # a hand-written program takes one input
        weights = unflatten_stacked(self.core.problem.layout, self.averaged)
        return forward_stacked(self.core.program, weights, x, self.core.how, keep=False)[0].float()

    def list_state_tensors(self) -> list[Tensor]:
        """All tensors that rounds change, for going back."""
        states = [*self.server_state.values(), *self.rule_state.values()]
        return [self.theta, self.averaged, self.t, *states]


def _average_decay(train: Train, t: int) -> float:
    """The part of the average that stays in round t; see `update_moving_average`."""
    return min(train.ema, t / (t + 10.0)) if train.ema else 0.0
