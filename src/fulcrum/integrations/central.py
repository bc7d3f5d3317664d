"""Client-level privacy for other people's servers: whole updates are clipped, averaged and noised, whoever made them.

    rounds = PrivateRounds.open(weights, parties=100, epsilon=8.0, rounds=50, participation=0.2)
    for t in range(50):
        cohort = rounds.begin()                       # who is asked; secret
        updates = {k: ask(k, rounds.weights) for k in cohort}
        rounds.finish(updates)                        # rounds.weights are the new ones

The server is trusted: it sees every update. What it releases, the new weights, is private for whole parties. The
mechanism is that of `training/client_level.py`: the same rules, noise, ledger and hard stop. What a party does is its
own affair, so this fits any framework: `flower/strategy.py` and `integrations/flare.py` are thin.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import fulcrum
from fulcrum.clipping import find_rule
from fulcrum.data.partition import Partition
from fulcrum.errors import BudgetError, ConfigError, ModelError, RunError
from fulcrum.models.layout import ParameterLayout
from fulcrum.privacy.ledger import Ledger, RunRecord, make_seed_digest
from fulcrum.privacy.plan import make_plan
from fulcrum.privacy.statement import AccountedRun, make_statement, statement_to_markdown
from fulcrum.rng import CipherRandomness, SecureRandomness, SeededRandomness
from fulcrum.runs.active_run import list_released_runs
from fulcrum.runs.choices import check_choices
from fulcrum.runs.folder import current_utc_time
from fulcrum.settings.checks import check_settings
from fulcrum.settings.files import settings_from_keywords
from fulcrum.settings.schema import Settings
from fulcrum.training.client_level import average_client_updates, check_server_rule, draw_cohort, make_server_release
from fulcrum.training.federation import Federation
from fulcrum.training.loop import reserve_round
from fulcrum.training.problem import TrainingProblem
from fulcrum.training.round import advance_snapshot, compute_reply_digests, find_planned_sigma, plan_round_events
from fulcrum.training.snapshot import Snapshot, make_first_snapshot
from fulcrum.types import ClientReply


class PrivateRounds:
    """The rounds of a trusted server. weights: the current ones by name. round: number of finished rounds."""

    def __init__(self, federation: Federation, ledger: Ledger, run: str, seed: int | None, others: dict[str, Tensor]):
        self._federation, self._ledger, self._run, self._seed = federation, ledger, run, seed
        self._others = others
        self._snapshot: Snapshot = make_first_snapshot(federation)
        self._attempt: int | None = None
        self._cohort: list[int] = []

    @staticmethod
    def open(
        weights: Mapping[str, Any],
        parties: int,
        *,
        rounds: int,
        epsilon: float | None = None,
        delta: float = 1e-5,
        sigma: float | None = None,
        participation: float = 1.0,
        method: str = "moo-c",
        seed: int | None = None,
        ledger: str | Path | None = None,
        name: str = "federation",
        **options: Any,
    ) -> PrivateRounds:
        """Plan all rounds. weights: the public initial ones by name, tensors or arrays; integers stay as they are.

        participation: probability q_c with which each party is asked in a round, in secret; it lowers the noise.
        Parties have equal weights. method, options: a rule and settings, as for `fulcrum.private`; moo-c adapts the
        clipping norm to what is released. seed: for simulations; None: secure. ledger: a file that adds up runs.
        """
        if epsilon is not None and sigma is not None:
            raise ConfigError(
                "epsilon and sigma are both given; epsilon chooses the noise, sigma is the noise: give one."
            )
        words: dict[str, Any] = {"method": method, "delta": delta, "rounds": rounds, "participation": participation}
        words |= {"data": name, "partition": "given", "parties": parties, "unit": "client", "weights": "uniform"}
        words |= {"randomness": "secure" if seed is None else "seeded", "lr": 1.0, "train": {"server": "sgd"}}
        words |= {"epsilon": epsilon} if epsilon is not None else {"sigma": sigma} if sigma is not None else {}
        words |= {"seed": seed} if seed is not None else {}
        words |= {"ledger": os.path.abspath(ledger)} if ledger is not None else {}
        settings = check_settings(settings_from_keywords({**words, **options}))
        check_choices(settings)
        rule = find_rule(settings.clip.rule)
        tensors = {key: torch.as_tensor(value).detach().cpu() for key, value in weights.items()}
        floats = {key: value.float() for key, value in tensors.items() if value.is_floating_point()}
        model = hold_parameters(floats)
        run = uuid.uuid4().hex
        randomness: CipherRandomness = (
            SecureRandomness(run) if seed is None else SeededRandomness(seed, identify_rounds(settings, floats))
        )
        partition = Partition(torch.arange(parties), torch.arange(parties + 1))
        problem = TrainingProblem(
            dataset=cast(Any, None),  # the server has no records
            partition=partition,
            model=model,
            layout=ParameterLayout.of(model),
            rule=rule,
            randomness=randomness,
            unit="client",
            proven=True,
        )
        check_server_rule(rule, settings, problem)
        plan = make_plan(settings, partition, [1] * parties, rule, population=name)
        federation = Federation(settings, problem, plan, cast(Any, None))
        others = {key: value for key, value in tensors.items() if key not in floats}
        opened = Ledger.open(":memory:" if ledger is None else ledger)
        return PrivateRounds(federation, opened, run, seed, others)

    # --- rounds ---------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self._snapshot.round

    @property
    def rounds(self) -> int:
        """Number of planned rounds."""
        return self._federation.settings.train.rounds

    @property
    def weights(self) -> dict[str, Tensor]:
        """The released weights, by name."""
        return {**self._federation.problem.layout.unflatten(self._snapshot.params), **self._others}

    @property
    def C(self) -> tuple[float, ...]:
        """The clipping norm of the coming round."""
        return tuple(self._snapshot.rule["C"].tolist())

    def begin(self) -> list[int]:
        """Pay for the next round and draw who is asked, numbers 0..parties-1. BudgetError where it is not affordable.

        Who is asked must stay secret: the noise relies on it. Nobody may be drawn; finish the round all the same.
        """
        plan, t = self._federation.plan, self.round
        if t >= self.rounds:
            raise BudgetError(f"all {self.rounds} planned rounds are done, and the noise was chosen for these.")
        if self.round == 0 and self._attempt is None:
            self._register()
        self._attempt = 0 if self._seed is not None else self._ledger.count_settled_attempts(self._run, t)
        everybody = range(plan.parties)
        events = plan_round_events(plan, everybody, t)
        if len(reserve_round(self._ledger, self._run, t, plan, events, self._attempt)) < plan.parties:
            raise BudgetError(
                f"the budget of {plan.name(0)!r} or another party is spent, so round {t + 1} is not taken."
            )
        assert plan.central is not None
        self._cohort = draw_cohort(self._federation.problem.randomness, t, plan.central, self._attempt)
        return list(self._cohort)

    def finish(self, updates: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Clip, average, noise and release; returns the new weights.

        updates: new weights minus `weights` of each party that answered, by its number and by name. Only parties that
        were asked count; one that did not answer did not take part. An update with a number that is not finite
        counts as zero.
        """
        if self._attempt is None:
            raise RunError("finish() was called before begin(); a round is paid for before anybody is asked.")
        plan, problem, t = self._federation.plan, self._federation.problem, self.round
        if strangers := set(updates) - set(self._cohort):
            raise RunError(f"party {min(strangers)} answered and was not asked; leave its update out.")
        replies = [self._read_update(k, updates[k]) for k in sorted(updates)]
        events = plan_round_events(plan, range(plan.parties), t)
        sigma = find_planned_sigma({events[k] for k in events})
        assert plan.central is not None
        reply = average_client_updates(
            problem, plan.central, self._snapshot.rule, replies, t, self.rounds, sigma, self._attempt
        )
        if any(planned != reply.events for planned in events.values()):
            raise BudgetError(f"round {t + 1} would release {reply.events}, and something else was reserved.")
        self._ledger.settle(self._run, t, compute_reply_digests(plan, [reply], range(plan.parties)), self._attempt)
        released = make_server_release(reply, plan.central, sigma, t, self.rounds)
        self._snapshot = advance_snapshot(self._federation, self._snapshot, t, released, reply.state)
        self._attempt, self._cohort = None, []
        return self.weights

    def _read_update(self, k: int, update: Mapping[str, Any]) -> ClientReply:
        layout = self._federation.problem.layout
        parts = []
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if name not in update or tuple(torch.as_tensor(update[name]).shape) != tuple(shape):
                raise ModelError(f"the update of party {k} has no {name!r} of shape {list(shape)}; send all weights.")
            parts.append(torch.as_tensor(update[name]).detach().float().reshape(-1))
        return ClientReply(k, torch.cat(parts), torch.zeros(0), (), {})

    # --- the ledger -----------------------------------------------------------------------------

    def _register(self) -> None:
        rule, ledger = self._federation.problem.rule, self._ledger
        ledger.bring_to_current_format()
        ledger.register_run(
            RunRecord(
                id=self._run,
                rule=rule.name,
                sound=rule.sound,
                private=rule.private,
                randomness=self._federation.problem.randomness.mode,
                arithmetic="proven",
                aggregation="plain",
                unit="client",
                seed_digest="" if self._seed is None else make_seed_digest(self._seed, ledger.identity),
                data_digest=self._federation.settings.data.source,
                settings_digest=self._federation.settings.method,
                simulation=self._seed is not None,
            )
        )

    @property
    def epsilon(self) -> float:
        """The epsilon of a party in this run so far."""
        return max(self._ledger.epsilons(self._run).values(), default=0.0)

    def report(self) -> dict[str, Any]:
        """The facts of the privacy statement, as privacy.json has them."""
        settings, plan, kept = (
            self._federation.settings,
            self._federation.plan,
            bool(self._federation.settings.run.ledger),
        )
        ledger, scope = self._ledger, None if self._federation.settings.run.ledger else self._run
        return make_statement(
            AccountedRun(
                settings=settings,
                plan=plan,
                rule=self._federation.problem.rule,
                spent=ledger.get_spends(scope),
                costs=ledger.epsilons(scope),
                run_costs=ledger.epsilons(self._run),
                run_id=self._run,
                scope="ledger" if kept else "run",
                randomness_mode=self._federation.problem.randomness.mode,
                dataset_name=settings.data.source,
                finished=self.round >= self.rounds,
                rounds_done=self.round,
                version=fulcrum.__version__,
                date=current_utc_time(),
                arithmetic="proven",
                others=list_released_runs(ledger) if kept else (),
            )
        )

    def statement(self) -> str:
        """The privacy statement as the page PRIVACY.md."""
        return statement_to_markdown(self.report())


def identify_rounds(settings: Settings, weights: Mapping[str, Tensor]) -> str:
    """The id of a seeded run's streams: other settings or initial weights have unrelated noise."""
    mac = hashlib.blake2b(repr(settings.replace(run={"ledger": ""})).encode(), digest_size=16)
    for name, value in weights.items():
        mac.update(name.encode() + value.contiguous().numpy().tobytes())
    return mac.hexdigest()


def hold_parameters(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module that holds these tensors as parameters under their names, "layer.weight" within a module "layer"."""
    if not tensors:
        raise ModelError("weights hold no floating-point numbers; give the model's state_dict.")
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = cast(nn.Module, module._modules[part])
        module.register_parameter(last, nn.Parameter(tensor.clone()))
    return root
