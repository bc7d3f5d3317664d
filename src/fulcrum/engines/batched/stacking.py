"""The one definition of what runs must have in common to be trained in one stack.

All settings must be equal, except the fields in `STACKABLE_FIELDS`, of which each run of a stack has its own value.
Runs that differ in any other field, including future ones, are not stacked. A run's private numbers come from its own
streams: the same bits however it is stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from torch import nn

from fulcrum.clipping import ClipRule, find_rule
from fulcrum.models.whitening import compute_buffer_digest
from fulcrum.settings.derived import compute_local_steps, get_planned_unit
from fulcrum.settings.schema import Settings, Train
from fulcrum.training.federation import Federation
from fulcrum.training.problem import uses_proven_arithmetic

STACKABLE_FIELDS: dict[str, frozenset[str]] = {
    "": frozenset({"method"}),  # a name only
    # The split is in each run's own partition.
    "data": frozenset({"parties", "partition", "alpha", "shards", "min_examples"}),
    "train": frozenset(
        {
            *("participation", "rate", "weights"),  # in each run's own plan, participants and weights
            *("lr", "schedule", "warmup", "decay_rounds", "decay", "weight_decay", "ema"),  # tables of `BatchedServer`
            *("server_lr", "server_momentum", "server_beta2", "server_eps"),  # given to each server optimiser
            *("steps", "epochs"),  # only through the number of local steps, which is in the key
        }
    ),
    # In each run's own rule state and plan (statistics_interval). Not shrink: a stack has one transform.
    "clip": frozenset(
        {
            *("C0", "kappa", "balance", "reach", "growth", "eta_C", "beta", "phi", "C_min", "C_max", "gamma", "rho_c"),
            *("stability", "reading", "statistics_interval", "statistics_rounds", "step", "search"),
        }
    ),
    # In each run's own plan.
    "privacy": frozenset(
        {
            *("epsilon", "sigma", "delta", "accountant", "max_participations", "budget", "budgets"),
            *("budget_delta", "noise_schedule", "rho_mu", "phases", "aggregation", "colluders"),
            "seed",  # in each run's own randomness
        }
    ),
    "client_level": frozenset({"estimator", "weight_cap", "min_weight"}),  # in each run's own plan
    # The seed is in the partition, the weights and the randomness. Nothing else here matters to `run_many`.
    "run": frozenset({"seed", "engine", "workers", "checkpoint_every", "ledger"}),
}
"""Fields, by section of the settings, in which runs of one stack may differ, and where each run's own value goes."""

PROBLEM_FIELDS: dict[str, frozenset[str]] = {
    "data": frozenset(
        {
            *("source", "dir", "validation", "features"),
            *("feature_groups", "feature_mirror", "feature_center", "feature_whiten"),
        }
    ),
    "model": frozenset(
        {
            *("name", "activation", "temper_scale", "temper_temperature", "temper_offset", "hidden"),
            *("init", "coordinates", "whiten", "norm", "train", "lora", "lora_alpha", "lora_targets", "arguments"),
        }
    ),
    "run": frozenset({"device"}),
}
"""Fields that decide nothing beyond the data set, the model and the device, which a federation's key has themselves."""


def make_stack_key(settings: Settings) -> Hashable:
    """What runs must have in common, from their settings alone: cheap, and finer than that of their federations."""
    # What is held out depends on the seed, so that runs of two seeds have two data sets.
    held_out = settings.run.seed if settings.data.validation else None
    return (*_list_shared_settings(settings, {}), compute_local_steps(settings.train), held_out)


def make_federation_key(federation: Federation) -> Hashable:
    """What prepared runs must have in common: data, model, rule, device and all settings that are not spread."""
    problem, settings = federation.problem, federation.settings
    return (
        *_list_shared_settings(settings, PROBLEM_FIELDS),
        compute_local_steps(settings.train),
        problem.dataset.fingerprint,
        id(problem.dataset) if not problem.dataset.fingerprint else 0,
        problem.dataset.task.key(),
        repr(problem.model),
        tuple(_list_module_attributes(problem.model)),
        compute_buffer_digest(problem.model),
        problem.layout,
        problem.rule,
        problem.groups,
        problem.unit,
        problem.precision,
        problem.diagnostics,
        str(problem.device),
        problem.randomness.mode,
        problem.proven,
        # A stack has one change of basis, so runs whose rule sets it differently are not stacked.
        repr(settings.clip) if _has_transform(federation) else None,
    )


def can_stack_runs(settings: Settings, rule: ClipRule | None = None) -> bool:
    """Whether runs of these settings can share a tensor program at all; others go one by one through their engines.

    A stack is for simulations: runs in real use, or in proven arithmetic, release by their own engines. Persons own
    several records each. Where whole parties are units, the rule must look at each update by itself.
    """
    # "auto" is seeded here: what is stacked is public data.
    if settings.privacy.randomness == "secure" or uses_proven_arithmetic(settings):
        return False
    unit, rule = get_planned_unit(settings.privacy), rule or find_rule(settings.clip.rule)
    return unit == "example" or (unit == "client" and rule.sound)


def get_server_numbers(train: Train) -> dict[str, float]:
    """The numbers of `Train` in which stacked runs may differ, for the server optimisers."""
    return {
        name: float(getattr(train, name))
        for name in STACKABLE_FIELDS["train"]
        if isinstance(getattr(train, name), float)
    }


def get_shared_train_fields(train: Train) -> dict[str, Any]:
    """The fields of `Train` that stacked runs have in common."""
    return {
        f.name: getattr(train, f.name) for f in dataclasses.fields(train) if f.name not in STACKABLE_FIELDS["train"]
    }


def _list_shared_settings(settings: Settings, known: dict[str, frozenset[str]]) -> Iterator[Hashable]:
    """(section, field, value) of all settings that are neither spread nor in `known`."""
    for outer in dataclasses.fields(settings):
        value = getattr(settings, outer.name)
        if not dataclasses.is_dataclass(value):
            if outer.name not in STACKABLE_FIELDS[""]:
                yield "", outer.name, _to_hashable(value)
            continue
        left_out = STACKABLE_FIELDS.get(outer.name, frozenset()) | known.get(outer.name, frozenset())
        for inner in dataclasses.fields(value):
            if inner.name not in left_out:
                yield outer.name, inner.name, _to_hashable(getattr(value, inner.name))


def _to_hashable(value: Any) -> Hashable:
    return repr(sorted(value.items())) if isinstance(value, dict) else value


def _list_module_attributes(model: nn.Module) -> Iterable[Hashable]:
    """Plain values that the modules hold: a model of one's own may compute with them, and repr need not show them."""
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str | tuple)}
        yield name, type(module), repr(sorted(plain.items()))


def _has_transform(federation: Federation) -> bool:
    """Whether the rule clips in another basis."""
    problem = federation.problem
    state = problem.rule.init(federation.settings.clip, problem.shape)
    return problem.rule.view(state, 0, federation.settings.train.rounds).transform is not None
