"""A party's key of one run: X25519, made in memory, signed with the party's registered key, forgotten afterwards."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fulcrum.errors import RunError
from fulcrum.flower.messages import BadMessage
from fulcrum.flower.signing import fingerprint, is_valid_statement, sign_statement

KEY_PURPOSE = "pairwise-key"
"""What a party's signature under its X25519 key is for."""
MASK_INFO = b"fulcrum pairwise mask 1"
EXCHANGE_PATTERN = re.compile(r"[0-9a-f]{64}")
"""The one form of an X25519 key as text."""
MAX_FIELD_BYTES = 2048
"""Characters of the longest field of a signed key."""


@dataclass(frozen=True)
class SignedKey:
    """A party's X25519 public key for one run, under its registered key's signature. Everything here is public.

    signing: the registered public key in OpenSSH's form. exchange: 32 bytes in hexadecimal, in small letters.
    signature: base64.
    """

    party: str
    signing: str
    exchange: str
    signature: str

    @property
    def fingerprint(self) -> str:
        """SHA256:... of the signing key, as `ssh-keygen -l` prints it; BadMessage where it is no key."""
        return _find_fingerprint(self.signing)

    def is_valid(self, run: str) -> bool:
        """Whether the signing key signed this X25519 key for this run and party, and the key makes secrets."""
        return _is_valid(self, run)


@lru_cache(maxsize=4096)
def _is_valid(key: SignedKey, run: str) -> bool:
    """A key stands in the manifest of every round; its signature is checked once."""
    try:
        signature = base64.b64decode(key.signature, validate=True)
        signing = _read_signing_key(key.signing)
        # A point of small order makes the same secret with everybody, which is no secret: refused before anybody pays.
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key.exchange)))
        return is_valid_statement(signing, KEY_PURPOSE, _make_statement(run, key.party, key.exchange), signature)
    except (ValueError, BadMessage):  # also what is not base64
        return False


@lru_cache(maxsize=4096)
def _find_fingerprint(signing: str) -> str:
    return fingerprint(_read_signing_key(signing))


def signed_key_from_table(table: Any) -> SignedKey:
    """A signed key from a message; BadMessage where it is not one."""
    names = ("party", "signing", "exchange", "signature")
    if not isinstance(table, Mapping) or set(table) != set(names):
        raise BadMessage("a key has missing or unknown fields.")
    if not all(isinstance(table[name], str) and len(table[name]) <= MAX_FIELD_BYTES for name in names):
        raise BadMessage("a key's field is not of the right type or size.")
    found = SignedKey(**{name: table[name] for name in names})
    # One form only: the same 32 bytes in capitals or with spaces would be another text, and two participants with one
    # key would have one mask, which a party between them adds and takes off again.
    if not EXCHANGE_PATTERN.fullmatch(found.exchange):
        raise BadMessage("an X25519 key is 32 bytes in hexadecimal, in small letters.")
    _read_signing_key(found.signing)
    return found


def _make_statement(run: str, party: str, exchange: str) -> bytes:
    parts = (run.encode(), party.encode(), bytes.fromhex(exchange))
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _read_signing_key(text: str) -> Any:
    try:
        return serialization.load_ssh_public_key(text.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadMessage("a signing key is not a public key in OpenSSH's form.") from None


class RunKey:
    """The private side: one X25519 key for one run, in this process's memory only. `forget` ends it.

    A process that starts again makes a new one: what it masked before cannot be masked again with the same streams.
    """

    def __init__(self, run: str, party: str, signing: Any) -> None:
        """signing: the party's registered private key."""
        self.run, self.party = run, party
        self._private: X25519PrivateKey | None = X25519PrivateKey.generate()
        self._secrets: dict[str, bytes] = {}  # by the other's X25519 key: each is computed once per run
        raw = self._private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        exchange = raw.hex()
        signature = sign_statement(signing, KEY_PURPOSE, _make_statement(run, party, exchange))
        public = signing.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        self.signed = SignedKey(party, public.decode(), exchange, base64.b64encode(signature).decode())

    def derive_mask_key(self, other: str, digest: bytes) -> bytes:
        """The 32-byte key of the mask shared with the holder of the X25519 key `other`, for one manifest.

        HKDF-SHA256 of the X25519 secret, with the manifest's digest as salt. Both ends get the same one.
        """
        if self._private is None:
            raise RunError("the key of this run was forgotten; a new run makes a new one.")
        secret = self._secrets.get(other)
        if secret is None:
            try:
                secret = self._private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
            except ValueError:  # a point of small order: the secret would be known to everybody
                raise BadMessage("an X25519 key is one that makes no secret.") from None
            self._secrets[other] = secret
        both = b"".join(sorted((bytes.fromhex(other), bytes.fromhex(self.signed.exchange))))
        return HKDF(hashes.SHA256(), 32, salt=digest, info=MASK_INFO + both).derive(secret)

    def forget(self) -> None:
        """Drop the private key and what was made of it: masks of this run can no longer be made, by anybody."""
        self._private = None
        self._secrets.clear()

    def __repr__(self) -> str:
        return f"RunKey(run={self.run!r}, party={self.party!r})"
