"""How much a stranger and a party may take of the public port."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from fulcrum.errors import ConfigError

RESERVED_FILES = 128
"""Files that the coordinator opens beside connections: libraries, ledger, run folder, data."""
FEWEST_CONNECTIONS = 32
"""Below this many connections a coordinator does not start."""


@dataclass(frozen=True)
class PortLimits:
    """What the public port allows. A stranger is whoever has not proved a registered party's key.

    When strangers' places are taken, the one that has got least far is dropped for the next: a party that wants to join
    gets a place while a flood is on.
    """

    strangers: int = 256
    """Connections of strangers at the same time."""
    strangers_per_address: int = 192
    """Those from one address: hospitals may share one."""
    per_party: int = 8
    """Connections of one party; its oldest is dropped for the next."""
    parties: int = 1000
    """Connections of all parties."""
    accepts_per_second: float = 200.0
    """New connections per second, in bursts of twice as many; the others wait in the kernel's queue."""
    handshakes_per_second: float = 40.0
    """TLS handshakes per second, in bursts of three times as many: each costs a millisecond or two."""
    requests_per_second: float = 100.0
    """Requests of one party per second, in bursts of four times as many; more are answered later."""
    head_seconds: float = 10.0
    """Seconds from a connection's first moment, or from the first byte of a later request, to the end of the head."""
    idle_seconds: float = 90.0
    """Seconds that a party's connection may stay without a request."""
    head_bytes: int = 16 * 1024
    """Bytes of the longest head of a request."""
    body_bytes: int = 64 << 20
    """Bytes of the longest body; the coordinator sets it to what an honest reply can have."""
    bodies_bytes: int = 512 << 20
    """Bytes of all bodies that are being read at the same time, at least one body."""
    slowest_bytes_per_second: float = 16 * 1024
    """A body or an answer that moves more slowly than this, after ten seconds, is given up."""

    @property
    def connections(self) -> int:
        """The most connections at the same time."""
        return self.strangers + self.parties

    def body_seconds(self, size: int) -> float:
        """The most seconds that so many bytes may take."""
        return 10.0 + size / self.slowest_bytes_per_second


def fit_file_limit(limits: PortLimits, say: Callable[[str], None]) -> PortLimits:
    """Raise this process's limit of open files as far as needed; where that is not allowed, take fewer connections.

    Every connection is an open file, so the limit is checked before the port opens. Raises ConfigError where it leaves
    no room to work.
    """
    try:
        import resource
    except ImportError:  # not a POSIX system
        return limits
    needed = limits.connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinity = resource.RLIM_INFINITY
    if soft == infinity or soft >= needed:
        return limits
    wanted = needed if hard == infinity else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    except (OSError, ValueError):
        pass
    if soft >= needed:
        return limits
    room = soft - RESERVED_FILES
    if room < FEWEST_CONNECTIONS:
        raise ConfigError(
            f"this process may open {soft} files, and the coordinator needs at least "
            f"{RESERVED_FILES + FEWEST_CONNECTIONS}; raise the limit (ulimit -n, or LimitNOFILE= in the systemd unit)."
        )
    strangers = max(8, min(limits.strangers, room // 4))
    say(
        f"this process may open {soft} files, so it takes {room} connections instead of {limits.connections}; raise "
        "the limit (ulimit -n, or LimitNOFILE= in the systemd unit) for more."
    )
    return dataclasses.replace(
        limits,
        strangers=strangers,
        strangers_per_address=min(limits.strangers_per_address, max(8, 3 * strangers // 4)),
        parties=room - strangers,
    )
