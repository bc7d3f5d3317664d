"""A party's gate: only requests that the coordinator signed, for this party, pass.

Whose signature counts, in this order:

1. `coordinator = "SHA256:..."` in the party's terms: that key and no other;
2. the key of the certificate that the coordinator showed in a TLS handshake which the party's CA vouched for;
3. without TLS (tests on one machine): the first key that is seen, until the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from fulcrum.flower.messages import BadMessage, Envelope
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.signing import fingerprint, load_certificate_key, read_signer

KEPT_CERTIFICATES = 8
"""Keys of certificates that are remembered: a certificate may change while requests are under way."""


class RequestGate:
    """Checks of every request before anything else of it is read. One gate serves one party's process."""

    def __init__(self, party: str, pinned: str = "", tls: bool = True) -> None:
        """pinned: the coordinator's fingerprint, from the terms; "" trusts the TLS certificate's key.

        tls: False takes the first key that signs a request.
        """
        self.party, self.pinned, self.tls = party, pinned, tls
        self._trusted: list[str] = []
        self._seen = b"", ""  # the certificate that was shown last, and its key's fingerprint
        self._lock = threading.Lock()

    def note_certificate(self, der: bytes) -> str:
        """Trust the key of a certificate that a verified TLS handshake showed; returns its fingerprint."""
        if der == self._seen[0]:  # every answer of the server shows its certificate
            return self._seen[1]
        found = fingerprint(load_certificate_key(der))
        with self._lock:
            self._seen = der, found
            if found not in self._trusted:
                self._trusted = [*self._trusted, found][-KEPT_CERTIFICATES:]
        return found

    def knows_signer(self, envelope: Envelope) -> bool:
        """Whether a request is signed by a key that counts. Where not, the certificate may have changed meanwhile."""
        try:
            return self._is_trusted(fingerprint(read_signer(envelope)))
        except BadMessage:
            return False

    def check(self, envelope: Envelope, header: Mapping[str, Any]) -> None:
        """Refuse a request that is not signed, not by the coordinator, or not for this party.

        Raises TermsRefusal with the code signature, signer or party. header: that of the envelope.
        """
        try:
            signer = fingerprint(read_signer(envelope))
        except BadMessage as error:
            raise TermsRefusal("signature", str(error).rstrip(".")) from error
        if not self._is_trusted(signer):
            raise TermsRefusal("signer", self._say_why(signer))
        named = header.get("party", "")
        if named != self.party and (named or header["kind"] != "hello" or self.tls):
            raise TermsRefusal("party")

    def _is_trusted(self, signer: str) -> bool:
        if self.pinned:
            return signer == self.pinned
        with self._lock:
            if not self.tls and not self._trusted:
                self._trusted = [signer]
            return signer in self._trusted

    def _say_why(self, signer: str) -> str:
        if self.pinned:
            return f"it was signed with {signer}, and the terms pin {self.pinned}"
        if not self.tls:
            return f"it was signed with {signer}, earlier ones with {', '.join(self._trusted)}"
        return (
            f"it was signed with {signer}, which is not the key of the server's certificate; where something on the "
            "way ends TLS, pin the coordinator's key in the terms: coordinator = SHA256:..."
        )
