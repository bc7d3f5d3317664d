"""Which runs share a stack: those that agree in everything but what each run of a stack has for itself."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulcrum.engines.batched import can_stack_runs, make_stack_key, run_many, runs
from fulcrum.engines.batched.runs import group_stackable_runs
from fulcrum.engines.batched.stacking import (
    PROBLEM_FIELDS,
    STACKABLE_FIELDS,
    get_server_numbers,
    get_shared_train_fields,
)
from fulcrum.rng import SeededRandomness
from fulcrum.runs import prepare
from fulcrum.settings.schema import Settings, Train
from fulcrum.training.federation import Federation
from fulcrum.training.problem import get_private_seed
from fulcrum.training.server import SERVERS, ServerOptimiser
from support.federations import play, toy_data, toy_settings, with_randomness

DATA = toy_data()
SECTIONS = [f.name for f in dataclasses.fields(Settings) if dataclasses.is_dataclass(getattr(Settings(), f.name))]
FIELDS = [(section, f.name) for section in SECTIONS for f in dataclasses.fields(getattr(Settings(), section))]
Changes = dict[str, dict[str, Any]]

QUANTITY: Changes = {"data": {"partition": "quantity"}}
CALIBRATED: Changes = {"privacy": {"sigma": None, "epsilon": 4.0}, "train": {"rounds": 2}}
GROWTH: Changes = {"privacy": {"noise_schedule": "growth"}}
CLIENT: Changes = {"privacy": {"unit": "client"}, "data": {"partition": "quantity", "parties": 6, "min_examples": 2}}

DIFFER: dict[tuple[str, str], tuple[Any, Changes]] = {
    ("data", "parties"): (4, {}),
    ("data", "partition"): ("quantity", {}),
    ("data", "alpha"): (5.0, QUANTITY),
    ("data", "shards"): (1, {"data": {"partition": "shards", "min_examples": 1}}),
    ("data", "min_examples"): (15, QUANTITY),
    ("train", "participation"): (0.5, {}),
    ("train", "rate"): (0.5, {}),
    ("train", "lr"): (0.1, {"clip": {"rule": "fixed"}}),
    ("train", "schedule"): ("linear", {}),
    ("train", "warmup"): (3, {}),
    ("train", "decay_rounds"): ((1,), {"train": {"schedule": "step"}}),
    ("train", "decay"): (0.5, {"train": {"schedule": "step", "decay_rounds": (1,)}}),
    ("train", "weight_decay"): (0.5, {}),
    ("train", "weights"): ("uniform", QUANTITY),
    ("train", "steps"): (0, {}),  # and epochs = 0.2: one local step both times, because the key has their number
    ("train", "epochs"): (0.1, {"train": {"steps": 0, "epochs": 0.2}}),
    ("train", "server_lr"): (0.3, {}),
    ("train", "server_momentum"): (0.2, {"train": {"server": "momentum"}}),
    ("train", "server_beta2"): (0.5, {"train": {"server": "adam"}}),
    ("train", "server_eps"): (0.1, {"train": {"server": "adam"}}),
    ("train", "ema"): (0.05, {}),
    ("clip", "C0"): (0.1, {"clip": {"rule": "fixed"}}),
    ("clip", "kappa"): (0.5, {"clip": {"rule": "moo-c"}}),
    ("clip", "balance"): (0.3, {}),
    ("clip", "reach"): (0.05, {"privacy": {"sigma": 0.1}, "model": {"name": "mlp", "hidden": (4,)}}),
    ("clip", "growth"): (1.01, {"clip": {"eta_C": 0.5}, "privacy": {"sigma": 0.2, "seed": 3}}),
    ("clip", "step"): (0.5, {}),
    ("clip", "search"): (False, {"clip": {"C0": 10.0, "step": 20.0}}),
    ("clip", "eta_C"): (0.5, {"clip": {"rule": "quantile"}}),
    ("clip", "beta"): (0.1, {"clip": {"rule": "moo-c", "phi": "identity", "eta_C": 1.0}, "train": {"rounds": 5}}),
    ("clip", "phi"): ("identity", {"clip": {"rule": "moo-c"}}),
    ("clip", "C_min"): (90.0, {"clip": {"rule": "quantile", "gamma": 0.01, "eta_C": 1.0, "C0": 100.0}}),
    ("clip", "C_max"): (1.1, {"clip": {"rule": "quantile", "gamma": 0.99, "eta_C": 1.0}, "privacy": {"sigma": 0.1}}),
    ("clip", "gamma"): (0.9, {"clip": {"rule": "quantile", "eta_C": 0.5}}),
    ("clip", "rho_c"): (0.9, {"clip": {"rule": "dynamic"}}),
    ("clip", "stability"): (0.5, {"clip": {"rule": "auto-s"}}),
    ("clip", "reading"): ("hypergradient", {"clip": {"rule": "moo-paper", "kappa": 0.3, "eta_C": 0.3}}),
    ("clip", "statistics_rounds"): (2, {"clip": {"rule": "hyfree", "statistics_rounds": 1}}),
    ("clip", "statistics_interval"): (0.6, {"clip": {"rule": "quantile"}}),
    ("privacy", "epsilon"): (2.0, CALIBRATED),
    ("privacy", "sigma"): (2.0, {}),
    ("privacy", "delta"): (1e-3, CALIBRATED),
    ("privacy", "accountant"): ("pld", {}),
    ("privacy", "max_participations"): (1, {}),
    ("privacy", "budget"): (9.0, {}),
    ("privacy", "budget_delta"): (1e-3, {"privacy": {"accountant": "pld", "budget_delta": 1e-4}}),
    ("privacy", "budgets"): ({"party-0": 2.0}, CALIBRATED),
    ("privacy", "noise_schedule"): ("growth", {}),
    ("privacy", "rho_mu"): (0.2, GROWTH),
    ("privacy", "phases"): ((1.0, 4.0), {"privacy": {"noise_schedule": "phases", "phases": (1.0, 2.0)}}),
    ("privacy", "aggregation"): ("ideal-secagg", {"clip": {"rule": "fixed"}}),
    ("privacy", "colluders"): (0.0, {"clip": {"rule": "fixed"}, "privacy": {"aggregation": "pairwise"}}),
    ("privacy", "seed"): (7, {}),
    ("client_level", "estimator"): ("clipped", CLIENT),
    ("client_level", "weight_cap"): (30.0, CLIENT),
    ("client_level", "min_weight"): (0.5, CLIENT | {"client_level": {"estimator": "clipped"}}),
    ("run", "seed"): (1, {}),
    ("run", "engine"): ("reference", {}),
    ("run", "workers"): (2, {}),
    ("run", "checkpoint_every"): (3, {}),
    ("run", "ledger"): ("elsewhere.db", {}),
}
"""For each field that is spread: another value, and settings under which it matters."""
IDLE = {
    *(("train", name) for name in ("steps", "epochs")),
    *(("privacy", name) for name in ("budget", "budget_delta", "accountant")),
    *(("run", name) for name in ("engine", "workers", "checkpoint_every", "ledger")),
}
"""Fields that change nothing here: those of `run_many`'s surroundings, and others at the values above."""


def runs_that_differ(section: str, name: str) -> list[Federation]:
    value, under = DIFFER[section, name]
    under = {**under, "train": {"rounds": 3, **under.get("train", {})}}
    base = toy_settings(run={"engine": "reference"}).replace(**under)
    also = {"epochs": 0.2} if name == "steps" else {}
    found = []
    for settings in (base, base.replace(**{section: {name: value, **also}})):
        # Two runs of one seed share nothing. Here they share their numbers, so that only the field can tell them apart.
        found.append(with_randomness(prepare(settings, DATA), SeededRandomness(get_private_seed(settings))))
    return found


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}, another"
        case tuple():
            return (*value, 7)
        case None:
            return 1.0
        case dict():
            return {**value, "another": 1.0}
    raise AssertionError(f"think of another value than {value!r}")


@pytest.mark.parametrize(("section", "name"), FIELDS)
@pytest.mark.every(3)
def test_runs_that_differ_in_a_field_have_their_own_value_or_are_not_stacked(section: str, name: str) -> None:
    if name not in STACKABLE_FIELDS.get(section, ()):
        settings = toy_settings()
        changed = settings.replace(**{section: {name: other(getattr(getattr(settings, section), name))}})
        assert make_stack_key(settings) != make_stack_key(changed)
        if name not in PROBLEM_FIELDS.get(section, ()):
            one = prepare(settings, DATA)
            assert group_stackable_runs([one, one, dataclasses.replace(one, settings=changed)]) == [[0, 1], [2]]
        return
    feds = runs_that_differ(section, name)
    assert group_stackable_runs(feds) == [[0, 1]]
    models = list(run_many(feds))[-1].averaged
    assert models is not None
    alone = [play(federation)[-1].averaged for federation in feds]
    for found, wanted in zip(models, alone, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    # So that the first run's value, given to the second, would have been noticed.
    first, second = alone
    assert torch.allclose(first, second, rtol=1e-3, atol=1e-5) == ((section, name) in IDLE)


def test_only_fields_that_exist_are_listed() -> None:
    for table in (STACKABLE_FIELDS, PROBLEM_FIELDS):
        for section, names in table.items():
            owner = getattr(Settings(), section) if section else Settings()
            assert names <= {f.name for f in dataclasses.fields(owner)}
    assert not any(names & STACKABLE_FIELDS.get(section, frozenset()) for section, names in PROBLEM_FIELDS.items())


@pytest.mark.parametrize("section", SECTIONS)
def test_a_field_that_nobody_thought_of_keeps_runs_apart(section: str) -> None:
    one = prepare(toy_settings(), DATA)
    own = getattr(one.settings, section)
    longer = dataclasses.make_dataclass(
        "Longer", [("not_thought_of", float, dataclasses.field(default=0.5))], bases=(type(own),), frozen=True
    )

    def with_value(value: float) -> Federation:
        part = longer(**vars(own), not_thought_of=value)
        return dataclasses.replace(one, settings=dataclasses.replace(one.settings, **{section: part}))

    feds = [with_value(value) for value in (0.5, 0.9, 0.5)]
    assert group_stackable_runs(feds) == [[0, 2], [1]]
    assert make_stack_key(feds[0].settings) == make_stack_key(feds[2].settings) != make_stack_key(feds[1].settings)


def test_a_section_that_nobody_thought_of_keeps_runs_apart() -> None:
    one = prepare(toy_settings(), DATA)
    longer = dataclasses.make_dataclass("Longer", [("kind", str, "a")], bases=(Settings,), frozen=True)
    feds = [dataclasses.replace(one, settings=longer(**vars(one.settings), kind=kind)) for kind in ("a", "b", "a")]
    assert group_stackable_runs(feds) == [[0, 2], [1]]


def test_a_server_optimiser_never_reads_the_first_runs_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_lr(aggregate: torch.Tensor, state: Any, train: Train) -> tuple[torch.Tensor, Any]:
        return train.lr * aggregate, state

    def by_schedule(aggregate: torch.Tensor, state: Any, train: Train) -> tuple[torch.Tensor, Any]:
        return (2.0 if train.schedule == "linear" else 1.0) * aggregate, state

    feds = [prepare(toy_settings(train={"lr": lr, "rounds": 2}), DATA) for lr in (0.5, 0.1)]
    assert group_stackable_runs(feds) == [[0, 1]]
    monkeypatch.setattr(SERVERS, "find", lambda name: ServerOptimiser(lambda d: {}, by_lr))
    models = list(run_many(feds))[-1].averaged
    assert models is not None
    for found, federation in zip(models, feds, strict=True):
        torch.testing.assert_close(found, play(federation)[-1].averaged, rtol=1e-3, atol=1e-5)
    monkeypatch.setattr(SERVERS, "find", lambda name: ServerOptimiser(lambda d: {}, by_schedule))
    with pytest.raises(AttributeError, match="schedule"):  # no number, so there is none for each run
        list(run_many(feds))
    train = Train()
    assert set(get_server_numbers(train)) | set(get_shared_train_fields(train)) < {
        f.name for f in dataclasses.fields(train)
    }
    assert not set(get_server_numbers(train)) & set(get_shared_train_fields(train))
    assert not hasattr(SimpleNamespace(**get_shared_train_fields(train)), "lr")


def test_models_that_hold_other_numbers_are_not_stacked() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.inner, self.scale = torch.nn.Linear(6, 3), scale  # repr does not show the scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.inner(x)

    feds = [prepare(toy_settings(), DATA, Scaled(scale)) for scale in (1.0, 2.0, 1.0)]
    assert group_stackable_runs(feds) == [[0, 2], [1]]


def test_what_cannot_be_stacked_is_said_from_settings_alone() -> None:
    assert can_stack_runs(toy_settings())
    assert not can_stack_runs(toy_settings(privacy={"unit": "person"}))
    assert can_stack_runs(toy_settings(privacy={"unit": "client"}))
    assert not can_stack_runs(toy_settings(privacy={"unit": "client"}, clip={"rule": "median"}))
    assert not can_stack_runs(toy_settings(privacy={"randomness": "secure"}))
    assert not can_stack_runs(toy_settings(privacy={"randomness": "secure", "arithmetic": "fast"}))
    assert not can_stack_runs(toy_settings(privacy={"arithmetic": "proven"}))
    assert can_stack_runs(toy_settings(privacy={"arithmetic": "fast"}))


@pytest.mark.parametrize("changes", [{"randomness": "secure"}, {"arithmetic": "proven"}])
def test_real_use_and_proven_arithmetic_go_through_their_own_engine(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("these runs were not to be stacked")

    monkeypatch.setattr(runs, "BatchedServer", never)
    privacy: Changes = {"train": {"rounds": 2}, "privacy": changes}
    assert len(list(run_many([prepare(toy_settings(**privacy), DATA) for _ in range(2)]))) == 2
    with pytest.raises(AssertionError, match="not to be stacked"):
        next(run_many([prepare(toy_settings(), DATA)]))


def test_what_is_held_out_differs_by_seed() -> None:
    def key(seed: int, validation: float) -> Any:
        return make_stack_key(toy_settings(run={"seed": seed}, data={"validation": validation}))

    assert key(0, 0.0) == key(1, 0.0)
    assert key(0, 0.1) == key(0, 0.1) != key(1, 0.1)
