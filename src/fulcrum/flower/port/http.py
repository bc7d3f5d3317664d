"""The head of an HTTP/1.1 request, read strictly: what a SuperNode sends, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_HEADERS = 64
_REQUEST_LINE = re.compile(rb"([A-Z]{1,10}) (/[!-~]{0,255}) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\t -~]*?)[ \t]*")
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    411: "Length Required",
    413: "Request Entity Too Large",
    426: "Upgrade Required",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class BadHead(Exception):
    """Not the head of a request that this port takes; `status` is what it is answered with."""

    def __init__(self, status: int) -> None:
        super().__init__(REASONS[status])
        self.status = status


@dataclass(frozen=True)
class RequestHead:
    """What stands before a request's body. headers: names in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]
    length: int


@dataclass(frozen=True)
class PortResponse:
    """An answer: status, body, and headers beside those that every answer has."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False
    """Whether the connection ends after it."""
    tail: bytes = b""
    """The end of the body, where many answers share it: it is not copied."""


def read_head(text: bytes) -> RequestHead:
    """The head that ends with an empty line. Bodies need a content-length; nothing chunked, folded or repeated.

    A name that decides where a request ends must not be readable in two ways, so a doubtful head is refused.
    """
    lines = text.removesuffix(b"\r\n\r\n").split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(lines[0])
    if found is None or len(lines) > MAX_HEADERS:
        raise BadHead(400)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        each = _HEADER.fullmatch(line)
        if each is None:
            raise BadHead(400)
        name = each[1].decode("ascii").lower()
        if name in headers:
            raise BadHead(400)
        headers[name] = each[2].decode("ascii")
    if "transfer-encoding" in headers or "upgrade" in headers:
        raise BadHead(411)
    length = headers.get("content-length", "0")
    if not (length.isdigit() and len(length) <= 18):
        raise BadHead(400)
    return RequestHead(found[1].decode(), found[2].decode("ascii"), headers, int(length))


SMALL_BYTES = 16 * 1024


def write_response(response: PortResponse, content_type: str) -> list[bytes]:
    """The bytes of an answer; head and body apart where the body is large, so that it is not copied."""
    lines = [
        f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Unknown')}",
        f"content-length: {len(response.body) + len(response.tail)}",
        f"content-type: {content_type}",
        *(f"{name}: {value}" for name, value in response.headers.items()),
        *(["connection: close"] if response.close else []),
    ]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii", "replace")
    if response.tail:
        return [head + response.body, response.tail]
    return [head + response.body] if len(response.body) <= SMALL_BYTES else [head, response.body]
