"""Finding 15, at the ledger: the same records under other parties' names started with an untouched budget.

At 243f1c8 an account was a name: four hospitals that had spent everything trained again as party-0..4. Now a ledger
knows the units of a party by keyed digests. It refuses units that are known under another name, and it tells apart
who is new, gone or still there when a party's data changes: those who stay keep what was spent.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulcrum.errors import BudgetError, ConfigError, InputError
from fulcrum.privacy.accounting import Spend, compute_epsilon
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import KnownUnits, Ledger, RunPlan
from fulcrum.privacy.ledger.units import find_shared_units, parse_units

DELTA = 1e-5
RUN = (Gaussian(0.1, 1.0, 20),)
PLAN = RunPlan(RUN, DELTA)
COST = compute_epsilon(RUN, DELTA)


def digests(*people: int) -> bytes:
    return b"".join(hashlib.blake2b(str(i).encode(), key=b"at the party", digest_size=16).digest() for i in people)


def enroll(ledger: Ledger, *parties: str, budget: float | None = None, **terms: Any) -> None:
    for party in parties:
        ledger.enroll(
            party, budget, **{"delta": DELTA, "accountant": "rdp", "unit": "person", "population": "x", **terms}
        )


def train(ledger: Ledger, run: str, party: str, units: bytes) -> bool:
    ledger.register_units(run, party, units)
    enroll(ledger, party, budget=1.2 * COST)
    ledger.register_plans(run, {party: PLAN})
    return ledger.reserve(run, 0, {party: RUN})[party]


@pytest.fixture
def ledger() -> Any:
    with Ledger.open(":memory:") as opened:
        yield opened


def test_records_known_under_another_name_are_refused(ledger: Ledger) -> None:
    assert train(ledger, "first", "north", digests(*range(10)))
    with pytest.raises(BudgetError, match=r"3 of the 5 records of party 'party-0' .* records of party 'north'"):
        ledger.register_units("second", "party-0", digests(7, 8, 9, 10, 11))
    assert ledger.find_known_units("party-0", digests(7, 8, 9, 10, 11)) == KnownUnits(5, 0, 0, {"north": 3})
    ledger.register_units("second", "party-0", digests(10, 11))  # other people are welcome
    ledger.register_units("third", "party-1", digests(7), allow_shared=True)


def test_two_parties_of_one_run_may_not_share_records_either(ledger: Ledger) -> None:
    with pytest.raises(BudgetError, match="1 of the 3 records of party"):
        ledger.register_all_units("run", {"a": digests(1, 2, 3), "b": digests(3, 4, 5)})
    assert ledger.find_known_units("a", digests(1)) == KnownUnits(1, 0, 0, {}), "none was added"
    ledger.register_all_units("run", {"a": digests(1, 2, 3), "b": digests(4, 5)})


def test_records_known_only_from_an_earlier_set_are_recognised(ledger: Ledger) -> None:
    """Whoever left a party is still known by its name."""
    assert train(ledger, "first", "north", digests(1, 2, 3))
    ledger.register_units("second", "north", digests(4, 5))
    with pytest.raises(BudgetError, match="1 of the 2 records of party 'south'"):
        ledger.register_units("third", "south", digests(1, 9))


def test_new_staying_and_gone_are_told_apart(ledger: Ledger) -> None:
    assert train(ledger, "first", "north", digests(1, 2, 3))
    assert ledger.find_known_units("north", digests(2, 3, 4, 5)) == KnownUnits(new=2, staying=2, gone=1)


def test_people_who_stay_keep_their_spend(ledger: Ledger) -> None:
    assert train(ledger, "first", "north", digests(1, 2, 3))
    assert not train(ledger, "second", "north", digests(3, 4, 5)), "person 3 has no budget for a second run"
    assert ledger.epsilon("north") == pytest.approx(COST)


def test_where_nobody_of_before_stays_the_budget_is_whole(ledger: Ledger) -> None:
    assert train(ledger, "first", "north", digests(1, 2, 3))
    ledger.register_units("second", "north", digests(4, 5))
    assert ledger.epsilon("north") == 0
    assert ledger.spent("north") == Spend.empty()
    assert train(ledger, "second", "north", digests(4, 5))
    assert ledger.epsilon("north") == pytest.approx(COST)
    # and who comes back has not been forgotten
    assert not train(ledger, "third", "north", digests(1, 9))
    assert ledger.epsilon("north") == pytest.approx(COST)


def test_the_spend_is_the_largest_over_those_present_not_the_sum_over_everybody(ledger: Ledger) -> None:
    enroll(ledger, "north", budget=None)
    for run, people in (("one", (1, 2)), ("two", (2, 3)), ("three", (3, 4)), ("four", (2, 4, 5))):
        ledger.register_units(run, "north", digests(*people))
        ledger.register_plans(run, {"north": PLAN})
        ledger.reserve(run, 0, {"north": RUN})
    # 2: one, two, four. 4: three, four. 5: four.
    assert ledger.spent("north") == Spend.empty().add_events(RUN, 3)
    ledger.register_units("five", "north", digests(4, 6))
    assert ledger.spent("north") == Spend.empty().add_events(RUN, 2)
    assert ledger.epsilon("north", "two") == pytest.approx(COST)


def test_slices_too_are_added_up_per_person(ledger: Ledger) -> None:
    terms = {"accountant": "pld", "delta": 2.5e-5}
    pld = compute_epsilon(RUN, DELTA, "pld")
    enroll(ledger, "north", budget=2.5 * pld, **terms)
    for run, people in (("one", (1, 2)), ("two", (2, 3)), ("three", (3, 4))):
        ledger.register_units(run, "north", digests(*people))
        ledger.register_plans(run, {"north": PLAN})
        assert ledger.reserve(run, 0, {"north": RUN})["north"]
    assert ledger.cost("north").epsilon == pytest.approx(2 * pld)  # person 3
    assert ledger.cost("north").delta == pytest.approx(2 * DELTA)
    ledger.register_units("four", "north", digests(3, 9))
    with pytest.raises(BudgetError, match="delta"):
        ledger.register_plans("four", {"north": PLAN})


def test_runs_without_digests_count_for_everybody(ledger: Ledger) -> None:
    enroll(ledger, "north", budget=None)
    ledger.register_plans("older", {"north": PLAN})
    ledger.reserve("older", 0, {"north": RUN})
    ledger.register_units("new", "north", digests(1, 2))
    assert ledger.spent("north") == Spend.empty().add_events(RUN)
    ledger.register_units("next", "north", digests(3))
    assert ledger.spent("north") == Spend.empty().add_events(RUN), "person 3 may have been in the older run"


def test_a_changed_population_is_refused_without_digests_and_welcome_with_them(ledger: Ledger) -> None:
    enroll(ledger, "north")
    with pytest.raises(ConfigError, match=r"population = .* register the digests of its records") as caught:
        enroll(ledger, "north", population="x, one record less")
    assert "another ledger" not in str(caught.value), "that advice would give the same people a new budget"
    ledger.register_units("run", "north", digests(1, 2))
    enroll(ledger, "north", population="x, one record less")
    with pytest.raises(ConfigError, match="different adversaries"):  # that is not about the data
        enroll(ledger, "north", population="x, seen in sums only (ideal secure aggregation)")


def test_a_run_is_resumed_with_the_units_that_it_began_with(ledger: Ledger) -> None:
    ledger.register_units("run", "north", digests(1, 2))
    before = ledger.head()
    ledger.register_units("run", "north", digests(2, 1, 1))  # a set: order and repetition say nothing
    assert ledger.head() == before
    with pytest.raises(ConfigError, match="registered other records for run 'run'"):
        ledger.register_units("run", "north", digests(1, 2, 3))
    with pytest.raises(InputError, match="16 bytes per unit"):
        ledger.register_units("run", "north", b"short")


def test_a_set_is_stored_once_for_all_runs(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        for run in ("one", "two", "three"):
            ledger.register_units(run, "north", digests(*range(100)))
        assert ledger._store.db.execute("SELECT count(*), sum(length(members)) FROM unit_sets").fetchone() == (1, 1600)


def test_digests_that_end_in_zeros_stay_apart() -> None:
    one, two = b"\0" * 16, b"\0" * 15 + b"\1"
    three = b"a" + b"\0" * 15
    assert len(parse_units(one + two + three)) == 3
    assert find_shared_units({"a": parse_units(three)}, {"b": parse_units(one + two)}) is None
    assert find_shared_units({"a": parse_units(three)}, {"b": parse_units(one + three)}) == ("b", "a", 1)


def test_shared_units_against_sets_of_python() -> None:
    stream = np.random.default_rng(0)
    for _ in range(40):
        sets = {name: set(stream.integers(0, 40, size=6).tolist()) for name in "abcd"}
        known = {name: parse_units(digests(*sets[name])) for name in "ab"}
        given = {name: parse_units(digests(*sets[name])) for name in "cd"}
        pairs = {(mine, other): len(sets[mine] & sets[other]) for mine in "cd" for other in "abcd" if mine != other}
        found = find_shared_units(known, given)
        assert (found is None) == (not any(pairs.values()))
        if found is not None:
            assert found[2] == pairs[found[0], found[1]]


def test_an_older_run_that_is_resumed_is_checked_for_its_own_people(ledger: Ledger) -> None:
    """Person 1 has spent a run, and is in a second one that pauses while a third begins without that person."""
    enroll(ledger, "north", budget=1.2 * COST)
    half = (RUN[0].with_count(10),)
    for run, people in (("one", (1, 2)), ("two", (1, 3)), ("three", (3, 4))):
        ledger.register_units(run, "north", digests(*people))
        ledger.register_plans(run, {"north": PLAN})
        for t in range(2 if run == "one" else 0):
            assert ledger.reserve(run, t, {"north": half})["north"]
    assert ledger.reserve("three", 0, {"north": half})["north"]
    assert not ledger.reserve("two", 0, {"north": (RUN[0].with_count(20),)})["north"], "person 1 has nothing left"
    assert ledger.reserve("two", 0, {"north": (RUN[0].with_count(1),)})["north"]
    assert ledger.spent("north").releases == 21, "said for person 1 too, who is in the run that reserved last"


# --- units that several parties have, on purpose ---------------------------------------------------


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_what_any_party_releases_of_a_shared_person_counts_for_all_that_have_the_person(
    ledger: Ledger, accountant: str
) -> None:
    people = {"north": digests(1, 2, 3), "south": digests(3, 4), "west": digests(5, 6)}
    ledger.register_all_units("run", people, allow_shared=True)
    enroll(ledger, *people, accountant=accountant, delta=2 * DELTA)
    ledger.register_plans("run", dict.fromkeys(people, PLAN))
    assert all(ledger.reserve("run", 0, dict.fromkeys(people, RUN)).values())
    assert ledger.spent("north") == ledger.spent("south") == Spend.empty().add_events(RUN, 2)
    assert ledger.spent("west") == Spend.empty().add_events(RUN)
    assert ledger.epsilon("north") > 1.2 * ledger.epsilon("west")
    ledger.register_all_units("next", {"north": digests(1, 2), "south": digests(3)}, allow_shared=True)
    assert ledger.spent("north") == Spend.empty().add_events(RUN), "the shared person has left"
    assert ledger.spent("south") == Spend.empty().add_events(RUN, 2), "and is still here"


def test_a_shared_persons_budget_is_not_passed_by_two_parties_in_one_round(ledger: Ledger) -> None:
    people = {"north": digests(1, 2, 3), "south": digests(3, 4)}
    ledger.register_all_units("run", people, allow_shared=True)
    enroll(ledger, *people, budget=1.2 * COST)
    ledger.register_plans("run", dict.fromkeys(people, PLAN))
    assert not any(ledger.reserve("run", 0, dict.fromkeys(people, RUN)).values()), "both together are too much"
    assert ledger.reserve("run", 0, {"north": RUN})["north"]
    assert not ledger.reserve("run", 0, {"south": RUN})["south"]
