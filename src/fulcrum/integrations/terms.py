"""What a private loop promises, from the arguments of `fulcrum.private`: settings, plan, sampling. All is public."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fulcrum.clipping import find_rule
from fulcrum.clipping.rule import ClipRule, ModelFacts, use_aggregate
from fulcrum.data.sampling import PartyData
from fulcrum.errors import ConfigError, DataError, ModelError
from fulcrum.models.layout import ParameterLayout
from fulcrum.privacy.plan import Plan, make_plan
from fulcrum.runs.choices import check_choices
from fulcrum.settings.checks import check_settings
from fulcrum.settings.files import settings_from_keywords
from fulcrum.settings.presets import find_method
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import gather_model_facts
from fulcrum.types import RuleState

FIXED_BY_LOOP = {
    "rounds": "epochs= and the loader say how many steps there are",
    "train.rounds": "epochs= and the loader say how many steps there are",
    "rate": "the loader's batch size says it",
    "steps": "a loop has one local step per round",
    "lr": "the optimizer has it",
    "parties": "a loop has one party; fulcrum.train federates several",
    "participation": "a loop has one party; fulcrum.train federates several",
    "server": "the optimizer takes its place",
    "unit": "persons= says whose records they are",
    "randomness": "seed= says it: with a seed a simulation, without one secure",
    "arithmetic": "a loop's own batches leave only fast",
}
"""Settings that a loop decides itself, and what decides them."""


@dataclass(frozen=True)
class LoopTerms:
    """The public terms of a private loop.

    party: whose record each row of the data set is. steps: number of planned releases T. epoch: steps per epoch.
    pieces: number of batches that a sample arrives in. batch: expected number of units of a sample, q n.
    owns_step: whether the rule sets the length of a step (moo); otherwise the optimizer's learning rate does.
    """

    settings: Settings
    plan: Plan
    rule: ClipRule
    layout: ParameterLayout
    groups: tuple[int, ...]
    party: PartyData
    name: str
    epoch: int
    pieces: int
    owns_step: bool
    persons: tuple[object, ...] = ()
    """The persons' ids where they are the units; they are never stored but by keyed digests."""

    @property
    def steps(self) -> int:
        return self.settings.train.rounds

    @property
    def rate(self) -> float:
        return self.settings.train.rate

    @property
    def batch(self) -> float:
        return self.rate * self.party.units

    def describe(self) -> dict[str, Any]:
        """What a saved state must agree with to go on."""
        return {
            "settings": hashlib.blake2b(repr(self.settings.replace(run={"ledger": ""})).encode()).hexdigest()[:32],
            "units": self.party.units,
            "rows": len(self.party.index),
            "pieces": self.pieces,
            "parameters": [
                [name, list(shape)] for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
            ],
        }

    def make_rule_state(self, model: nn.Module) -> RuleState:
        """The rule's first state: from public settings and the public initial weights."""
        shape = ModelFacts(self.layout.dim, self.layout.sizes, self.groups)
        facts = gather_model_facts(self.settings.train, self.plan, shape, self.layout, model)
        device = next(iter(model.parameters())).device
        return {name: value.to(device) for name, value in self.rule.init(self.settings.clip, facts).items()}


def count_records(loader: Any) -> int:
    """Number of records of the loader's data set; DataError where a Poisson sample cannot be drawn from it."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, torch.utils.data.IterableDataset) or not isinstance(dataset, Sized):
        raise DataError(
            "loader has no data set with a length and records by number, which a Poisson sample is drawn from; give a "
            "torch DataLoader over a map-style data set."
        )
    if len(dataset) == 0:
        raise DataError("the loader's data set is empty; at least one record is needed.")
    return len(dataset)


def read_batch_size(loader: Any) -> int:
    """The loader's batch size; ConfigError where its sampler is not an ordinary one that Poisson sampling replaces."""
    sampler = getattr(loader, "sampler", None)
    ordinary = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    if not getattr(loader, "batch_size", None) or not isinstance(sampler, ordinary):
        raise ConfigError(
            f"loader draws its batches with {type(sampler).__name__}, and the guarantee needs Poisson samples, which "
            "take its place; give a DataLoader with batch_size and shuffle=True."
        )
    if getattr(sampler, "replacement", False):
        raise ConfigError("loader draws with replacement, and the guarantee needs Poisson samples; leave that out.")
    return int(loader.batch_size)


def group_records(persons: Any, records: int) -> tuple[PartyData, tuple[object, ...]]:
    """The unit of each record: itself, or its person; and the persons' ids.

    persons [n]: numbers or texts, one per record.
    """
    rows = torch.arange(records)
    if persons is None:
        return PartyData(rows, rows, records, apart=True), ()
    ids = persons.tolist() if hasattr(persons, "tolist") else list(persons)
    if len(ids) != records:
        raise DataError(f"persons has {len(ids)} entries and the data set {records} records; give one for each record.")
    numbers: dict[Any, int] = {}
    unit_of = torch.tensor([numbers.setdefault(each, len(numbers)) for each in ids])
    return PartyData(rows, unit_of, len(numbers)), tuple(numbers)


def find_trained_parameters(model: nn.Module, optimizer: Optimizer) -> ParameterLayout:
    """The layout of the model's trainable parameters, after they are known to be those of the optimizer."""
    layout = ParameterLayout.of(model)
    named = dict(model.named_parameters())
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, LBFGS):
        raise ConfigError("optimizer = LBFGS asks for the same batch's gradient again and again; use SGD or Adam.")
    missing = [name for name in layout.names if id(named[name]) not in given]
    if missing:
        raise ModelError(
            f"parameter {missing[0]!r} needs a gradient and is not in the optimizer; freeze it by "
            "requires_grad_(False), or give it to the optimizer."
        )
    trained = {id(named[name]) for name in layout.names}
    if any(id(p) not in trained and p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            "the optimizer has parameters that are not the model's; give the model that holds all of them."
        )
    for group in optimizer.param_groups:
        if group.get("maximize"):
            raise ConfigError("optimizer.maximize = True is not known to private steps; minimise the negative loss.")
        if not float(group["lr"]) > 0 and not float(group.get("initial_lr", 0.0)) > 0:
            raise ConfigError("optimizer.lr must be above 0: schedules are factors of it.")
    return layout


def make_terms(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    *,
    epochs: float,
    persons: Any,
    accumulate: int,
    physical_batch: int | None,
    name: str,
    options: Mapping[str, Any],
) -> LoopTerms:
    """All terms of a private loop, checked. options: settings by name, as `fulcrum.train` takes them."""
    records, size = count_records(loader), read_batch_size(loader)
    if not epochs > 0 or not math.isfinite(epochs):
        raise ConfigError(f"epochs = {epochs!r} is out of range; it must be a number above 0.")
    if accumulate < 1:
        raise ConfigError(f"accumulate = {accumulate!r} is out of range; it is the number of batches per step, from 1.")
    if physical_batch is not None and physical_batch < 1:
        raise ConfigError(f"physical_batch = {physical_batch!r} is out of range; it is a number of examples, from 1.")
    party, people = group_records(persons, records)
    rate = min(1.0, size * accumulate / records)
    epoch = max(1, math.ceil(len(loader) / accumulate))
    pieces = accumulate if physical_batch is None else max(accumulate, math.ceil(size * accumulate / physical_batch))
    words = {"data": name, "partition": "given", "rounds": max(1, round(epochs * epoch)), "rate": rate, "steps": 1}
    words |= {"unit": "example" if persons is None else "person", **options}
    settings = settings_from_keywords({**words, "arithmetic": "fast"})
    settings = check_settings(settings.replace(train={"lr": 1.0, "server": "sgd", "participation": 1.0}))
    check_choices(settings)
    rule = find_rule(settings.clip.rule)
    refuse_method(settings, rule)
    layout = find_trained_parameters(model, optimizer)
    plan = make_plan(settings, [name], [party.units], rule, population=name)
    groups = layout.layers if settings.clip.groups == "layer" else ()
    owns_step = rule.apply is not use_aggregate
    return LoopTerms(settings, plan, rule, layout, groups, party, name, epoch, pieces, owns_step, people)


def refuse_fixed_options(options: Mapping[str, Any]) -> None:
    """ConfigError for settings that the loop itself decides."""
    for given, why in FIXED_BY_LOOP.items():
        if given in options:
            raise ConfigError(f"{given} is no option of fulcrum.private: {why}.")


def refuse_method(settings: Settings, rule: ClipRule) -> None:
    """ConfigError for what a loop of one party cannot do."""
    if find_method(settings.method).unit == "client":
        raise ConfigError(f"method = {settings.method!r} protects whole parties; a loop has one: use fulcrum.train.")
    if settings.privacy.aggregation != "plain":
        raise ConfigError("privacy.aggregation is about several parties; a loop has one: leave it out.")
    if not rule.sound:
        raise ConfigError(
            f"clip.rule = {rule.name!r} reads raw private values, so its epsilon is no guarantee; choose another."
        )
    if rule.view(rule.init(settings.clip, ModelFacts(1, (1,))), 0, 1).probes is not None:
        raise ConfigError(
            f"clip.rule = {rule.name!r} asks for losses at other weights, which a loop of your own does not compute; "
            "use fulcrum.train."
        )
    if settings.data.validation or settings.privacy.evaluation_epsilon is not None:
        raise ConfigError(
            "data.validation is for fulcrum.train; in a loop, keep public records for evaluation yourself."
        )


def compute_stream_id(terms: LoopTerms, model: nn.Module, seed: int) -> str:
    """The id of a seeded loop's streams, keyed by its seed: other settings or weights have unrelated noise."""
    mac = hashlib.blake2b(str(seed).encode(), digest_size=16, person=b"fulcrum-loop-id")
    mac.update(json.dumps(terms.describe(), sort_keys=True).encode())
    mac.update(repr([(key, value) for key, value in vars(terms.settings).items() if key != "run"]).encode())
    start: Tensor = terms.layout.flatten(model).detach().cpu()
    mac.update(start.contiguous().float().numpy().tobytes())
    return mac.hexdigest()
