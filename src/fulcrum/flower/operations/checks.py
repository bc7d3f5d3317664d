"""One check, one line: what `fulcrum party --check` and `fulcrum serve --check` print."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import resource
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

import fulcrum
from fulcrum.errors import ConfigError, FulcrumError

FINE, WARNING, WRONG = "ok", "warning", "WRONG"
EXPIRY_WARNING_DAYS = 30
"""A certificate that ends within so many days is worth a warning."""
DISK_WARNING_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """The outcome of one check: level is ok, warning or WRONG; words say what was found, or what to do."""

    what: str
    level: str
    words: str


def run_checks(checks: Iterable[tuple[str, Callable[[], Check | str]]]) -> Iterator[Check]:
    """The outcome of each check in turn. An error of ours is its sentence; any other one is named by its kind."""
    for what, check in checks:
        try:
            found = check()
        except FulcrumError as error:
            found = Check(what, WRONG, str(error).rstrip("."))
        except Exception as error:  # a check must never hide those after it
            found = Check(what, WRONG, f"{type(error).__name__}: {error}")
        yield Check(what, FINE, found) if isinstance(found, str) else found


def format_check(check: Check) -> str:
    """A check as one line; control characters of foreign texts are not printed."""
    words = "".join(c if c.isprintable() else " " for c in check.words)
    return f"{check.level:8} {check.what:12} {words}"


def count_wrong(checks: Iterable[Check]) -> int:
    """The number of checks that went wrong."""
    return sum(check.level == WRONG for check in checks)


def describe_versions() -> str:
    """The versions that must agree between coordinator and parties, and those that may matter."""
    import torch

    from fulcrum.flower.messages import MESSAGE_VERSION

    parts = [f"Fulcrum {fulcrum.__version__}", f"messages {MESSAGE_VERSION}"]
    with contextlib.suppress(ImportError):
        import flwr

        parts.append(f"flwr {flwr.__version__}")
        from fulcrum.flower.flwr141.pinned import check_flower_version

        check_flower_version()
    return ", ".join([*parts, f"torch {torch.__version__}", f"Python {platform.python_version()}"])


def check_private_file(path: Path, what: str) -> Check:
    """Whether only its owner can read a secret file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Check(what, WARNING, f"{path} can be read by others (mode {mode:o}); chmod 600 {path}")
    return Check(what, FINE, f"{path}, readable by its owner alone")


def load_certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file; ConfigError where there is none."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{path} holds no certificate in PEM form.")
    return found


def check_expiry(certificates: Iterable[x509.Certificate], what: str, now: datetime.datetime | None = None) -> Check:
    """Whether certificates are valid now, and for how long."""
    now = now or datetime.datetime.now(datetime.UTC)
    first = min(certificates, key=lambda each: each.not_valid_after_utc)
    days = (first.not_valid_after_utc - now).total_seconds() / 86400
    until = first.not_valid_after_utc.date().isoformat()
    if now < first.not_valid_before_utc:
        return Check(
            what, WRONG, f"not valid before {first.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is the clock right?"
        )
    if days < 0:
        return Check(what, WRONG, f"expired on {until}; renew it, or set this machine's clock if that is wrong")
    level = WARNING if days < EXPIRY_WARNING_DAYS else FINE
    return Check(what, level, f"valid until {until}, {math.floor(days)} days{'; renew it' if level == WARNING else ''}")


def count_days_left(path: Path) -> float | None:
    """Days until the first certificate of a file ends; None where it cannot be read at the moment."""
    try:
        first = min(load_certificates(path), key=lambda each: each.not_valid_after_utc)
    except ConfigError:
        return None
    return (first.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def list_certificate_hosts(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a server's certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def check_key_matches(certificate: Path, key: Path) -> Check:
    """Whether a private key belongs to a certificate."""
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"{key} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError):
        raise ConfigError(f"{key} is not a private key in PEM form without a passphrase.") from None
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    theirs = load_certificates(certificate)[0].public_key().public_bytes(*form)
    if private.public_key().public_bytes(*form) != theirs:
        return Check("key", WRONG, f"{key} is not the key of {certificate}; give the pair that was made together")
    return check_private_file(key, "key")


def check_disk(folder: Path, needed: int = 0) -> Check:
    """Whether a folder can be written, and has room. needed: bytes that are known to be."""
    at = folder
    while not at.exists():
        at = at.parent
    if not os.access(at, os.W_OK):
        return Check("disk", WRONG, f"{at} cannot be written by this user; give it another folder, or change its owner")
    free = shutil.disk_usage(at).free
    level = WRONG if free < needed else WARNING if free < needed + DISK_WARNING_BYTES else FINE
    return Check(
        "disk", level, f"{free / 1e9:.1f} GB free at {at}{f', {needed / 1e9:.1f} GB needed' if needed > 5e7 else ''}"
    )


def check_file_limit(needed: int) -> Check:
    """Whether this process may open as many files and connections as it will need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        return Check(
            "files", WARNING, f"{soft} open files allowed, {needed} may be needed (limit {hard}): ulimit -n {needed}"
        )
    return Check("files", FINE, f"{soft} open files allowed")
