"""Finding 15: `party` and `person` in the user's file were ignored unless the user asked for them.

At 243f1c8 the default split drew party-0, party-1, ... from a file that names its hospitals, so the same records
trained again, under other names, in a ledger where every hospital had spent everything. Persons counted as examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulcrum.data import Dataset, from_arrays
from fulcrum.errors import BudgetError, ConfigError
from fulcrum.runs import execute, prepare
from fulcrum.runs.preparation import collect_ledger_warnings, list_unit_digests
from fulcrum.settings.files import settings_from_keywords
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation

NAMES = ["north", "south", "west", "east"]


def settings(**sections: dict[str, Any]) -> Settings:
    base = Settings().replace(
        data={"min_examples": 2},
        model={"name": "linear"},
        train={"rounds": 2, "rate": 0.5},
        privacy={"sigma": 1.5, "epsilon": None},
        run={"device": "cpu"},
    )
    return base.replace(**sections)


X = np.random.default_rng(1).normal(size=(80, 3)).astype(np.float32)


def hospitals(n: int = 80, **more: Any) -> Dataset:
    given: dict[str, Any] = {
        "x": np.resize(X, (n, 3)),
        "y": np.arange(n) % 2,
        "party": np.array(NAMES)[np.arange(n) % 4],
        "classes": 2,
        **more,
    }
    return from_arrays(given.pop("x"), given.pop("y"), **given)


def names(federation: Federation) -> list[str]:
    return [federation.problem.partition.name(k) for k in range(federation.problem.partition.parties)]


def test_the_parties_of_the_data_are_the_default():
    made = prepare(settings(), hospitals())
    assert names(made) == sorted(NAMES)
    assert made.settings.data.partition == "given", "the run's record says so"
    # What 243f1c8 did: other names for the same people.
    old = prepare(settings(data={"partition": "iid"}), hospitals(public=True))
    assert names(old) == [f"party-{k}" for k in range(5)]


@pytest.mark.parametrize("method", ["iid", "quantity", "dirichlet", "shards"])
def test_another_split_of_private_data_is_refused(method: str):
    with pytest.raises(ConfigError, match="names the party of each record"):
        prepare(settings(data={"partition": method}), hospitals())
    allowed = prepare(settings(data={"partition": method, "public": True}), hospitals())
    assert any("split anew" in warning for warning in allowed.problem.dataset.warnings)


def test_a_number_of_parties_that_contradicts_the_data_is_refused():
    with pytest.raises(ConfigError, match=r"data.parties = 10, but arrays names 4 parties"):
        prepare(settings(data={"parties": 10}), hospitals())
    assert len(names(prepare(settings(data={"parties": 4}), hospitals()))) == 4


def test_a_spent_ledger_is_not_spent_again_under_other_names(tmp_path: Path):
    ledger = {"ledger": str(tmp_path / "kept.sqlite"), "device": "cpu"}
    execute(prepare(settings(privacy={"epsilon": 2.0, "sigma": None}, run=ledger), hospitals()))
    again = prepare(settings(privacy={"epsilon": 2.0, "sigma": None}, run=ledger), hospitals())
    with pytest.raises(BudgetError, match="4 of 4 parties"):
        collect_ledger_warnings(again)


def test_persons_of_the_data_are_the_unit_by_default():
    persons = np.arange(80) // 4
    made = prepare(settings(), hospitals(person=persons))
    assert (made.settings.privacy.unit, made.problem.unit, made.plan.unit) == ("person", "person", "person")
    plain = prepare(settings(), hospitals())
    assert plain.settings.privacy.unit == "example"
    explicit = prepare(settings(privacy={"unit": "example"}), hospitals(person=persons))
    assert explicit.plan.unit == "example"
    assert any("protected k times less" in warning for warning in explicit.problem.dataset.warnings)


def test_what_auto_chose_must_go_with_the_other_settings():
    shared = {"aggregation": "ideal-secagg"}
    with pytest.raises(ConfigError, match=r"privacy.unit = 'person' does not go with"):
        prepare(settings(privacy=shared), hospitals(person=np.arange(80) // 4))
    made = prepare(settings(clip={"rule": "fixed"}, privacy=shared), hospitals())
    assert made.settings.privacy.randomness == "seeded"
    assert any("simulation and protects nobody" in warning for warning in made.problem.dataset.warnings)
    with pytest.raises(ConfigError, match=r"run.precision"):
        prepare(settings(run={"precision": "bf16"}), hospitals())


def digests_of(federation: Federation) -> dict[str, set[bytes]]:
    found = list_unit_digests(federation)
    return {name: {whole[i : i + 16] for i in range(0, len(whole), 16)} for name, whole in found.items()}


def everybody(units: dict[str, set[bytes]]) -> set[bytes]:
    return {unit for own in units.values() for unit in own}


def test_the_same_records_are_known_again_under_another_name():
    one = digests_of(prepare(settings(), hospitals()))
    renamed = np.array(["a", "b", "c", "d"])[np.arange(80) % 4]
    two = digests_of(prepare(settings(), hospitals(party=renamed)))
    assert one.keys() == set(NAMES)
    assert [one[old] for old in NAMES] == [two[new] for new in "abcd"]
    # Other targets for the same people, or one unnamed split: still the same units.
    flipped = digests_of(prepare(settings(), hospitals(y=(np.arange(80) + 1) % 2)))
    assert flipped == one
    whole = digests_of(prepare(settings(data={"parties": 3}), hospitals(party=None)))
    assert everybody(whole) == everybody(one)
    other = digests_of(prepare(settings(), hospitals(x=np.random.default_rng(9).normal(size=(80, 3)))))
    assert not everybody(one) & everybody(other), "the check can tell strangers apart"


def test_changing_data_keeps_the_people_who_stay():
    people = np.array([f"p{i // 2}" for i in range(80)])
    before = digests_of(prepare(settings(), hospitals(person=people)))["north"]
    later = np.array(["a0", *people[1:]])  # somebody new, whose id sorts first and renumbers everybody
    after = digests_of(prepare(settings(), hospitals(person=later)))["north"]
    assert (len(before - after), len(after - before)) == (1, 1)
    grown = hospitals(81, person=np.append(people, people[0]))
    assert digests_of(prepare(settings(), grown))["north"] == before, "one record more of a known person"


def test_people_who_stay_keep_their_simulated_party_too():
    """A file without parties is split over simulated ones: one record more must not move the others."""
    alone = settings(data={"parties": 3})
    before = digests_of(prepare(alone, hospitals(party=None)))
    after = digests_of(prepare(alone.replace(run={"seed": 7}), hospitals(81, x=np.vstack([X, X[:1] + 9]), party=None)))
    assert all(before[name] <= after[name] for name in before)
    assert len(everybody(after)) == 81
    # The wrong split, by position: after one more record many people would be strangers at their party.
    even = alone.replace(data={"partition": "iid"})
    old = digests_of(prepare(even, hospitals(party=None)))
    new = digests_of(prepare(even, hospitals(81, x=np.vstack([X, X[:1] + 9]), party=None)))
    assert sum(len(old[name] - new[name]) for name in old) > 20


def test_equal_records_are_as_many_units_as_they_are():
    same = np.zeros((80, 3), np.float32)
    assert all(len(units) == 20 for units in digests_of(prepare(settings(), hospitals(x=same))).values())


def test_the_user_is_told_who_stays_is_new_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger over changing data: records changed in their last digit look like new people, which must be said."""
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "record.key"))
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(80, 3)).astype(np.float32), np.arange(80) % 2
    party = np.array(["north", "south"])[np.arange(80) % 2]
    names: dict[str, Any] = {"epsilon": 1.0, "rounds": 1, "rate": 0.3, "ledger": str(tmp_path / "kept.sqlite")}

    def prepared(values: np.ndarray, rows: slice = slice(None)) -> Federation:
        data = from_arrays(values[rows], y[rows], party=party[rows], classes=2)
        return prepare(settings_from_keywords({**names, "budget": 9.0}), data)

    execute(prepared(x))
    assert collect_ledger_warnings(prepared(x)) == []
    fewer = collect_ledger_warnings(prepared(x, slice(4, None)))
    assert any("38 units stay" in words and "0 are new, 2 are gone" in words for words in fewer)
    rescaled = collect_ledger_warnings(prepared(x * np.float32(1.0001)))
    assert any("starts anew" in words for words in rescaled)
