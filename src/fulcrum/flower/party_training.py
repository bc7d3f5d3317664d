"""A party's local training: its own model, its own records, and the engine that is fastest on its device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fulcrum.data import Dataset
from fulcrum.engines import Engine, find_engine
from fulcrum.flower.messages import compute_model_fingerprint
from fulcrum.flower.party_data import count_units, make_single_party_partition
from fulcrum.flower.task_terms import task_fingerprint
from fulcrum.flower.terms import PartyTerms, find_allowed_rule, terms_to_settings
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.runs.preparation import build_checked_model
from fulcrum.training.problem import TrainingProblem
from fulcrum.types import ClientReply, RoundRequest


@dataclass(frozen=True)
class PartyRunFacts:
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

    def __init__(self, name: str, dataset: Dataset, terms: PartyTerms, device: torch.device) -> None:
        self.name, self.terms, self.device = name, terms, device
        # One client trains here, so a second worker would have nothing to do.
        self.settings = terms_to_settings(terms).replace(run={"workers": 1})
        self._given = dataset
        self._current: tuple[PartyRunFacts, TrainingProblem, Engine] | None = None

    @cached_property
    def units(self) -> int:
        """The number of units n_k: this party's examples or persons."""
        return count_units(self._given, self.terms.unit)

    @cached_property
    def _model_and_records(self) -> tuple[torch.nn.Module, Dataset]:
        model, dataset = build_checked_model(self.settings, self._given, None)
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
        return reply

    def _prepare_run(self, facts: PartyRunFacts) -> tuple[TrainingProblem, Engine]:
        """Problem and engine of a run, kept until another run asks."""
        if self._current is None or self._current[0] != facts:
            problem = TrainingProblem.of(
                self.settings.replace(clip={"groups": facts.groups}),
                self.dataset,
                make_single_party_partition(len(self.dataset.y), facts.client, self.name),
                self.model,
                self.device,
                rule=find_allowed_rule(self.terms, facts.rule),
                randomness=SecureRandomness() if facts.seed is None else SeededRandomness(facts.seed),
            )
            self._current = facts, problem, find_engine("auto", problem)
        return self._current[1:]
