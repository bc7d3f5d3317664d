"""Noise schedules and statistics released now and then: composed exactly, charged as they are, never underpaid."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fulcrum.clipping import RULES, ClipRule
from fulcrum.clipping.fixed import FIXED
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Spend, compute_epsilon
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import Plan, check_privacy_names, compute_rounds_for_budget, make_plan
from fulcrum.privacy.schedule import compute_noise_factors
from fulcrum.runs import prepare
from fulcrum.settings.files import dump_settings, parse_settings
from fulcrum.settings.schema import Privacy, Settings
from fulcrum.training.loop import federate
from fulcrum.types import Assignment
from support.events import as_gaussian
from support.federations import one_client, play, toy_data, toy_federation, toy_problem

DELTA = 1e-5


def settings_of(**sections: dict[str, Any]) -> Settings:
    base = Settings().replace(
        train={"rounds": 12},
        privacy={"epsilon": 2.0, "noise_schedule": "growth", "rho_mu": 0.5},
        clip={"rule": "dynamic"},
    )
    return base.replace(**sections)


def planned(rule: ClipRule = FIXED, units: tuple[int, ...] = (300, 40), **sections: dict[str, Any]) -> Plan:
    return make_plan(settings_of(**sections), len(units), list(units), rule)


# --- the factors --------------------------------------------------------------------------------


def test_schedules_by_hand() -> None:
    assert compute_noise_factors(Privacy(), 3) == (1.0, 1.0, 1.0)
    growth = compute_noise_factors(Privacy(noise_schedule="growth", rho_mu=0.8), 4)
    assert growth == pytest.approx([1.0, 0.8**0.25, 0.8**0.5, 0.8**0.75])
    mus = [1 / (2.0 * s) for s in growth]  # mu_t = mu_0 rho_mu^(-t/T): the budget of a round grows
    assert all(a < b for a, b in itertools.pairwise(mus))
    phases = compute_noise_factors(Privacy(noise_schedule="phases", phases=(1.0, 4.0)), 5)
    assert phases == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"noise_schedule": "grow"}, "choose one of constant, growth, phases"),
        ({"noise_schedule": "phases"}, "needs at least one phase"),
        ({"noise_schedule": "phases", "phases": [1.0] * 13}, "has 13 phases for 12 rounds"),
        ({"noise_schedule": "phases", "phases": [1.0, 0.0]}, "privacy.phases = 0"),
        ({"phases": ["a"]}, "a list of numbers"),
        ({"rho_mu": 0.0}, "privacy.rho_mu"),
    ],
)
def test_wrong_schedules_are_named(privacy: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_privacy_names(parse_settings({"train": {"rounds": 12}, "privacy": {"epsilon": 1.0, **privacy}}))


def test_a_schedule_survives_its_settings_file() -> None:
    import tomllib

    settings = parse_settings({"privacy": {"epsilon": 1.0, "noise_schedule": "phases", "phases": [1, 2.5]}})
    assert settings.privacy.phases == (1.0, 2.5)
    assert parse_settings(tomllib.loads(dump_settings(settings))) == settings


# --- calibration --------------------------------------------------------------------------------


def google(events: list[Gaussian], delta: float = DELTA) -> float:
    """What Google's accountant says of releases one after the other; it shares no code with ours below PLD."""
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(orders=[*np.arange(2.5, 12.0, 0.25), *range(12, 64)])
    for event in events:
        noised = dp_accounting.GaussianDpEvent(event.sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(event.rate, noised), event.count)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(
    "schedule",
    [
        {"noise_schedule": "growth", "rho_mu": 0.5},
        {"noise_schedule": "growth", "rho_mu": 1.5},
        {"noise_schedule": "phases", "phases": (1.0, 3.0, 2.0)},
    ],
    ids=["growth", "decline", "phases"],
)
def test_mu_0_is_solved_so_that_the_rounds_together_cost_epsilon(schedule: dict[str, Any]) -> None:
    plan = planned(privacy={"epsilon": 2.0, **schedule}, train={"rounds": 12, "steps": 3})
    shape = compute_noise_factors(Privacy(**schedule), 12)
    sigma = plan.party(0).sigma
    one_by_one = [Gaussian(0.05, sigma * s, 3) for s in shape]
    assert google(one_by_one) == pytest.approx(2.0, rel=5e-3)
    assert [plan.events(0, t) for t in range(12)] == [(event,) for event in one_by_one]
    assert [plan.assignment(0, t, 0.1).sigma for t in range(12)] == [e.sigma for e in one_by_one]
    assert plan.party(0).epsilon_rdp == compute_epsilon(one_by_one, DELTA) <= 2.0
    assert plan.party(0).epsilon_pld < plan.party(0).epsilon_rdp
    # the same judge rejects noise calibrated as if it did not move, and as if it were its mean
    constant = make_plan(settings_of(privacy={"noise_schedule": "constant"}, train={"steps": 3}), 1, [300], FIXED)
    for wrong in (constant.party(0).sigma, constant.party(0).sigma / float(np.mean(shape))):
        assert google([Gaussian(0.05, wrong * s, 3) for s in shape]) != pytest.approx(2.0, rel=5e-3)


def test_with_sigma_it_is_that_of_the_first_round() -> None:
    plan = planned(privacy={"epsilon": None, "sigma": 1.4})
    assert plan.party(0).sigma == plan.assignment(0, 0, 1.0).sigma == 1.4
    assert plan.party(0).sigma_last == pytest.approx(1.4 * 0.5 ** (11 / 12))
    assert plan.compute_step_noise(0, 6) == pytest.approx(1.4 * 0.5**0.5 / 15)


def test_two_hundred_rounds_plan_with_few_sigmas_asked_for() -> None:
    """Time is not tested; how often RDP is computed anew is."""
    from fulcrum.privacy.accounting import compute_step_rdp

    compute_step_rdp.cache_clear()
    make_plan(settings_of(train={"rounds": 200}), 1, [300], FIXED)
    assert compute_step_rdp.cache_info().misses < 200 * 15


def test_epsilon_on_the_way_is_that_of_the_rounds_so_far() -> None:
    plan = planned()
    curve = plan.curve(0, points=13)
    for (t, cost), events in zip(curve, itertools.accumulate(plan.events(0, t) for t in range(12)), strict=False):
        assert cost == (compute_epsilon(events[:t], DELTA) if t else 0.0)
    steps = np.diff([cost for _, cost in curve])
    assert steps[-1] > steps[2]  # clearer rounds cost more


def test_a_cap_is_planned_for_the_costliest_rounds() -> None:
    plan = planned(privacy={"epsilon": 2.0, "max_participations": 4})
    worst = compute_epsilon([event for t in range(8, 12) for event in plan.events(0, t)], DELTA)
    assert plan.party(0).epsilon_rdp == pytest.approx(worst)
    assert worst <= 2.0
    for chosen in itertools.combinations(range(12), 4):
        assert compute_epsilon([event for t in chosen for event in plan.events(0, t)], DELTA) <= worst * (1 + 1e-12)
    # a plan for the first rounds would be overspent by the last
    naive = make_plan(settings_of(train={"rounds": 4}, privacy={"noise_schedule": "constant"}), 1, [300], FIXED)
    late = [
        Gaussian(0.05, naive.party(0).sigma * s)
        for s in compute_noise_factors(Privacy(noise_schedule="growth", rho_mu=0.5), 12)[8:]
    ]
    assert compute_epsilon(late, DELTA) > 2.0


def test_rounds_for_a_budget_counts_the_schedules_own_rounds() -> None:
    settings = settings_of()
    sigma = make_plan(settings, 1, [300], FIXED).party(0).sigma
    assert compute_rounds_for_budget(settings, sigma=sigma) == 12
    fewer = compute_rounds_for_budget(settings, epsilon=1.5, sigma=sigma)
    assert 0 < fewer < 12
    plan = planned()
    assert plan.compute_epsilon_at(fewer, 0) <= 1.5 < plan.compute_epsilon_at(fewer + 1, 0)
    assert compute_rounds_for_budget(settings, epsilon=99.0, sigma=sigma) == 12  # the schedule ends there


def test_the_ledger_and_the_purse_charge_each_round_its_own_noise() -> None:
    federation = toy_federation(
        clip={"rule": "dynamic", "C0": 1.5, "rho_c": 0.3},
        privacy={"sigma": None, "epsilon": 3.0, "noise_schedule": "growth", "rho_mu": 0.5},
    )
    with Ledger.open(":memory:") as ledger:
        results = [result for result, _ in federate(federation, ledger, "r")]
        spent = ledger.get_spends("r")["party-0"]
    plan = federation.plan
    assert spent == Spend.empty().add_events([event for t in range(6) for event in plan.events(0, t)])
    # The ledger adds up at one Renyi order, the best one for the whole run: never less than the rounds cost.
    as_plans = [plan.compute_epsilon_at(t + 1, 0) for t in range(6)]
    assert all(r.epsilon >= cost * (1 - 1e-9) for r, cost in zip(results, as_plans, strict=True))
    assert [r.epsilon for r in results] == sorted(r.epsilon for r in results)
    assert results[-1].epsilon == pytest.approx(as_plans[-1])
    assert results[-1].epsilon == pytest.approx(3.0, rel=1e-3)
    assert [r.C[0] for r in results] == pytest.approx([1.5 * 0.3 ** (t / 6) for t in range(6)])


def test_the_noise_that_is_drawn_is_the_schedules() -> None:
    plan = planned(privacy={"epsilon": None, "sigma": 1.4})
    problem = toy_problem("fixed")
    for t in (0, 11):
        task = dataclasses.replace(plan.assignment(0, t, 1.0), rate=1e-9)
        silent = one_client(problem, rate=task.rate, sigma=task.sigma, lr=1e-9)
        noise = problem.randomness.normal(("noise", 0, 0, 0), problem.layout.dim).float()
        torch.testing.assert_close(silent.delta * problem.party(0).units, -task.sigma * noise, rtol=1e-3, atol=1e-5)


# --- statistics now and then --------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (1, 4), (3, 4), (5, 2), (4, 4), (7, 20)])
def test_asked_steps_are_counted_over_the_whole_run(steps: int, every: int) -> None:
    task = Assignment(0, 0.1, 1.0, steps, 1.0, every)
    asked = [task.asks_statistics(t, step) for t in range(9) for step in range(steps)]
    assert [i for i, ask in enumerate(asked) if ask] == list(range(0, 9 * steps, every))
    assert [task.asked(t) for t in range(9)] == [sum(asked[t * steps : (t + 1) * steps]) for t in range(9)]


def test_dc_sgd_pays_for_its_histogram_once_an_epoch() -> None:
    rule = RULES["dc-sgd"]
    sections: dict[str, Any] = {
        "clip": {"rule": "dc-sgd", "statistics_interval": 1.0},
        "privacy": {"epsilon": 2.0, "noise_schedule": "constant"},
        "train": {"rounds": 12, "steps": 5, "rate": 0.05},
    }
    plan = planned(rule, **sections)
    sigma = plan.party(0).sigma
    sigma_H = max(6.0, 5 * sigma)
    sigma_T = (sigma**-2 - sigma_H**-2) ** -0.5
    asked, plain = Gaussian(0.05, sigma), Gaussian(0.05, pytest.approx(sigma_T))  # type: ignore[arg-type]
    for t in range(12):  # 20 steps an epoch, 5 a round: steps 0, 20 and 40 ask
        one, *more = plan.events(0, t)
        assert (one.count, [e.count for e in more]) == ((1, [4]) if t % 4 == 0 else (5, []))
        assert one.with_count(1) == (asked if t % 4 == 0 else plain)
    together = [Gaussian(0.05, sigma, 3), Gaussian(0.05, sigma_T, 57)]
    assert google(together) == pytest.approx(2.0, rel=5e-3)
    assert google([Gaussian(0.05, sigma, 60)]) > 2.02  # as if every step had a histogram: the judge sees the difference
    each = planned(rule, **{**sections, "clip": {"rule": "dc-sgd", "statistics_interval": 0.0}})
    assert each.events(0, 0) == (Gaussian(0.05, each.party(0).sigma, 5),)
    assert each.party(0).sigma > sigma


@pytest.mark.parametrize("rule", [name for name, r in RULES.items() if r.cost.startswith("paid")])
def test_what_a_run_releases_now_and_then_is_what_it_reserved(rule: str) -> None:
    """federate stops a run whose events differ from the plan's; C moves only when there was something to hear."""
    federation = toy_federation(
        clip={"rule": rule, "statistics_interval": 0.5, "eta_C": 0.2},
        train={"rounds": 7, "rate": 0.2, "lr": 0.5, "steps": 1},
        privacy={"sigma": 1.0},
        run={"seed": 4},  # in which moo-scalar's C moves more than once
    )
    plan = federation.plan
    assert plan.group(0).statistics_interval == 2
    results = play(federation)
    assert len({as_gaussian(event).sigma for t in range(7) for event in plan.events(0, t)}) == 2
    C = [result.C[0] for result in results]
    if rule in ("quantile", "dc-sgd", "moo-scalar"):
        assert all(C[t] == C[t + 1] for t in (1, 3, 5))
        assert len(set(C)) > 2


def test_shares_that_depend_on_the_batch_make_a_group_of_every_size() -> None:
    """quantile's sigma_b grows with the batch, so in between large parties pay a little more than small ones."""
    sections: dict[str, Any] = {
        "clip": {"statistics_interval": 0.5},
        "privacy": {"epsilon": 2.0, "noise_schedule": "constant"},
    }
    units = (100_000, 40, 40, 300)
    plan = planned(RULES["quantile"], units, **sections)
    assert len(plan.groups) == 3
    for k in range(4):
        assert plan.party(k).epsilon_rdp == pytest.approx(2.0, rel=1e-3)
    assert plan.party(0).sigma != plan.party(1).sigma
    assert len(planned(RULES["dc-sgd"], units, **sections).groups) == 1
    assert len(planned(RULES["quantile"], units, **{**sections, "clip": {"statistics_interval": 0.0}}).groups) == 1


@pytest.mark.parametrize("steps", [1, 3])
def test_equal_parties_release_what_a_batch_dependent_share_planned(steps: int) -> None:
    """All parties are one group then, and its steps without statistics have the noise that their batch gives them."""
    federation = prepare(
        Settings().replace(
            data={"source": "toy", "parties": 3, "partition": "iid"},
            model={"name": "linear"},
            train={"rounds": 4, "rate": 0.5, "lr": 0.5, "steps": steps},
            clip={"rule": "quantile", "statistics_interval": 1.0},
            privacy={"epsilon": 5.0},
        ),
        toy_data(6000),
    )
    plan = federation.plan
    assert set(plan.sizes.tolist()) == {2000}
    assert (len(plan.groups), plan.groups[0].statistics_interval) == (1, 2)
    with Ledger.open(":memory:") as ledger:
        results = [result for result, _ in federate(federation, ledger, "r")]  # stops where events differ
        for k in range(3):
            planned_here = [event for t in range(4) for event in plan.events(k, t)]
            assert ledger.get_spends("r")[plan.name(k)] == Spend.empty().add_events(planned_here)
    assert results[-1].epsilon == pytest.approx(5.0, rel=1e-3)
    # as it was planned before, with a batch of 1: other events, for which the run stopped after it had paid
    wrong = dataclasses.replace(plan.groups[0], batch=1.0)
    assert [wrong.compute_round_events(t) for t in range(4)] != [plan.events(0, t) for t in range(4)]


def test_an_own_schedule_must_give_one_factor_per_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_schedules.py").write_text(
        "def falling(privacy, rounds):\n    return [1 / (1 + t) for t in range(rounds)]\n"
        "def short(privacy, rounds):\n    return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert compute_noise_factors(Privacy(noise_schedule="own_schedules:falling"), 3) == (1.0, 1 / 2, 1 / 3)
    with pytest.raises(ConfigError, match=r"own_schedules:short.*one factor per round"):
        compute_noise_factors(Privacy(noise_schedule="own_schedules:short"), 3)


def test_free_rules_and_rules_without_privacy_know_no_refresh() -> None:
    for rule in ("moo", "fixed", "none"):
        plan = planned(RULES[rule], clip={"rule": rule, "statistics_interval": 3.0})
        assert plan.group(0).statistics_interval == 1
    assert math.isinf(planned(RULES["none"]).party(0).epsilon_rdp)


def test_statistics_that_were_not_asked_for_do_not_leave() -> None:
    problem = toy_problem("quantile")
    quiet = one_client(problem, sigma=1.0, steps=2)
    assert quiet.extra.any()
    from fulcrum.settings.schema import Clip
    from fulcrum.training.client import train_client
    from fulcrum.types import RoundRequest

    state = problem.rule.init(Clip(), problem.shape)
    task = Assignment(0, 0.5, 1.0, 2, 0.5, statistics_interval=100)
    params = problem.layout.flatten(problem.model)
    reply = train_client(problem, RoundRequest(3, 10, params, (task,), (state,)), task, state)
    assert not reply.extra.any()
    first = train_client(problem, RoundRequest(0, 10, params, (task,), (state,)), task, state)
    assert first.events[0] == Gaussian(0.5, 1.0)
    assert first.events[1] == reply.events[0] != first.events[0]
    once = train_client(
        problem, RoundRequest(0, 10, params, (dataclasses.replace(task, steps=1),), (state,)),
        dataclasses.replace(task, steps=1), state,
    )  # fmt: skip
    assert torch.equal(first.extra, once.extra)  # averaged over the step that was asked, not over both
