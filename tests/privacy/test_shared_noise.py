"""Shared noise under an ideal secure aggregation: one dose on the sum, charged as such, never called more than that."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fulcrum.cli import show
from fulcrum.engines import find_engine
from fulcrum.engines.batched import run_many
from fulcrum.engines.stacked import sampling
from fulcrum.errors import BudgetError, ConfigError
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.statement import statement_to_markdown
from fulcrum.rng import Randomness, SeededRandomness
from fulcrum.runs import execute, prepare
from fulcrum.settings.checks import check_settings
from fulcrum.training.federation import Federation, make_model_facts
from fulcrum.training.round import compute_aggregate_noise, run_round
from fulcrum.training.snapshot import make_first_snapshot
from support.federations import play, toy_data, toy_settings

DATA = toy_data()
SHARED = {"aggregation": "ideal-secagg"}
RATE, LR, C = 0.2, 0.5, 1.5


def federation(engine: str = "reference", seed: int = 0, **changes: Any) -> Federation:
    """Three parties of unequal size, one round of dp-sgd with shared noise unless told otherwise."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"engine": engine, "seed": seed},
        "data": {"partition": "quantity"},
        "clip": {"rule": "fixed", "C0": C},
        "train": {"lr": LR, "rate": RATE, "ema": 0.0},
        "privacy": {"sigma": 1.0, **SHARED},
    }
    merged = {name: {**sections.get(name, {}), **changes.get(name, {})} for name in {**sections, **changes}}
    return prepare(toy_settings(**merged), DATA)


def with_randomness(made: Federation, randomness: Randomness) -> Federation:
    """The federation with another source of samples and noise."""
    problem = dataclasses.replace(made.problem, randomness=randomness)
    return dataclasses.replace(made, problem=problem, engine=find_engine(made.settings.run.engine, problem))


def update(made: Federation) -> torch.Tensor:
    """The first round's released aggregate [d]."""
    before = make_first_snapshot(made)
    return run_round(made, before, range(made.plan.parties), 0)[0].params - before.params


# --- the noise on the sum ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["reference", "parallel", "stacked"])
def test_the_parties_parts_make_exactly_one_dose_on_the_aggregate(engine: str) -> None:
    sigma = 3.0
    randomness = SeededRandomness(5)  # two runs of one seed share nothing; here they must share samples and draws
    loud, quiet = (
        with_randomness(federation(engine, privacy={"sigma": factor * sigma}), randomness) for factor in (2, 1)
    )
    found = update(loud) - update(quiet)  # the same samples and draws: what is left is the noise of one sigma
    plan, d = quiet.plan, quiet.problem.layout.dim
    draws = torch.stack([randomness.normal(("noise", 0, k, 0), d).float() for k in range(3)])
    whole = sum(plan.units(k) for k in range(3))
    part = LR * sigma * C / (RATE * whole) / math.sqrt(3)  # of each party: three independent ones make sigma C / (q n)
    torch.testing.assert_close(found, -part * draws.sum(dim=0), rtol=1e-4, atol=1e-5)
    for wrong in (1.0, 3.0):  # parts as large as a dose; a part of a part
        assert not torch.allclose(found, -part * math.sqrt(3) / wrong * draws.sum(dim=0), rtol=1e-2)


def on_host(made: Federation) -> torch.Tensor:
    return update(made)


def on_device(made: Federation) -> torch.Tensor:
    """As on a GPU, which makes the parties' noise itself and adds it up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "can_draw_on_device", lambda device, sources: True)
        last = list(run_many([made]))[-1].averaged
    assert last is not None
    return last[0] - made.problem.layout.flatten(made.problem.model)


def spread(aggregation: str, by: Any) -> float:
    """Standard deviation of the aggregate's noise over seeds, in units of lr sigma C / (q n)."""
    sigma, squares = 200.0, []
    for seed in range(60):
        made = federation(seed=seed, train={"rounds": 1}, privacy={"sigma": sigma, "aggregation": aggregation})
        whole = sum(made.plan.units(k) for k in range(3))
        squares.append(float((by(made) / (LR * sigma * C / (RATE * whole))).square().mean()))
    return math.sqrt(sum(squares) / len(squares))


@pytest.mark.parametrize("by", [on_host, on_device])
def test_the_aggregates_noise_has_the_promised_standard_deviation(by: Any) -> None:
    assert spread("ideal-secagg", by) == pytest.approx(1.0, abs=0.06)  # 60 x 21 draws: 2% of standard error
    assert spread("plain", by) == pytest.approx(math.sqrt(3), abs=0.1)  # every party's own dose: rejected above


def test_rules_and_plans_are_told_the_smaller_noise() -> None:
    made, plain = federation(), federation(privacy={"aggregation": "plain"})
    whole = sum(made.plan.units(k) for k in range(3))
    expected = 1.0 / (RATE * whole)
    assert made.plan.compute_noise_to_signal(21).direction == pytest.approx(expected)
    assert make_model_facts(made).noise == pytest.approx(expected)
    tasks = [made.plan.assignment(k, 0, LR) for k in range(3)]
    weights = torch.tensor([made.plan.units(k) / whole for k in range(3)])
    assert compute_aggregate_noise(
        tasks, [made.plan.compute_step_noise(k) for k in range(3)], weights
    ) == pytest.approx(expected)
    assert plain.plan.compute_noise_to_signal(21).direction == pytest.approx(expected * math.sqrt(3))


@pytest.mark.parametrize("rule", ["fixed", "moo"])
@pytest.mark.parametrize("engine", ["parallel", "stacked", "many"])
def test_every_engine_equals_the_reference(engine: str, rule: str) -> None:
    reference = play(federation(clip={"rule": rule}))[-1].params
    if engine == "many":
        plain = federation(clip={"rule": rule}, privacy={"aggregation": "plain"})
        rounds = list(run_many([federation(clip={"rule": rule}), plain]))
        assert rounds[-1].averaged is not None
        found, other = rounds[-1].averaged
        assert not torch.allclose(other, reference, rtol=1e-2)  # in one stack with a run that does not share
    else:
        found = play(federation(engine, clip={"rule": rule}))[-1].params
    torch.testing.assert_close(found, reference, rtol=1e-3, atol=1e-5)


# --- what it costs, and when it must stop -------------------------------------------------------------


def test_every_party_is_charged_what_the_sum_costs(tmp_path: Path) -> None:
    made = federation(train={"rounds": 3})
    with Ledger.open(tmp_path / "ledger") as ledger:
        execute_into(made, ledger)
        spends = ledger.get_spends("r")
        assert {spend.events for spend in spends.values()} == {(Gaussian(RATE, 1.0, 3),)}  # sigma, not sigma / sqrt(3)
    same = federation(privacy={"sigma": None, "epsilon": 2.0})
    plain = federation(privacy={"sigma": None, "epsilon": 2.0, "aggregation": "plain"})
    assert same.plan.groups[0].sigma == plain.plan.groups[0].sigma  # the gain is in how much of it adds up


def execute_into(made: Federation, ledger: Ledger) -> int:
    from fulcrum.training.loop import federate

    return len(list(federate(made, ledger, "r")))


def test_epsilons_against_different_adversaries_do_not_share_an_account(tmp_path: Path) -> None:
    play(federation(privacy={"aggregation": "plain"}), tmp_path / "ledger")
    with pytest.raises(ConfigError, match="population"):
        play(federation(), tmp_path / "ledger", run="another")


def test_the_run_ends_when_one_party_cannot_pay(tmp_path: Path) -> None:
    made = federation()
    one = made.plan.group(0).epsilon(2, made.plan.delta, made.plan.accountant)
    with Ledger.open(tmp_path / "ledger") as ledger:
        ledger.enroll("party-0", **{**made.plan.terms(0), "budget": one})
        assert execute_into(made, ledger) == 2  # the others have budget, but not its part of the noise
    assert len(play(federation(privacy={"aggregation": "plain"}))) == 6


def test_a_sum_that_lacks_somebodys_noise_is_not_made() -> None:
    made = federation()
    with pytest.raises(BudgetError, match="2 of 3 parties"):
        run_round(made, make_first_snapshot(made), [0, 2], 0)


REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "privacy.unit": {"privacy": {"unit": "person"}},
    "train.steps": {"train": {"steps": 2}},
    "train.weights": {"train": {"weights": "uniform"}},
    "train.participation": {"train": {"participation": 0.5}},
    "privacy.max_participations": {"privacy": {"max_participations": 2}},
    "privacy.budgets": {"privacy": {"sigma": None, "epsilon": 2.0, "budgets": {"party-0": 1.0}}},
    "privacy.randomness": {"privacy": {"randomness": "secure"}},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_one_dose_does_not_cover_is_refused_by_name(field: str) -> None:
    changes = REFUSED[field]
    with pytest.raises(ConfigError, match=rf"^{field} = .*privacy\.aggregation = 'ideal-secagg'"):
        check_settings(toy_settings(**{**changes, "privacy": {**changes.get("privacy", {}), **SHARED}}))
    check_settings(toy_settings(**changes))


@pytest.mark.parametrize("rule", ["none", "moo-client", "moo-scalar", "moo-paper", "quantile", "oso", "wav"])
def test_rules_whose_releases_are_more_than_one_common_sum_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"clip\.rule = '{rule}'"):
        federation(clip={"rule": rule})


# --- what is said about it --------------------------------------------------------------------------


def test_the_assumption_stands_wherever_an_epsilon_does(tmp_path: Path) -> None:
    result = execute(federation(train={"rounds": 2}), tmp_path / "run")
    page = (tmp_path / "run" / "PRIVACY.md").read_text(encoding="utf-8")
    for words in (
        "SIMULATED SECURE AGGREGATION", "UNDER AN ASSUMPTION ONLY", "NOTHING BUT THE WEIGHTED SUM", "NOT IMPLEMENTED",
        "colludes", "under-noised", "sums (2)", "sigma of the sum", "seen in sums only (assumed)",
    ):  # fmt: skip
        assert words in page, words
    assert "sees every update of every party" not in page
    assert result.summary["aggregation"] == "ideal-secagg"
    assert "ideal secure aggregation" in show.describe_guarantee(result.summary)
    assert any("NOT private" in warning for warning in result.summary["warnings"])
    plain = execute(federation(privacy={"aggregation": "plain"}, train={"rounds": 2}), tmp_path / "plain")
    other = (tmp_path / "plain" / "PRIVACY.md").read_text(encoding="utf-8")
    assert "secure aggregation" not in other.lower()
    assert "secure aggregation" not in show.describe_guarantee(plain.summary)


def test_a_statement_without_the_assumption_would_be_noticed() -> None:
    from fulcrum.runs.active_run import ActiveRun, write_privacy_statement

    made = federation()
    with Ledger.open(":memory:") as ledger:
        facts = write_privacy_statement(ActiveRun(made, None, ledger, "r"), 0, finished=True)
    assert (facts["guarantee"], facts["aggregation"]) == ("assumed", "ideal-secagg")
    assert "WARNING" in statement_to_markdown(facts)
    assert "WARNING: SIMULATED" not in statement_to_markdown({**facts, "guarantee": "yes"})


def test_parties_across_machines_are_not_told_to_share(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="parties sign with cryptography")
    from fulcrum.flower.prepare import make_served_settings

    for changes in ({"privacy": SHARED}, {"data": {"features": "scattering"}}):
        with pytest.raises(ConfigError, match=r"^(privacy\.aggregation|data\.features)"):
            make_served_settings(toy_settings(**changes), 3, simulation=True)
