"""Every header field and every array of a request, with values that no honest coordinator sends.

Whatever comes, a party answers with a signed message. A refusal has cost nothing; an update stays within the terms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.clipping import RULES
from fulcrum.errors import FulcrumError
from fulcrum.flower import keys
from fulcrum.flower.messages import Envelope, pack_envelope, read_message_header
from fulcrum.flower.party import PartyService, load_arrays
from fulcrum.flower.proposals import make_proposal
from fulcrum.flower.refusals import REFUSAL_TEXTS
from fulcrum.flower.terms import read_terms_file
from fulcrum.privacy.ledger import Ledger
from fulcrum.types import RoundRequest
from support.events import as_gaussian
from support.flower import toy_party, toy_request, toy_settings, toy_terms

TOY = toy_settings(rule="moo-scalar")
NASTY: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2,
    10**6,
    2**63,
    10**400,
    0.0,
    -0.5,
    5e-324,
    1e-300,
    0.999,
    1e300,
    "",
    "x",
    "party-0\n",
    "../../etc",
    "a" * 300,
    "os:system",
    [],
    [1],
    {},
    {"a": 1},
    [[[[]]]],
)
RAW = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"[" * 900 + b"]" * 900)


@dataclass
class Watched:
    """A party, and what its trainer was asked for."""

    service: PartyService
    public: Any
    asked: list[RoundRequest]

    def ask(self, envelope: Envelope) -> str:
        """ "" for an answer within the terms, else the refusal's code; fails where a refusal has cost anything."""
        before, trained = len(self.entries()), len(self.asked)
        reply = self.service.answer(envelope)
        assert keys.has_valid_signature(self.public, reply)
        header = read_message_header(reply, ("update", "refused", "welcome", "noted"))
        assert header["request"] == envelope.digest
        entries = self.entries()
        if header["kind"] == "update":
            self.check_within_terms(entries[-1])
            return ""
        assert reply.body == b""
        assert len(entries) == before, "a refusal has reserved something"
        assert len(self.asked) == trained, "a refusal has computed something"
        if header["kind"] == "refused":
            assert header["code"] in REFUSAL_TEXTS
            assert header["code"] != "internal", "nothing may fail in a way that nobody foresaw"
            return str(header["code"])
        return ""

    def entries(self) -> list[Any]:
        known = self.service.name in self.service.ledger.accounts()
        return list(self.service.ledger.entries(self.service.name)) if known else []

    def check_within_terms(self, entry: Any) -> None:
        terms = self.service.terms
        assert terms is not None
        released = [as_gaussian(event) for event in entry.events]
        assert sum(event.count for event in released) <= terms.steps
        assert all(event.rate <= terms.rate and event.sigma >= terms.sigma for event in released)
        request = self.asked[-1]
        (task,), (state,) = request.assignments, request.states
        assert request.round < request.rounds <= terms.rounds
        assert 0 < task.lr <= terms.lr
        assert 0 <= request.weight_decay <= terms.weight_decay
        total = float(torch.linalg.vector_norm(state["C"].double()))
        assert terms.C_min * (1 - 1e-5) <= total <= terms.C_max * (1 + 1e-5)
        assert bool((state["C"] > 0).all())
        start = RULES["moo-scalar"].init(TOY.clip, self.service.trainer.problem(_facts(self.service)).shape)
        for name, value in start.items():
            assert bool(torch.isfinite(state[name]).all())
            if name not in ("C", "memory"):
                assert torch.equal(state[name], value), f"{name} came from elsewhere"


def _facts(service: PartyService) -> Any:
    current = service.trainer._current
    assert current is not None
    return current[0]


@pytest.fixture(scope="module")
def party(tmp_path_factory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("party")
    terms = toy_terms(TOY, budget=1e6)
    with toy_party(folder, TOY, terms=terms) as service:
        asked: list[RoundRequest] = []
        train = service.trainer.train

        def watched(facts, request):
            asked.append(request)
            return train(facts, request)

        service.trainer.train = watched  # type: ignore[method-assign]
        yield Watched(service, keys.load_public_key(folder / "keys" / "party-0.pub"), asked)


def round_request(party: Watched) -> Envelope:
    number = len(party.service.ledger.entries(party.service.name))
    return toy_request(party.service, TOY, run=f"run-{number}")


def hello_request(party: Watched) -> Envelope:
    proposal = make_proposal(TOY, 3)
    return pack_envelope({"kind": "hello", "run": "run-1", "nonce": "n", "proposal": proposal})


REQUESTS: dict[str, Callable[[Watched], Envelope]] = {"round": round_request, "hello": hello_request}


def list_paths(table: dict[str, Any], inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        yield (*inside, name)
        if isinstance(value, dict):
            yield from list_paths(value, (*inside, name))


def change(envelope: Envelope, path: tuple[str, ...], value: Any, drop: bool = False) -> Envelope:
    """The envelope with one value of its header changed or taken out."""
    header = json.loads(envelope.header)
    *outer, last = path
    table = header
    for name in outer:
        table = table[name]
    if drop:
        del table[last]
    else:
        table[last] = value
    return Envelope(json.dumps(header).encode(), envelope.body)


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_honest_request_is_answered(party, kind):
    assert party.ask(REQUESTS[kind](party)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_of_a_header_with_every_strange_value(party, kind):
    honest = REQUESTS[kind](party)
    refused = answered = 0
    for path in list_paths(json.loads(honest.header)):
        for value in NASTY:
            code = party.ask(change(REQUESTS[kind](party), path, value))
            refused, answered = refused + bool(code), answered + (not code)
        assert party.ask(change(REQUESTS[kind](party), path, None, drop=True)) or kind == "hello", path
        for raw in RAW:
            marked = change(REQUESTS[kind](party), path, "MARK")
            code = party.ask(Envelope(marked.header.replace(b'"MARK"', raw), marked.body))
            assert code or path == ("proposal", "budget"), path  # a party's budget is its own
        code = party.ask(change(REQUESTS[kind](party), (*path[:-1], "more"), 1))
        assert code == "message", path
    assert refused > 5 * answered > 0, "the check must see both"


@pytest.mark.slow
@pytest.mark.parametrize("agrees", [True, False])
def test_every_field_of_a_proposal_before_anybody_agreed(tmp_path, agrees):
    """Nothing fails in an unforeseen way, no code is imported for a name, and what is agreed to is valid."""
    with toy_party(tmp_path, TOY, terms=None, consent=lambda terms: agrees) as service:
        public = keys.load_public_key(tmp_path / "keys" / "party-0.pub")
        party = Watched(service, public, [])
        honest = hello_request(party)
        for path in list_paths(json.loads(honest.header)):
            for value in NASTY[::3] if agrees else NASTY:
                code = party.ask(change(honest, path, value))
                assert code in {"", "consent", "message", "task", "rule", "model", "data", "version"}, (
                    path,
                    value,
                    code,
                )
                if service.terms is not None:
                    assert read_terms_file(service.terms_path) == service.terms
                    service.terms_path.unlink()
                    service.terms, service._dataset, service._trainer = None, None, None
                    service.ledger.close()
                    service.ledger = Ledger.open(":memory:")


def bodies(honest: Envelope) -> Iterator[tuple[str, bytes]]:
    arrays = load_arrays(honest.body)
    for name, value in arrays.items():
        for number in (torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e7, -1.0, 0.0, 1e-45, 1e-30):
            wrong = value.clone()
            wrong.view(-1)[0] = number
            yield f"{name} with {number}", pack_envelope({}, {**arrays, name: wrong}).body
        for dtype in (torch.float64, torch.float16, torch.int32, torch.bool):
            yield f"{name} as {dtype}", pack_envelope({}, {**arrays, name: value.to(dtype)}).body
        for shape in ((0,), (1, *value.shape), (*value.shape, 2)):
            yield f"{name} of shape {shape}", pack_envelope({}, {**arrays, name: torch.ones(shape)}).body
        rest = {other: each for other, each in arrays.items() if other != name}
        yield f"no {name}", pack_envelope({}, rest).body
    for name in ("state.stability", "state.eta_C", "state.C_max", "state.kappa", "C", "x"):
        yield f"another array {name}", pack_envelope({}, {**arrays, name: torch.tensor(-1.0)}).body
    yield from (("nothing", b""), ("noise", b"\0" * 64), ("too much", b"\0" * 300_000), ("a cut", honest.body[:-3]))


HARMLESS = ("params with -1.0", "params with 0.0", "params with 1e-45", "params with 1e-30", "state.memory with -1.0")


def test_every_array_with_every_strange_content(party):
    for words, body in bodies(round_request(party)):
        honest = round_request(party)
        code = party.ask(Envelope(honest.header, body))
        allowed = words in HARMLESS or (words.startswith("state.memory with") and abs(float(words.split()[-1])) <= 1)
        assert (code == "") == allowed, (words, code)


@pytest.mark.every(3)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(sorted(REQUESTS)))
def test_several_strange_values_at_once(party, data, kind):
    envelope = REQUESTS[kind](party)
    paths = list(list_paths(json.loads(envelope.header)))
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=2, max_size=4, unique=True)):
        value = data.draw(st.one_of(st.sampled_from(NASTY), st.floats(allow_nan=False), st.integers(-(2**70), 2**70)))
        try:
            envelope = change(envelope, path, value)
        except (KeyError, TypeError):  # an outer table was replaced before
            continue
    party.ask(envelope)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.binary(max_size=100), body=st.binary(max_size=200))
def test_any_bytes_at_all(party, header, body):
    assert party.ask(Envelope(header, body)) == "message"
    assert party.ask(Envelope(round_request(party).header, body)) == "message"


def test_the_watch_sees_what_it_is_there_for(party, monkeypatch):
    """The wrong cases: a party that reserves before it checks, and one that lets a C beyond its terms pass."""
    monkeypatch.setattr("fulcrum.flower.party.check_clipping_state", lambda *given: None)
    honest = round_request(party)
    arrays = load_arrays(honest.body)
    far = pack_envelope({}, {**arrays, "state.C": torch.full_like(arrays["state.C"], 1e5)}).body
    with pytest.raises(AssertionError):
        party.ask(Envelope(honest.header, far))
    monkeypatch.undo()

    def fail(*given):
        raise FulcrumError("too late")

    honest = round_request(party)
    monkeypatch.setattr(party.service.trainer, "train", fail)
    with pytest.raises(AssertionError, match="reserved"):
        party.ask(honest)
