"""Signatures of the coordinator and of parties: what is signed, by which key, and for what purpose.

A signature names its purpose, so that one made for a request is not valid as a reply, a rotation or anything else.
A sealed signature carries the signer's public key; whoever checks it decides by the key's fingerprint whether to trust
it, and a fingerprint is the one that `ssh-keygen -l` prints.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from fulcrum.errors import ConfigError
from fulcrum.flower.messages import BadMessage, Envelope

REQUEST_PURPOSE = "request"
"""The coordinator signs requests: hello, round, done."""
MAX_SEALED_BYTES = 4096
"""Bytes of the longest signature together with its key."""
_SEAL = b"FS1"

PublicKey = Any
"""A public key of the cryptography package: elliptic curve, Ed25519 or RSA."""


def fingerprint(key: PublicKey) -> str:
    """SHA256:... of a public key, as `ssh-keygen -l -f NAME.pub` prints it."""
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def sign_statement(key: Any, purpose: str, content: bytes) -> bytes:
    """A signature over `content` that is valid for this purpose only. key: elliptic curve, Ed25519 or RSA."""
    words = _with_purpose(purpose, content)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return bytes(key.sign(words, ec.ECDSA(hashes.SHA384())))
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return bytes(key.sign(words))
    if isinstance(key, rsa.RSAPrivateKey):
        return bytes(key.sign(words, _pss(), hashes.SHA384()))
    raise ConfigError("a key for signatures must be of an elliptic curve, Ed25519 or RSA; make one with fulcrum certs.")


def is_valid_statement(key: PublicKey, purpose: str, content: bytes, signature: bytes) -> bool:
    """Whether the signature was made with this key, for this purpose, over exactly this content."""
    words = _with_purpose(purpose, content)
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, words, ec.ECDSA(hashes.SHA384()))
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, words)
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, words, _pss(), hashes.SHA384())
        else:
            return False
    except (InvalidSignature, ValueError):
        return False
    return True


def _with_purpose(purpose: str, content: bytes) -> bytes:
    name = purpose.encode()
    return b"fulcrum statement 1:" + len(name).to_bytes(2, "big") + name + content


def _pss() -> Any:
    return padding.PSS(padding.MGF1(hashes.SHA384()), padding.PSS.DIGEST_LENGTH)


@dataclass
class RequestSigner:
    """The coordinator's signing key. `sign(envelope)` seals a request; parties know the key by its fingerprint.

    path: the key's file, which `reload` reads again; None for a key without one.
    """

    key: Any
    path: Path | None = None

    def reload(self) -> None:
        """Read the key's file again: a renewed certificate may have a new key. A file that cannot be read changes
        nothing."""
        if self.path is not None:
            with contextlib.suppress(ConfigError):
                self.key = load_request_signer(self.path).key

    @property
    def fingerprint(self) -> str:
        """What parties pin: `coordinator = "SHA256:..."` in terms.toml."""
        return fingerprint(self.key.public_key())

    def sign(self, envelope: Envelope) -> Envelope:
        """The same request with a signature over header and body, and with them over run, round, attempt and party."""
        signature = sign_statement(self.key, REQUEST_PURPOSE, bytes.fromhex(envelope.digest))
        own = self.key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return replace(envelope, signature=_SEAL + len(own).to_bytes(2, "big") + own + signature)


def load_request_signer(path: Path) -> RequestSigner:
    """The signer of a private key file: PEM (such as the TLS certificate's key) or OpenSSH, without a passphrase."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"key {path} cannot be read: {error.strerror}.") from None
    for load in (serialization.load_pem_private_key, serialization.load_ssh_private_key):
        try:
            key = load(content, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        if isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey):
            return RequestSigner(key, path)
    raise ConfigError(f"{path} is not a private key for signatures (PEM or OpenSSH, without a passphrase).")


def derive_request_signer(secret: bytes) -> RequestSigner:
    """A signer that follows from a run's secret, for runs without TLS: the same one again after a crash."""
    number = int.from_bytes(hashlib.sha512(b"fulcrum request signer" + secret).digest()[:47], "big")
    return RequestSigner(ec.derive_private_key(number + 1, ec.SECP384R1()))


def read_signer(envelope: Envelope) -> PublicKey:
    """The key that a request says it is signed with, its signature checked; BadMessage where there is none."""
    return _read_signer(envelope.digest, envelope.signature)


@lru_cache(maxsize=32)  # a party looks at a request's signer before it reads the request, and again when it answers
def _read_signer(digest: str, sealed: bytes) -> PublicKey:
    if not (len(_SEAL) + 2 < len(sealed) <= MAX_SEALED_BYTES and sealed.startswith(_SEAL)):
        raise BadMessage("the request is not signed.")
    start = len(_SEAL) + 2
    end = start + int.from_bytes(sealed[len(_SEAL) : start], "big")
    try:
        key = serialization.load_der_public_key(sealed[start:end])
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadMessage("the request's signature holds no key.") from None
    if not is_valid_statement(key, REQUEST_PURPOSE, bytes.fromhex(digest), sealed[end:]):
        raise BadMessage("the request's signature does not fit its content.")
    return key


def load_certificate_key(der: bytes) -> PublicKey:
    """The public key of a certificate in DER, such as the one that a TLS server showed."""
    from cryptography import x509

    return x509.load_der_x509_certificate(der).public_key()
