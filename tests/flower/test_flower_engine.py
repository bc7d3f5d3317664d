"""The coordinator's side over a post in memory: the same result as in one process, and no bad party stops it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum import runs as api
from fulcrum.clipping import RULES
from fulcrum.engines.parallel import ParallelEngine
from fulcrum.errors import ConfigError, RunError
from fulcrum.flower import keys
from fulcrum.flower.consent import make_consent_text
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.messages import Envelope, assignment_from_table, pack_envelope
from fulcrum.flower.party import load_arrays
from fulcrum.flower.prepare import make_served_settings
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.models.layout import ParameterLayout
from fulcrum.privacy.ledger import Ledger
from fulcrum.settings.presets import METHODS
from fulcrum.settings.schema import Settings
from fulcrum.types import Assignment
from support.federations import toy_data
from support.flower import NAMES, flip_last_byte, serve, share_streams, toy_federation, toy_settings, toy_terms

TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}
"""In-process against Flower on one machine: the arithmetic is the same, so are the bits up to threading."""


def flat(result) -> torch.Tensor:
    return ParameterLayout.of(result.model).flatten(result.model)


def ledger_lines(path, party):
    with Ledger.open(path) as ledger:
        return [(e.round, e.events, e.digest) for e in ledger.entries(party)]


@pytest.mark.parametrize(
    "settings",
    [
        toy_settings(),
        toy_settings(3, "fixed", steps=2, server="momentum", ema=0.5),
        toy_settings(3, combine="median"),
        toy_settings(2, combine="geometric-median"),
    ],
)
@pytest.mark.every(2)
def test_a_simulation_across_machines_is_the_run_in_one_process(tmp_path, monkeypatch, settings):
    share_streams(monkeypatch)
    alone = api.execute(api.prepare(settings, toy_data(120)), tmp_path / "alone")
    with toy_federation(tmp_path, settings) as bus:
        result = serve(bus, settings, tmp_path / "served", monkeypatch)
    torch.testing.assert_close(flat(result), flat(alone), **TOLERANCE)
    assert pytest.approx(alone.C, rel=1e-6) == result.C
    assert result.epsilons == alone.epsilons
    for name in NAMES:
        own = ledger_lines(tmp_path / f"{name}.sqlite", name)
        assert len(own) == settings.train.rounds
        assert own == ledger_lines(tmp_path / "served" / "ledger.sqlite", name), "the coordinator's mirror"
        assert own == ledger_lines(tmp_path / "alone" / "ledger.sqlite", name), "the run in one process"


def test_a_party_that_trains_fast_gives_what_the_reference_engine_gives(tmp_path, monkeypatch):
    """The parties take the engine that `auto` picks; the reference engine writes every gradient out."""
    settings = toy_settings(3, steps=2)
    share_streams(monkeypatch)
    reference = dataclasses.replace(settings, run=dataclasses.replace(settings.run, engine="reference"))
    alone = api.execute(api.prepare(reference, toy_data(120)))
    with toy_federation(tmp_path, settings) as bus:
        result = serve(bus, settings, tmp_path / "served", monkeypatch)
        current = [service.trainer._current for service in bus.services.values()]
        engines = [made[2] for made in current if made is not None]
        assert len(engines) == 3
    assert all(isinstance(engine, ParallelEngine) for engine in engines)
    # The engines state different bounds for the error of their norms, and factors are divided by them.
    torch.testing.assert_close(flat(result), flat(alone), rtol=1e-4, atol=1e-5)
    start = api.prepare(settings, toy_data(120)).problem
    assert not torch.allclose(flat(result), start.layout.flatten(start.model), rtol=1e-2, atol=1e-2)
    assert pytest.approx(alone.C, rel=1e-5) == result.C


def preset_settings(name: str, **train) -> Settings:
    """The toy federation with everything that a method's preset sets."""
    settings = toy_settings(3, **train)
    parts = METHODS[name].parts
    sections = {section: dataclasses.replace(getattr(settings, section), **values) for section, values in parts.items()}
    return dataclasses.replace(settings, method=name, **sections)


REHEARSED = sorted(
    name
    for name, method in METHODS.items()
    if method.parts["clip"].get("rehearse") and method.parts["clip"]["rule"] != "moo"
)
PRESETS = sorted(
    name
    for name, method in METHODS.items()
    if method.unit == "example" and RULES[method.parts["clip"]["rule"]].sound and name not in REHEARSED
)
SOUND = sorted(name for name, rule in RULES.items() if rule.sound and rule.private)


QUICK_PRESETS = ("moo-unrehearsed", "dp-sgd", "quantile", "hyfreedp")


def test_the_presets_use_every_sound_rule():
    assert set(QUICK_PRESETS) <= set(PRESETS)
    assert {METHODS[name].parts["clip"]["rule"] for name in PRESETS} == set(SOUND)


@pytest.mark.parametrize(
    "name", [name if name in QUICK_PRESETS else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_every_sound_preset_gives_the_same_across_machines(tmp_path, monkeypatch, name):
    settings = preset_settings(name, steps=2)
    share_streams(monkeypatch)
    alone = api.execute(api.prepare(settings, toy_data(120)), tmp_path / "alone")
    with toy_federation(tmp_path, settings) as bus:
        result = serve(bus, settings, tmp_path / "served", monkeypatch)
    assert result.summary["rounds"] == 3
    assert result.summary["status"] == "finished"
    torch.testing.assert_close(flat(result), flat(alone), **TOLERANCE)
    assert pytest.approx(alone.C, rel=1e-6) == result.C
    assert result.epsilons == alone.epsilons
    for party in NAMES:
        own = ledger_lines(tmp_path / f"{party}.sqlite", party)
        assert len(own) == 3
        assert own == ledger_lines(tmp_path / "alone" / "ledger.sqlite", party)


@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsed_preset_without_declared_units_is_refused_with_what_to_do(tmp_path, monkeypatch, name):
    settings = preset_settings(name, steps=2)
    with (
        toy_federation(tmp_path, settings) as bus,
        pytest.raises(ConfigError, match=r"declare data\.units"),
    ):
        serve(bus, settings, tmp_path / "served", monkeypatch)


@pytest.mark.parametrize("name", ["moo", *REHEARSED])
def test_the_coordinator_rehearses_before_it_proposes(tmp_path, monkeypatch, name):
    """Declared units alone decide; the parties see in their consent what was chosen, and why it is free."""
    from fulcrum.runs.rehearsal import choice, memory

    monkeypatch.setattr(memory, "get_memory_folder", lambda: tmp_path / "rehearsals")
    played = []

    def play(facts, model=None, public=None, log=None):
        played.append(facts)
        return choice.Rehearsed(choice.Candidate("linear", 2.0, 3.0), facts.digest())

    monkeypatch.setattr(memory, "rehearse", play)
    settings = dataclasses.replace(
        preset_settings(name, steps=2), data=dataclasses.replace(toy_settings().data, units=(40,))
    )
    chosen = choice.Candidate("linear", 2.0, 3.0).apply(settings, 2)
    with toy_federation(tmp_path, chosen) as bus:
        result = serve(bus, settings, tmp_path / "served", monkeypatch)
        (terms, *_) = [service.terms for service in bus.services.values()]
        (service, *_) = bus.services.values()
        (tmp_path / "own").mkdir()
        service.write_party_statement(tmp_path / "own")
    own = (tmp_path / "own" / "PRIVACY.md").read_text()
    assert "stood in the terms before this party read a record" in own
    assert len(played) == 1
    assert result.summary["rounds"] == 3
    assert terms is not None
    assert terms.rehearsed
    assert terms.lr == chosen.train.lr == 0.75
    assert terms.clip.C0 == 2.0
    text = make_consent_text(terms, 40)
    assert "made-up records" in text
    assert "learning rate up to 0.75" in text
    assert "made-up" not in make_consent_text(dataclasses.replace(terms, rehearsed=False), 40)
    assert "made-up" in (tmp_path / "served" / "PRIVACY.md").read_text()
    wrong = dataclasses.replace(settings, data=dataclasses.replace(settings.data, units=(40, 40)))
    with pytest.raises(ConfigError, match=r"data\.units has 2 numbers for 3 parties"):
        serve(bus, wrong, tmp_path / "again", monkeypatch)


def test_dc_sgd_is_paid_for_statistics_only_in_the_rounds_that_release_them(tmp_path, monkeypatch):
    settings = preset_settings("dc-sgd")  # rate 0.2, refresh 1: a histogram with every fifth step
    settings = dataclasses.replace(settings, train=dataclasses.replace(settings.train, rounds=7))
    with toy_federation(tmp_path, settings) as bus:
        serve(bus, settings, tmp_path / "served", monkeypatch)
    sigmas = [events[0].sigma for _, events, _ in ledger_lines(tmp_path / "party-0.sqlite", "party-0")]
    assert [sigma == 1.1 for sigma in sigmas] == [True, False, False, False, False, True, False]
    assert min(sigmas) == 1.1, "a step without a histogram costs less, so its sigma is larger"


@pytest.mark.parametrize("name", ["dc-sgd", "dynamic"])
def test_terms_of_one_run_suffice_for_it(tmp_path, monkeypatch, name):
    """The default budget is what one run costs, with its noise schedule and its statistics interval, and no more."""
    settings = preset_settings(name, steps=2)
    with toy_federation(
        tmp_path, settings, terms=lambda party: accept_proposal(party, make_proposal(settings, 3))
    ) as bus:
        result = serve(bus, settings, tmp_path / "served", monkeypatch)
        service = bus.services[0]
        assert result.summary["rounds"] == 3
        assert service.terms is not None
        assert service.ledger.epsilon(NAMES[0]) <= service.terms.budget <= service.ledger.epsilon(NAMES[0]) + 2e-4
        assert service.terms.budget < service.terms.compute_planned_epsilon()


def test_a_field_that_an_assignment_gets_later_travels_too(tmp_path, monkeypatch):
    Longer = dataclasses.make_dataclass(
        "Assignment", [("padding", int, dataclasses.field(default=0))], bases=(Assignment,), frozen=True
    )
    monkeypatch.setattr("fulcrum.privacy.plan.party_group.Assignment", Longer)
    monkeypatch.setattr("fulcrum.flower.messages.Assignment", Longer)
    settings = toy_settings(2)
    with toy_federation(tmp_path, settings) as bus:
        result = serve(bus, settings, tmp_path / "run", monkeypatch)
        headers = [json.loads(envelope.header) for _, envelope in bus.sent]
        tasks = [header["assignment"] for header in headers if header["kind"] == "round"]
        assert result.summary["status"] == "finished"
        assert len(tasks) == 6
        assert all(task["padding"] == 0 for task in tasks)
        longer: list[Any] = [assignment_from_table({**task, "padding": 3}) for task in tasks]
        assert all(task.padding == 3 for task in longer)


def test_another_seed_is_another_run(tmp_path, monkeypatch):
    settings = toy_settings(2)
    with toy_federation(tmp_path, settings) as bus:
        one = serve(bus, settings, tmp_path / "one", monkeypatch)
        with pytest.raises(RunError, match="too few"):  # their ledgers have seen the seed
            serve(bus, settings, tmp_path / "again", monkeypatch)
        assert "had the seed of this simulation" in (tmp_path / "again" / "parties.jsonl").read_text()
    with toy_federation(tmp_path / "new", settings) as bus:  # other ledgers, another run id, the same seed
        two = serve(bus, settings, tmp_path / "new" / "two", monkeypatch)
    torch.testing.assert_close(flat(one), flat(two), **TOLERANCE)
    with toy_federation(tmp_path / "secure", settings, simulation=False) as bus:
        three = serve(bus, settings, tmp_path / "secure" / "run", monkeypatch, simulation=False)
    assert not torch.allclose(flat(one), flat(three), **TOLERANCE)


# --- bad parties --------------------------------------------------------------------------------


def resigned(tmp_path, k: int, header: bytes, body: bytes) -> Envelope:
    """What a party with a key but without manners sends."""
    return keys.sign_envelope(keys.load_private_key(tmp_path / "keys" / NAMES[k]), Envelope(header, body))


def changed(reply: Envelope, **arrays) -> bytes:
    return pack_envelope({}, {**load_arrays(reply.body), **arrays}).body


def delta(reply: Envelope) -> torch.Tensor:
    return load_arrays(reply.body)["delta"]


TRICKS = {
    "NaN": ("not finite", lambda d, r: resigned(d, 1, r.header, changed(r, delta=delta(r) * torch.nan))),
    "a wrong shape": ("shape", lambda d, r: resigned(d, 1, r.header, changed(r, delta=torch.zeros(7)))),
    "a wrong type": ("type", lambda d, r: resigned(d, 1, r.header, changed(r, delta=delta(r).double()))),
    "a huge update": ("larger", lambda d, r: resigned(d, 1, r.header, changed(r, delta=delta(r) * 1e6))),
    "another array": ("unknown", lambda d, r: resigned(d, 1, r.header, changed(r, more=torch.zeros(1)))),
    "no signature": ("signature", lambda d, r: Envelope(r.header, r.body)),
    "another's signature": ("signature", lambda d, r: resigned(d, 2, r.header, r.body)),
    "another's name": ("signature", lambda d, r: resigned(d, 1, r.header.replace(b"party-1", b"party-2"), r.body)),
    "a stranger's name": ("register", lambda d, r: resigned(d, 1, r.header.replace(b"party-1", b"party-9"), r.body)),
    "changed on its way": ("signature", lambda d, r: Envelope(r.header, flip_last_byte(r.body), r.signature)),
    "cheaper events": (
        "asked for",
        lambda d, r: resigned(d, 1, r.header.replace(b"0.2,1.1,1]", b"0.2,9.9,1]"), r.body),
    ),
    "nonsense": ("JSON", lambda d, r: Envelope(b"\0\1", b"\2", b"\3")),
    "terabytes": ("larger than", lambda d, r: resigned(d, 1, r.header, b"\0" * 200_000)),
}


@pytest.mark.parametrize(("words", "trick"), TRICKS.values(), ids=TRICKS)
@pytest.mark.every(3)
def test_a_bad_party_is_left_out_and_reported_and_the_round_goes_on(tmp_path, monkeypatch, words, trick):
    settings = toy_settings(2)
    with toy_federation(tmp_path, settings) as bus:

        def tamper(k, request, reply):
            return trick(tmp_path, reply) if k == 1 and b'"kind":"update"' in reply.header else reply

        bus.tamper = tamper
        result = serve(bus, settings, tmp_path / "run", monkeypatch)
    assert result.summary["status"] == "finished"
    reports = [json.loads(line) for line in (tmp_path / "run" / "parties.jsonl").read_text().splitlines()]
    refused = [line for line in reports if line["party"] == "party-1" and "refused" in line["what"]]
    assert len(refused) == 2
    assert words in refused[0]["what"]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["participants"] for line in metrics] == [[0, 2], [0, 2]]
    assert bool(torch.isfinite(flat(result)).all())


@pytest.mark.parametrize("C", [1e9, -1.0, 0.0])
def test_a_C_that_no_rule_reaches_is_not_believed(tmp_path, monkeypatch, C):
    """moo-client: each party adapts its own C, and says which one it used."""
    settings = toy_settings(2, "moo-client")
    with toy_federation(tmp_path, settings) as bus:

        def tamper(k, request, reply):
            if k != 1 or b'"kind":"update"' not in reply.header:
                return reply
            return resigned(tmp_path, 1, reply.header, changed(reply, C=torch.tensor([C])))

        bus.tamper = tamper
        result = serve(bus, settings, tmp_path / "run", monkeypatch)
    assert result.summary["status"] == "finished"
    assert "its clipping norm is outside the agreed range" in (tmp_path / "run" / "parties.jsonl").read_text()


def test_an_old_reply_is_not_taken_for_a_new_one(tmp_path, monkeypatch):
    settings = toy_settings(3)
    first: list[Envelope] = []
    with toy_federation(tmp_path, settings) as bus:

        def tamper(k, request, reply):
            if k == 1 and b'"kind":"update"' in reply.header:
                first.append(reply)
                return first[0]
            return reply

        bus.tamper = tamper
        serve(bus, settings, tmp_path / "run", monkeypatch)
    text = (tmp_path / "run" / "parties.jsonl").read_text()
    assert text.count("it answers another request") == 2, "round 1 was honest; rounds 2 and 3 were replays"


def test_a_party_cannot_answer_for_another(tmp_path, monkeypatch):
    """party-1's node passes on what party-2 would honestly answer to its own request."""
    settings = toy_settings(1)
    with toy_federation(tmp_path, settings) as bus:

        def tamper(k, request, reply):
            return bus.services[2].answer(request) if k == 1 and b'"kind":"round"' in request.header else reply

        bus.tamper = tamper
        serve(bus, settings, tmp_path / "run", monkeypatch)
    assert "it is from party-2" in (tmp_path / "run" / "parties.jsonl").read_text()


# --- late and missing parties -------------------------------------------------------------------


def test_missing_parties_change_the_weights_and_may_come_back(tmp_path, monkeypatch):
    settings = toy_settings(4)
    with toy_federation(tmp_path, settings) as bus:

        def on_round(result):
            bus.away = {2} if result.round == 1 else set()

        serve(bus, settings, tmp_path / "run", monkeypatch, on_round=on_round)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["participants"] for line in metrics] == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [line[0] for line in ledger_lines(tmp_path / "party-2.sqlite", "party-2")] == [0, 2, 3]
    assert metrics[-1]["epsilons"][2] < metrics[-1]["epsilons"][0]


def test_a_late_party_is_not_waited_for_beyond_the_deadline(tmp_path, monkeypatch):
    settings = toy_settings(2)
    with toy_federation(tmp_path, settings) as bus:
        bus.tamper = lambda k, request, reply: None if k == 0 and b'"kind":"round"' in request.header else reply
        result = serve(bus, settings, tmp_path / "run", monkeypatch)
    assert result.summary["status"] == "finished"
    text = (tmp_path / "run" / "parties.jsonl").read_text()
    assert "did not answer round 1 in time" in text
    # It computed and paid; the mirror counts it too, since something may have left. Then it rests.
    assert len(ledger_lines(tmp_path / "party-0.sqlite", "party-0")) == 1
    assert len(ledger_lines(tmp_path / "run" / "ledger.sqlite", "party-0")) == 1


def test_too_few_parties_stop_the_run_and_it_can_go_on(tmp_path, monkeypatch):
    settings = toy_settings(3, min_parties=3)
    wait_policy = WaitPolicy(round_timeout=1.0, join_timeout=0.5, min_parties=3)
    with toy_federation(tmp_path, settings) as bus:

        def on_round(result):
            bus.away = {1}

        with pytest.raises(RunError, match="only 2 of at least 3"):
            serve(bus, settings, tmp_path / "run", monkeypatch, on_round=on_round, wait_policy=wait_policy)
        bus.away = set()
        result = serve(bus, settings, tmp_path / "run", monkeypatch, resume=True)
    assert result.summary["status"] == "finished"
    for name in NAMES:
        assert [line[0] for line in ledger_lines(tmp_path / f"{name}.sqlite", name)] == [0, 1, 2]


def test_a_party_that_returns_within_the_round_is_asked_again(tmp_path, monkeypatch):
    settings = toy_settings(1)
    with toy_federation(tmp_path, settings) as bus:
        lost: list[int] = []

        def tamper(k, request, reply):
            if k == 1 and b'"kind":"round"' in request.header and not lost:
                lost.append(k)
                bus.back = {1}  # it was killed with its reply stored but not sent, and started again
                return None
            return reply

        bus.tamper = tamper
        serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=WaitPolicy(60.0, 60.0, 1))
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["participants"] == [0, 1, 2]
    assert len(ledger_lines(tmp_path / "party-1.sqlite", "party-1")) == 1


def test_a_spent_budget_ends_the_run_when_too_few_are_left(tmp_path, monkeypatch):
    settings = toy_settings(4, min_parties=3)
    with toy_federation(tmp_path, settings) as bus:
        terms = toy_terms(settings, "party-1", rounds=2)
        bus.services[1].prepare()  # opens its account
        bus.services[1].ledger.change_budget("party-1", terms.compute_planned_epsilon() * 1.0001)
        result = serve(bus, settings, tmp_path / "run", monkeypatch, wait_policy=WaitPolicy(1.0, 1.0, 3))
    assert "too few parties have budget left" in result.summary["status"]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["participants"] for line in metrics] == [[0, 1, 2], [0, 1, 2], [0, 2]]
    assert "budget is spent" in (tmp_path / "run" / "parties.jsonl").read_text()


# --- the coordinator crashes --------------------------------------------------------------------


class Crash(BaseException):
    """As kill -9: nothing of the run is written after it."""


@pytest.mark.parametrize("simulation", [True, False])
def test_after_a_crash_the_run_goes_on_and_nobody_pays_twice(tmp_path, monkeypatch, simulation):
    """The coordinator dies with all replies of round 2 in hand and none of them on disk."""
    settings = toy_settings(4)
    whole = None
    if simulation:
        with toy_federation(tmp_path / "other", settings) as bus:
            whole = serve(bus, settings, tmp_path / "other" / "whole", monkeypatch)
    with toy_federation(tmp_path, settings, simulation) as bus:
        said: list[str] = []

        def tamper(k, request, reply):
            if k == 2 and b'"round":1,' in request.header and not said:
                said.append("now")
                raise Crash
            return reply

        bus.tamper = tamper
        with pytest.raises(Crash):
            serve(bus, settings, tmp_path / "run", monkeypatch, simulation=simulation)
        asked = len(bus.sent)
        result = serve(bus, settings, tmp_path / "run", monkeypatch, resume=True)
        again = [e for k, e in bus.sent[asked:] if k == 0 and b'"round":1,' in e.header]
        before = [e for k, e in bus.sent[:asked] if k == 0 and b'"round":1,' in e.header]
    same = [(e.header, e.body) for e in before[-1:]]  # a signature may differ: replies refer to header and body
    assert [(e.header, e.body) for e in again] == same, "the request of the interrupted round is the same"
    assert result.summary["status"] == "finished"
    run = json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    for name in NAMES:
        with Ledger.open(tmp_path / f"{name}.sqlite") as ledger:
            entries = [e for e in ledger.entries(name) if e.run == run]
        assert [e.round for e in entries] == [0, 1, 2, 3]
        assert [e.attempt for e in entries] == [0, 0, 0, 0]
        mirror = ledger_lines(tmp_path / "run" / "ledger.sqlite", name)
        assert [line[2] for line in mirror] == [e.digest for e in entries], "none is free: each release was paid"
    if whole is not None:
        torch.testing.assert_close(flat(result), flat(whole), **TOLERANCE)


def test_a_served_run_is_not_continued_in_one_process(tmp_path, monkeypatch):
    settings = toy_settings(1)
    with toy_federation(tmp_path, settings) as bus:
        serve(bus, settings, tmp_path / "run", monkeypatch)
    with pytest.raises(RunError, match="fulcrum serve --resume"):
        api.resume(tmp_path / "run")
    api.execute(api.prepare(settings, toy_data(120)), tmp_path / "alone")
    with toy_federation(tmp_path, settings) as bus, pytest.raises(RunError, match="fulcrum resume"):
        serve(bus, settings, tmp_path / "alone", monkeypatch, resume=True)


# --- joining ------------------------------------------------------------------------------------


def test_only_a_party_in_the_register_can_join(tmp_path, monkeypatch):
    settings = toy_settings(1)
    with toy_federation(tmp_path, settings) as bus:
        (tmp_path / "other").mkdir()
        keys.make_key_pair(tmp_path / "other", "party-1")  # the name is right, the key is not
        bus.services[1].key = keys.load_private_key(tmp_path / "other" / "party-1")
        said: list[str] = []
        result = serve(bus, settings, tmp_path / "run", monkeypatch, said=said)
    assert result.summary["parties"] == 2
    assert any("claims to be from party-1" in words for words in said)


def test_a_party_that_does_not_simulate_does_not_join_a_simulation(tmp_path, monkeypatch):
    settings = toy_settings(1)
    with toy_federation(tmp_path, settings, simulation=False) as bus:
        with pytest.raises(RunError, match="only 0 of at least 1"):
            serve(bus, settings, tmp_path / "run", monkeypatch)
        assert all(service.ledger.entries(service.name) == [] for service in bus.services.values())


def test_what_only_makes_sense_in_one_process_is_refused():
    settings = toy_settings()
    assert make_served_settings(settings, 3, False).privacy.randomness == "secure"
    assert make_served_settings(settings, 3, True).privacy.randomness == "seeded"
    with pytest.raises(ConfigError, match="diagnostics"):
        make_served_settings(
            dataclasses.replace(settings, run=dataclasses.replace(settings.run, diagnostics=True)), 3, False
        )
    with pytest.raises(ConfigError, match="validation"):
        make_served_settings(
            dataclasses.replace(settings, data=dataclasses.replace(settings.data, validation=0.1)), 3, False
        )
