"""A party answers within its terms, pays before it computes, and sends the same bytes again after a crash."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from support.events import as_gaussian

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.errors import ConfigError
from fulcrum.flower import keys, party, party_training
from fulcrum.flower.messages import Envelope, pack_envelope, read_message_header
from fulcrum.flower.proposals import accept_proposal, check_proposal, make_proposal
from fulcrum.flower.refusals import REFUSAL_TEXTS, TermsRefusal
from fulcrum.flower.request_checks import ASSIGNMENT_LIMITS
from fulcrum.flower.terms import read_terms_file, terms_to_toml
from fulcrum.privacy.ledger import Ledger
from fulcrum.types import Assignment
from support.flower import EVENT, NAMES, toy_party, toy_request, toy_settings, toy_terms

SETTINGS = toy_settings()


def code(reply: Envelope) -> str:
    """ "" for an update, otherwise why it was refused."""
    header = read_message_header(reply, ("update", "refused", "welcome", "noted"))
    return header.get("code", "")


# --- terms --------------------------------------------------------------------------------------

BEYOND = {
    "a larger rate": ({"rate": 0.3}, "rate"),
    "a rate of zero": ({"rate": 0}, "rate"),
    "more steps": ({"steps": 2}, "steps"),
    "no steps": ({"steps": 0}, "steps"),
    "a smaller sigma": ({"sigma": 1.0}, "sigma"),
    "no noise": ({"sigma": 0}, "sigma"),
    "a rule without noise": ({"rule": "none"}, "rule"),
    "a rule that was not agreed": ({"rule": "fixed"}, "rule"),
    "a rule of the server's": ({"rule": "os:system"}, "rule"),
    "another unit": ({"unit": "person"}, "unit"),
    "other groups": ({"groups": "layer"}, "groups"),
    "another model": ({"model": "0" * 16}, "model"),
    "another task": ({"task": "0" * 16}, "task"),
    "more rounds": ({"rounds": 5}, "rounds"),
    "a round beyond the last": ({"round": 4}, "rounds"),
    "a larger learning rate": ({"lr": 0.6}, "lr"),
    "a learning rate of zero": ({"lr": 0}, "lr"),
    "weight decay": ({"weight_decay": 0.1}, "lr"),
    "a seed": ({"simulation": {"seed": 1, "stream": "x"}}, "seed"),
    "another party": ({"party": "party-1"}, "party"),
    "noise shared with others": ({"noise_parties": 2}, "shared-noise"),
    "a number beyond any federation": ({"client": 10**6}, "party"),
    "a field of the wrong type": ({"rate": "0.2"}, "message"),
}


@pytest.mark.parametrize(("change", "wanted"), BEYOND.values(), ids=BEYOND)
def test_what_goes_beyond_the_terms_is_refused_and_costs_nothing(tmp_path, change, wanted):
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS, **change))) == wanted
        assert service.ledger.entries(service.name) == []


@pytest.mark.parametrize("C", [float("nan"), float("inf"), 0.0, -1.0, 1e-4, 2e3])
def test_a_C_that_is_not_finite_or_outside_its_range_is_refused(tmp_path, C):
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS, C=C))) in ("C", "message")
        assert service.ledger.entries(service.name) == []


@pytest.mark.parametrize("size", [3e38, 2e6, torch.nan, -torch.inf])
def test_numbers_that_would_overflow_are_refused(tmp_path, size):
    """In the weights, and in the one vector that a rule's party needs: moo-scalar's remembered direction."""
    settings = toy_settings(rule="moo-scalar")
    with toy_party(tmp_path, settings) as service:
        honest = toy_request(service, settings)
        for name, wanted in (("params", "params"), ("state.memory", "state"), ("state.C", "C")):
            arrays = party.load_arrays(honest.body)
            arrays[name] = torch.full_like(arrays[name], size)
            answered = code(service.answer(Envelope(honest.header, pack_envelope({}, arrays).body)))
            assert answered == (wanted if abs(size) < torch.inf else "message")
        assert service.ledger.entries(service.name) == []
        assert code(service.answer(honest)) == ""


@pytest.mark.parametrize("change", [{}, {"rate": 0.1}, {"sigma": 9.0}, {"lr": 0.1}, {"rounds": 3}])
def test_what_is_within_the_terms_is_answered_and_paid(tmp_path, change):
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS, **change))) == ""
        (entry,) = service.ledger.entries(service.name)
        event = dataclasses.replace(EVENT, rate=change.get("rate", 0.2), sigma=change.get("sigma", 1.1))
        assert entry.events == (event,)
        assert entry.digest is not None


@pytest.mark.parametrize(("interval", "wanted"), [(1, "interval"), (4, "interval"), (7, "interval"), (5, ""), (10, "")])
def test_statistics_are_refused_more_often_than_agreed_and_charged_as_they_go_out(tmp_path, interval, wanted):
    settings = toy_settings(rule="dc-sgd")
    terms = toy_terms(settings, statistics_interval=5)
    with toy_party(tmp_path, settings, terms=terms) as service:
        reply = service.answer(toy_request(service, settings, round=1, statistics_interval=interval))
        assert code(reply) == wanted
        if not wanted:  # step 1 releases no histogram: it costs what its gradient's noise costs
            (entry,) = service.ledger.entries(service.name)
            (event,) = entry.events
            assert as_gaussian(event).sigma > 1.1


def test_a_new_field_is_refused_unless_it_keeps_its_default_or_has_a_limit(tmp_path, monkeypatch):
    Longer = dataclasses.make_dataclass(
        "Assignment", [("cheaper", float, dataclasses.field(default=1.0))], bases=(Assignment,), frozen=True
    )
    with toy_party(tmp_path, SETTINGS) as service:
        monkeypatch.setattr("fulcrum.flower.messages.Assignment", Longer)
        for value, wanted in ((0.5, "field"), ("x", "message"), (1.0, "")):
            assert code(service.answer(toy_request(service, SETTINGS, assignment={"cheaper": value}))) == wanted
        assert len(service.ledger.entries(service.name)) == 1
    monkeypatch.undo()
    assert set(ASSIGNMENT_LIMITS) == {field.name for field in dataclasses.fields(Assignment)}, "each has a limit"


def test_what_would_be_released_must_be_what_was_reserved(tmp_path, monkeypatch):
    with toy_party(tmp_path, SETTINGS) as service:
        train = service.trainer.train
        monkeypatch.setattr(
            service.trainer, "train", lambda *given: dataclasses.replace(train(*given), events=(EVENT, EVENT))
        )
        assert code(service.answer(toy_request(service, SETTINGS))) == "internal"
        assert service.replies.get("run-1", 0) is None


def test_the_engine_is_made_once_per_run(tmp_path, monkeypatch):
    made = []
    find = party_training.find_engine

    def counted(*given):
        made.append(given[0])
        return find(*given)

    monkeypatch.setattr(party_training, "find_engine", counted)
    with toy_party(tmp_path, SETTINGS) as service:
        for run, t in (("run-1", 0), ("run-1", 1), ("run-2", 0)):
            assert code(service.answer(toy_request(service, SETTINGS, round=t, run=run))) == ""
    assert made == ["auto", "auto"]


def test_terms_from_before_the_statistics_interval_still_read(tmp_path):
    terms = toy_terms(SETTINGS)
    lines = [line for line in terms_to_toml(terms).splitlines() if not line.startswith("statistics_interval")]
    (tmp_path / "terms.toml").write_text("\n".join(lines))
    assert read_terms_file(tmp_path / "terms.toml") == terms
    assert terms.statistics_interval == 1


def test_without_file_locks_a_party_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ConfigError, match="POSIX"), toy_party(tmp_path, SETTINGS):
        pass


def test_a_rule_is_not_even_looked_up_unless_it_was_agreed(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        with toy_party(tmp_path, SETTINGS) as service:
            assert code(service.answer(toy_request(service, SETTINGS, rule="evil:rule"))) == "rule"
    finally:
        sys.path.remove(str(tmp_path))
    assert "evil" not in sys.modules


def test_terms_come_back_from_their_file_as_they_went(tmp_path):
    terms = toy_terms(SETTINGS)
    (tmp_path / "terms.toml").write_text(terms_to_toml(terms))
    assert read_terms_file(tmp_path / "terms.toml") == terms


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sigma = 1.1", "sigma = 0.0", "sigma"),
        ("sigma = 1.1", "sigma = nan", "finite"),
        ("rate = 0.2", "rate = 1.5", "rate"),
        ('rules = ["moo"]', 'rules = ["none"]', "not sound"),
        ('rules = ["moo"]', "rules = []", "rules"),
        ("steps = 1", 'steps = "1"', "steps"),
        ("steps = 1", "stepps = 1", "steps"),
        ("delta = 0.001", "delta = 1.0", "delta"),
    ],
)
def test_terms_that_make_no_sense_are_named(tmp_path, old, new, words):
    text = terms_to_toml(toy_terms(SETTINGS))
    assert old in text
    (tmp_path / "terms.toml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        read_terms_file(tmp_path / "terms.toml")


def test_a_proposal_is_checked_as_a_whole_before_the_run():
    terms = toy_terms(SETTINGS)
    check_proposal(terms, make_proposal(SETTINGS, 3))
    for change in (
        {"rate": 0.9},
        {"sigma": 0.1},
        {"rounds": 99},
        {"rules": ["fixed"]},
        {"rate": "x"},
        {"statistics_interval": 0},
    ):
        with pytest.raises(TermsRefusal):
            check_proposal(terms, {**make_proposal(SETTINGS, 3), **change})


def test_the_budget_of_accepted_terms_is_what_one_run_costs():
    terms = accept_proposal("party-0", make_proposal(SETTINGS, 3))
    assert terms.compute_planned_epsilon() <= terms.budget < terms.compute_planned_epsilon() * 1.001


# --- consent ------------------------------------------------------------------------------------


def hello(**changes) -> Envelope:
    proposal = {**make_proposal(SETTINGS, 3), **changes}
    return pack_envelope({"kind": "hello", "run": "run-1", "nonce": "n", "proposal": proposal})


def test_without_terms_nothing_is_answered_until_somebody_agrees(tmp_path):
    asked = []

    def refuse(terms):
        asked.append(terms)
        return False

    with toy_party(tmp_path, SETTINGS, terms=None, consent=refuse) as service:
        assert code(service.answer(pack_envelope({**HEADER_OF_A_ROUND}))) == "no-terms"
        assert code(service.answer(hello())) == "consent"
        assert asked[0].sigma == 1.1
        assert not (tmp_path / "party-0.toml").exists()
        service.consent = lambda terms: True
        assert code(service.answer(hello())) == ""
        # From now on they hold: a later proposal that asks for more is refused without asking anybody.
        service.consent = lambda terms: pytest.fail("asked again")
        assert code(service.answer(hello(rate=0.9))) == "rate"
    assert read_terms_file(tmp_path / "party-0.toml").rate == 0.2


HEADER_OF_A_ROUND = {
    "kind": "round",
    **dict.fromkeys(("run", "nonce", "party", "rule", "groups", "unit", "model", "task"), "x"),
    **dict.fromkeys(("round", "rounds", "weight_decay"), 1),
    "assignment": {},
    "simulation": {},
}


def test_without_a_terminal_and_without_terms_a_party_refuses(tmp_path):
    with toy_party(tmp_path, SETTINGS, terms=None) as service:
        assert code(service.answer(hello())) == "no-terms"


# --- ledger and replies ---------------------------------------------------------------------------


def test_a_repeated_request_brings_the_same_bytes_and_costs_nothing_more(tmp_path):
    with toy_party(tmp_path, SETTINGS) as service:
        request = toy_request(service, SETTINGS)
        first = service.answer(request)
        spent = service.ledger.epsilon(service.name)
    with toy_party(tmp_path, SETTINGS) as service:  # another process, later
        assert service.answer(request) == first
        assert service.ledger.epsilon(service.name) == spent
        assert len(service.ledger.entries(service.name)) == 1


def test_a_repeated_round_with_another_request_is_refused(tmp_path):
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(toy_request(service, SETTINGS))) == ""
        for change in ({"C": 2.0}, {"nonce": "1" * 32}, {"sigma": 2.0}):
            assert code(service.answer(toy_request(service, SETTINGS, **change))) == "repeated"
        assert len(service.ledger.entries(service.name)) == 1
        assert code(service.answer(toy_request(service, SETTINGS, round=1))) == ""


def test_it_is_paid_before_it_is_computed_and_stored_before_it_is_settled(tmp_path, monkeypatch):
    """Three crashes, one in each gap; each time the round is finished under the same reservation."""
    request = None
    with toy_party(tmp_path, SETTINGS) as service:
        request = toy_request(service, SETTINGS)
        monkeypatch.setattr(service.trainer, "train", _crash)
        assert code(service.answer(request)) == "internal"
        (entry,) = service.ledger.entries(service.name)
        assert entry.digest is None, "reserved, nothing released"
        monkeypatch.undo()
    with toy_party(tmp_path, SETTINGS) as service:
        monkeypatch.setattr(service.replies, "put", _crash)
        assert code(service.answer(request)) == "internal"
        (entry,) = service.ledger.entries(service.name)
        assert entry.digest is None, "what was computed was not stored, so it did not leave"
    with toy_party(tmp_path, SETTINGS) as service:
        monkeypatch.setattr(service.ledger, "settle", _crash)
        assert code(service.answer(request)) == "internal"
    with toy_party(tmp_path, SETTINGS) as service:
        stored = service.replies.get("run-1", 0)
        assert stored is not None
        assert service.answer(request) == stored.reply
        (entry,) = service.ledger.entries(service.name)
        assert entry.digest == party.compute_stored_digest(stored.reply)


def _crash(*args, **kwargs):
    raise RuntimeError("secret: 42")


def test_an_answer_that_was_released_and_lost_is_not_made_again(tmp_path):
    with toy_party(tmp_path, SETTINGS) as service:
        request = toy_request(service, SETTINGS)
        service.answer(request)
    (tmp_path / "party-0.sqlite.replies").unlink()
    with toy_party(tmp_path, SETTINGS) as service:
        assert code(service.answer(request)) == "lost"
        assert len(service.ledger.entries(service.name)) == 1


def test_the_budget_holds_over_runs_whatever_the_server_asks(tmp_path):
    terms = toy_terms(SETTINGS)
    two = dataclasses.replace(terms, rounds=2).compute_planned_epsilon()
    terms = dataclasses.replace(terms, budget=two * 1.0001)
    with toy_party(tmp_path, SETTINGS, terms=terms) as service:
        codes = [code(service.answer(toy_request(service, SETTINGS, round=0, run=f"run-{i}"))) for i in range(4)]
        assert codes == ["", "", "budget", "budget"]
        assert service.ledger.epsilon(service.name) <= terms.budget
    with Ledger.open(tmp_path / "party-0.sqlite") as ledger:
        assert ledger.accounts()["party-0"].budget == terms.budget


def test_an_error_never_carries_its_text_to_the_server(tmp_path, monkeypatch):
    heard: list[str] = []
    with toy_party(tmp_path, SETTINGS, say=heard.append) as service:
        monkeypatch.setattr(service.trainer, "train", _crash)
        reply = service.answer(toy_request(service, SETTINGS))
    assert code(reply) == "internal"
    assert b"42" not in reply.header.replace(read_message_header(reply, ("refused",))["request"].encode(), b"")
    assert any("secret: 42" in words for words in heard), "the party itself is told"
    assert code(reply) in REFUSAL_TEXTS


def test_two_processes_cannot_share_a_ledger(tmp_path):
    with toy_party(tmp_path, SETTINGS), pytest.raises(ConfigError, match="in use"), toy_party(tmp_path, SETTINGS):
        pass


# --- randomness and signatures ------------------------------------------------------------------


def body(tmp_path, **options) -> bytes:
    with toy_party(tmp_path, SETTINGS, **options) as service:
        reply = service.answer(toy_request(service, SETTINGS))
        assert code(reply) == ""
        return reply.body


def test_real_randomness_is_never_the_same_twice_and_a_shared_seed_is(tmp_path):
    assert body(tmp_path / "a") != body(tmp_path / "b")
    assert body(tmp_path / "c", simulation=True) == body(tmp_path / "d", simulation=True)


def test_a_simulation_needs_a_seed(tmp_path):
    with toy_party(tmp_path, SETTINGS, simulation=True) as service:
        assert code(service.answer(toy_request(service, SETTINGS, simulation={}))) == "no-seed"


def test_every_answer_is_signed_and_names_its_request(tmp_path):
    with toy_party(tmp_path, SETTINGS) as service:
        public = keys.load_public_key(tmp_path / "keys" / "party-0.pub")
        for request in (
            toy_request(service, SETTINGS),
            hello(),
            Envelope(b"nonsense"),
            toy_request(service, SETTINGS, rate=1),
        ):
            reply = service.answer(request)
            assert keys.has_valid_signature(public, reply)
            assert read_message_header(reply, ("update", "refused", "welcome"))["request"] == request.digest


PUBLIC_FACTS = ("units", "shape", "model", "task", "randomness", "ledger")
REPLY_FIELDS = ("kind", "nonce", "run", "party", "request")


def test_a_party_says_its_public_facts_and_writes_its_own_statement(tmp_path):
    with toy_party(tmp_path, SETTINGS) as service:
        welcome = read_message_header(service.answer(hello()), ("welcome",))
        assert (welcome["units"], welcome["shape"], welcome["randomness"]) == (40, [6], "secure")
        assert set(welcome) == {*PUBLIC_FACTS, *REPLY_FIELDS}
        service.answer(toy_request(service, SETTINGS))
        service.answer(pack_envelope({"kind": "done", "run": "run-1", "nonce": "n", "rounds": 4}))
        assert service.done
        service.write_party_statement(tmp_path / "out")
        epsilon = service.ledger.epsilon(service.name)
    words = (tmp_path / "out" / "PRIVACY.md").read_text()
    assert f"epsilon = {epsilon:.4g}"[:12] in words
    assert "operating system's entropy" in words
    assert NAMES[0] in words
    assert NAMES[1] not in words


def test_what_is_sent_has_the_noise_that_the_terms_ask_for(tmp_path, monkeypatch):
    """Against the same rounds without noise: the difference has sigma C lr / batch, and not half or twice it."""
    noisy = deltas(tmp_path / "a")
    monkeypatch.setattr("fulcrum.training.client.release_with_noise", lambda clipped, extra, *given: (clipped, extra))
    clean = deltas(tmp_path / "b")
    found = float(torch.cat([a - b for a, b in zip(noisy, clean, strict=True)]).std())
    wanted = 1.1 * 1.0 * 0.5 / (0.2 * 40)
    assert 0.7 < found / wanted < 1.4
    assert not 0.7 < found / (2 * wanted) < 1.4
    assert not 0.7 < found / (wanted / 2) < 1.4


def deltas(folder) -> list[torch.Tensor]:
    with toy_party(folder, SETTINGS, simulation=True) as service:
        replies = [service.answer(toy_request(service, SETTINGS, round=t)) for t in range(4)]
        return [party.load_arrays(reply.body)["delta"] for reply in replies]
