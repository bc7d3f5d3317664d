"""Finding 3 over the wire: a coordinator reached a "sound" rule's factors through the rule's state.

243f1c8 took the whole state from the request and bounded its numbers from above only: a negative `stability` passed,
and auto-s then scaled a target's gradient by a huge factor of either sign. Now a party makes the state from its own
terms; only C travels (and moo-scalar's direction), within a range.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.clipping import RULES
from fulcrum.clipping.rule import ModelFacts
from fulcrum.clipping.testing import TEST_MODELS, check_moves
from fulcrum.errors import ConfigError
from fulcrum.flower.messages import Envelope, pack_envelope, read_message_header
from fulcrum.flower.party import PartyService, load_arrays
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.rule_terms import RuleTerms
from fulcrum.flower.terms import read_terms_file, terms_to_toml
from fulcrum.settings.schema import Clip
from fulcrum.types import RoundRequest, Stats
from support.flower import toy_party, toy_request, toy_settings, toy_terms

SOUND = sorted(name for name, rule in RULES.items() if rule.sound and rule.private)


def code(reply: Envelope) -> str:
    return str(read_message_header(reply, ("update", "refused", "welcome", "noted")).get("code", ""))


def watch(service: PartyService) -> list[RoundRequest]:
    """What the party's trainer is asked for from now on."""
    asked: list[RoundRequest] = []
    train = service.trainer.train

    def watched(facts: Any, request: RoundRequest) -> Any:
        asked.append(request)
        return train(facts, request)

    service.trainer.train = watched  # type: ignore[method-assign]
    return asked


def old_request(service: PartyService, settings: Any, **state: float) -> Envelope:
    """A request that carries the whole state, as 243f1c8 sent and took it, with some of its numbers changed."""
    honest = toy_request(service, settings)
    layout = service.trainer.layout
    whole = {**RULES[settings.clip.rule].init(settings.clip, ModelFacts(layout.dim, layout.sizes))}
    whole |= {name: torch.full_like(whole[name], value) for name, value in state.items()}
    arrays = {"params": load_arrays(honest.body)["params"], **{f"state.{name}": each for name, each in whole.items()}}
    return Envelope(honest.header, pack_envelope({}, arrays).body)


@pytest.mark.parametrize("rule", ["auto-s", "psac"])
def test_a_negative_stability_does_not_get_in(tmp_path, rule):
    settings = toy_settings(rule=rule)
    # The old computation: with the state of the request, a unit of norm 2 gets a factor that is far out of bounds.
    state = {"C": torch.ones(1), "stability": torch.tensor(-1.99999)}
    if rule == "psac":  # r = -norm^2 / (norm + 1) up to a little, so that |g| + r / (|g| + r) nearly vanishes
        state["stability"] = torch.tensor(-4 / 3 * 0.99999)
    stats = Stats(norms=torch.tensor([[2.0]]), mask=torch.tensor([True]))
    assert float((RULES[rule].clip(stats, state)[0] * stats.norms).abs()) > 1e3
    assert float(state["stability"].abs().max()) <= 1e6, "the old check, which this passes"

    with toy_party(tmp_path, settings) as service:
        asked = watch(service)
        for value in (-1.99999, -1e-3, 0.0, 1e-30, torch.nan, torch.inf, 0.02):
            assert code(service.answer(old_request(service, settings, stability=value))) == "message"
        assert service.ledger.entries(service.name) == []
        assert asked == []
        assert code(service.answer(toy_request(service, settings))) == ""
        assert float(asked[0].states[0]["stability"]) == pytest.approx(0.01), "from the party's own terms"


@pytest.mark.parametrize("rule", SOUND)
def test_no_entry_of_any_rules_state_is_taken_unless_it_must_move(tmp_path, rule):
    settings = toy_settings(rule=rule)
    with toy_party(tmp_path, settings) as service:
        honest = toy_request(service, settings)
        arrays = load_arrays(honest.body)
        start = RULES[rule].init(settings.clip, ModelFacts(service.trainer.layout.dim, service.trainer.layout.sizes))
        moving = set(RULES[rule].moves) if RULES[rule].where == "server" else set()
        assert {name for name in arrays if name != "params"} == {f"state.{name}" for name in moving}
        for name in set(start) - moving:
            more = pack_envelope({}, {**arrays, f"state.{name}": start[name]}).body
            assert code(service.answer(Envelope(honest.header, more))) == "message"
        assert service.ledger.entries(service.name) == []
        asked = watch(service)
        assert code(service.answer(honest)) == ""
        for name in set(start) - moving:
            assert torch.equal(asked[0].states[0][name], start[name]), name


def test_what_moves_is_what_a_rule_needs():
    """The wrong cases: a rule that reads more than it names clips differently at a party."""
    for name in SOUND:
        for shape in TEST_MODELS:
            check_moves(RULES[name], Clip(rule=name), shape)
    for name, moves in (("moo-scalar", ("C",)), ("moo-c", ()), ("moo", ())):
        with pytest.raises(AssertionError, match="moves"):
            check_moves(dataclasses.replace(RULES[name], moves=moves), Clip(rule=name), TEST_MODELS[0])


# --- neighbours: C ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "C",
    [
        [-1.0, 1.0],
        [0.0, 1.0],
        [1e-30, 1.0],
        [1e-45, 1e-3],
        [torch.nan, 1.0],
        [torch.inf, 1.0],
        [800.0, 700.0],
        [3e38, 1.0],
    ],
)
def test_a_share_of_C_out_of_range_is_refused(tmp_path, C):
    settings = toy_settings(rule="quantile")
    settings = dataclasses.replace(settings, clip=dataclasses.replace(settings.clip, groups="layer"))
    settings = settings.replace(model={"name": "mlp", "hidden": (4,)})
    with toy_party(tmp_path, settings) as service:
        honest = toy_request(service, settings, groups="layer")
        arrays = {"params": load_arrays(honest.body)["params"]}
        for values, wanted in ((C, ("C", "message")), ([1.0, 1e-6], ("",))):
            body = pack_envelope({}, {**arrays, "state.C": torch.tensor(values)}).body
            assert code(service.answer(Envelope(honest.header, body))) in wanted
        assert len(service.ledger.entries(service.name)) == 1


@pytest.mark.parametrize("rule", ["fixed", "auto-s", "psac", "units-of-c", "wav", "dynamic"])
def test_where_C_follows_from_the_terms_no_C_is_taken(tmp_path, rule):
    settings = toy_settings(rule=rule)
    terms = toy_terms(settings, clip=RuleTerms(C0=2.0, rho_c=0.5))
    with toy_party(tmp_path, settings, terms=terms) as service:
        honest = toy_request(service, settings)
        more = pack_envelope({}, {**load_arrays(honest.body), "state.C": torch.ones(1)}).body
        assert code(service.answer(Envelope(honest.header, more))) == "message"
        asked = watch(service)
        for t in (0, 2):
            assert code(service.answer(toy_request(service, settings, round=t))) == ""
        found = [float(torch.linalg.vector_norm(request.states[0]["C"])) for request in asked]
        assert found == pytest.approx([2.0, 2.0 * 0.5 ** (2 / 4)] if rule == "dynamic" else [2.0, 2.0])


# --- neighbours: states that live at the party ------------------------------------------------------


def test_a_partys_own_state_stays_with_it_over_crashes(tmp_path):
    settings = toy_settings(rule="moo-client")
    seen: list[dict[str, torch.Tensor]] = []
    for t in range(3):  # another process for every round
        with toy_party(tmp_path, settings, simulation=True) as service:
            asked = watch(service)
            request = toy_request(service, settings, round=t, C=777.0)  # C is not even sent
            reply = service.answer(request)
            assert code(reply) == ""
            assert service.answer(request) == reply
            seen.append(dict(asked[0].states[0]))
            assert len(asked) == 1
            assert torch.equal(load_arrays(reply.body)["C"], seen[-1]["C"])
    assert float(seen[0]["C"]) == 1.0
    assert not seen[0]["memory"].any()
    assert seen[1]["memory"].any()
    assert not torch.equal(seen[1]["memory"], seen[2]["memory"])
    with toy_party(tmp_path, settings, simulation=True) as service:  # another run begins anew
        asked = watch(service)
        other = {"seed": 8, "stream": "toy"}
        assert code(service.answer(toy_request(service, settings, round=1, run="run-2", simulation=other))) == ""
        assert not asked[0].states[0]["memory"].any()


# --- neighbours: what is agreed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("stability", -0.5), ("stability", 0.0), ("shrink", -1.0), ("rho_c", -1.0)]
)
def test_settings_that_no_rule_bears_cannot_be_agreed_to(tmp_path, name, value):
    settings = toy_settings(rule="auto-s")
    proposal = make_proposal(settings, 3)
    proposal["clip"] = {**proposal["clip"], name: value}
    with pytest.raises(ConfigError, match=rf"clip\.{name}"):
        accept_proposal("party-0", proposal)
    text = terms_to_toml(toy_terms(settings))
    lines = [f"{name} = {value}" if line.startswith(f"{name} = ") else line for line in text.splitlines()]
    (tmp_path / "terms.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"clip\.{name}"):
        read_terms_file(tmp_path / "terms.toml")


def test_a_proposal_with_other_settings_of_the_rule_is_refused(tmp_path):
    settings = toy_settings(rule="auto-s")
    with toy_party(tmp_path, settings) as service:
        for change, wanted in (({}, ""), ({"stability": 0.5}, "clip"), ({"C0": 2.0}, "clip"), ({"x": 1}, "message")):
            proposal = make_proposal(settings, 3)
            proposal["clip"] = {**proposal["clip"], **change}
            hello = pack_envelope({"kind": "hello", "run": "r", "nonce": "n", "proposal": proposal})
            assert code(service.answer(hello)) == wanted


def test_terms_of_rules_with_options_come_back_from_their_file(tmp_path, monkeypatch):
    (tmp_path / "optioned_rule.py").write_text(
        "import dataclasses\nfrom fulcrum.clipping import RULES\n"
        "defaults = {'speed': 0.1, 'on': False, 'word': ''}\n"
        "RULE = dataclasses.replace(RULES['fixed'], name='optioned', options=defaults)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    clip = RuleTerms(C0=3.0, options={"speed": 0.5, "on": True, "word": 'a "b"'})
    terms = toy_terms(toy_settings(), rules=("optioned_rule:RULE",), clip=clip)
    (tmp_path / "terms.toml").write_text(terms_to_toml(terms))
    assert read_terms_file(tmp_path / "terms.toml") == terms
    wrong = dataclasses.replace(terms, clip=dataclasses.replace(clip, options={"spede": 1.0}))
    (tmp_path / "terms.toml").write_text(terms_to_toml(wrong))
    with pytest.raises(ConfigError, match="spede"):
        read_terms_file(tmp_path / "terms.toml")


def test_every_setting_of_a_rule_is_agreed_on_or_is_the_coordinators_own():
    elsewhere = {"rule", "groups", "C_min", "C_max"}  # fields of the terms themselves
    elsewhere |= {"statistics_interval", "statistics_rounds"}  # together a number of steps in the terms
    only_coordinator = {"balance", "reach", "growth", "reading"}  # moo's step length; rules that are not sound
    only_coordinator |= {
        "rehearse",
        "rehearse_on",
        "step",
        "search",
    }  # what is measured beforehand; moo's step and search of C
    agreed = {field.name for field in dataclasses.fields(RuleTerms)}
    assert agreed | elsewhere | only_coordinator == {field.name for field in dataclasses.fields(Clip)}
    assert all(getattr(RuleTerms(), name) == getattr(Clip(), name) for name in agreed), "the same defaults"


def test_a_rule_that_is_not_built_in_is_imported_only_after_consent(tmp_path, monkeypatch):
    """243f1c8 looked a proposal's rules up before anybody had agreed: the name alone ran code."""
    (tmp_path / "sneaky_rule.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'ran')!r}).write_text('')\n"
        "import dataclasses\nfrom fulcrum.clipping import RULES\n"
        "RULE = dataclasses.replace(RULES['fixed'], name='sneaky')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    proposal = {**make_proposal(toy_settings(), 3), "rules": ["sneaky_rule:RULE"]}
    hello = pack_envelope({"kind": "hello", "run": "r", "nonce": "n", "proposal": proposal})
    with toy_party(tmp_path, toy_settings(), terms=None, consent=lambda terms: False) as service:
        assert code(service.answer(hello)) == "consent"
        assert not (tmp_path / "ran").exists()
        service.consent = lambda terms: True
        assert code(service.answer(hello)) == ""
        assert (tmp_path / "ran").exists()


def test_an_older_coordinator_gets_one_clear_answer(tmp_path):
    said: list[str] = []
    with toy_party(tmp_path, toy_settings(), say=said.append) as service:
        header = json.loads(toy_request(service, toy_settings()).header)
        for version in (3, 2, None, "4", 4.0, True):
            old = Envelope(json.dumps({**header, "v": version}).encode())
            assert code(service.answer(old)) == "version"
        assert "install the same version of Fulcrum" in said[-1]
        assert service.ledger.entries(service.name) == []
