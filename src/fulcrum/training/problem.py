"""What stays the same over all rounds and clients of a run: data, model, rule, randomness."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fulcrum.clipping import find_rule
from fulcrum.clipping.rule import ClipRule, ModelFacts
from fulcrum.data import Dataset, Partition, PartyData, build_party_data
from fulcrum.data.declared import choose_randomness, choose_unit
from fulcrum.data.tasks import Task
from fulcrum.gradients import PROVEN_BLOCK, GradientRecorder
from fulcrum.models.layout import ParameterLayout
from fulcrum.rng import Randomness, make_randomness
from fulcrum.settings.derived import count_evaluations
from fulcrum.settings.schema import Settings
from fulcrum.types import make_short_repr


@dataclass(frozen=True)
class TrainingProblem:
    """What stays the same over all rounds and clients of a run: data, model, rule, randomness.

    groups: the clipping group of each parameter tensor; empty for flat clipping. workers: number of cores
    for the parallel engine; 0: PyTorch's number of threads. proven: whether the bounds on contributions are proven, in
    float64 from the gradients to the release (privacy.arithmetic).
    """

    __repr__ = make_short_repr

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
    proven: bool = False

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
        # "auto" must not decide anything below: a private data set's randomness is secure.
        settings = settings.replace(
            privacy={"unit": choose_unit(settings, dataset), "randomness": choose_randomness(settings, dataset)}
        )
        place = torch.device(device)
        model = model.to(place)
        layout = ParameterLayout.of(model)
        return TrainingProblem(
            dataset=dataset,
            partition=partition,
            model=model,
            layout=layout,
            rule=rule or find_rule(settings.clip.rule),
            randomness=randomness
            or make_randomness(
                settings.privacy.randomness,
                get_private_seed(settings),
                identify_releases(settings, dataset, partition, model, layout),
            ),
            unit=settings.privacy.unit,
            groups=layout.layers if settings.clip.groups == "layer" else (),
            device=place,
            diagnostics=settings.run.diagnostics,
            precision=settings.run.precision,
            workers=settings.run.workers,
            proven=uses_proven_arithmetic(settings),
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
        return self.make_recorder()

    def make_recorder(self) -> GradientRecorder:
        """A gradient recorder of the model; in blocks of one size where bounds are proven."""
        return GradientRecorder(self.model, self.layout, self.dataset.task, block=PROVEN_BLOCK if self.proven else 0)

    def party(self, client: int) -> PartyData:
        """The client's records and units."""
        return build_party_data(self.dataset, self.partition, client, self.unit)


def uses_proven_arithmetic(settings: Settings) -> bool:
    """Whether bounds are proven: privacy.arithmetic, where auto means proven with secure randomness, else fast."""
    chosen = settings.privacy.arithmetic
    return chosen == "proven" or (chosen == "auto" and settings.privacy.randomness == "secure")


def get_private_seed(settings: Settings) -> int:
    """The seed of sampling and noise in a seeded run: privacy.seed, or run.seed where it is not set."""
    return settings.run.seed if settings.privacy.seed is None else settings.privacy.seed


RELEASE_IRRELEVANT_SETTINGS = {
    "data": ("source", "dir", "public", "withdrawn"),  # the records themselves are in the digest
    "task": ("metrics", "score", "threshold", "choose_threshold"),
    "privacy": ("randomness", "arithmetic", "seed", "budget", "budget_delta"),
}
"""Settings that change no release, by section: where records lie, how a model is judged, what a ledger allows."""


IMBALANCE_SETTINGS = ("imbalance", "class_balance")


def identify_releases(
    settings: Settings, dataset: Dataset, partition: Partition, model: nn.Module, layout: ParameterLayout
) -> str:
    """A digest, keyed by the private seed, of all that decides what a run releases: the id in its private streams.

    A seeded run with the same settings, records, split and initial weights repeats bit for bit, and any other run has
    unrelated noise. Engine, device, paths, ledgers and budgets are left out: they change no release. It stays in
    memory: a stored digest of records would be a test for guessed records.
    """
    mac = hashlib.blake2b(str(get_private_seed(settings)).encode(), digest_size=32, person=b"fulcrum-run-id")
    sections = ("data", "task", "train", "clip", "privacy", "client_level")
    parts: dict[str, dict[str, Any]] = {name: dataclasses.asdict(getattr(settings, name)) for name in sections}
    for section, left_out in RELEASE_IRRELEVANT_SETTINGS.items():
        for name in left_out:
            parts[section].pop(name, None)
    parts["privacy"]["unit"] = choose_unit(settings, dataset)
    if dataset.task_settings is not None:  # what is trained on, whether the settings or the data named it
        declared = dataclasses.asdict(dataset.task_settings)
        parts["task"] = {name: declared[name] for name in parts["task"]}
    if parts["task"]["imbalance"] == "none":  # as if they were not there: seeded runs of earlier versions repeat
        parts["task"] = {name: value for name, value in parts["task"].items() if name not in IMBALANCE_SETTINGS}
    if settings.privacy.evaluation_epsilon is not None:  # what decides the noise and the cells of evaluations
        parts["evaluations"] = {"count": count_evaluations(settings), "threshold": settings.task.threshold}
    # The public seed also invites parties; the arithmetic decides how far each unit is scaled down.
    parts["run"] = {"seed": settings.run.seed, "precision": settings.run.precision}
    parts["run"]["proven"] = uses_proven_arithmetic(settings)
    mac.update(json.dumps(parts, sort_keys=True, default=str).encode())
    mac.update(f"|{dataset.fingerprint}|{dataset.task.name}|{type(model).__qualname__}|{layout.shapes}|".encode())
    for tensor in (partition.order, partition.starts, layout.flatten(model).detach().cpu()):
        mac.update(tensor.contiguous().numpy().tobytes())
    mac.update(compute_architecture_digest(model))
    return mac.hexdigest()


def compute_architecture_digest(model: nn.Module) -> bytes:
    """A digest of what a model computes beside its trained weights: two activations are two models.

    Its modules with their plain attributes, the source of those that are neither PyTorch's nor ours, frozen parameters
    and buffers.
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, module in model.named_modules():
        kind = type(module)
        plain = {key: describe_attribute(value) for key, value in vars(module).items() if not key.startswith("_")}
        plain.pop("training", None)
        digest.update(f"|{name}|{kind.__qualname__}|{sorted(plain.items())}|".encode())
        if kind.__module__.partition(".")[0] not in ("torch", "fulcrum"):
            digest.update(read_code(kind))
    frozen = [(name, value) for name, value in model.named_parameters() if not value.requires_grad]
    for name, value in (*frozen, *model.named_buffers()):
        digest.update(f"|{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def describe_attribute(value: object) -> str:
    """A module's attribute in words that are the same in every process; "" where there are none."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(describe_attribute, value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return str(getattr(value, "__qualname__", ""))


def read_code(kind: type[nn.Module]) -> bytes:
    """The source of a class, or its forward's compiled code where there is no source."""
    try:
        return inspect.getsource(kind).encode()
    except (OSError, TypeError):
        code = getattr(kind.forward, "__code__", None)
        return b"" if code is None else bytes(code.co_code) + repr(code.co_names).encode()


def assign_coordinate_groups(layout: ParameterLayout, groups: tuple[int, ...]) -> torch.Tensor:
    """The group of each of the d coordinates, int64 [d]."""
    chosen = torch.tensor(groups or (0,) * len(layout.sizes))
    return torch.repeat_interleave(chosen, torch.tensor(layout.sizes))
