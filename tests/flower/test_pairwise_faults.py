"""Masked rounds that go wrong: who pays, what the coordinator's ledger says, and what a party agrees to beforehand."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum.errors import ConfigError
from fulcrum.flower.consent import make_consent_text
from fulcrum.flower.messages import Envelope, read_message_header
from fulcrum.flower.pairwise import coordinator as masked
from fulcrum.flower.pairwise.keys import KEY_PURPOSE, RunKey, _make_statement
from fulcrum.flower.pairwise.party import MaskedRounds
from fulcrum.flower.prepare import make_served_settings
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.signing import sign_statement
from fulcrum.flower.terms import find_rule_of_terms, read_terms_file, terms_to_toml, validate_terms
from fulcrum.privacy.ledger import Ledger
from fulcrum.training import loop
from fulcrum.training.void_attempts import VOID_DIGEST
from support.flower import NAMES, Bus, serve, toy_party, toy_request, toy_settings, toy_terms
from support.pairwise import federation, kind, masked_settings, pins


class Crash(Exception):
    """The coordinator's process ends here."""


def lose_message(bus: Bus, party: int, round: int, times: int = 1) -> None:
    """A party's masked message of a round is lost on its way, so often."""
    left = [times]

    def tamper(k: int, request: Envelope, reply: Envelope) -> Envelope | None:
        header = json.loads(request.header)
        if header["kind"] == "manifest" and (k, header["round"]) == (party, round) and left[0]:
            left[0] -= 1
            return None
        return reply

    bus.tamper = tamper


def count_rows(bus: Bus) -> list[int]:
    return [len(service.ledger.entries(service.name)) for service in bus.services.values()]


# --- what the coordinator's ledger says -------------------------------------------------------------


@pytest.mark.parametrize("charged", [True, False])
def test_void_attempts_are_in_the_coordinators_ledger_too(tmp_path: Path, monkeypatch: Any, charged: bool) -> None:
    """Its statement must claim no less than the parties' own ledgers; without `pay_again` (the wrong case) it would."""
    if not charged:
        monkeypatch.setattr(loop.VoidAttempts, "pay_again", lambda self, sent: set(self.events))
    settings = masked_settings(3)
    with federation(tmp_path, settings, simulation=False) as bus:
        lose_message(bus, party=2, round=1, times=2)
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        paid = [service.ledger.epsilon(service.name) for service in bus.services.values()]
        assert count_rows(bus) == [5, 5, 5]
    assert result.summary["rounds"] == 3
    assert (result.epsilon >= max(paid) * (1 - 1e-9)) == charged
    if charged:
        assert result.epsilon == pytest.approx(max(paid))
        with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
            (run,) = ledger.runs()
            digests = [entry.digest for entry in ledger.list_round_entries("party-0", run, 1)]
        assert digests[:2] == [VOID_DIGEST] * 2
        assert digests[2] != VOID_DIGEST


@pytest.mark.parametrize("moment", ["manifest", "round"])
def test_a_coordinator_that_was_killed_within_a_round_goes_on_and_pays_again(
    tmp_path: Path, monkeypatch: Any, moment: str
) -> None:
    """Between a party's message and the others': it may have paid, so the resumed round is a new release for all."""
    settings = masked_settings(3)
    with federation(tmp_path, settings, simulation=False) as bus:
        seen: list[int] = []

        def crash(k: int, request: Envelope, reply: Envelope) -> Envelope:
            header = json.loads(request.header)
            if header["kind"] == moment and header["round"] == 1 and k == 1 and not seen:
                seen.append(k)
                raise Crash
            return reply

        bus.tamper = crash
        with pytest.raises(Crash):
            serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        result = serve(bus, settings, tmp_path / "run", monkeypatch, resume=True)
        paid = [service.ledger.epsilon(service.name) for service in bus.services.values()]
        rows = count_rows(bus)
    assert result.summary["rounds"] == 3
    assert rows == ([4, 4, 3] if moment == "manifest" else [3, 3, 3])  # before the manifest nobody has paid
    assert result.epsilon >= max(paid) * (1 - 1e-9)


# --- parties that go away or refuse -----------------------------------------------------------------


def test_a_party_that_starts_again_before_its_manifest_has_released_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(2)
    with federation(tmp_path, settings, simulation=False) as bus:
        service, codes = bus.services[1], []

        def restart(k: int, request: Envelope, reply: Envelope) -> Envelope:
            header = json.loads(request.header)
            if kind(reply) == "refused":
                codes.append(json.loads(reply.header)["code"])
            if k == 1 and header["kind"] == "round" and header["round"] == 1 and not codes:
                service._masked = MaskedRounds(service.name, service.key)  # a new process: nothing pending, no key
            return reply

        bus.tamper = restart
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert codes == ["stale"]
        assert count_rows(bus) == [3, 2, 3]  # the void attempt is paid by who sent
    assert result.summary["rounds"] == 2


def test_a_party_that_dies_between_paying_and_masking_pays_once(tmp_path: Path, monkeypatch: Any) -> None:
    """What was reserved and never settled did not leave: the next message uses it."""
    settings = masked_settings(2)
    with federation(tmp_path, settings, simulation=False) as bus:
        trainer = bus.services[1].trainer
        real, failed = trainer.release, list[int]()

        def die(*given: Any) -> Any:
            if not failed:
                failed.append(1)
                raise OSError("no memory")
            return real(*given)

        monkeypatch.setattr(trainer, "release", die)
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert failed == [1]
        assert count_rows(bus) == [3, 2, 3]


def test_a_party_that_refuses_every_manifest_costs_the_others_one_attempt(tmp_path: Path, monkeypatch: Any) -> None:
    """Each attempt costs whoever masks. A party without pins refuses for good, so it is asked once."""
    settings = masked_settings(3)
    with federation(tmp_path, settings, simulation=False) as bus:
        lonely = bus.services[2]
        assert lonely.terms is not None
        lonely.terms = dataclasses.replace(lonely.terms, peers={})
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert count_rows(bus) == [4, 4, 0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["participants"] for row in rows] == [[0, 1]] * 3
    assert result.summary["rounds"] == 3


@pytest.mark.parametrize("wrong", ["another signing key", "a point of small order"])
def test_a_party_whose_key_of_the_run_nobody_can_use_is_left_out_alone(
    tmp_path: Path, monkeypatch: Any, wrong: str
) -> None:
    """The others would refuse every manifest with it: the coordinator must not ask them, nor give them up for that."""
    settings = masked_settings(3)
    with federation(tmp_path, settings, simulation=False) as bus:
        odd = bus.services[2]
        if wrong == "another signing key":
            odd._masked.signing = ec.generate_private_key(ec.SECP384R1())
        else:
            weak = RunKey("run", odd.name, odd.key)

            def sign_weak(self: MaskedRounds, run: str) -> RunKey:
                statement = _make_statement(run, self.party, "00" * 32)
                signature = base64.b64encode(sign_statement(self.signing, KEY_PURPOSE, statement)).decode()
                weak.signed = dataclasses.replace(weak.signed, exchange="00" * 32, signature=signature)
                return weak

            monkeypatch.setattr(odd._masked, "start_run", sign_weak.__get__(odd._masked))
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert count_rows(bus) == [3, 3, 0]
    assert result.summary["rounds"] == 3
    log = (tmp_path / "run" / "parties.jsonl").read_text()
    assert "not signed with its registered key, or makes no secret" in log
    assert "is void" not in log


def test_a_key_that_is_revoked_between_ready_and_message_voids_one_attempt(tmp_path: Path, monkeypatch: Any) -> None:
    settings = masked_settings(3)
    real = masked.MaskedCoordinator._collect_messages

    def revoke(self: Any, request: Any, *given: Any) -> Any:
        if request.round == 1 and "party-2" in self.engine.registry.public_keys:
            self.engine.registry.public_keys = {
                name: key for name, key in self.engine.registry.public_keys.items() if name != "party-2"
            }
        return real(self, request, *given)

    monkeypatch.setattr(masked.MaskedCoordinator, "_collect_messages", revoke)
    with federation(tmp_path, settings, simulation=False) as bus:
        result = serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert count_rows(bus) == [4, 4, 2]  # its message had left, and is paid
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["participants"] for row in rows] == [[0, 1, 2], [0, 1], [0, 1]]
    assert result.summary["rounds"] == 3


def test_two_runs_at_one_party_never_mix(tmp_path: Path) -> None:
    """A second run's request ends the first one's key and what was pending: its manifest is then refused, unpaid."""
    settings = masked_settings(2)
    terms = toy_terms(settings, "party-0", peers=pins(tmp_path, "party-0"))
    with toy_party(tmp_path, settings, 0, terms=terms) as service:
        first = read_message_header(service.answer(toy_request(service, settings, run="run-1")), ("ready",))
        second = read_message_header(service.answer(toy_request(service, settings, run="run-2")), ("ready",))
        assert first["key"]["exchange"] != second["key"]["exchange"]
        assert first["fresh"] != second["fresh"]
        with pytest.raises(TermsRefusal, match="no computed round"):
            service._masked.mask(service.trainer, terms, service.ledger, "run-1", 0, b"{}")
        assert service.ledger.entries("party-0") == []


def test_a_fraction_of_colluders_is_of_the_registered_parties_however_many_join() -> None:
    served = make_served_settings(masked_settings(2, colluders=0.5), 5, simulation=False)
    assert served.privacy.colluders == 3.0
    assert make_proposal(served, 3)["colluders"] == 3


def test_one_ledger_counts_against_one_adversary(tmp_path: Path) -> None:
    """What masked rounds cost holds against c colluders; a plain run's statement from that ledger would claim more."""
    settings, plain = masked_settings(2), toy_settings(2)
    own: dict[str, Any] = {"peers": pins(tmp_path, "party-0")}
    with toy_party(tmp_path, settings, 0, terms=toy_terms(settings, **own)) as service:
        assert kind(service.answer(toy_request(service, settings))) == "ready"  # which registers its records
    for other, terms in (
        (plain, toy_terms(plain)),
        (settings, toy_terms(settings, **own, colluders=2)),
        (settings, toy_terms(settings, **own, colluders=0)),
    ):
        with (
            toy_party(tmp_path, other, 0, terms=terms) as service,
            pytest.raises(ConfigError, match="against different adversaries do not add up"),
        ):
            service.prepare()
    with toy_party(tmp_path, settings, 0, terms=toy_terms(settings, **own)) as service:
        service.prepare()


# --- what a party agrees to -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["quantile", "moo-client", "wav"])
def test_terms_with_masks_take_no_rule_that_says_more_than_the_sum(tmp_path: Path, rule: str) -> None:
    """The coordinator's own settings refuse it; a hostile one proposes it all the same, and its statistics are bare."""
    proposal = make_proposal(toy_settings(2, rule=rule), 3)
    assert accept_proposal("party-0", proposal, 50.0).rules == (rule,)  # each party's own noise covers it
    for rules in ([rule], ["moo", rule]):
        hostile = {**proposal, "rules": rules, "aggregation": "pairwise", "colluders": 1}
        with pytest.raises(ConfigError, match=f"clip.rule = '{rule}'.*use moo or fixed"):
            accept_proposal("party-0", hostile, 50.0)
    terms = dataclasses.replace(toy_terms(masked_settings(2)), rules=("moo", rule))
    with pytest.raises(ConfigError, match="use moo or fixed"):
        find_rule_of_terms(terms, rule)  # again when a run names it
    (tmp_path / "terms.toml").write_text(terms_to_toml(terms))
    with pytest.raises(ConfigError, match="use moo or fixed"):
        read_terms_file(tmp_path / "terms.toml")


def test_a_proposal_pins_nobodys_key() -> None:
    """A coordinator that could propose the peers' fingerprints would propose its own, and know every mask."""
    proposal = make_proposal(masked_settings(2), 3)
    own = "SHA256:" + "A" * 43
    for name, value in (("peers", {"party-1": own}), ("pinned", "2026-11-16"), ("coordinator", own)):
        with pytest.raises(ConfigError, match=f"a proposal says {name}"):
            accept_proposal("party-0", {**proposal, name: value}, look_up=False)
    assert accept_proposal("party-0", {**proposal, "peers": {}}, look_up=False).peers == {}


def test_who_is_asked_to_agree_reads_that_the_noise_is_shared_and_with_whom() -> None:
    terms = toy_terms(masked_settings(2))
    text = make_consent_text(terms, 40)
    assert "SHARED NOISE" in text
    assert "up to 1 colluding parties" in text
    assert "NO other party's key is pinned" in text
    assert "covers no participant" not in text
    assert "covers no participant" in make_consent_text(dataclasses.replace(terms, colluders=0), 40)
    pinned = dataclasses.replace(terms, peers={"party-1": "SHA256:" + "A" * 43})
    assert "NO other party's key" not in make_consent_text(validate_terms(pinned), 40)
    assert "SHARED NOISE" not in make_consent_text(toy_terms(toy_settings(2)), 40)
    assert NAMES[0] in text
