"""What stays the same over all rounds and clients of a run: data, model, rule, randomness."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from fulcrum.clipping import find_rule
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.data import Dataset, Partition, PartyData, build_party_data
from fulcrum.data.tasks import Task
from fulcrum.gradients import GradientRecorder
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import Randomness, make_randomness
from fulcrum.settings.schema import Settings


@dataclass(frozen=True)
class TrainingProblem:
    """What stays the same over all rounds and clients of a run: data, model, rule, randomness.

    groups: the clipping group of each parameter tensor; empty for flat clipping. workers: number of cores
    for the parallel engine; 0: PyTorch's number of threads.
    """

    dataset: Dataset
    partition: Partition
    model: nn.Module
    layout: ParameterLayout
    rule: ClipRule
    randomness: Randomness
    unit: str = "example"
    groups: tuple[int, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    diagnostics: bool = False
    precision: str = "float32"
    workers: int = 0

    @staticmethod
    def of(
        settings: Settings,
        dataset: Dataset,
        partition: Partition,
        model: nn.Module,
        device: torch.device | str = "cpu",
        *,
        rule: ClipRule | None = None,
        randomness: Randomness | None = None,
    ) -> TrainingProblem:
        """The problem that the settings describe, over these records, parties and model; the model goes to the device.

        rule, randomness: replace those that the settings name.
        """
        place = torch.device(device)
        model = model.to(place)
        layout = ParameterLayout.of(model)
        return TrainingProblem(
            dataset=dataset,
            partition=partition,
            model=model,
            layout=layout,
            rule=rule or find_rule(settings.clip.rule),
            randomness=randomness or make_randomness(settings.privacy.randomness, settings.run.seed),
            unit=settings.privacy.unit,
            groups=layout.layers if settings.clip.groups == "layer" else (),
            device=place,
            diagnostics=settings.run.diagnostics,
            precision=settings.run.precision,
            workers=settings.run.workers,
        )

    @property
    def task(self) -> Task:
        """The prediction task, with its loss and metrics."""
        return self.dataset.task

    @property
    def shape(self) -> ModelFacts:
        """The model facts that the rule may use."""
        return ModelFacts(self.layout.dim, self.layout.sizes, self.groups)

    @cached_property
    def coordinates(self) -> torch.Tensor:
        """The group of each of the d coordinates, int64 [d]."""
        return assign_coordinate_groups(self.layout, self.groups).to(self.device)

    @cached_property
    def gradient_recorder(self) -> GradientRecorder:
        """The gradient recorder of the model, made once. Not thread-safe."""
        return GradientRecorder(self.model, self.layout, self.dataset.task)

    def party(self, client: int) -> PartyData:
        """The client's records and units."""
        return build_party_data(self.dataset, self.partition, client, self.unit)


def assign_coordinate_groups(layout: ParameterLayout, groups: tuple[int, ...]) -> torch.Tensor:
    """The group of each of the d coordinates, int64 [d]."""
    chosen = torch.tensor(groups or (0,) * len(layout.sizes))
    return torch.repeat_interleave(chosen, torch.tensor(layout.sizes))
