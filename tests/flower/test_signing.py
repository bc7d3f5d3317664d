"""Requests are signed by the coordinator for one party; a party's gate passes nothing else."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="requests are signed with cryptography: pip install 'fulcrum-fl[flower]'")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from fulcrum.errors import ConfigError
from fulcrum.flower import certs, keys
from fulcrum.flower.messages import Envelope, pack_envelope, read_message_header
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.request_gate import RequestGate
from fulcrum.flower.signing import (
    RequestSigner,
    derive_request_signer,
    fingerprint,
    is_valid_statement,
    load_request_signer,
    sign_statement,
)
from fulcrum.flower.terms import validate_terms
from support.flower import NAMES, flip_last_byte, serve, toy_federation, toy_party, toy_request, toy_settings, toy_terms

SETTINGS = toy_settings()
OURS, OTHER = derive_request_signer(b"ours"), derive_request_signer(b"another")


def code(service: Any, request: Envelope) -> str:
    header = read_message_header(service.answer(request), ("update", "refused", "welcome", "noted"))
    return str(header.get("code", ""))


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()])
def test_a_signature_is_for_one_key_one_purpose_and_one_content(key: Any) -> None:
    signed = sign_statement(key, "masks", b"content")
    public = key.public_key()
    assert is_valid_statement(public, "masks", b"content", signed)
    assert not is_valid_statement(public, "request", b"content", signed)
    assert not is_valid_statement(public, "masks", b"other", signed)
    assert not is_valid_statement(OURS.key.public_key(), "masks", b"content", signed)
    assert not is_valid_statement(public, "masks", b"content", b"")
    assert not is_valid_statement(public, "mask", b"scontent", signed), "the purpose cannot flow into the content"


def test_keys_of_a_certificate_authority_sign_too(tmp_path: Path) -> None:
    """The server's key may be an RSA one from somebody else's CA."""
    key = rsa.generate_private_key(65537, 2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "server.key").write_bytes(key.private_bytes(*form))
    signer = load_request_signer(tmp_path / "server.key")
    gate = RequestGate("a", signer.fingerprint)
    request = pack_envelope({"kind": "done", "party": "a"})
    gate.check(signer.sign(request), {"kind": "done", "party": "a"})
    (tmp_path / "server.key").write_text("nothing")
    with pytest.raises(ConfigError, match="is not a private key for signatures"):
        load_request_signer(tmp_path / "server.key")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_fingerprint_is_the_one_that_ssh_keygen_prints(tmp_path: Path) -> None:
    _, public = keys.make_key_pair(tmp_path, "coordinator")
    said = subprocess.run(["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == fingerprint(keys.load_public_key(public))
    assert load_request_signer(tmp_path / "coordinator").fingerprint == said.split()[1]


def test_the_gate_passes_the_coordinators_requests_and_no_others(tmp_path: Path) -> None:
    """The wrong cases: unsigned, signed by a registered party's own key, changed after signing, for somebody else."""
    gate = RequestGate(NAMES[0], OURS.fingerprint)
    with toy_party(tmp_path, SETTINGS, gate=gate) as service:
        plain = toy_request(service, SETTINGS)
        signed = OURS.sign(plain)
        keys.make_key_pair(tmp_path / "other", NAMES[1])
        of_a_party = RequestSigner(keys.load_private_key(tmp_path / "other" / NAMES[1]))
        assert code(service, plain) == "signature"
        assert code(service, dataclasses.replace(signed, signature=flip_last_byte(signed.signature))) == "signature"
        assert code(service, of_a_party.sign(plain)) == "signer"
        changed = toy_request(service, SETTINGS, round=1)
        assert code(service, Envelope(changed.header, changed.body, signed.signature)) == "signature"
        assert code(service, Envelope(plain.header, plain.body + b"x", signed.signature)) == "signature"
        assert code(service, OURS.sign(toy_request(service, SETTINGS, party=NAMES[1]))) == "party"
        done = pack_envelope({"kind": "done", "run": "run-1", "nonce": "n", "rounds": 4})
        assert code(service, OURS.sign(done)) == "party", "who is meant must be said"
        assert not service.done
        assert service.ledger.entries(service.name) == []
        assert code(service, signed) == ""
        assert len(service.ledger.entries(service.name)) == 1
        assert code(service, OURS.sign(plain)) == "", "another signature of the same request is the same request"
        assert len(service.ledger.entries(service.name)) == 1


def test_the_key_of_a_vouched_certificate_is_trusted(tmp_path: Path) -> None:
    certs.make_certificate_authority(tmp_path, ["127.0.0.1"])
    signer = load_request_signer(tmp_path / "server.key")
    header = {"kind": "hello", "party": "a"}
    request = signer.sign(pack_envelope(header))
    gate = RequestGate("a")
    with pytest.raises(TermsRefusal, match="not the key of the server's certificate"):
        gate.check(request, header)
    pem = (tmp_path / "server.crt").read_bytes()
    from cryptography import x509

    der = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    assert gate.note_certificate(der) == signer.fingerprint
    gate.check(request, header)
    pinned = RequestGate("a", OTHER.fingerprint)
    pinned.note_certificate(der)
    with pytest.raises(TermsRefusal, match="terms pin"):  # a pinned key counts alone
        pinned.check(request, header)


def test_without_tls_the_first_key_counts() -> None:
    gate = RequestGate("a", tls=False)
    header = {"kind": "hello"}
    gate.check(OURS.sign(pack_envelope(header)), header)
    with pytest.raises(TermsRefusal, match="earlier ones"):
        gate.check(OTHER.sign(pack_envelope(header)), header)


def test_a_run_is_signed_from_greeting_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = toy_settings(2)
    with toy_federation(tmp_path, settings) as bus:
        for service in bus.services.values():
            service.gate = RequestGate(service.name, tls=False)
        result = serve(bus, settings, tmp_path / "served", monkeypatch)
        assert result.summary["rounds"] == 2
        assert all(service.done for service in bus.services.values())
        assert {len(request.signature) > 200 for _, request in bus.sent} == {True}


def test_terms_pin_a_fingerprint_or_nothing() -> None:
    assert validate_terms(toy_terms(SETTINGS, coordinator=OURS.fingerprint)).coordinator == OURS.fingerprint
    with pytest.raises(ConfigError, match="coordinator must be a fingerprint"):
        validate_terms(toy_terms(SETTINGS, coordinator="SHA256:short"))
