"""Large federations: what a round costs depends on who takes part, not on who sits out."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from fulcrum.clipping import find_rule
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import make_plan
from fulcrum.runs import prepare
from fulcrum.settings.schema import Settings
from fulcrum.training.loop import MAX_PARTIES_WITH_EPSILON, draw_invited_parties, federate, reserve_round
from fulcrum.training.round import plan_round_events
from fulcrum.training.run_account import RunAccount
from support.federations import toy_data


def settings(parties: int, participation: float, rounds: int = 4) -> Settings:
    return Settings().replace(
        data={"parties": parties, "partition": "iid", "min_examples": 1},
        train={"participation": participation, "rounds": rounds, "rate": 0.5},
        privacy={"sigma": 1.0},
    )


def invited_counts(participation: float, parties: int, rounds: int) -> np.ndarray:
    chosen = Counter(
        k for t in range(rounds) for k in draw_invited_parties(settings(parties, participation, rounds), parties, t)
    )
    return np.array([chosen[k] for k in range(parties)])


def test_everyone_is_invited_independently_with_the_chance_that_was_set() -> None:
    rounds, parties, chance = 400, 60, 0.3
    counts = invited_counts(chance, parties, rounds)
    total, spread = int(counts.sum()), counts.var(ddof=1)

    def fits(q: float) -> bool:
        enough = stats.binomtest(total, rounds * parties, q).pvalue > 1e-3
        # Independent over parties: the counts spread as binomial ones do.
        even = stats.chi2.cdf((parties - 1) * spread / (rounds * q * (1 - q)), parties - 1)
        return enough and 1e-3 < even < 1 - 1e-3

    assert fits(chance)
    assert not fits(0.27)
    assert not fits(0.33)
    first, second = (draw_invited_parties(settings(parties, chance), parties, t) for t in (0, 1))
    assert first != second
    assert first == sorted(set(first)) == draw_invited_parties(settings(parties, chance), parties, 0)
    assert draw_invited_parties(settings(5, 1.0), 5, 0) == [0, 1, 2, 3, 4]
    assert max(draw_invited_parties(settings(3, 0.999), 3, 1)) <= 2


def test_a_million_parties_plan_and_sample_without_an_object_each() -> None:
    million = 1_000_000
    asked = settings(million, 1e-4, rounds=50)
    sizes = np.full(million, 20)
    tracemalloc.start()
    try:
        plan = make_plan(asked, million, sizes, find_rule("moo"))
        assert len(plan.groups) == 1
        everyone = set()
        with Ledger.open(":memory:") as ledger:
            account = RunAccount(ledger, "run")
            for t in range(5):
                invited = draw_invited_parties(asked, million, t)
                assert 30 < len(invited) < 200
                granted = reserve_round(ledger, "run", t, plan, plan_round_events(plan, invited, t), attempt=0)
                assert granted == invited
                account.read_rounds_until(t + 1)
                everyone |= set(granted)
            assert set(ledger.accounts()) == {plan.name(k) for k in everyone}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The plan itself holds twelve bytes a party; a Python object each would take a hundred megabytes and more.
    assert peak < 60e6
    assert 0 < account.largest < plan.compute_epsilon_at(50, 0)


def test_a_ledger_reads_new_accounts_only_and_writes_a_round_in_four_transactions() -> None:
    plan = make_plan(settings(1000, 0.1), 1000, np.full(1000, 20), find_rule("moo"))
    with Ledger.open(":memory:") as ledger:
        said: list[str] = []
        ledger._store.db.set_trace_callback(said.append)
        for t in range(3):
            said.clear()
            invited = list(range(t, 1000, 10))
            reserve_round(ledger, "run", t, plan, plan_round_events(plan, invited, t), attempt=0)
            ledger.settle("run", t, {plan.name(k): "digest" for k in invited})
            assert sum(line.startswith("BEGIN IMMEDIATE") for line in said) == 4  # enroll, plan, reserve, settle
        said.clear()
        reserve_round(
            ledger, "run", 3, plan, plan_round_events(plan, range(0, 1000, 10), 3), attempt=0
        )  # nothing to enroll
        assert sum(line.startswith("BEGIN IMMEDIATE") for line in said) == 1
        ledger._store.db.set_trace_callback(None)
        ledger.change_budget("party-10", 7.5)
        assert ledger.accounts()["party-10"].budget == 7.5
        assert len(ledger.accounts()) == 30 * 10


@pytest.mark.parametrize(
    ("parties", "listed"), [(MAX_PARTIES_WITH_EPSILON, True), (MAX_PARTIES_WITH_EPSILON + 1, False)]
)
def test_every_party_is_listed_each_round_up_to_a_limit(parties: int, listed: bool) -> None:
    asked = settings(parties, 10 / parties, rounds=2)
    federation = prepare(asked, toy_data(2 * parties))
    with Ledger.open(":memory:") as ledger:
        results = [result for result, _ in federate(federation, ledger, "run")]
    assert results[-1].epsilon > 0
    assert len(results[-1].epsilons) == (parties if listed else 0)
    if listed:
        paid = {k for k, epsilon in enumerate(results[-1].epsilons) if epsilon > 0}
        assert paid == {k for result in results for k in result.participants or ()}
