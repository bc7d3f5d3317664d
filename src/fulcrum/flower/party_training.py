"""A party's local training: its own model, its own records, and the engine that is fastest on its device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fulcrum.data import Dataset, build_party_data
from fulcrum.data.records import take_rows
from fulcrum.engines import Engine, find_engine
from fulcrum.flower.messages import model_fingerprint
from fulcrum.flower.party_data import single_party_partition
from fulcrum.flower.terms import Terms, allowed_rule
from fulcrum.models.build import build_model, is_built_in
from fulcrum.models.checks import validate_model
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.training.problem import Problem
from fulcrum.types import ClientReply, RoundRequest


@dataclass(frozen=True)
class RunFacts:
    """What stays the same over the rounds of one run of one party.

    client: this party's number in the run. rule: the clipping rule's name. groups: flat or layer.
    seed: None where the party draws its own randomness (always, except in simulations).
    """

    run: str
    client: int
    rule: str
    groups: str
    seed: int | None


class LocalTrainer:
    """Trains on one party's records. The model is built once, and the engine once per run."""

    def __init__(self, name: str, dataset: Dataset, terms: Terms, device: torch.device) -> None:
        self.name, self.terms, self.device = name, terms, device
        self.dataset = dataset.with_float_inputs() if is_built_in(terms.model) else dataset
        self._current: tuple[RunFacts, Problem, Engine] | None = None

    @cached_property
    def units(self) -> int:
        """The number of units n_k: this party's examples or persons."""
        partition = single_party_partition(len(self.dataset.y), 0, self.name)
        return build_party_data(self.dataset, partition, 0, self.terms.unit).units

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model that the terms name, built by this party's own software; each round brings its weights."""
        task, sample = self.dataset.task, take_rows(self.dataset.sample.x, slice(0, 8))
        model = build_model(self.terms.model, self.dataset.shape, task.outputs, 0, sample, task=task)
        validate_model(model, take_rows(sample, slice(0, 2)))
        return model.to(self.device)

    @cached_property
    def layout(self) -> ParameterLayout:
        """How the model's parameters lie in one vector [d]."""
        return ParameterLayout.of(self.model)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of this party's own model."""
        return model_fingerprint(self.model, self.layout)

    def problem(self, facts: RunFacts) -> Problem:
        """The training problem of a run, over this party's own records and no others."""
        return self._prepared(facts)[0]

    def train(self, facts: RunFacts, request: RoundRequest) -> ClientReply:
        """One round of local training; the request has one assignment, this party's."""
        (reply,) = self._prepared(facts)[1].run(request)
        return reply

    def _prepared(self, facts: RunFacts) -> tuple[Problem, Engine]:
        """Problem and engine of a run, kept until another run asks."""
        if self._current is None or self._current[0] != facts:
            problem = Problem(
                dataset=self.dataset,
                partition=single_party_partition(len(self.dataset.y), facts.client, self.name),
                model=self.model,
                layout=self.layout,
                rule=allowed_rule(self.terms, facts.rule),
                randomness=SecureRandomness() if facts.seed is None else SeededRandomness(facts.seed),
                unit=self.terms.unit,
                groups=self.layout.layers if facts.groups == "layer" else (),
                device=self.device,
                workers=1,  # one client trains here, so a second worker would have nothing to do
            )
            self._current = facts, problem, find_engine("auto", problem)
        return self._current[1:]
