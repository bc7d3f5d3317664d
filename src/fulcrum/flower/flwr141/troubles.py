"""What can be wrong between a party and its coordinator: the cause of a failed connection, in words to act on."""

from __future__ import annotations

import json
import socket
import ssl
import time
from typing import Any

import httpx


class Trouble(Exception):
    """Why the coordinator cannot be reached, or does not let this party in.

    cause: clock, certificate, proxy, key, version, redirect, answer, address, away, restarted or port. words: a
    sentence without its full stop.
    """

    def __init__(self, cause: str, words: str) -> None:
        super().__init__(words)
        self.cause, self.words = cause, words


BROKEN_OFF = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""What is raised when the other side took a connection and hung up."""
CERTIFICATE_WORDS = {
    9: "the coordinator's certificate is not valid yet by this machine's clock ({now}); set the clock, or wait",
    10: "the coordinator's certificate has expired by this machine's clock ({now}); the coordinator must renew it, or "
    "this machine's clock is wrong",
    18: "the coordinator's certificate is signed by itself and not by the CA of --ca; ask the coordinator for its CA",
    19: "the coordinator's certificate is not signed by the CA of --ca; ask the coordinator for its CA's certificate",
    20: "the coordinator's certificate is not signed by the CA of --ca; ask the coordinator for its CA's certificate",
    62: "the coordinator's certificate is for another name than {server}; use the name that it was made for",
    64: "the coordinator's certificate is for another address than {server}; use the name that it was made for",
}
"""Codes of OpenSSL's verification, in words."""


def name_trouble(error: BaseException, server: str, proxy: str | None) -> Trouble:
    """The cause of a failed request, from what the network raised."""
    chain = _list_causes(error)
    for each in chain:
        if isinstance(each, ssl.SSLCertVerificationError):
            words = CERTIFICATE_WORDS.get(each.verify_code, f"the coordinator's certificate is refused: {each.reason}")
            now = time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC"
            return Trouble("certificate", words.format(now=now, server=server))
    if isinstance(error, httpx.ProxyError) or (proxy and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)):
        shown = hide_password(proxy or "on the way")
        return Trouble(
            "proxy", f"the proxy {shown} does not let this party through to {server}; see HTTPS_PROXY and NO_PROXY"
        )
    connecting = isinstance(error, httpx.ConnectError)
    for each in chain:
        if isinstance(each, ssl.SSLError) or (connecting and isinstance(each, BROKEN_OFF)):
            return Trouble(
                "port",
                f"the TLS handshake with {server} broke off: there is no TLS, or something on the way (a balancer, a "
                "firewall) ends the connection",
            )
        if isinstance(each, socket.gaierror):
            return Trouble("address", f"the name of {server} cannot be looked up; check --server and the network")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Trouble("away", f"nobody answers at {server}: the coordinator is not running, or a firewall is between")
    if isinstance(error, httpx.TimeoutException):
        return Trouble("away", f"{server} has stopped answering; the network or the coordinator hangs")
    return Trouble("away", f"the connection to {server} broke off; the coordinator may have been restarted")


def hide_password(proxy: str) -> str:
    """A proxy's address without the password that may stand in it."""
    scheme, found, rest = proxy.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if found else proxy


def _list_causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


REFUSAL_WORDS = {
    "key": "the coordinator does not know this party's key; send it NAME.pub, and check that it is in its register",
    "signature": "the coordinator finds this party's signature wrong; check that --key is the pair of its NAME.pub",
    "revoked": "the coordinator has revoked this party's key; make a new pair, and ask it to register NAME.pub",
    "clock": "this machine's clock is too far from the coordinator's; set it, with NTP for instance",
}


def name_refusal(status: int, body: bytes, server: str, versions: int) -> Trouble:
    """The cause of an answer that is no success."""
    said: dict[str, Any] = {}
    try:
        found = json.loads(body)
        said = found if isinstance(found, dict) else {}
    except ValueError:
        pass
    cause = said.get("cause")
    if cause == "version" or status == 426:
        other = said.get("speaks")
        theirs = f" (its messages are of version {other}, ours of {versions})" if isinstance(other, int) else ""
        return Trouble("version", f"the coordinator has another version of Fulcrum{theirs}; install the same at both")
    if isinstance(cause, str) and cause in REFUSAL_WORDS:
        return Trouble("clock" if cause == "clock" else "key", REFUSAL_WORDS[cause])
    if 300 <= status < 400:
        return Trouble(
            "redirect", f"{server} wants to send this party elsewhere ({status}); redirects are not followed"
        )
    if status in (401, 403):
        return Trouble("key", "the coordinator turned this party away; check its key, and the coordinator's register")
    if status == 407:
        return Trouble("proxy", "the proxy asks for a user name and password; give them in HTTPS_PROXY")
    if status == 413:
        return Trouble("answer", "the coordinator does not read a message of this size: its model is another one")
    if status in (429, 502, 503, 504):
        return Trouble("away", f"the coordinator is busy or starting ({status})")
    return Trouble("answer", f"{server} answers with {status}: it is no Fulcrum coordinator, or another version of one")
