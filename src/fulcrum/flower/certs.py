"""Certificates and keys for a federation that has none yet: a development CA, a server certificate, key pairs.

For real use take the server's certificate from your own CA; the parties need that CA's certificate.
Each party makes its own key pair and sends only NAME.pub to the coordinator.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fulcrum.errors import ConfigError
from fulcrum.flower.keys import write_secret_file

VALIDITY_DAYS = 365


def make_certificate_authority(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """Write ca.crt, ca.key, server.crt and server.key; the server's certificate names every host given.

    hosts: names and addresses by which parties will reach the server. Nothing is overwritten.
    """
    if not hosts:
        raise ConfigError("a server certificate needs at least one host: the name or address parties will use.")
    files = [folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key")]
    for path in files:
        if path.exists():
            raise ConfigError(f"{path} exists; nothing is overwritten, so choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = _make_x509_name("Fulcrum development CA")
    ca = (
        _start_certificate(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    server = (
        _start_certificate(_make_x509_name("Fulcrum coordinator"), ca_name, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_make_host_name(host) for host in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    for path, certificate in zip(files[::2], (ca, server), strict=True):
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for path, key in zip(files[1::2], (ca_key, server_key), strict=True):
        write_secret_file(
            path,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
    return files


def _start_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=VALIDITY_DAYS))
    )


def _make_x509_name(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])


def _make_host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _make_key_usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )
