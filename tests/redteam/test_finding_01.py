"""Finding 1: two seeded runs shared their noise and samples, because stream keys held no run id.

At 243f1c8 the streams were named by (purpose, round, client, step) and the seed alone. Two runs that differ in C only
had the same noise: it cancelled in the difference of the two releases. Now every private stream is keyed by a digest of
all that decides the releases.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from fulcrum.data import from_arrays
from fulcrum.errors import RunError
from fulcrum.rng import SecureRandomness, SeededRandomness
from fulcrum.runs import prepare
from fulcrum.training.loop import federate
from fulcrum.training.problem import identify_releases
from support.federations import toy_data, toy_settings

KEYS = (("sample", 0, 0, 0), ("noise", 0, 0, 0), ("noise-extra", 0, 0, 0), ("cohort", 0), ("noise", "central", 0))


def words_of(**sections: dict[str, Any]) -> list[tuple[int, ...]]:
    source = prepare(toy_settings(**sections), toy_data()).problem.randomness
    return [tuple(source.words(key, 4).tolist()) for key in KEYS]  # type: ignore[attr-defined]


CHANGES: list[dict[str, dict[str, Any]]] = [
    {"clip": {"C0": 2.0}},
    {"clip": {"rule": "quantile"}},
    {"privacy": {"sigma": 1.25}},
    {"privacy": {"delta": 1e-6, "sigma": 1.0}},
    {"train": {"rounds": 9}},
    {"train": {"lr": 0.123}},
    {"train": {"rate": 0.21}},
    {"train": {"server_lr": 0.5}},
    {"train": {"weight_decay": 0.01}},
    {"privacy": {"accountant": "pld", "sigma": 1.0}},
    {"data": {"parties": 2}},
    {"data": {"partition": "quantity"}},
    {"run": {"seed": 1}},
    {"privacy": {"seed": 7, "sigma": 1.0}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_runs_that_differ_in_anything_that_decides_a_release_share_no_stream(change: dict[str, Any]) -> None:
    base, other = words_of(privacy={"sigma": 1.0}), words_of(**{"privacy": {"sigma": 1.0}, **change})
    assert not set(base) & set(other)


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"engine": "reference"}},
        {"run": {"workers": 1}},
        {"run": {"checkpoint_every": 3}},
        {"run": {"ledger": "x"}},
    ],
    ids=str,
)
def test_engine_and_paths_change_nothing(change: dict[str, Any]) -> None:
    assert words_of(privacy={"sigma": 1.0}) == words_of(privacy={"sigma": 1.0}, **change)


def test_other_records_have_other_streams() -> None:
    settings, data = toy_settings(privacy={"sigma": 1.0}), toy_data()
    changed = data.x.clone()
    changed[0, 0] += 1
    other = from_arrays(changed, data.y, data.x_test, data.y_test, name=data.name, classes=data.classes)
    ids = [prepare(settings, one).problem.randomness.run for one in (data, data, other)]  # type: ignore[attr-defined]
    assert ids[0] == ids[1] != ids[2]


def test_the_difference_of_two_runs_hides_no_noise_any_more() -> None:
    """The attack itself: releases at C and 2 C. With common noise, twice the first minus the second has none left."""
    data = toy_data()
    d, releases = 0, []
    for C in (1.0, 2.0):
        problem = prepare(toy_settings(clip={"C0": C, "rule": "fixed"}, privacy={"sigma": 4.0}), data).problem
        d = problem.layout.dim
        releases.append(C * problem.randomness.normal(("noise", 0, 0, 0), d))
    assert float((2 * releases[0] - releases[1]).std()) > 1.0
    old = [C * SeededRandomness(0).normal(("noise", 0, 0, 0), d) for C in (1.0, 2.0)]  # keys of 243f1c8: no run id
    assert float((2 * old[0] - old[1]).std()) == 0.0


def test_the_id_is_keyed_by_the_private_seed_and_the_private_seed_can_be_set_apart() -> None:
    settings, data = toy_settings(privacy={"sigma": 1.0}), toy_data()
    problem = prepare(settings, data).problem
    ids = {
        identify_releases(
            settings.replace(privacy={"seed": seed}), data, problem.partition, problem.model, problem.layout
        )
        for seed in (None, 1, 2)
    }
    assert len(ids) == 3
    apart = [prepare(settings.replace(privacy={"seed": 3}, run={"seed": public}), data).problem for public in (0, 1)]
    weights = [torch.cat([p.detach().flatten() for p in problem.model.parameters()]) for problem in apart]
    assert not torch.equal(weights[0], weights[1])  # the public seed makes the weights, the private one does not
    same = prepare(settings.replace(privacy={"seed": 9}), data).problem
    assert torch.equal(weights[0], torch.cat([p.detach().flatten() for p in same.model.parameters()]))


def test_a_federation_whose_settings_are_replaced_does_not_train_with_the_old_noise() -> None:
    federation = prepare(toy_settings(privacy={"sigma": 1.0}), toy_data())
    changed = dataclasses.replace(federation, settings=federation.settings.replace(clip={"C0": 2.0}))
    with pytest.raises(RunError, match="prepare it again"):
        next(federate(changed))
    assert next(federate(federation))  # the check is about the change


def test_secure_randomness_serves_one_run_in_one_process() -> None:
    source = SecureRandomness()
    source.claim("first")
    source.claim("first")  # a resumed generator of the same run
    with pytest.raises(RunError, match="repeat its noise"):
        source.claim("second")
    with pytest.raises(RunError, match="never leaves the process"):
        pickle.dumps(source)
    object.__setattr__(source, "_process", -1)  # as after a fork
    for draw in (source.uniform, source.normal):
        with pytest.raises(RunError, match="another process"):
            draw(("noise", 0, 0, 0), 1)
    with pytest.raises(RunError, match="another process"):
        source.locate_stream(("noise", 0, 0, 0))
