"""A party's own ledger says what each run was, before its first release, from what the party itself knows."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.data import Dataset, from_arrays
from fulcrum.errors import ConfigError
from fulcrum.flower.messages import Envelope, pack_envelope, read_message_header
from fulcrum.flower.party_data import population_fingerprint
from fulcrum.flower.party_ledger import make_run_plan
from fulcrum.flower.proposals import accept_proposal, make_proposal, shorten_plan
from fulcrum.flower.terms import PartyTerms, read_terms_file, terms_to_toml
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger, LedgerAccount, RunPlan
from fulcrum.settings.schema import Settings
from support.federations import toy_data
from support.flower import part, toy_party, toy_request, toy_settings, toy_terms

SETTINGS = toy_settings()


def code(reply: Envelope) -> str:
    return str(read_message_header(reply, ("update", "refused", "welcome", "noted")).get("code", ""))


def two_rules(settings: Settings) -> PartyTerms:
    return toy_terms(settings, rules=("fixed", "moo"))


@pytest.mark.parametrize("simulation", [True, False])
def test_a_run_is_registered_with_what_the_party_knows(tmp_path, simulation):
    with toy_party(tmp_path, SETTINGS, terms=two_rules(SETTINGS), simulation=simulation) as service:
        assert code(service.answer(toy_request(service, SETTINGS, rule="moo"))) == ""
        record = service.ledger.runs()["run-1"]
        assert (record.rule, record.sound, record.private, record.unit) == ("moo", True, True, "example")
        assert record.randomness == ("seeded" if simulation else "secure")
        assert record.arithmetic == ("fast" if simulation else "proven")
        assert record.simulation == simulation
        assert bool(record.seed_digest) == simulation
        assert service.ledger.has_plan("run-1", service.name)
        raw = part(toy_data(120), SETTINGS, 0).fingerprint
        assert raw not in json.dumps(dataclasses.asdict(record)), "finding 13: no hash of records without a key"
    assert raw.encode() not in (tmp_path / "party-0.sqlite").read_bytes()


def test_a_refused_request_registers_nothing(tmp_path):
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS, sigma=0.1))) == "sigma"
        assert code(service.answer(toy_request(service, SETTINGS, C=1e9))) == "C"
        assert service.ledger.runs() == {}


def test_the_statement_names_the_rule_that_ran(tmp_path):
    """243f1c8 named the first rule of the terms, whichever ran."""
    with toy_party(tmp_path, SETTINGS, terms=two_rules(SETTINGS)) as service:
        assert code(service.answer(toy_request(service, SETTINGS, rule="moo"))) == ""
        service.write_party_statement(tmp_path / "out")
        facts = json.loads((tmp_path / "out" / "privacy.json").read_text())
        assert facts["run"]["rule"] == "moo"
        assert [run["rule"] for run in facts["runs_covered"]] == ["moo"]
        assert code(service.answer(toy_request(service, toy_settings(rule="fixed"), run="run-2"))) == ""
        service.write_party_statement(tmp_path / "out")
        facts = json.loads((tmp_path / "out" / "privacy.json").read_text())
        assert {run["rule"] for run in facts["runs_covered"]} == {"moo", "fixed"}
        assert facts["epsilon"] == pytest.approx(service.ledger.epsilon(service.name))


def test_one_simulated_run_makes_the_whole_ledger_a_simulation(tmp_path):
    with toy_party(tmp_path, SETTINGS, simulation=True) as service:
        assert code(service.answer(toy_request(service, SETTINGS))) == ""
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS, run="run-2"))) == ""
        service.write_party_statement(tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert facts["randomness"]["mode"] == "seeded"
    assert facts["guarantee"] != "yes"


def test_a_seed_that_the_ledger_has_seen_is_refused(tmp_path):
    with toy_party(tmp_path, SETTINGS, simulation=True) as service:
        assert code(service.answer(toy_request(service, SETTINGS))) == ""
        for stream in ("toy", "other"):
            again = toy_request(service, SETTINGS, run="run-2", simulation={"seed": 7, "stream": stream})
            assert code(service.answer(again)) == "seen-seed"
        other = toy_request(service, SETTINGS, run="run-2", simulation={"seed": 8, "stream": "toy"})
        assert code(service.answer(other)) == ""
        assert [entry.run for entry in service.ledger.entries(service.name)] == ["run-1", "run-2"]


def test_a_runs_id_does_not_stand_for_two_runs(tmp_path):
    with toy_party(tmp_path, SETTINGS, terms=two_rules(SETTINGS)) as service:
        assert code(service.answer(toy_request(service, SETTINGS, rule="moo"))) == ""
        fixed = toy_request(service, toy_settings(rule="fixed"), round=1)
        assert code(service.answer(fixed)) == "run"
        assert len(service.ledger.entries(service.name)) == 1
    with toy_party(tmp_path, SETTINGS, terms=two_rules(SETTINGS), simulation=True) as service:
        assert code(service.answer(toy_request(service, SETTINGS, round=1, rule="moo"))) == "run"


def test_two_runs_never_share_a_stream(tmp_path):
    """The same id at two coordinators, runs in turn, a restart: the party's secret is another one each time."""
    secrets = []
    for asked in ((("run-1", 0), ("run-2", 0), ("run-1", 1)), (("run-1", 2), ("run-2", 1))):
        with toy_party(tmp_path, SETTINGS) as service:
            for run, t in asked:
                assert code(service.answer(toy_request(service, SETTINGS, round=t, run=run))) == ""
                current = service.trainer._current
                assert current is not None
                secrets.append(current[1].randomness.secret)  # type: ignore[attr-defined]
    assert len(set(secrets)) == len(secrets) == 5


# --- people who come and go -----------------------------------------------------------------------


def without_first(data: Dataset, n: int) -> Dataset:
    return from_arrays(data.x[n:], data.y[n:], classes=3, name=data.name)


def test_people_who_stay_keep_what_they_spent_and_the_party_is_told(tmp_path):
    data = part(toy_data(120), SETTINGS, 0)
    fewer = without_first(data, 5)
    said: list[str] = []
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS))) == ""
        spent = service.ledger.epsilon(service.name)
    with toy_party(tmp_path, SETTINGS, say=said.append) as service:
        service.load_records = lambda task: dataclasses.replace(fewer, task_settings=task)
        assert code(service.answer(toy_request(service, SETTINGS, run="run-2"))) == ""
        assert service.ledger.epsilon(service.name) > spent
    assert any("35 examples are known" in words and "5 are gone" in words for words in said)


def test_another_key_of_the_records_is_refused(tmp_path, monkeypatch):
    """With it everybody would seem to be new, and have a full budget."""
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS))) == ""
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "other.key"))
    with toy_party(tmp_path, SETTINGS) as service, pytest.raises(ConfigError, match="FULCRUM_KEY_FILE"):
        service.prepare()


def test_an_account_of_version_0_1_goes_on(tmp_path):
    """Its population was a hash of the records without a key; that account stays as it is."""
    data = part(toy_data(120), SETTINGS, 0)
    terms = toy_terms(SETTINGS)
    with Ledger.open(tmp_path / "party-0.sqlite") as ledger:
        former = f"{data.name}, {population_fingerprint(data)}"
        ledger.enroll_parties([LedgerAccount("party-0", 50.0, terms.delta, "rdp", "example", former)])
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS))) == ""


# --- the plan ---------------------------------------------------------------------------------------


def test_the_plan_of_the_terms_is_the_run_as_proposed(tmp_path):
    terms = accept_proposal("party-0", make_proposal(SETTINGS, 3))
    assert terms.plan == ((0.2, 1.1, 4),)
    assert make_run_plan(terms) == RunPlan((Gaussian(0.2, 1.1, 4),), 1e-3)
    (tmp_path / "terms.toml").write_text(terms_to_toml(terms))
    assert read_terms_file(tmp_path / "terms.toml") == terms
    open_ended = dataclasses.replace(terms, plan=())
    assert open_ended.planned_events == (Gaussian(0.2, 1.1, 4),), "the worst case of terms without a plan"


@pytest.mark.parametrize("plan", [((0.3, 1.1, 4),), ((0.2, 1.0, 4),), ((0.2, 1.1, 5),), ((0.2, 1.1, 0),)])
def test_a_plan_beyond_the_terms_is_refused(plan):
    proposal = {**make_proposal(SETTINGS, 3), "plan": plan}
    with pytest.raises(ConfigError, match="plan"):
        accept_proposal("party-0", proposal)


def test_a_long_plan_is_shortened_and_never_costs_less():
    rows = [(0.1, 2.0 - t / 2000, 1) for t in range(1000)]
    short = shorten_plan(rows)
    assert len(short) <= 300
    assert sum(count for _, _, count in short) == 1000
    cost = []
    for each in (short, rows):
        events = [Gaussian(float(rate), float(sigma), int(count)) for rate, sigma, count in each]
        cost.append(Spend.empty().add_events(events).epsilon(1e-5, "rdp"))
    assert cost[1] <= cost[0] < 1.01 * cost[1]
    assert shorten_plan([]) == []


def test_pld_prices_a_partys_plan_once_and_a_second_run_needs_its_own_delta(tmp_path):
    settings = SETTINGS.replace(privacy={"accountant": "pld", "delta": 1e-3, "budget_delta": 2e-3})
    terms = accept_proposal("party-0", make_proposal(settings, 3))
    assert (terms.delta, terms.run_delta) == (2e-3, 1e-3)
    terms = dataclasses.replace(terms, budget=2.2 * terms.budget)
    with toy_party(tmp_path, settings, terms=terms) as service:
        assert code(service.answer(toy_request(service, settings))) == ""
        after_one = service.ledger.epsilon(service.name)
        for t in (1, 2, 3):
            assert code(service.answer(toy_request(service, settings, round=t))) == ""
        assert service.ledger.epsilon(service.name) == after_one, "a run counts as its whole plan from its start"
        assert code(service.answer(toy_request(service, settings, run="run-2"))) == ""
        assert service.ledger.epsilon(service.name) == pytest.approx(2 * after_one)
        assert code(service.answer(toy_request(service, settings, run="run-3"))) == "budget"


@pytest.mark.parametrize(
    ("arithmetic", "simulation", "wanted", "ran"),
    [
        ("auto", False, "", "proven"),
        ("proven", False, "", "proven"),
        ("fast", False, "arithmetic", "fast"),
        ("auto", True, "arithmetic", "fast"),
        ("proven", True, "", "proven"),
    ],
)
def test_proven_arithmetic_is_the_default_at_a_party(tmp_path, arithmetic, simulation, wanted, ran):
    """A coordinator cannot talk it away; and its statement says proven only where every party agrees."""
    proposals = [make_proposal(SETTINGS.replace(privacy={"arithmetic": asked}), 3) for asked in ("proven", "fast")]
    terms = toy_terms(SETTINGS, arithmetic=arithmetic)
    with toy_party(tmp_path, SETTINGS, terms=terms, simulation=simulation) as service:
        for proposal, answer in zip(proposals, (wanted, ""), strict=True):
            hello = pack_envelope({"kind": "hello", "run": "r", "nonce": "n", "proposal": proposal})
            assert code(service.answer(hello)) == answer
        assert code(service.answer(toy_request(service, SETTINGS))) == ""
        assert service.ledger.runs()["run-1"].arithmetic == ran
