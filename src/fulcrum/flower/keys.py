"""A party's key pair: ECDSA on P-384 in OpenSSH's format, the same pair that authenticates its SuperNode.

The private key never leaves the party. The coordinator keeps one public key per party, `NAME.pub`; the
file's name is the party's name, so a party cannot use another's name.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum.errors import ConfigError
from fulcrum.flower.messages import Envelope

PARTY_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIGNATURE_CONTEXT = b"fulcrum reply 1:"
"""Context prefix, so that a signature over a reply is not valid for anything else (Flower signs timestamps)."""


def check_party_name(name: str) -> str:
    """A party's name, or a ConfigError: it becomes a file's name and a ledger's account."""
    if not PARTY_NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"party name {name!r} is not usable; use up to 64 letters, digits, dots, dashes and underscores."
        )
    return name


def make_key_pair(folder: Path, name: str, units: int | None = None) -> tuple[Path, Path]:
    """Write NAME (private, readable by the owner only) and NAME.pub; refuses to overwrite either.

    units: the party's number of units, as agreed; it is written behind the key and bounds what the party may claim.
    """
    private, public = folder / check_party_name(name), folder / f"{name}.pub"
    for path in (private, public):
        if path.exists():
            raise ConfigError(f"{path} exists; a key is never overwritten, so choose another name or folder.")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret_file(
        private,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    words = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    fixed = "" if units is None else f" units={units}"
    public.write_bytes(words + f" {name}{fixed}\n".encode())
    return private, public


def write_secret_file(path: Path, content: bytes) -> None:
    """A new file that only its owner can read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def load_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key file as `make_key_pair` or `ssh-keygen -t ecdsa -b 384` write it, without a passphrase."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"key {path} cannot be read: {error.strerror}.") from None
    except Exception:  # whatever the library makes of a damaged file
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a private key; make one with: fulcrum certs --party NAME.")
    return key


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """A public key file in OpenSSH's format."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"key {path} cannot be read: {error.strerror}.") from None
    except Exception:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is not a public key; each party sends its NAME.pub, made by fulcrum certs.")
    return key


def public_key_to_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """The key as Flower registers it: PEM."""
    text: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return text


def load_public_keys(folder: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """Every NAME.pub of a folder, by name: the parties that the coordinator knows."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; --keys names the folder that holds one NAME.pub for each party.")
    found = {check_party_name(path.stem): load_public_key(path) for path in sorted(folder.glob("*.pub"))}
    if not found:
        raise ConfigError(f"{folder} holds no NAME.pub; put the public key of every party there.")
    if len({public_key_to_pem(key) for key in found.values()}) < len(found):
        raise ConfigError(f"{folder} holds the same key under two names; each party needs its own.")
    return found


class KeyRegister(Mapping[str, ec.EllipticCurvePublicKey]):
    """The folder of NAME.pub files, read again when it changes: a key that is added counts, one that is gone does not.

    `refresh()` looks at the folder; what cannot be read leaves the register as it was: a file may be half written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._keys, self._stamp = load_public_keys(folder), self._look()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> ec.EllipticCurvePublicKey:
        return self._keys[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    def refresh(self) -> bool:
        """Read the folder again if a file in it has changed; True where it was read anew."""
        with self._lock:
            try:
                stamp = self._look()
                if stamp == self._stamp:
                    return False
                self._keys, self._stamp = load_public_keys(self.folder), stamp
            except (ConfigError, OSError):
                return False
        return True

    def _look(self) -> tuple[tuple[str, int, int], ...]:
        files = sorted(self.folder.glob("*.pub"))
        return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)


def sign_envelope(key: ec.EllipticCurvePrivateKey, envelope: Envelope) -> Envelope:
    """The envelope with the party's signature over header and body."""
    signature = key.sign(_SIGNATURE_CONTEXT + bytes.fromhex(envelope.digest), ec.ECDSA(hashes.SHA384()))
    return dataclasses.replace(envelope, signature=signature)


def has_valid_signature(key: ec.EllipticCurvePublicKey, envelope: Envelope) -> bool:
    """Whether the signature is this party's, over exactly these bytes."""
    if not 0 < len(envelope.signature) <= 256:
        return False
    try:
        key.verify(envelope.signature, _SIGNATURE_CONTEXT + bytes.fromhex(envelope.digest), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True
