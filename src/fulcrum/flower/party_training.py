"""A party's local training: its own model, its own records, and the engine that is fastest on its device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from fulcrum.clipping.party_state import complete_party_state
from fulcrum.clipping.rule import ClipRule, gradient_multiplier
from fulcrum.data import Dataset
from fulcrum.data.records import select_rows
from fulcrum.engines import Engine, find_engine
from fulcrum.engines.fast import make_ghost_step
from fulcrum.errors import ConfigError, DataError
from fulcrum.flower.messages import SimulatedStreams, compute_model_fingerprint
from fulcrum.flower.party_canaries import PartyCanaries
from fulcrum.flower.party_data import count_units, make_single_party_partition, make_stand_in
from fulcrum.flower.task_terms import task_fingerprint
from fulcrum.flower.terms import PartyTerms, find_rule_of_terms, terms_to_settings
from fulcrum.gradients import retain_freed_memory
from fulcrum.gradients.threads import make_single_threaded_pool
from fulcrum.models.build import is_built_in
from fulcrum.models.checks import validate_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.models.own import check_outputs
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.runs.preparation import build_checked_model
from fulcrum.settings.schema import Settings
from fulcrum.training.client import HeldSum, StepFn, hold_sum, release_held_sum
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import Assignment, ClientReply, Released, RoundRequest, RuleState

T = TypeVar("T")


@dataclass(frozen=True)
class PartyRunFacts:
    """What stays the same over the rounds of one run of one party.

    client: this party's number in the run. rule: the clipping rule's name. streams: None where the party draws its own
    randomness (always, except in simulations).
    """

    run: str
    client: int
    rule: str
    streams: SimulatedStreams | None


class LocalTrainer:
    """Trains on one party's records. The model is built once, and the engine once per run."""

    def __init__(
        self,
        name: str,
        dataset: Dataset,
        terms: PartyTerms,
        device: torch.device,
        canaries: PartyCanaries | None = None,
    ) -> None:
        self.name, self.terms, self.device, self.canaries = name, terms, device, canaries
        if canaries is not None and terms.aggregation != "plain":
            raise ConfigError(f"--canaries audits updates that stand alone, and aggregation = {terms.aggregation!r}.")
        self.settings = terms_to_settings(terms)
        self._given = dataset
        self._current: tuple[PartyRunFacts, TrainingProblem, Engine] | None = None
        self._step: tuple[PartyRunFacts, StepFn] | None = None
        self._start: tuple[PartyRunFacts, RuleState] | None = None
        self._worker: ThreadPoolExecutor | None = None

    @cached_property
    def units(self) -> int:
        """The number of units n_k: this party's examples or persons."""
        return count_units(self._given, self.terms.unit)

    @cached_property
    def _model_and_records(self) -> tuple[torch.nn.Module, Dataset]:
        # Built without a look at the records: others get to know the model's fingerprint, buffers included.
        model, _ = build_checked_model(self.settings, make_stand_in(self._given), None)
        dataset = self._given.with_float_inputs() if is_built_in(self.settings.model) else self._given
        pair = select_rows(dataset.sample.x, slice(0, 2))
        try:
            validate_model(model, pair)
            check_outputs(model, pair, dataset.task)
        except Exception as problem:  # a user's model may raise any error
            raise DataError(f"the model of the terms failed on two of this party's records: {problem}") from problem
        return model.to(self.device), dataset

    @property
    def model(self) -> torch.nn.Module:
        """The model that the terms name, built by this party's own software; each round brings its weights."""
        return self._model_and_records[0]

    @property
    def dataset(self) -> Dataset:
        """This party's records, as the model takes them."""
        return self._model_and_records[1]

    @cached_property
    def layout(self) -> ParameterLayout:
        """How the model's parameters lie in one vector [d]."""
        return ParameterLayout.of(self.model)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of this party's own model."""
        return compute_model_fingerprint(self.model, self.layout)

    @cached_property
    def task_fingerprint(self) -> str:
        """The fingerprint of the task that this party trains on."""
        return task_fingerprint(self._given)

    def problem(self, facts: PartyRunFacts) -> TrainingProblem:
        """The training problem of a run, over this party's own records and no others."""
        return self._prepare_run(facts)[0]

    def train(self, facts: PartyRunFacts, request: RoundRequest) -> ClientReply:
        """One round of local training; the request has one assignment, this party's."""
        (reply,) = self._prepare_run(facts)[1].run(request)
        if self.canaries is not None:
            self.canaries.write_log(facts.run, self.terms.delta)
        return reply

    def hold(self, facts: PartyRunFacts, request: RoundRequest) -> HeldSum:
        """The clipped sum of this party's step, not noised yet: with pairwise masks it waits for the round's set."""
        problem = self.problem(facts)
        if self._step is None or self._step[0] != facts:  # which settles once how to follow the model
            self._step = facts, make_ghost_step(problem.make_recorder())
        (task,), (state,) = request.assignments, request.states
        step = self._step[1]
        return self._compute(lambda: hold_sum(problem, request, task, state, step))

    def release(self, facts: PartyRunFacts, held: HeldSum, task: Assignment) -> ClientReply:
        """The integers of a held sum, before masks. task: with the terms that follow from the manifest."""
        problem = self.problem(facts)
        return self._compute(lambda: release_held_sum(problem, held, task))

    def _compute(self, call: Callable[[], T]) -> T:
        """A call's result. On a CPU it runs in a single-threaded worker, as the parallel engine's clients do.

        In this thread PyTorch would split each small operation over all cores, and the cores would wait for each other.
        """
        if self.device.type != "cpu":
            return call()
        if self._worker is None:
            retain_freed_memory()
            self._worker = make_single_threaded_pool(1)
        return self._worker.submit(call).result()

    def start_state(self, facts: PartyRunFacts) -> RuleState:
        """The rule's state at the start of a run: from this party's own terms and model, and nothing else."""
        problem = self.problem(facts)
        if self._start is None or self._start[0] != facts:
            state = problem.rule.init(self._make_settings(facts).clip, problem.shape)
            self._start = facts, {name: value.to(self.device) for name, value in state.items()}
        return {name: value.clone() for name, value in self._start[1].items()}

    def complete_state(self, facts: PartyRunFacts, moved: RuleState, round: int, rounds: int) -> RuleState:
        """The state of a rule that the coordinator adapts. moved: what was received of it."""
        on_device = {name: value.to(self.device) for name, value in moved.items()}
        start = self.start_state(facts)
        return complete_party_state(self.problem(facts).rule, start, on_device, round, rounds, self.layout.dim)

    def adapt_own_state(self, facts: PartyRunFacts, request: RoundRequest, reply: ClientReply) -> RuleState:
        """The state of a rule that each party adapts for itself, after a round: from what this party released."""
        rule: ClipRule = self.problem(facts).rule
        if rule.when == "step":
            return reply.state
        (task,) = request.assignments
        batch = task.rate * self.units
        return rule.adapt(
            reply.state,
            Released(
                aggregate=reply.delta,
                extra=reply.extra,
                lr=task.lr,
                steps=float(task.steps),
                round=request.round,
                rounds=request.rounds,
                noise=gradient_multiplier(rule.share, task.sigma, batch) / batch / math.sqrt(task.steps),
                asked=float(task.asked(request.round)),
            ),
        )

    def _make_settings(self, facts: PartyRunFacts) -> Settings:
        # One client trains here, so a second worker would have nothing to do.
        return terms_to_settings(self.terms, facts.rule, facts.streams is not None).replace(run={"workers": 1})

    def _prepare_run(self, facts: PartyRunFacts) -> tuple[TrainingProblem, Engine]:
        """Problem and engine of a run, kept until another run asks.

        Each time they are made, real randomness gets a new secret of the operating system. So no choice of a run's id
        by a coordinator brings the same stream twice; within a run, every round has streams of its own.
        """
        if self._current is None or self._current[0] != facts:
            streams = facts.streams
            problem = TrainingProblem.of(
                self._make_settings(facts),
                self.dataset,
                make_single_party_partition(len(self.dataset.y), facts.client, self.name),
                self.model,
                self.device,
                rule=find_rule_of_terms(self.terms, facts.rule),
                randomness=SecureRandomness(facts.run)
                if streams is None
                else SeededRandomness(streams.seed, bind_stream_to_records(streams, self.dataset)),
            )
            own = self.canaries
            engine = find_engine("auto", problem) if own is None else own.make_engine(facts.run, facts.client, problem)
            self._current = facts, problem, engine
        return self._current[1:]


def bind_stream_to_records(streams: SimulatedStreams, dataset: Dataset) -> str:
    """The id of a simulated party's random streams, keyed by the seed: other records of the party have other noise.

    It stays in memory: a stored digest of records would be a test for guessed records.
    """
    mac = hashlib.blake2b(str(streams.seed).encode(), digest_size=32, person=b"fulcrum-party")
    mac.update(f"{streams.stream}|{dataset.fingerprint}".encode())
    return mac.hexdigest()
