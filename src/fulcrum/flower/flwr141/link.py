"""The coordinator's side: Flower's fleet API in this process, behind the hardened port."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping

from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fulcrum.flower.flwr141.bundles import make_app_bundle
from fulcrum.flower.flwr141.fleet import FLEET_PATHS, FleetService
from fulcrum.flower.flwr141.pinned import check_flower_version
from fulcrum.flower.port.limits import PortLimits, fit_file_limit
from fulcrum.flower.port.server import HardenedServer, TlsFiles

FRAMING_BYTES = 1 << 20
"""Bytes of a request beside the numbers in it, at most."""

__all__ = ["FLEET_PATHS", "LocalSuperlink", "TlsFiles"]


class LocalSuperlink:
    """Flower's fleet API in this process: `with LocalSuperlink(...) as link:` then `link.transport` carries envelopes.

    SuperNodes with a registered key are served; control and runtime APIs exist nowhere.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: TlsFiles | None,
        nodes: Mapping[str, bytes],
        app: bytes | None = None,
        *,
        limits: PortLimits | None = None,
        report: Callable[[str, str], None] = lambda party, words: None,
        read_register: Callable[[], Mapping[str, bytes] | None] = lambda: None,
    ) -> None:
        """nodes: the public key (PEM) of every party, by name; only these are let in.

        app: the Flower app bundle that SuperNodes are offered; a placeholder unless given, since no party runs it.
        read_register: called every few seconds; the keys of all parties where they may have changed, else None.
        report: called with a party's name (or "") and a sentence on what happened at the port.
        """
        check_flower_version()
        limits = fit_file_limit(limits or PortLimits(), lambda words: report("", words))
        self.transport = FleetService(nodes, secrets.randbits(62) + 1, app or make_app_bundle(), limits.body_bytes)
        self._report, self._read_register = report, read_register
        self.server = HardenedServer(
            host,
            port,
            self.transport,
            limits,
            tls,
            content_type=PROTOBUF_MEDIA_TYPE,
            report=lambda words: report("", words),
            watch=self._look_at_register,
            on_certificate=lambda: self.transport.on_certificate(),
        )
        self.transport.loop = lambda: self.server.loop
        self.transport.count_port = self.server.count
        self.transport.limit_replies = self._limit_replies

    def __enter__(self) -> LocalSuperlink:
        self.server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()

    def _limit_replies(self, size: int) -> None:
        """No request may be larger than an honest reply of `size` bytes with its framing."""
        most = size + FRAMING_BYTES
        self.transport.body_bytes = most
        old = self.server.limits
        self.server.limits = dataclasses.replace(old, body_bytes=most, bodies_bytes=max(old.bodies_bytes, 4 * most))

    def _look_at_register(self) -> None:
        """Parties whose key was added come in, those whose key is gone are dropped; nobody needs a restart."""
        nodes = self._read_register()
        if nodes is None:
            return
        new, gone = self.transport.update_nodes(nodes)
        for party in sorted(gone):
            self.server.drop_party(party)
        for party in sorted(gone - new):
            self._report(party, "its key was taken from the register: it is not let in any more")
        for party in sorted(new):
            self._report(party, f"its {'new ' if party in gone else ''}key is in the register now")
