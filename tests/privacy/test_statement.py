"""The statement: true numbers, loud where nothing is promised, complete enough to sign."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from fulcrum.clipping import ClipRule, find_rule
from fulcrum.errors import ConfigError
from fulcrum.privacy.accounting import Accountant, Spend, compute_epsilon, format_epsilon
from fulcrum.privacy.events import Gaussian, Unprotected
from fulcrum.privacy.plan import Plan, make_plan
from fulcrum.privacy.statement import (
    AccountedRun,
    CoveredRun,
    EvaluationData,
    make_statement,
    statement_to_markdown,
)
from fulcrum.settings.checks import check_settings
from fulcrum.settings.schema import Settings

MOO, NONE = find_rule("moo"), find_rule("none")
KEYS = {
    "meaning",
    "epsilon", "epsilon_pld", "delta", "unit", "relation", "adversary", "accountant", "private", "sound", "nominal",
    "guarantee", "guarantee_text", "target", "planned", "randomness", "scope", "run", "releases", "groups_of_records",
    "adds_up", "not_covered", "warnings", "parties", "schedule", "aggregation", "arithmetic", "simulation",
    "evaluation", "runs_covered", "random_numbers",
}  # fmt: skip


def planned(rule: ClipRule = MOO, parties: int = 3, **sections: dict[str, Any]) -> tuple[Settings, Plan]:
    settings = Settings().replace(train={"rounds": 20}, privacy={"sigma": 1.2}).replace(**sections)
    return settings, make_plan(settings, parties, [300 + k for k in range(parties)], rule)


def state(rule: ClipRule = MOO, rounds: tuple[int, ...] = (20, 20, 7), **sections: dict[str, Any]) -> dict[str, Any]:
    """The statement of a run in which each party took part in so many rounds."""
    return told(*planned(rule, len(rounds), **sections), rule, rounds)


def told(settings: Settings, plan: Plan, rule: ClipRule, rounds: tuple[int, ...], **more: Any) -> dict[str, Any]:
    spent = {plan.name(k): Spend.empty().add_events(plan.events(k), times) for k, times in enumerate(rounds) if times}
    arguments: dict[str, Any] = {
        "run_id": "f00d",
        "scope": "run",
        "randomness_mode": "secure",
        "arithmetic": "proven",
        "dataset_name": "digits",
        "finished": True,
        "rounds_done": 20,
        "version": "0.1.0",
        "date": "2025-06-01",
    }
    return make_statement(AccountedRun(settings, plan, rule, spent, **{**arguments, **more}))


def test_the_numbers_are_those_of_what_was_released():
    facts = state(rounds=(20, 5, 0))
    assert set(facts) == KEYS
    for party, times in zip(facts["parties"], (20, 5, 0), strict=True):
        assert party["epsilon_rdp"] == compute_epsilon([Gaussian(0.05, 1.2, times)], 1e-5)
        assert party["epsilon_pld"] == compute_epsilon([Gaussian(0.05, 1.2, times)], 1e-5, "pld")
        assert party["releases"] == times
    assert facts["epsilon"] == facts["parties"][0]["epsilon_rdp"] > facts["epsilon_pld"] > 0
    assert facts["planned"]["epsilon"] == facts["epsilon"]
    assert (facts["guarantee"], facts["sound"], facts["nominal"]) == ("yes", True, False)
    assert f"epsilon = {format_epsilon(facts['epsilon'])}" in facts["guarantee_text"]


def test_every_release_and_term_is_on_the_page():
    page = statement_to_markdown(state())
    for words in (
        "zero-out", "add-or-remove", "honest-but-curious", "who takes part", "dp-accounting 0.6", "RDP is enforced",
        "This run only", "operating system's entropy", "updates (20)", "C (20)", "models (20)", "sigma = 1.2",
        "Poisson-sampled at rate 0.05", "several parties adds up", "disjoint", "group privacy", "Timing",
        "Side channels", "Floating-point", "Choosing settings", "Test data", "constants that scale it", "malicious",
        "population", "data-protection officer", "signature", "f00d", "2025-06-01", "Fulcrum 0.1.0", "party-2",
    ):  # fmt: skip
        assert words in page, words
    assert "WARNING" not in page
    assert "inf" not in page.replace("inferred", "")


def test_the_other_accountant_is_named_when_it_is_the_one_enforced():
    facts = state(privacy={"accountant": "pld"})
    assert facts["accountant"]["enforced"] == "pld"
    assert facts["epsilon"] == facts["epsilon_pld"] == state()["epsilon_pld"] < facts["epsilon_rdp"]
    page = statement_to_markdown(facts)
    assert "PLD is enforced, RDP is shown beside it" in page
    assert (
        f"epsilon = {format_epsilon(facts['epsilon_pld'])} (PLD; {format_epsilon(facts['epsilon_rdp'])} by RDP)" in page
    )


OWN = Accountant("own", lambda spends, delta: np.array([0.1 * s.releases for s in spends]), lambda event: True)


def test_an_own_accountant_is_the_headline_when_it_is_enforced():
    facts = state(privacy={"accountant": f"{__name__}:OWN"})
    assert facts["epsilon"] == pytest.approx(2.0)  # 20 releases
    assert facts["epsilon_rdp"] == state()["epsilon"]
    assert facts["planned"] == {key: pytest.approx(facts[key]) for key in ("epsilon", "epsilon_rdp", "epsilon_pld")}
    assert facts["accountant"]["enforced"] == "own"
    page = statement_to_markdown(facts)
    assert "OWN is enforced, RDP, PLD is shown beside it; all are upper bounds" in page
    assert "epsilon (OWN) | epsilon (RDP) | epsilon (PLD)" in page
    beside = f"{format_epsilon(facts['epsilon_rdp'])} by RDP, {format_epsilon(facts['epsilon_pld'])} by PLD"
    assert f"epsilon = 2 (OWN; {beside})" in page


def test_no_privacy_is_said_first_and_loudly():
    facts = state(NONE)
    assert (facts["epsilon"], facts["epsilon_pld"], facts["guarantee"]) == ("inf", "inf", "none")
    assert facts["private"] is False
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    page = statement_to_markdown(facts)
    assert "NOT PRIVATE" in page.splitlines()[2]
    assert "without noise" in page
    assert "infinite" in page


def test_an_unsound_rule_has_a_nominal_epsilon_and_no_guarantee():
    facts = state(replace(MOO, name="paper", sound=False))
    assert (facts["guarantee"], facts["sound"], facts["nominal"]) == ("nominal", False, True)
    assert facts["guarantee_text"].startswith("NOT A GUARANTEE")
    page = statement_to_markdown(facts)
    assert "NOMINAL" in page.splitlines()[2]
    assert "THEY REVEAL MORE" in page


def test_a_seeded_run_says_that_it_hangs_on_the_seed():
    settings, plan = planned()
    facts = told(settings, plan, MOO, (20, 20, 20), randomness_mode="seeded")
    assert "only while the seed is secret" in facts["guarantee_text"]
    assert (facts["guarantee"], facts["simulation"]) == ("simulation", True)
    assert facts["random_numbers"]["key"] == "seed"
    assert "simulation" in facts["randomness"]["text"]
    assert any("secure" in warning for warning in facts["warnings"])
    lines = statement_to_markdown(facts).splitlines()
    assert lines[0] == "# Privacy statement of a simulation"
    assert "SIMULATION" in lines[2]
    page = statement_to_markdown(state())
    assert state()["simulation"] is False
    assert "seed is secret" not in page
    assert "simulation" not in page.lower()


def test_a_ledger_covers_all_its_runs_and_tells_this_one_apart():
    settings, plan = planned()
    facts = told(settings, plan, MOO, (20, 20, 20), scope="ledger", run_costs={"party-0": 0.25, "gone": 9.0})
    assert facts["scope"]["run_epsilon"] == 0.25 < facts["epsilon"]
    page = statement_to_markdown(facts)
    assert "All runs on record in this ledger" in page
    assert "This run alone" in page


def test_the_ledgers_numbers_are_the_statements():
    settings, plan = planned()
    facts = told(settings, plan, MOO, (20, 20, 20), costs={"party-0": 2.00004, "party-1": 3.00001})
    assert (facts["epsilon"], [party["epsilon_rdp"] for party in facts["parties"]]) == (
        3.00001,
        [2.00004, 3.00001, 0.0],
    )
    page = statement_to_markdown(facts)
    assert "epsilon = 3.001 (RDP; " in page  # rounded up, everywhere
    assert "| 2.001 |" in page
    assert page.index("epsilon = ") == page.index("epsilon = 3.001")


def covered(**changes: Any) -> CoveredRun:
    usual: dict[str, Any] = {"id": "old", "rule": "moo", "sound": True, "private": True, "randomness": "secure"}
    return CoveredRun(**{**usual, "arithmetic": "proven", "simulation": False, **changes})


WORST = {
    "none": (covered(private=False, rule="none"), "without noise in run old"),
    "nominal": (covered(sound=False, rule="median"), "In run old the rule 'median' sets the clipping norm"),
    "unknown": (CoveredRun("old"), "does not say which rule and which random numbers run old used"),
    "simulation": (covered(randomness="seeded"), "only while the seed is secret"),
    "yes": (covered(), "Each example has"),
}


@pytest.mark.parametrize("level", WORST)
def test_a_statement_is_as_good_as_the_worst_run_that_it_covers(level: str):
    settings, plan = planned()
    other, words = WORST[level]
    facts = told(settings, plan, MOO, (20, 20, 20), scope="ledger", others=(other,))
    assert facts["guarantee"] == level
    assert words in facts["guarantee_text"]
    assert [run["id"] for run in facts["runs_covered"]] == ["old", "f00d"]
    assert facts["sound"] is (level not in ("nominal", "unknown"))
    page = statement_to_markdown(facts)
    assert ("WARNING" in page.splitlines()[2]) is (level != "yes")
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert told(settings, plan, MOO, (20, 20, 20), scope="ledger")["guarantee"] == "yes"


def test_several_runs_have_the_ledgers_sum_alone():
    """The PLD of pooled releases is no bound for a run that was chosen after seeing another."""
    settings, plan = planned()
    facts = told(settings, plan, MOO, (20, 20, 20), scope="ledger", others=(covered(),), costs={"party-0": 5.0})
    assert facts["epsilon"] == facts["epsilon_pld"] == 5.0
    assert [key for key in facts["parties"][0] if key.startswith("epsilon")] == ["epsilon_rdp"]
    assert "PLD" not in statement_to_markdown(facts)


def test_arithmetic_noise_and_random_numbers_are_told():
    proven, page = state(), statement_to_markdown(state())
    assert proven["arithmetic"]["mode"] == "proven"
    for words in ("written bound", "Exact Gaussian noise", "public grid", "certified", "ChaCha20"):
        assert words in page, words
    settings, plan = planned()
    fast = told(settings, plan, MOO, (20, 20, 20), arithmetic="fast")
    assert (fast["guarantee"], fast["arithmetic"]["mode"]) == ("yes", "fast")
    assert "measured margin and is not proven" in fast["guarantee_text"]
    mixed = told(settings, plan, MOO, (20, 20, 20), scope="ledger", others=(covered(arithmetic="fast"),))
    assert mixed["arithmetic"]["mode"] == "fast"


EVALUATIONS = {
    "none": (EvaluationData(), True, "Nothing was scored"),
    "public": (EvaluationData("public", 90, 20), True, "count as public"),
    "held-out": (EvaluationData("held-out", 9, 20), False, "NOT PROTECTED"),
    "paid": (EvaluationData("held-out", 9, 20, True, 0.50001, 1e-5), True, "Each held-out unit has epsilon = 0.5001"),
}


@pytest.mark.parametrize("case", EVALUATIONS)
def test_scores_of_private_records_are_a_release(case: str):
    settings, plan = planned()
    data, protected, words = EVALUATIONS[case]
    facts = told(settings, plan, MOO, (20, 20, 20), evaluation=data)
    assert facts["evaluation"]["protected"] is protected
    assert words in statement_to_markdown(facts)
    assert ("evaluation" in [item["kind"] for item in facts["releases"]]) is (case != "none")
    assert ("Each example has" in facts["guarantee_text"]) is (data.kind != "held-out")
    assert ("Each held-out unit has epsilon = 0.5001" in facts["guarantee_text"]) is (case == "paid")
    assert ("held-out records have no protection" in facts["guarantee_text"]) is (not protected)


def test_something_unprotected_in_an_earlier_run_makes_the_total_infinite():
    settings, plan = planned()
    spent = {"party-1": Spend.empty().add_events(plan.events(1), 3).add_events([Unprotected()])}
    facts = make_statement(
        AccountedRun(
            settings, plan, MOO, spent, run_id="x", scope="ledger", randomness_mode="secure", dataset_name="digits",
            finished=True, rounds_done=3, version="0", date="today",
        )
    )  # fmt: skip
    assert facts["epsilon"] == "inf"
    assert facts["parties"][0]["epsilon_rdp"] == 0
    json.dumps(facts, allow_nan=False)
    assert "infinite" in statement_to_markdown(facts)


def test_warnings_reach_the_page():
    settings, plan = planned(privacy={"delta": 0.01}, run={"diagnostics": True})
    facts = told(
        settings, plan, MOO, (5, 5, 5), finished=False, rounds_done=5, dataset_warnings=("The copy is a JPEG.",)
    )
    page = statement_to_markdown(facts)
    words_of_an_early_end = "whoever stops the run after looking at it counts the planned one"
    assert words_of_an_early_end in page
    assert words_of_an_early_end not in statement_to_markdown(state())
    priced = told(*planned(privacy={"accountant": "pld"}), MOO, (5, 5, 5), finished=False, rounds_done=5)
    assert "covers its whole plan, which counts from its start" in statement_to_markdown(priced)
    for words in ("not below 1/n", "not finished", "5 of 20", "The copy is a JPEG.", "must not leave a party"):
        assert words in page, words
    quiet = statement_to_markdown(state())
    assert "not finished" not in quiet
    assert "diagnostics" not in quiet


def test_a_rule_that_pays_for_statistics_lists_them():
    assert [item["kind"] for item in state()["releases"]] == ["updates", "C", "models", "participation"]
    paid = state(replace(MOO, share=lambda sigma, batch: 0.1))
    assert "statistics" in [item["kind"] for item in paid["releases"]]


def test_a_noise_schedule_and_statistics_now_and_then_are_told():
    still = state()
    assert still["schedule"] == {"name": "constant", "sigma_min": 1.2, "sigma_max": 1.2}
    moving = state(rounds=(1,), train={"rounds": 8}, privacy={"sigma": 1.2, "noise_schedule": "growth", "rho_mu": 0.5})
    low = 1.2 * 0.5 ** (7 / 8)
    assert moving["schedule"] == {"name": "growth", "sigma_min": pytest.approx(low), "sigma_max": 1.2}
    page = statement_to_markdown(moving)
    assert f"sigma = {low:.5g} to 1.2, moving over the rounds by the public schedule 'growth'" in page
    assert "sigma (first round)" in page
    assert "schedule" not in statement_to_markdown(still)
    rare = state(find_rule("dc-sgd"), clip={"statistics_interval": 0.5})
    statistics = next(item for item in rare["releases"] if item["kind"] == "statistics")
    assert statistics["times"] == 2  # steps 0 and 10 of 20
    assert "every 10th step" in statistics["text"]


def test_group_privacy_is_true_for_the_gaussian():
    """m records move the sum by m: the exact delta at the claimed epsilon must not pass the claimed delta."""

    def exact_delta(sigma: float, eps: float) -> float:
        return float(norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma))

    facts = state(rounds=(1, 1, 1), train={"rate": 1.0, "rounds": 1}, privacy={"sigma": 8.0})
    assert facts["epsilon"] < 0.6
    for group in facts["groups_of_records"]:
        m = group["records"]
        assert group["epsilon"] == pytest.approx(m * facts["epsilon"])
        assert exact_delta(8.0 / m, group["epsilon"]) <= group["delta"]
        # the same check rejects leaving delta or epsilon as they were
        assert exact_delta(8.0 / m, facts["epsilon"]) > facts["delta"]
    assert "| 2 |" in statement_to_markdown(facts)


def test_persons_need_no_group_privacy():
    facts = state(privacy={"unit": "person"})
    page = statement_to_markdown(facts)
    assert "One person at one party" in page
    assert "all records of one person" in page
    assert "examples of one person" not in page


def test_many_parties_are_summed_up_on_the_page_and_listed_in_the_file():
    settings, plan = planned(parties=1500)
    facts = told(settings, plan, MOO, tuple(1 + k % 3 for k in range(1500)))
    assert len(facts["parties"]) == 1500
    page = statement_to_markdown(facts)
    assert "1500 parties with 300 to 1799 examples each" in page
    assert page.count("| party-") == 10
    assert "| party-2 |" in page  # the smallest of those that spent most


def test_names_cannot_break_the_table():
    settings = Settings().replace(train={"rounds": 20}, privacy={"sigma": 1.2})
    plan = make_plan(settings, ["a|b", "c\nd"], [30, 40], MOO)
    lines = statement_to_markdown(told(settings, plan, MOO, (1, 1))).splitlines()
    assert any(line.startswith("| a\\|b | 30 |") for line in lines)
    assert any(line.startswith("| c d | 40 |") for line in lines)


def client_facts(rule: str = "fixed", parties: int = 200, **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "train": {"participation": 0.1, "weights": "uniform"},
        "privacy": {"unit": "client"},
    }
    sections = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}
    chosen = find_rule(rule)
    settings, plan = planned(chosen, parties, **sections)
    return told(settings, plan, chosen, (20,) * parties)


def test_client_level_names_its_own_unit_and_adversary():
    facts = client_facts()
    assert set(facts) == KEYS
    assert facts["unit"] == "client"
    assert facts["epsilon"] == compute_epsilon([Gaussian(0.1, 1.2, 20)], 1e-5)
    assert [item["kind"] for item in facts["releases"]] == ["means", "C", "models", "participation"]
    page = statement_to_markdown(facts)
    for words in (
        "Each whole party has epsilon", "THE SERVER IS TRUSTED", "NOT who took part", "adds the noise",
        "EVERY party is charged", "must not be published", "must not be compared", "parties together",
        "q_c W = 20", "at most 0.05 times C",
        "| 200 parties | 0.1 | 1.2 | 20 |", "sizes count as public", "do not publish it",
    ):  # fmt: skip
        assert words in page, words
    # nothing of the other promise, in which the server is the adversary and the participants are public
    for words in (
        "honest-but-curious",
        "sees every update of every party",
        "One example",
        "who takes part in which round, the",
    ):
        assert words not in page, words
        assert words in statement_to_markdown(state()), words
    assert page.count("| party-") == 0


def test_client_level_tells_the_estimator_and_lists_those_who_differ():
    page = statement_to_markdown(client_facts(client_level={"estimator": "clipped", "min_weight": 0.5}))
    assert "at least q_c W_min = 10; one party moves it by at most 0.2 times C" in page
    settings, plan = planned(find_rule("fixed"), 3, privacy={"unit": "client"})
    page = statement_to_markdown(told(settings, plan, find_rule("fixed"), (20, 20, 5)))
    assert "| 2 parties |" in page
    assert "| party-2 |" in page
    assert "among 3" in page


def test_client_level_with_the_median_is_nominal():
    facts = client_facts("median")
    assert (facts["guarantee"], facts["nominal"]) == ("nominal", True)
    assert "statistics" not in [item["kind"] for item in facts["releases"]]
    assert "THEY REVEAL MORE" in statement_to_markdown(facts)


def test_weights_from_a_file_are_said_to_be_taken_as_public():
    assert "weights in start.npz, which are taken to be public" in statement_to_markdown(
        state(model={"init": "start.npz"})
    )
    assert "starts from the weights" not in statement_to_markdown(state(model={"init": "synthetic"}))


def test_reduced_precision_is_said_and_never_goes_with_secure_randomness():
    page = statement_to_markdown(state(run={"precision": "tf32"}))
    assert "proved for float32 only" in page
    assert "proved for float32 only" not in statement_to_markdown(state())
    check_settings(Settings().replace(run={"precision": "bf16"}, privacy={"sigma": 1.0}))
    with pytest.raises(ConfigError, match="only float32 keeps"):
        check_settings(Settings().replace(run={"precision": "bf16"}, privacy={"sigma": 1.0, "randomness": "secure"}))


def test_the_curve_holds_for_one_finished_run_and_one_pair_for_several():
    whole = state()["meaning"]
    assert (whole["source"], whole["holds"]) == ("pld", True)
    settings, plan = planned()
    stopped = told(settings, plan, MOO, (7, 7, 7), finished=False, rounds_done=7)["meaning"]
    assert stopped["source"] == "epsilon"
    others = (CoveredRun("beef", "moo", True, True, "secure", "proven", False),)
    several = told(settings, plan, MOO, (20, 20, 20), scope="ledger", others=others, costs={"party-0": 3.0})
    assert several["meaning"]["source"] == "epsilon"
    page = statement_to_markdown(several)
    assert "## What this epsilon means" in page
    assert page.index("epsilon = ") < page.index("## What this epsilon means")


@pytest.mark.parametrize(("mode", "word"), [("seeded", "SIMULATION: this does NOT hold"), ("secure", "")])
def test_what_epsilon_means_holds_or_says_why_not(mode: str, word: str):
    settings, plan = planned()
    facts = told(settings, plan, MOO, (20, 20, 20), randomness_mode=mode)
    assert (word in statement_to_markdown(facts)) is bool(word) or not word
    assert facts["meaning"]["holds"] is (mode == "secure")
