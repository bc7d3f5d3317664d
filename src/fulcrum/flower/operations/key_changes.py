"""Rotation and revocation of parties' keys, as files that two people exchange: `fulcrum keys`.

A party makes a new pair and a note, NAME.rotation.json, that its old key signs: whoever holds the old key wants the new
one. The coordinator accepts the note into its register. A key that was lost or stolen is revoked: it moves to
`revoked/`, and a running coordinator turns it away within seconds. The ledger and the party's name stay the same, so a
new key brings no new budget.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum.errors import ConfigError
from fulcrum.flower.keys import (
    check_party_name,
    load_private_key,
    load_public_key,
    public_key_to_pem,
    write_secret_file,
)

_CONTEXT = b"fulcrum key rotation 1:"
REVOKED_FOLDER = "revoked"


def _public_line(key: ec.EllipticCurvePublicKey, name: str) -> bytes:
    words = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return bytes(words) + f" {name}\n".encode()


def _message(name: str, old: ec.EllipticCurvePublicKey, new: bytes) -> bytes:
    return _CONTEXT + json.dumps([name, public_key_to_pem(old).decode(), new.decode()]).encode()


def rotate_key(key: Path) -> tuple[Path, Path]:
    """At a party: a new pair in place of `key`, and the note for the coordinator. Returns (note, the old key's place).

    The old private key is kept beside it as NAME.old until the coordinator has accepted the note.
    """
    name = check_party_name(key.name)
    old = load_private_key(key)
    kept, note = key.with_name(f"{name}.old"), key.with_name(f"{name}.rotation.json")
    for path in (kept, note):
        if path.exists():
            raise ConfigError(f"{path} exists: a rotation is under way; finish it, then move that file away.")
    new = ec.generate_private_key(ec.SECP384R1())
    line = _public_line(new.public_key(), name)
    signature = old.sign(_message(name, old.public_key(), line), ec.ECDSA(hashes.SHA384()))
    fresh = key.with_name(f"{name}.new")
    write_secret_file(
        fresh,
        new.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    note.write_text(
        json.dumps({"party": name, "public_key": line.decode(), "signature": signature.hex()}, indent=1) + "\n"
    )
    os.replace(key, kept)
    os.replace(fresh, key)
    key.with_name(f"{name}.pub").write_bytes(line)
    return note, kept


def accept_rotation(register: Path, note: Path) -> str:
    """At the coordinator: replace NAME.pub by the key in the note, if the present key signed it. Returns the name."""
    try:
        table = json.loads(note.read_text(encoding="utf-8"))
        name, line, signature = (
            str(table["party"]),
            str(table["public_key"]).encode(),
            bytes.fromhex(table["signature"]),
        )
    except OSError as error:
        raise ConfigError(f"{note} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{note} is no note of fulcrum keys rotate; ask the party for its NAME.rotation.json."
        ) from None
    check_party_name(name)
    current = register / f"{name}.pub"
    if not current.is_file():
        raise ConfigError(
            f"{register} has no {name}.pub; a new party sends its NAME.pub, and a revoked one a new pair."
        )
    old = load_public_key(current)
    try:
        old.verify(signature, _message(name, old, line), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise ConfigError(
            f"{note} is not signed by {name}'s present key; ask {name} in person before you trust it."
        ) from None
    fresh = register / f".{name}.fresh"
    # What was fixed with the former key, such as units=480, holds for the new one; the party's own words do not count.
    facts = current.read_bytes().split()[2:]
    fresh.write_bytes(b" ".join([*line.split()[:2], *(facts or [name.encode()])]) + b"\n")
    try:
        load_public_key(fresh)
        _retire(current)
        os.replace(fresh, current)
    finally:
        fresh.unlink(missing_ok=True)
    return name


def revoke_key(register: Path, name: str) -> Path:
    """At the coordinator: take a party's key out of the register. Returns where it is kept."""
    current = register / f"{check_party_name(name)}.pub"
    if not current.is_file():
        raise ConfigError(f"{register} has no {name}.pub; the register holds {_list_names(register)}.")
    place = _retire(current)
    current.unlink()
    return place


def _retire(current: Path) -> Path:
    folder = current.parent / REVOKED_FOLDER
    folder.mkdir(exist_ok=True)
    place = folder / f"{current.stem}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}.pub"
    number = 0
    while place.exists():
        number += 1
        place = folder / f"{current.stem}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{number}.pub"
    place.write_bytes(current.read_bytes())
    return place


def _list_names(register: Path) -> str:
    return ", ".join(sorted(path.stem for path in register.glob("*.pub"))) or "no key"
