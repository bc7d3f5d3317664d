"""How a round went, from released values alone: what observers, metrics.jsonl and the report show of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from fulcrum.clipping import RULES, ModelFacts
from fulcrum.clipping.fixed import FIXED
from fulcrum.clipping.moo import MOO, MOO_C, compute_alignment
from fulcrum.runs import execute, prepare
from fulcrum.runs.split import describe_split
from fulcrum.settings.files import parse_settings
from fulcrum.settings.schema import Clip
from fulcrum.training.round import describe_course
from fulcrum.types import Released

FAST = {"data.source": "digits", "data.parties": 3, "train.rounds": 3, "privacy.epsilon": 4.0}


def make_released(aggregate: torch.Tensor, noise: float = 0.5) -> Released:
    return Released(aggregate, torch.zeros(1), lr=0.5, steps=2.0, round=1, rounds=10, noise=noise)


def test_lengths_of_update_noise_and_move() -> None:
    state = FIXED.init(Clip(rule="fixed", C0=2.0), ModelFacts(4, (4,)))
    found = describe_course(
        FIXED, state, make_released(torch.tensor([3.0, 4.0, 0.0, 0.0])), torch.tensor([1.0, 0, 0, 0])
    )
    # Noise per coordinate 0.5 in units of eta N C = 0.5 * 2 * 2, in four coordinates.
    assert found == {"update": pytest.approx(5.0), "move": pytest.approx(1.0), "noise": pytest.approx(0.5 * 2.0 * 2.0)}
    assert set(describe_course(FIXED, None, make_released(torch.ones(4)), torch.ones(4))) == {"update", "move"}


def test_the_noise_is_as_long_as_said() -> None:
    state = FIXED.init(Clip(rule="fixed", C0=1.0), ModelFacts(20_000, (20_000,)))
    noise = 0.3 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))  # eta N C = 1
    found = describe_course(FIXED, state, make_released(noise, 0.3), noise)
    assert found["update"] / found["noise"] == pytest.approx(1.0, rel=0.05)
    wrong = describe_course(FIXED, state, make_released(1.2 * noise, 0.3), noise)
    assert wrong["update"] / wrong["noise"] != pytest.approx(1.0, rel=0.05)


def test_values_that_are_not_finite_are_left_out() -> None:
    state = FIXED.init(Clip(rule="fixed", C0=1.0), ModelFacts(2, (2,)))
    assert "update" not in describe_course(FIXED, state, make_released(torch.tensor([math.nan, 1.0])), torch.ones(2))


@pytest.mark.parametrize("rule", [MOO, MOO_C], ids=lambda rule: rule.name)
def test_moo_shows_the_two_parts_of_its_objective(rule) -> None:
    state = rule.init(Clip(rule=rule.name, C0=2.0, kappa=0.25), ModelFacts(3, (3,)))
    state = {**state, "memory": torch.tensor([1.0, 0.0, 0.0])}
    released = make_released(torch.tensor([0.5, 0.1, 0.0]))
    found = rule.course(state, released)
    assert float(found["penalty"]) == pytest.approx(0.25 * float(torch.linalg.vector_norm(state["C"])))
    assert torch.equal(found["alignment"], compute_alignment(state, released))
    # The signs of both decide where the rule goes.
    before, after = (
        (state["step"], rule.adapt(state, released)["step"])
        if rule is MOO
        else (torch.linalg.vector_norm(state["C"]), torch.linalg.vector_norm(rule.adapt(state, released)["C"]))
    )
    assert (float(after) > float(before)) == (float(found["alignment"]) > float(found["penalty"]))


def test_every_rule_gives_numbers_or_nothing() -> None:
    shape = ModelFacts(6, (4, 2))
    for name in RULES:
        rule = RULES[name]
        state = rule.init(dataclasses.replace(Clip(), rule=name), shape)
        released = dataclasses.replace(make_released(torch.ones(6)), extra=torch.zeros(40))
        assert all(value.ndim == 0 for value in rule.course(state, released).values()), name


def test_a_run_writes_its_course_and_its_split(tmp_path: Path) -> None:
    federation = prepare(parse_settings({}, {**FAST, "data.partition": "dirichlet"}, "moo"))
    seen = []
    execute(federation, tmp_path / "run", on_round=lambda result: seen.append(result.course))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [set(line["course"]) for line in lines] == [{"update", "move", "noise", "alignment", "penalty", "step"}] * 3
    assert lines[0]["course"]["step"] == pytest.approx(seen[0]["step"], rel=1e-5)
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    assert split["parties"] == 3
    assert [sum(row) for row in split["labels"]] == split["units"] == federation.problem.partition.sizes.tolist()


def test_labels_of_private_data_are_never_written() -> None:
    federation = prepare(parse_settings({}, FAST, "moo"))
    assert "labels" in describe_split(federation)
    problem = federation.problem
    private = dataclasses.replace(problem, dataset=dataclasses.replace(problem.dataset, public=False))
    found = describe_split(dataclasses.replace(federation, problem=private))
    assert set(found) == {"parties", "public", "names", "units"}
    assert found["public"] is False
