"""The plan: what it promises before training is what the ledger charges during it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fulcrum.clipping import ClipRule, find_rule
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend, compute_epsilon
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.privacy.ledger import Ledger, LedgerAccount
from fulcrum.privacy.plan import Plan, compute_rounds_for_budget, make_plan, party_group
from fulcrum.settings.schema import Settings
from fulcrum.types import Assignment

MOO = find_rule("moo")
UNITS = [300, 40, 500]


def settings_of(**sections: dict[str, Any]) -> Settings:
    base = Settings().replace(train={"rounds": 20}, privacy={"epsilon": 2.0})
    return base.replace(**sections)


# --- calibration --------------------------------------------------------------------------------


def test_each_party_gets_the_sigma_of_its_own_budget():
    plan = make_plan(settings_of(privacy={"budgets": {"b": 0.5}}), ["a", "b", "c"], UNITS, MOO)
    assert len(plan.groups) == 2
    for k, budget in enumerate((2.0, 0.5, 2.0)):
        party = plan.party(k)
        assert party.budget == budget
        assert party.epsilon_pld < party.epsilon_rdp <= budget
        assert party.epsilon_rdp == pytest.approx(budget, rel=1e-3)
        assert party.epsilon_rdp == compute_epsilon([Gaussian(0.05, party.sigma, 20)], 1e-5)
    assert plan.party(1).sigma > plan.party(0).sigma == plan.party(2).sigma
    assert plan.party(1).batch == pytest.approx(2.0)
    assert plan.assignment(1, 3, 0.7) == Assignment(1, 0.05, plan.party(1).sigma, 1, 0.7)


def test_steps_and_epochs_are_all_paid_for():
    for train, steps in (({"steps": 4}, 4), ({"steps": 0, "epochs": 0.5}, 10)):
        plan = make_plan(settings_of(train=train), 1, [300], MOO)
        assert plan.events(0) == (Gaussian(0.05, plan.party(0).sigma, steps),)
        assert plan.party(0).epsilon_rdp == compute_epsilon([Gaussian(0.05, plan.party(0).sigma, 20 * steps)], 1e-5)


def overspends(sigma: float, rounds_taken: int) -> bool:
    """Whether a party that took part in that many rounds passed epsilon = 2."""
    return compute_epsilon([Gaussian(0.05, sigma)] * rounds_taken, 1e-5) > 2.0


def test_client_sampling_gives_no_amplification():
    full, sampled = (make_plan(settings_of(train={"participation": p}), 3, UNITS, MOO).party(0) for p in (1.0, 0.1))
    assert sampled.sigma == full.sigma
    # A party may be drawn in every round. Had 0.1 multiplied its rate, it would pass its budget then:
    amplified = make_plan(settings_of(train={"rate": 0.05 * 0.1}), 3, UNITS, MOO).party(0)
    assert not overspends(sampled.sigma, 20)
    assert overspends(amplified.sigma, 20)


def test_a_public_cap_on_participations_is_what_is_paid_for():
    plan = make_plan(settings_of(privacy={"max_participations": 5}), 3, UNITS, MOO)
    assert plan.participations(0) == 5
    sigma = plan.party(0).sigma
    assert not overspends(sigma, 5)
    assert overspends(sigma, 6)
    assert plan.compute_epsilon_at(20, 0) == plan.compute_epsilon_at(5, 0) > plan.compute_epsilon_at(4, 0)
    assert make_plan(settings_of(privacy={"max_participations": 99}), 3, UNITS, MOO).participations(0) == 20


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_ledger_grants_exactly_what_was_planned(accountant: str):
    plan = make_plan(settings_of(privacy={"accountant": accountant}), 2, [300, 400], MOO)
    with Ledger.open(":memory:") as ledger:
        ledger.enroll_parties(LedgerAccount(plan.name(k), **plan.terms(k)) for k in range(2))
        ledger.register_plans("run", {plan.name(k): plan.make_run_plan(k) for k in range(2)})
        wanted = {plan.name(k): plan.events(k) for k in range(2)}
        granted = [all(ledger.reserve("run", t, wanted).values()) for t in range(21)]
        assert granted == [True] * 20 + [False]
        assert ledger.epsilon("party-0") == pytest.approx(plan.compute_epsilon_at(20, 0))


def test_with_sigma_epsilon_is_reported_and_nothing_is_limited():
    plan = make_plan(settings_of(privacy={"epsilon": None, "sigma": 1.3}), 3, UNITS, MOO)
    assert plan.party(0).sigma == 1.3
    assert plan.party(0).budget is None
    assert plan.party(0).epsilon_rdp == compute_epsilon([Gaussian(0.05, 1.3, 20)], 1e-5)
    assert plan.terms(0)["budget"] is None


def test_a_private_rule_must_be_told_how_private():
    with pytest.raises(ConfigError, match=r"--epsilon .* or --sigma"):
        make_plan(settings_of(privacy={"epsilon": None}), 3, UNITS, MOO)


def test_a_rule_without_privacy_promises_none():
    plan = make_plan(settings_of(), 3, UNITS, find_rule("none"))
    party = plan.party(0)
    assert (party.sigma, party.epsilon_rdp, party.epsilon_pld, party.budget) == (0.0, math.inf, math.inf, None)
    assert plan.events(0) == (Unprotected(1),)
    assert plan.compute_epsilon_at(0, 0) == 0
    assert "no privacy guarantee" in plan.warnings[0]
    text = json.dumps(plan.to_json(), allow_nan=False)
    assert json.loads(text)["epsilon"] == "inf"


def test_what_was_spent_before_counts_against_the_same_budget():
    past = {
        "party-1": Spend.empty().add_events([Gaussian(0.05, 1.5, 20)]),
        "stranger": Spend.empty().add_events([Unprotected()]),
    }
    fresh = make_plan(settings_of(), 3, UNITS, MOO)
    plan = make_plan(settings_of(), 3, UNITS, MOO, past)
    assert plan.party(0).sigma == fresh.party(0).sigma
    assert plan.party(1).sigma > fresh.party(1).sigma
    assert plan.compute_epsilon_at(0, 1) == past["party-1"].epsilon(1e-5) > 0
    together = past["party-1"].add_events(plan.events(1), 20).epsilon(1e-5)
    assert plan.party(1).epsilon_rdp == together <= 2.0
    with pytest.raises(ConfigError, match=r"party-1 has spent epsilon = .* of its budget 0.5 already"):
        make_plan(settings_of(privacy={"epsilon": 0.5}), 3, UNITS, MOO, past)
    none_left = {f"party-{k}": past["party-1"] for k in range(3)}
    assert len(make_plan(settings_of(), 3, UNITS, MOO, none_left).groups) == 1  # no group without members


# --- names, sizes, many parties -----------------------------------------------------------------


def test_an_unknown_party_in_budgets_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"'hospital-nort', which is not there; did you mean 'hospital-north'\?"):
        make_plan(settings_of(privacy={"budgets": {"hospital-nort": 1.0}}), ["hospital-north", "clinic"], [9, 9], MOO)
    with pytest.raises(ConfigError, match="the parties are 'party-0' to 'party-2'"):
        make_plan(settings_of(privacy={"budgets": {"zzz": 1.0}}), 3, UNITS, MOO)


def test_names_may_be_given_counted_or_asked_for():
    @dataclass(frozen=True)
    class Split:
        parties: int = 3

        def name(self, k: int) -> str:
            return f"site {k}"

    assert [make_plan(settings_of(), names, UNITS, MOO).name(2) for names in (3, ["x", "y", "z"], Split())] == [
        "party-2",
        "z",
        "site 2",
    ]
    with pytest.raises(ConfigError, match="same name"):
        make_plan(settings_of(), ["x", "x", "y"], UNITS, MOO)


@pytest.mark.parametrize("units", [[300, 40], [300, 40, 0], [300, 40, 1.5], torch.tensor([[1, 2, 3]])])
def test_impossible_sizes_are_named(units: Any):
    with pytest.raises(ConfigError, match="units"):
        make_plan(settings_of(), 3, units, MOO)


def test_a_million_parties_are_calibrated_once_a_group(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def counted(*arguments: Any) -> float:
        calls.append(arguments)
        return 1.0 + len(calls)

    monkeypatch.setattr(party_group, "calibrate_sigma", counted)
    units = torch.full((1_000_000,), 60)
    plan = make_plan(settings_of(privacy={"budgets": {"party-7": 1.0, "party-999999": 1.0}}), 1_000_000, units, MOO)
    assert len(calls) == len(plan.groups) == 2
    assert plan.group(7) is plan.group(999_999)
    assert plan.party(999_999).sigma != plan.party(0).sigma
    assert (plan.parties, plan.units(500_000)) == (1_000_000, 60)
    assert len(plan.to_json()["parties"]) == 1000


def test_the_ledger_is_told_which_data_a_party_holds():
    base = make_plan(settings_of(), 3, UNITS, MOO).terms(0)["population"]
    assert base == make_plan(settings_of(train={"lr": 3.0}), 3, UNITS, MOO).terms(0)["population"]
    others = [
        make_plan(settings_of(run={"seed": 1}), 3, UNITS, MOO),  # another seed deals the records out anew
        make_plan(settings_of(data={"alpha": 0.1}), 3, UNITS, MOO),
        make_plan(settings_of(data={"source": "mnist"}), 3, UNITS, MOO),
        make_plan(settings_of(), 3, [301, 40, 500], MOO),
    ]
    assert all(base != other.terms(0)["population"] for other in others)
    given = [make_plan(settings_of(data={"partition": "given"}, run={"seed": s}), 3, UNITS, MOO) for s in (0, 1)]
    assert given[0].terms(0) == given[1].terms(0)
    assert make_plan(settings_of(), 3, UNITS, MOO, population="ward 5").terms(0)["population"].startswith("ward 5")


# --- noise --------------------------------------------------------------------------------------


def simulated(plan: Plan, weights: np.ndarray, dim: int, taking_part: float) -> tuple[float, float]:
    """Noise of one step of the aggregate by drawing it: norm of the vector, spread along one direction."""
    random = np.random.default_rng(3)
    norms, along = [], []
    for _ in range(400):
        chosen = np.flatnonzero(random.random(plan.parties) < taking_part)
        if not len(chosen):
            continue
        total = np.zeros(dim)
        for k in chosen:
            noise = random.normal(0, plan.party(int(k)).sigma, dim) / plan.party(int(k)).batch
            total += weights[k] / weights[chosen].sum() * noise
        norms.append(np.linalg.norm(total))
        along.append(total[0])
    return float(np.sqrt(np.mean(np.square(norms)))), float(np.std(along))


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_noise_of_the_aggregate_against_drawn_noise(weights: str):
    units = np.array([300, 40, 500, 200, 200, 90])
    settings = settings_of(train={"weights": weights}, privacy={"budgets": {"party-2": 1.0}})
    plan = make_plan(settings, len(units), units, MOO)
    noise = plan.compute_noise_to_signal(25)
    shares = units.astype(float) if weights == "examples" else np.ones(len(units))
    norm, along = simulated(plan, shares, 25, 1.0)
    assert noise.ratio == pytest.approx(norm, rel=0.05)
    assert noise.direction == pytest.approx(along, rel=0.15)
    # the same check rejects the noise of one party, and that of a single trusted curator
    assert plan.compute_noise_to_signal(25, 0).ratio != pytest.approx(norm, rel=0.05)
    assert plan.party(0).sigma * 5 / (0.05 * units.sum()) != pytest.approx(norm, rel=0.05)


def test_noise_with_client_sampling_is_that_of_the_expected_cohort():
    plan = make_plan(settings_of(train={"participation": 0.5}), 40, np.full(40, 100), MOO)
    norm, _ = simulated(plan, np.ones(40), 25, 0.5)
    assert plan.compute_noise_to_signal(25).ratio == pytest.approx(norm, rel=0.05)


def test_noise_of_one_party_follows_the_formula():
    plan = make_plan(settings_of(clip={"C0": 0.5}), 3, UNITS, MOO)
    sigma = plan.party(1).sigma
    noise = plan.compute_noise_to_signal(100, 1)
    assert noise.coordinate == pytest.approx(sigma * 0.5 / (0.05 * 40))
    assert noise.norm == pytest.approx(sigma * 0.5 * 10 / (0.05 * 40))
    assert noise.ratio == pytest.approx(noise.norm / 0.5)
    assert noise.direction == pytest.approx(sigma / (0.05 * 40))
    assert plan.compute_noise_to_signal(100, 1, C=2.0).coordinate == pytest.approx(4 * noise.coordinate)


# --- questions ----------------------------------------------------------------------------------


def test_epsilon_over_the_rounds_grows_to_the_end():
    plan = make_plan(settings_of(), 3, UNITS, MOO)
    curve = plan.curve(0, points=5)
    assert [t for t, _ in curve] == [0, 5, 10, 15, 20]
    costs = [cost for _, cost in curve]
    assert costs[0] == 0
    assert costs == sorted(set(costs))
    assert costs[-1] == plan.party(0).epsilon_rdp
    assert plan.compute_epsilon_at(20, 0, "pld") == plan.party(0).epsilon_pld


def test_rounds_for_a_budget_is_the_inverse_of_the_plan():
    settings = settings_of(train={"steps": 3})
    sigma = make_plan(settings, 1, [300], MOO).party(0).sigma
    assert compute_rounds_for_budget(settings, sigma=sigma) == 20
    assert compute_rounds_for_budget(settings, epsilon=1.0, sigma=sigma) < 20
    half = Spend.empty().add_events([Gaussian(0.05, sigma, 30)])
    assert compute_rounds_for_budget(settings, sigma=sigma, spent=half) == 10
    assert compute_rounds_for_budget(settings, epsilon=0.01, sigma=0.5) == 0
    with pytest.raises(ConfigError, match="give an epsilon as budget and a sigma"):
        compute_rounds_for_budget(settings)
    with pytest.raises(ConfigError, match="epsilon = -1"):
        compute_rounds_for_budget(settings, epsilon=-1, sigma=1.0)


@pytest.mark.parametrize(
    ("change", "rule", "words", "doubtful"),
    [
        # delta is to be small against 1/n: it is the large parties for which it may not be
        ({"privacy": {"delta": 0.01}}, MOO, ["delta = 0.01 is not below 1/n for 1 of 3", "party-0", "0.0033"], [0]),
        ({"train": {"rate": 0.01}}, MOO, ["expected batch is below 1 for 2 of 3"], [1, 2]),
        ({}, replace(MOO, sound=False), ["NOT SOUND", "nominal"], []),
        ({}, MOO, [], []),
    ],
)
def test_warnings_name_what_is_doubtful(change: dict[str, Any], rule: ClipRule, words: list[str], doubtful: list[int]):
    plan = make_plan(settings_of(**change), 3, [300, 40, 50], rule)
    assert len(plan.warnings) == bool(words)
    assert all(word in plan.warnings[0] for word in words)
    assert [k for k in range(3) if plan.party(k).warnings] == doubtful


def test_persons_are_counted_as_persons():
    plan = make_plan(settings_of(privacy={"unit": "person"}), 3, UNITS, MOO)
    assert plan.terms(1)["unit"] == "person"
    assert plan.terms(1)["population"].endswith("40 persons")


@pytest.mark.parametrize("dim", [None, 650])
def test_json_is_valid_and_complete(dim: int | None):
    plan = make_plan(settings_of(privacy={"budgets": {"party-1": 1.0}}), 3, UNITS, MOO)
    facts = json.loads(json.dumps(plan.to_json(dim), allow_nan=False))
    assert facts["epsilon"] == plan.party(0).epsilon_rdp
    assert [group["parties"] for group in facts["groups"]] == [2, 1]
    assert facts["parties"][1]["budget"] == 1.0
    assert facts["curve"][-1] == {"round": 20, "epsilon": facts["epsilon"]}
    assert ("noise" in facts) == (dim is not None)


def test_an_unreachable_epsilon_names_the_party():
    settings = settings_of(privacy={"delta": 1e-12, "budgets": {"b": 1e-4}})
    with pytest.raises(ConfigError, match=r"no sigma fits for b: epsilon = 0.0001 .* cannot be reached"):
        make_plan(settings, ["a", "b", "c"], UNITS, MOO)


# --- the unit client ----------------------------------------------------------------------------


def client_plan(rule: str = "fixed", parties: int = 200, **sections: dict[str, Any]) -> Plan:
    base = settings_of(privacy={"unit": "client"}, train={"participation": 0.1, "weights": "uniform", "steps": 7})
    return make_plan(base.replace(**sections), parties, np.full(parties, 30), find_rule(rule))


def test_client_level_calibrates_one_release_a_round_at_the_clients_rate():
    plan = client_plan()
    z = plan.party(0).sigma
    assert plan.events(0) == (Gaussian(0.1, z, 1),)
    assert plan.party(0).epsilon_rdp == compute_epsilon([Gaussian(0.1, z, 20)], 1e-5) == pytest.approx(2.0, rel=1e-3)
    # local steps cost nothing, the secret draw lowers the noise, and a round more costs more
    assert client_plan(train={"steps": 1}).party(0).sigma == z
    assert client_plan(train={"participation": 1.0}).party(0).sigma > 1.5 * z
    assert client_plan(train={"rounds": 40}).party(0).sigma > z
    assert plan.assignment(3, 2, 0.4) == Assignment(3, 0.05, 0.0, 7, 0.4)
    assert (plan.party(0).units, plan.party(0).batch) == (1, 20)
    assert plan.terms(0)["unit"] == "client"


def test_client_level_has_one_noise_and_the_strictest_budget_sets_it():
    plan = client_plan(privacy={"budgets": {"party-7": 0.8}})
    assert {group.sigma for group in plan.groups} == {client_plan(privacy={"epsilon": 0.8}).party(0).sigma}
    assert plan.party(7).epsilon_rdp == plan.party(0).epsilon_rdp <= 0.8
    assert (plan.party(7).budget, plan.party(0).budget) == (0.8, 2.0)


@pytest.mark.parametrize(("estimator", "reach"), [("fixed", 1 / 20), ("clipped", 2 / 16)])
def test_client_level_noise_follows_the_estimators_sensitivity(estimator: str, reach: float):
    plan = client_plan(client_level={"estimator": estimator, "min_weight": 0.8})
    z = plan.party(0).sigma
    assert plan.compute_noise_to_signal(25).direction == pytest.approx(z * reach)
    assert plan.compute_noise_to_signal(25, 3).ratio == pytest.approx(5 * z * reach)
    light = client_plan(train={"weights": "examples"}, client_level={"weight_cap": 60.0, "estimator": estimator})
    assert light.compute_noise_to_signal(25).direction > plan.compute_noise_to_signal(25).direction  # W = K / 2


@pytest.mark.parametrize(
    ("parties", "change", "words"),
    [
        (200, {}, []),
        (50, {}, ["among 50", "hundreds of parties"]),
        (200, {"privacy": {"delta": 0.01}}, ["delta = 0.01 is not below 1/K for K = 200"]),
        (200, {"train": {"participation": 0.001}}, ["expected number of participants is 0.2"]),
    ],
)
def test_client_level_warnings(parties: int, change: dict[str, Any], words: list[str]):
    found = " ".join(client_plan(parties=parties, **change).warnings)
    assert bool(found) == bool(words)
    assert all(word in found for word in words)
    assert "nominal" in " ".join(client_plan("median").warnings)


def test_client_level_rounds_for_a_budget_and_json():
    plan = client_plan()
    settings = settings_of(privacy={"unit": "client"}, train={"participation": 0.1, "steps": 7})
    assert compute_rounds_for_budget(settings, sigma=plan.party(0).sigma) == 20
    facts = json.loads(json.dumps(plan.to_json(650), allow_nan=False))
    assert (facts["unit"], facts["groups"][0]["rate"], facts["groups"][0]["steps"]) == ("client", 0.1, 1)
    assert facts["noise"]["aggregate"] == facts["noise"]["parties"][0]
    unprotected = client_plan("none", privacy={"epsilon": None})
    assert unprotected.events(0) == (Unprotected(1),)
